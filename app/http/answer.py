"""One response on the wire, with what every response carries."""

import itertools
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any, Final, NamedTuple, Protocol

from app.errors import ShardgateError
from app.http.cors import Cors
from app.http.problems import problem, status_of
from app.http.s3_answers import code_of, error_document, failed_condition
from app.http.s3_requests import speaks_s3
from app.observability.logging import log_failure
from app.observability.requests import note_request_id

type Scope = Mapping[str, Any]
type Headers = list[tuple[bytes, bytes]]
type Given = Mapping[bytes, bytes]
"""The headers of a request, by name; see `combined`."""

type Body = bytes | AsyncIterator[bytes]
type Respond = Callable[[], Awaitable[None]]

ALLOW: Final = b"GET, HEAD, OPTIONS"
NO_REFERRER: Final = (b"referrer-policy", b"no-referrer")
NO_STORE: Final = (b"cache-control", b"no-store")
_REQUEST_ID: Final = re.compile(rb"[\x21-\x7e]{1,128}")
_process: Final = secrets.token_hex(4).encode()
_numbers: Final = itertools.count(1)


class AtHand(NamedTuple):
    """A whole answer that needs no waiting."""

    status: HTTPStatus
    head: bytes
    """Its headers, as they are written."""
    body: bytes
    request_id: bytes = b""
    """For logs, as what follows."""
    dataset: str = ""
    """Of what; without one it is not told of."""
    caller: str = ""
    """Who asks."""


class Write(Protocol):
    """Writes an answer, complete with its headers, to the connection."""

    async def __call__(self, status: HTTPStatus, headers: Headers, body: Body, /) -> None:
        """Return when all of it is handed on."""
        ...


type Later = Callable[[Write], Awaitable[None]]
"""An answer that must be waited for; it may raise once it has begun to be written."""


class Answer:
    """The response to one request with the headers *given*."""

    __slots__ = ("_cors", "_query", "_write", "given", "has_started", "request_id")

    def __init__(self, given: Given, write: Write, cors: Cors, query: bytes = b"") -> None:
        self.given = given
        self._query = query
        self.request_id = request_id(given.get(b"x-request-id"))
        note_request_id(self.request_id)
        self.has_started = False
        self._write = write
        self._cors = cors

    async def send(self, status: HTTPStatus, headers: Headers, body: Body = b"") -> None:
        """Send *headers*, to which CORS and the request id are added, and *body*."""
        headers += self._cors.headers(self.given.get(b"origin"))
        headers.append((b"x-request-id", self.request_id))
        self.has_started = True
        await self._write(status, headers, body)

    @property
    def is_s3(self) -> bool:
        """Whether the client speaks S3."""
        return speaks_s3(self.given, self._query)

    @property
    def is_foreign(self) -> bool:
        """Whether a page sent the request that may not read the answer, nor is from here.

        Browsers ask for leave to send some requests, not all.
        """
        origin = self.given.get(b"origin")
        if origin is None or self._cors.admits(origin):
            return False
        return origin.partition(b"://")[2] != self.given.get(b"host")

    async def fail(self, error: ShardgateError) -> None:
        """Tell of *error*."""
        status = status_of(error)
        log_failure(status, error)
        if status is HTTPStatus.UNAUTHORIZED and self.is_s3:
            status = HTTPStatus.FORBIDDEN
        extra = [(b"allow", ALLOW)] if status is HTTPStatus.METHOD_NOT_ALLOWED else []
        await self.problem(status, str(error), *extra, code=code_of(status, error))

    async def problem(
        self,
        status: HTTPStatus,
        detail: str,
        *extra: tuple[bytes, bytes],
        code: str | None = None,
    ) -> None:
        """Send a problem document, or S3's *code* to who speaks that.

        Errors are not cached unless *extra* says how.
        """
        if self.is_s3:
            request_id = self.request_id.decode()
            condition = failed_condition(status, self.given)
            code = code or code_of(status)
            headers, body = error_document(status, code, detail, request_id, condition)
        else:
            headers, body = problem(status, detail)
        headers += extra
        if not any(name == b"cache-control" for name, _ in extra):
            headers.append(NO_STORE)
        await self.send(status, headers, body)

    async def preflight(self, allow: bytes = ALLOW) -> None:
        """Answer OPTIONS where the methods *allow* are served."""
        headers = self._cors.preflight(allow, self.given.get(b"access-control-request-headers"))
        await self.send(HTTPStatus.NO_CONTENT, [*headers, (b"allow", allow), NO_STORE])

    def completed(self, headers: Headers) -> Headers:
        """Add to the *headers* of another application what every answer carries."""
        present = {name for name, _ in headers}
        more = [*self._cors.headers(self.given.get(b"origin")), NO_STORE, NO_REFERRER]
        more.append((b"x-request-id", self.request_id))
        return [*headers, *(header for header in more if header[0] not in present)]


def asgi_writer(send: Any) -> Write:
    """Write to an ASGI server."""

    async def write(status: HTTPStatus, headers: Headers, body: Body) -> None:
        await send({"type": "http.response.start", "status": status, "headers": headers})
        if isinstance(body, bytes):
            await send({"type": "http.response.body", "body": body})
            return
        async for piece in body:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    return write


def combined(headers: Headers) -> dict[bytes, bytes]:
    """Give the request's headers by name; the values of a repeated one are a list (§5.3)."""
    given = dict(headers)
    if len(given) == len(headers):
        return given
    values: dict[bytes, list[bytes]] = {}
    for name, value in headers:
        values.setdefault(name, []).append(value)
    return {name: b", ".join(each) for name, each in values.items()}


def request_id(given: bytes | None) -> bytes:
    """Keep the client's id if it is fit for a header and a log, else make one."""
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given
    return b"%b-%x" % (_process, next(_numbers))
