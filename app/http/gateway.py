"""The door: ours first, then datasets."""

from typing import Any

from app.http.answer import Answer, AtHand, Headers, Scope
from app.http.cors import Cors
from app.http.dataplane import DataPlane
from app.settings import RESERVED


class Gateway:
    """Sends what is ours to the control plane, and everything else to the data plane."""

    def __init__(self, control: Any, data: DataPlane, cors: Cors) -> None:
        self._control = control
        self._data = data
        self._cors = cors

    def at_hand(self, raw_path: bytes, headers: Headers) -> AtHand | None:
        """Answer a GET that needs no waiting, outside of ASGI."""
        return self._data.at_hand(raw_path, headers)

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Speak ASGI."""
        if scope["type"] != "http":
            await self._control(scope, receive, send)
        elif scope["path"] == "/" or scope["path"].split("/", 2)[1] in RESERVED:
            await self._ours(scope, receive, send)
        else:
            await self._data(scope, receive, send)

    async def _ours(self, scope: Scope, receive: Any, send: Any) -> None:
        answer = Answer(scope, send, self._cors)
        if scope["method"] == "OPTIONS":
            await answer.preflight()
        else:
            await self._control(scope, receive, answer.decorate)
