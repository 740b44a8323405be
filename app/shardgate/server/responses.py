"""Responses: CORS and the other headers of every response, and explanations of failures."""

import re
from base64 import b64encode
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from http import HTTPStatus
from typing import Final, cast

from shardgate.errors import ShardgateError
from shardgate.observability.logging import log_failure
from shardgate.read.bodies import Body
from shardgate.server.problems import Failure, status_of
from shardgate.server.request import Exchange, Headers, Request, Response, encode_headers

ALLOW: Final = b"GET, HEAD, OPTIONS"
NO_REFERRER: Final = (b"referrer-policy", b"no-referrer")
NO_STORE: Final = (b"cache-control", b"no-store")

_EXPOSED: Final = (
    b"access-control-expose-headers",
    b"ETag, Content-Range, Content-Length, Content-Encoding, Retry-After, X-Request-ID",
)
_FOR_ALL: Final[Headers] = [(b"access-control-allow-origin", b"*"), _EXPOSED]
_HEAD_FOR_ALL: Final = encode_headers(_FOR_ALL)
_ALLOWED: Final = (
    b"Authorization, Cache-Control, Content-Encoding, Content-MD5, Content-Type, Idempotency-Key,"
    b" If-Match, If-None-Match, If-Range, Range, X-Request-ID"
)
_OF_S3: Final = re.compile(rb"(?i:x-amz-|amz-sdk-)[A-Za-z0-9-]+")


class Cors:
    """CORS headers (Fetch standard §3.2) for *origins* or ``*``; errors have them too."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._any = "*" in origins
        self._origins = frozenset(origin.encode() for origin in origins)

    def admits(self, origin: bytes) -> bool:
        """Return whether pages of *origin* may read responses."""
        return self._any or origin in self._origins

    def headers(self, origin: bytes | None) -> Headers:
        """Return the headers of any response to a page of *origin*."""
        if self._any:
            return _FOR_ALL
        if origin is None or not self.admits(origin):
            return [(b"vary", b"Origin")]
        return [(b"access-control-allow-origin", origin), _EXPOSED, (b"vary", b"Origin")]

    def head(self, origin: bytes | None) -> bytes:
        """Return `headers` as HTTP/1.1 writes them."""
        return _HEAD_FOR_ALL if self._any else encode_headers(self.headers(origin))

    def preflight(self, allow: bytes, requested: bytes | None = None) -> Headers:
        """Return preflight headers for the methods *allow*, with *requested* headers of S3."""
        names = (each.strip() for each in (requested or b"").split(b","))
        allowed = [_ALLOWED, *filter(_OF_S3.fullmatch, names)]
        return [
            (b"access-control-allow-methods", allow),
            (b"access-control-allow-headers", b", ".join(allowed)),
            (b"access-control-max-age", b"86400"),  # a day, the longest that a browser keeps it
            # Chromium asks for leave before a public page reads from an inner network.
            (b"access-control-allow-private-network", b"true"),
        ]


type Explain = Callable[[Request, Failure], Awaitable[Response]]
"""Returns the response that explains a failure, without the headers of every response."""


@dataclass(eq=False, slots=True)
class Responder:
    """Sends the response to *request*."""

    request: Request
    exchange: Exchange
    cors: Cors
    explain: Explain

    async def send(self, status: HTTPStatus, headers: Headers, body: Body = b"") -> None:
        """Send *headers*, to which CORS and the request id are added, and *body*."""
        headers += self.cors.headers(self.request.headers.get(b"origin"))
        headers.append((b"x-request-id", self.request.id))
        await self.exchange.write(Response(status, headers, body))

    async def send_document(self, media_type: bytes, body: bytes) -> None:
        """Send 200 with a *body* that must not be cached."""
        length = (b"content-length", b"%d" % len(body))
        await self.send(HTTPStatus.OK, [(b"content-type", media_type), length, NO_STORE], body)

    @property
    def is_foreign(self) -> bool:
        """Return whether a page of another origin, which CORS does not allow, sent the request."""
        origin = self.request.headers.get(b"origin")
        if origin is None or self.cors.admits(origin):
            return False
        return origin.partition(b"://")[2] != self.request.headers.get(b"host")

    async def fail(self, error: ShardgateError) -> None:
        """Explain *error*."""
        status = status_of(error)
        log_failure(status, error)
        extra = [(b"allow", ALLOW)] if status is HTTPStatus.METHOD_NOT_ALLOWED else []
        await self._send_failure(Failure(status, str(error), error), extra)

    async def problem(self, status: HTTPStatus, detail: str, *extra: tuple[bytes, bytes]) -> None:
        """Explain a failure with *detail*, with *extra* headers."""
        await self._send_failure(Failure(status, detail), extra)

    async def _send_failure(self, failure: Failure, extra: Iterable[tuple[bytes, bytes]]) -> None:
        response = await self.explain(self.request, failure)
        headers = cast("Headers", response.headers)
        # A page is not cached, where a problem may be; lines of `Vary` add up.
        present = {name for name, _ in headers} - {b"vary"}
        headers = [*headers, *(header for header in extra if header[0] not in present)]
        if not any(name == b"cache-control" for name, _ in headers):
            headers.append(NO_STORE)
        await self.send(response.status, headers, response.body)

    async def preflight(self, allow: bytes = ALLOW) -> None:
        """Answer OPTIONS where the methods *allow* are served."""
        headers = self.cors.preflight(
            allow, self.request.headers.get(b"access-control-request-headers")
        )
        await self.send(HTTPStatus.NO_CONTENT, [*headers, (b"allow", allow), NO_STORE])

    def completed(self, headers: Headers) -> Headers:
        """Return the *headers* of another ASGI application with those of every response."""
        present = {name for name, _ in headers}
        more = [*self.cors.headers(self.request.headers.get(b"origin")), NO_STORE, NO_REFERRER]
        more.append((b"x-request-id", self.request.id))
        return [*headers, *(header for header in more if header[0] not in present)]


def page_headers(*, style: str = "", script: str = "") -> Headers:
    """Return the headers of an HTML page that may use its own inline *style* and *script* only,
    and pictures of this service.
    """
    policy = ["default-src 'none'", "base-uri 'none'", "form-action 'self'"]
    policy.append("img-src 'self' data:")
    if style:
        policy.append(f"style-src '{csp_digest(style)}'")
    if script:
        policy += [f"script-src '{csp_digest(script)}'", "connect-src 'self'"]
    return [
        (b"content-security-policy", "; ".join([*policy, "frame-ancestors 'none'"]).encode()),
        NO_REFERRER,
    ]


def csp_digest(text: str) -> str:
    """Return the source expression of a content security policy for an inline *text*."""
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"
