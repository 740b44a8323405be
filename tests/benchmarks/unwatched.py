"""The service without counts of requests and lines about them, to compare with."""

from typing import Any

from app import server
from app.__main__ import main
from app.http.answer import AtHand, Given, Later
from app.http.watched import Watched
from app.main import create_app
from app.seeing.request_counts import RequestCounts
from app.settings import Settings


class _Unwatched:
    """Hands requests on."""

    def __init__(self, watched: Watched) -> None:
        self.counts = RequestCounts(())
        self._service = watched.service
        self.refuse = watched.service.refuse

    def begin(
        self, raw_path: bytes, given: Given, peer: bytes, now: float
    ) -> AtHand | Later | None:
        """Begin to answer."""
        return self._service.begin(raw_path, given, peer, now)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer."""
        await self._service(scope, receive, send)


def _make_app(settings: Settings) -> Any:
    return server.make_ready(_Unwatched(create_app(settings)))


def serve() -> None:
    """Run the command."""
    server.make_app = _make_app
    main()
