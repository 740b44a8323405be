"""Responses: CORS and the other headers of every response, and the headers of an entity."""

import re
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from hashlib import sha256
from http import HTTPStatus
from typing import Final

from shardgate.errors import ShardgateError
from shardgate.auth.access import ServedDataset
from shardgate.server.conditions import content_range, etag_of_selected, last_modified
from shardgate.server.problems import problem, status_of
from shardgate.server.request import Exchange, Headers, Request, Response, encode_headers
from shardgate.gateway.s3.dialect import error_code, error_document, speaks_s3
from shardgate.model import VirtualKey
from shardgate.observability.logging import log_failure
from shardgate.read.bodies import Body, Entity, Selection
from shardgate.storage.http_headers import METADATA

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
            (b"access-control-max-age", b"86400"),
            (b"access-control-allow-private-network", b"true"),
        ]


type Explain = Callable[
    [Request, HTTPStatus, str, Mapping[str, object]], Awaitable[tuple[Headers, bytes]]
]
"""Returns the headers and body of an error; see `ErrorPages.explain`."""


class Responder:
    """Sends the response to *request*."""

    __slots__ = ("_cors", "exchange", "explain", "headers", "request")

    def __init__(self, request: Request, exchange: Exchange, cors: Cors, explain: Explain) -> None:
        self.request = request
        self.headers = request.headers
        self.exchange = exchange
        self._cors = cors
        self.explain = explain

    async def send(self, status: HTTPStatus, headers: Headers, body: Body = b"") -> None:
        """Send *headers*, to which CORS and the request id are added, and *body*."""
        headers += self._cors.headers(self.headers.get(b"origin"))
        headers.append((b"x-request-id", self.request.id))
        await self.exchange.write(Response(status, headers, body))

    async def send_document(self, media_type: bytes, body: bytes) -> None:
        """Send 200 with a *body* that must not be cached."""
        length = (b"content-length", b"%d" % len(body))
        await self.send(HTTPStatus.OK, [(b"content-type", media_type), length, NO_STORE], body)

    @property
    def is_s3(self) -> bool:
        """Return whether the client speaks S3."""
        return speaks_s3(self.headers, self.request.query)

    @property
    def is_foreign(self) -> bool:
        """Return whether a page of another origin, which CORS does not allow, sent the request."""
        origin = self.headers.get(b"origin")
        if origin is None or self._cors.admits(origin):
            return False
        return origin.partition(b"://")[2] != self.headers.get(b"host")

    async def fail(self, error: ShardgateError) -> None:
        """Send *error* as a problem document, or as an error of S3."""
        status = status_of(error)
        log_failure(status, error)
        if status is HTTPStatus.UNAUTHORIZED and self.is_s3:
            status = HTTPStatus.FORBIDDEN
        extra = [(b"allow", ALLOW)] if status is HTTPStatus.METHOD_NOT_ALLOWED else []
        await self.problem(status, str(error), *extra, code=error_code(status, error))

    async def problem(
        self, status: HTTPStatus, detail: str, *extra: tuple[bytes, bytes], code: str | None = None
    ) -> None:
        """Send a problem document, its page to a browser, or an error of S3 with *code*."""
        if self.is_s3:
            code = code or error_code(status)
            request_id = self.request.id.decode()
            headers, body = error_document(status, code, detail, request_id, self.headers)
        elif any(name == b"cache-control" for name, _ in extra):  # one for all, whatever Accept is
            headers, body = problem(status, detail)
        else:
            headers, body = await self.explain(self.request, status, detail, {})
        headers += extra
        if not any(name == b"cache-control" for name, _ in headers):
            headers.append(NO_STORE)
        await self.send(status, headers, body)

    async def preflight(self, allow: bytes = ALLOW) -> None:
        """Answer OPTIONS where the methods *allow* are served."""
        headers = self._cors.preflight(allow, self.headers.get(b"access-control-request-headers"))
        await self.send(HTTPStatus.NO_CONTENT, [*headers, (b"allow", allow), NO_STORE])

    def completed(self, headers: Headers) -> Headers:
        """Return the *headers* of another ASGI application with those of every response."""
        present = {name for name, _ in headers}
        more = [*self._cors.headers(self.headers.get(b"origin")), NO_STORE, NO_REFERRER]
        more.append((b"x-request-id", self.request.id))
        return [*headers, *(header for header in more if header[0] not in present)]


