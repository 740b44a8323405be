"""The door: ours first, then datasets."""

from collections.abc import MutableMapping
from typing import Any, Final

from app.errors import ForeignPageError
from app.http.answer import ALLOW, Answer, AtHand, Headers, Later, Scope, asgi_writer, combined
from app.http.cors import Cors
from app.http.dataplane import DataPlane
from app.http.writing import FOREIGN
from app.settings import RESERVED

_READING: Final = ("GET", "HEAD")
_WRITING: Final = b"GET, HEAD, POST, PUT, DELETE, OPTIONS"


class Gateway:
    """Sends what is ours to the control plane, and everything else to the data plane."""

    def __init__(self, control: Any, data: DataPlane, cors: Cors) -> None:
        self._control = control
        self._data = data
        self._cors = cors

    def begin(self, raw_path: bytes, headers: Headers) -> AtHand | Later | None:
        """Begin to answer a GET outside of ASGI; see `DataPlane.begin`."""
        return self._data.begin(raw_path, headers)

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Speak ASGI."""
        if scope["type"] != "http":
            await self._control(scope, receive, send)
        elif scope["path"] == "/" or scope["path"][1:].partition("/")[0] in RESERVED:
            await self._ours(scope, receive, send)
        else:
            await self._data(scope, receive, send)

    async def _ours(self, scope: Scope, receive: Any, send: Any) -> None:
        query = scope["query_string"]
        answer = Answer(combined(scope["headers"]), asgi_writer(send), self._cors, query)

        async def decorate(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = answer.completed(message["headers"])
            await send(message)

        if scope["method"] == "OPTIONS":
            await answer.preflight(_WRITING if scope["path"].startswith("/api/") else ALLOW)
        elif scope["path"] == "/" and scope["method"] == "GET" and answer.is_s3:
            await self._data.list_buckets(answer)
        elif scope["method"] not in _READING and answer.is_foreign:
            await answer.fail(ForeignPageError(FOREIGN))
        else:
            await self._control(scope, receive, decorate)
