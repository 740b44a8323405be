"""The service without metrics and access log, for comparison."""

from typing import Any

from shardgate import server
from shardgate.__main__ import main
from shardgate.http.instrumentation import InstrumentedApp
from shardgate.main import create_app
from shardgate.settings import Settings


class _Uninstrumented:
    """Passes requests on."""

    def __init__(self, app: InstrumentedApp) -> None:
        self.metrics = app.metrics
        self._app = app.app
        self.begin = app.app.begin
        self.refuse = app.app.refuse

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer."""
        await self._app(scope, receive, send)


def _make_app(settings: Settings) -> Any:
    return server.tune_memory(_Uninstrumented(create_app(settings)))


def serve() -> None:
    """Run the command."""
    server.make_app = _make_app
    main()