_LASTING: Final = b"public, max-age=31536000, immutable"
"""For keys that always name the same bytes (RFC 8246)."""
_LASTING_PRIVATE: Final = b"private, max-age=31536000, immutable"
_PRIVATE: Final[Headers] = [(b"vary", b"Authorization"), NO_REFERRER]
"""For responses that depend on the caller; a token may be in the path."""
_VARY: Final = b"Accept-Encoding"
_VARY_OF_S3: Final = b"Accept-Encoding, Authorization, Amz-Sdk-Invocation-Id"
"""By these a cache tells clients of S3 from others; see `speaks_s3`."""
_SANDBOX: Final = (b"content-security-policy", b"sandbox")
"""For every object, whatever its type: it shares its origin with the pages of the service."""
_CONTENT_TYPES: Final = {
    "json": b"application/json",
    "info": b"application/json",
    "zarray": b"application/json",
    "zattrs": b"application/json",
    "zgroup": b"application/json",
    "zmetadata": b"application/json",
    "txt": b"text/plain; charset=utf-8",
    "md": b"text/plain; charset=utf-8",
    "png": b"image/png",
    "jpg": b"image/jpeg",
    "jpeg": b"image/jpeg",
}
"""By name or file extension; no type that a browser would run."""


def content_type(key: str) -> bytes:
    """Return the media type of an object by its *key*."""
    extension = key.rpartition("/")[2].rpartition(".")[2]
    return _CONTENT_TYPES.get(extension, b"application/octet-stream")


def cache_headers(dataset: ServedDataset) -> Headers:
    """Return the caching headers of a mutable response."""
    cache_control = (b"cache-control", dataset.cache_control)
    return [cache_control, *([] if dataset.is_public else _PRIVATE)]


def entity_headers(
    dataset: ServedDataset, key: VirtualKey, entity: Entity, selection: Selection
) -> Headers | None:
    """Return the headers of a selected entity; `None` if the response is a problem instead."""
    status, part, _, coding, is_s3 = selection
    if part is None and status is not HTTPStatus.NOT_MODIFIED:
        return None
    cache_control = dataset.cache_control
    if entity.is_immutable:
        cache_control = _LASTING if dataset.is_public else _LASTING_PRIVATE
    etag = etag_of_selected(entity, selection).encode("latin-1")
    headers = [(b"etag", etag), (b"cache-control", cache_control), _SANDBOX]
    if part is not None:
        stored = entity.headers
        headers += [
            (b"accept-ranges", b"bytes"),
            (b"content-length", b"%d" % (part.stop - part.start)),
            (b"content-type", stored.content_type.encode() or content_type(key)),
            *[(METADATA + name.encode(), value.encode()) for name, value in stored.metadata],
        ]
        if status is HTTPStatus.PARTIAL_CONTENT:
            headers.append((b"content-range", content_range(part, entity.length)))
        if coding:
            headers.append((b"content-encoding", coding.encode("latin-1")))
    if not dataset.is_public:
        headers += _PRIVATE
    if is_s3:
        headers.append((b"vary", _VARY_OF_S3))
    elif entity.coding or entity.is_inflated:
        headers.append((b"vary", _VARY))
    return headers + last_modified(entity.modified_s)


def page_headers(*, style: str = "", script: str = "") -> Headers:
    """Return the headers of an HTML page that may use its own inline *style* and *script* only,
    and pictures of this service.
    """
    policy = ["default-src 'none'", "base-uri 'none'", "form-action 'none'"]
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
