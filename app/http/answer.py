"""One response on the wire, with what every response carries."""

import itertools
import re
import secrets
from collections.abc import AsyncIterator, Mapping, MutableMapping
from http import HTTPStatus
from typing import Any, Final, NamedTuple

from app.http.cors import Cors
from app.http.problems import problem

type Scope = Mapping[str, Any]
type Headers = list[tuple[bytes, bytes]]

ALLOW: Final = b"GET, HEAD, OPTIONS"
NO_STORE: Final = (b"cache-control", b"no-store")
_REQUEST_ID: Final = re.compile(rb"[\x21-\x7e]{1,128}")
_process: Final = secrets.token_hex(4)
_numbers: Final = itertools.count(1)


class AtHand(NamedTuple):
    """A whole answer that needs no waiting."""

    status: HTTPStatus
    headers: Headers
    body: bytes


class Answer:
    """Sends the response to one request."""

    __slots__ = ("_send", "cors", "has_started", "headers", "request_id")

    def __init__(self, scope: Scope, send: Any, cors: Cors) -> None:
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        """Request headers; of a repeated one, the last."""
        self.request_id = request_id(self.headers.get(b"x-request-id"))
        self.has_started = False
        self.cors = cors
        self._send = send

    async def send(
        self, status: HTTPStatus, headers: Headers, body: bytes | AsyncIterator[bytes] = b""
    ) -> None:
        """Send *headers*, to which CORS and the request id are added, and *body*."""
        headers += self.cors.headers(self.headers.get(b"origin"))
        headers.append((b"x-request-id", self.request_id))
        self.has_started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        if isinstance(body, bytes):
            await self._send({"type": "http.response.body", "body": body})
            return
        async for piece in body:
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        await self._send({"type": "http.response.body", "body": b""})

    async def problem(self, status: HTTPStatus, detail: str, *extra: tuple[bytes, bytes]) -> None:
        """Send a problem document; errors are not cached unless *extra* says how."""
        headers, body = problem(status, detail)
        headers += extra
        if not any(name == b"cache-control" for name, _ in extra):
            headers.append(NO_STORE)
        await self.send(status, headers, body)

    async def decorate(self, message: MutableMapping[str, Any]) -> None:
        """Send an ASGI message of another application, with what every answer carries."""
        if message["type"] == "http.response.start":
            present = {name for name, _ in message["headers"]}
            more = [*self.cors.headers(self.headers.get(b"origin")), NO_STORE]
            more.append((b"x-request-id", self.request_id))
            message["headers"] = [*message["headers"], *(h for h in more if h[0] not in present)]
        await self._send(message)

    async def preflight(self) -> None:
        """Answer OPTIONS."""
        headers = self.cors.preflight(ALLOW)
        await self.send(HTTPStatus.NO_CONTENT, [*headers, (b"allow", ALLOW), NO_STORE])


def request_id(given: bytes | None) -> bytes:
    """Keep the client's id if it is fit for a header and a log, else make one."""
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given
    return f"{_process}-{next(_numbers):x}".encode()
