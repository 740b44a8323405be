"""Conditional range reads over HTTP (RFC 9110 §13, §14), for the S3 and HTTP stores.

Refusals are classified in this order: the store may have a newer URL; 304, 412 and 416 are about
the version or the range; a refusal that the store accepts as proof is absence; others are failures.
"""

import re
import ssl
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, Literal, Self

from app.errors import (
    StorageDeniedError,
    StorageError,
    StorageThrottledError,
    StorageTimeoutError,
    StorageUnavailableError,
    TruncatedReadError,
    VersionChangedError,
)
from app.model import ByteRange, ByteRequest, Condition, ETag, ObjectRef
from app.storage.contract import (
    NOT_MODIFIED,
    Found,
    NotModified,
    Stat,
    check_condition,
    clamp,
    stream_of,
)
from app.storage.http1_client import (
    BadAnswerError,
    CutOffError,
    ExchangeError,
    ForbiddenAddressError,
    HttpClient,
    Response,
    Target,
)
from app.storage.http_headers import (
    is_gzip,
    last_modified,
    object_headers,
    parse_content_range,
    parse_unsatisfied,
    read_headers,
    version_of,
)

type HttpMethod = Literal["GET", "HEAD"]

NO_SUCH_KEY: Final = "NoSuchKey"
"""The only code that proves absence in S3: proxies in front of it answer 404 too."""

_OK: Final = frozenset({200, 206})
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_MAX_REDIRECTS: Final = 5
_NOT_MODIFIED: Final = 304
_NOT_FOUND: Final = 404
_PRECONDITION_FAILED: Final = 412
_UNSATISFIED: Final = 416
_TOO_MANY: Final = 429
_SERVER_ERROR: Final = 500
_DENIED: Final = frozenset({401, 403, 407})
_DENIED_CODES: Final = frozenset({"ExpiredToken", "InvalidToken", "TokenRefreshRequired"})
_THROTTLED_CODES: Final = frozenset({"SlowDown", "Throttling", "RequestLimitExceeded"})
_TRANSIENT_CODES: Final = frozenset(
    {"ConditionalRequestConflict", "OperationAborted", "RequestTimeout"}
)
_FROM_PROXIES: Final = frozenset({204, 404, 410})
"""Statuses that proxies send for a while, without an error document of S3."""
_DOCUMENT_NBYTES: Final = 16 * 1024
_WITHOUT_DOCUMENT: Final = frozenset({304, 412, 416})
_EXPLAINED: Final = frozenset({403, 404})
"""Statuses of a HEAD whose reason a GET tells."""
_CODE: Final = re.compile(rb"<Error[\s>].*?<Code>([A-Za-z0-9.]{1,64})</Code>", re.DOTALL)
_MESSAGE: Final = re.compile(rb"<Message>([^<]{0,512})</Message>")
_FAILURES: Final = (ExchangeError, OSError)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A response without the object: its status, and the code of S3's error document."""

    method: HttpMethod
    status: int
    code: str = ""
    message: str = ""
    """Message of the server; never shown, since it may hold parts of a signature."""
    size: int | None = None
    """Size of the object according to a 416."""

    @property
    def is_no_such_key(self) -> bool:
        return self.status == _NOT_FOUND and self.code == NO_SUCH_KEY

    def failure(self, ref: ObjectRef) -> StorageError:
        """Return the error for a refusal that is about neither absence, version nor range."""
        reason = f"the server answered {self.status} {self.code}".rstrip()
        if self.status in _DENIED or self.code in _DENIED_CODES:
            return StorageDeniedError(ref, reason)
        if self.status == _TOO_MANY or self.code in _THROTTLED_CODES:
            return StorageThrottledError(ref, reason)
        is_transient = (
            self.status >= _SERVER_ERROR
            or self.code in _TRANSIENT_CODES
            or (self.status in _FROM_PROXIES and not self.code)
        )
        return StorageUnavailableError(ref, reason, lasting=not is_transient)


def no_bucket(ref: ObjectRef) -> StorageUnavailableError:
    """Return the error for *ref* in a bucket that does not exist."""
    return StorageUnavailableError(ref, "there is no such bucket", lasting=True)


class HttpReader(ABC):
    """Reads objects over a pool of connections; subclasses know URLs and refusals."""

    requires_etags = False
    """True if every response about an object has an ETag."""
    follows_redirects = False

    def __init__(self, client: HttpClient) -> None:
        self._http = client

    @abstractmethod
    async def _target(self, method: HttpMethod, ref: ObjectRef) -> Target:
        """Return the URL for *method* of *ref*."""

    @abstractmethod
    def _proves_absence(self, refusal: Refusal) -> bool:
        """Return whether the store itself answered that there is no such object."""

    def _renew(self, method: HttpMethod, ref: ObjectRef, refusal: Refusal) -> bool:  # noqa: ARG002
        """Return whether a new URL could succeed after *refusal*."""
        return False

    def _follow(self, ref: ObjectRef, target: Target, location: str) -> Target:
        """Return the target of a redirect, or raise."""
        raise NotImplementedError

    async def get(
        self,
        ref: ObjectRef,
        request: ByteRequest | None = None,
        *,
        if_match: Condition | None = None,
        if_none_match: ETag | None = None,
    ) -> Found | NotModified | None:
        if isinstance(request, ByteRange) and not request.length:
            return await self._get_nothing(ref, request, if_match, if_none_match)
        try:
            body = await self._open(ref, request, if_match, if_none_match, is_eager=True)
            if not isinstance(body, _Body):
                return body
            try:
                data = await body.read()
            finally:
                body.response.release()
        except _FAILURES as error:
            raise _storage_error(ref, error) from error
        if body.etag == if_none_match:
            return NOT_MODIFIED
        headers = body.response.headers
        return Found(
            data, body.byte_range, body.size, body.etag, is_gzip(headers), body.modified_s, headers
        )

    @asynccontextmanager
    async def stream(
        self, ref: ObjectRef, byte_range: ByteRange, *, if_match: Condition | None
    ) -> AsyncGenerator[AsyncIterator[bytes]]:
        if not byte_range.length:
            if await self._get_nothing(ref, byte_range, if_match, None) is None:
                raise VersionChangedError(ref)
            yield stream_of(b"")
            return
        try:
            body = await self._open(ref, byte_range, if_match, None)
        except _FAILURES as error:
            raise _storage_error(ref, error) from error
        if not isinstance(body, _Body):
            raise VersionChangedError(ref)
        try:
            if body.byte_range != byte_range:
                raise VersionChangedError(ref)
            yield body.pieces()
        finally:
            body.response.release()

    async def stat(self, ref: ObjectRef) -> Stat | None:
        if (found := await self.head(ref)) is None:
            return None
        headers, size = found
        etag = version_of(headers, size)
        return Stat(size, etag, is_gzip(headers), last_modified(headers), object_headers(headers))

    async def head(self, ref: ObjectRef) -> tuple[Mapping[bytes, bytes], int] | None:
        """Return the response headers and the size of *ref*, `None` if absent."""
        try:
            response = await self._request("HEAD", ref)
            if isinstance(response, Refusal) and response.status in _EXPLAINED:
                response = await self._explain(ref, response)
        except _FAILURES as error:
            raise _storage_error(ref, error) from error
        if isinstance(response, Refusal):
            self._check_absence(ref, response, None)
            return None
        if (size := response.length) is None:
            raise StorageUnavailableError(ref, "the response has no Content-Length", lasting=True)
        return response.headers, size

    async def aclose(self) -> None:
        await self._http.aclose()

    async def _head_status(self, ref: ObjectRef) -> int:
        try:
            return (await self._request("HEAD", ref)).status
        except _FAILURES as error:
            raise _storage_error(ref, error) from error

    async def _get_nothing(
        self,
        ref: ObjectRef,
        request: ByteRange,
        if_match: Condition | None,
        if_none_match: ETag | None,
    ) -> Found | NotModified | None:
        """Read an empty range, which ``Range`` cannot express."""
        found = await self.stat(ref)
        if found is None:
            if if_match is not None:
                raise VersionChangedError(ref)
            return None
        check_condition(ref, if_match, found.etag, found.modified_s)
        if found.etag == if_none_match:
            return NOT_MODIFIED
        return Found(b"", clamp(ref, request, found.size, if_match), found.size, found.etag)

    async def _open(
        self,
        ref: ObjectRef,
        request: ByteRequest | None,
        if_match: Condition | None,
        if_none_match: ETag | None,
        *,
        is_eager: bool = False,
    ) -> "_Body | NotModified | None":
        headers = read_headers(request, if_match, if_none_match)
        response = await self._request("GET", ref, headers, is_eager=is_eager)
        if isinstance(response, Refusal):
            if response.status == _NOT_MODIFIED and if_none_match is not None:
                return NOT_MODIFIED
            if response.status == _UNSATISFIED and request is not None:
                explicit = await self._satisfiable(ref, request, response, if_match)
                return await self._open(ref, explicit, if_match, if_none_match, is_eager=is_eager)
            self._check_absence(ref, response, if_match)
            return None
        try:
            data = None
            if response.length is None and request is None:
                data = await response.read()
            return _Body.check(ref, response, request, if_match, data)
        except BaseException:
            response.release()
            raise

    async def _request(
        self, method: HttpMethod, ref: ObjectRef, headers: bytes = b"", *, is_eager: bool = False
    ) -> Response | Refusal:
        target, is_renewed, redirects = await self._target(method, ref), False, 0
        while redirects <= _MAX_REDIRECTS:
            response = await self._http.send(method, target, headers, is_eager=is_eager)
            if response.status in _OK:
                if self.requires_etags and b"etag" not in response.headers:
                    response.release()
                    raise BadAnswerError("the response has no ETag, which S3 always sends")
                return response
            location = response.headers.get(b"location")
            if self.follows_redirects and response.status in _REDIRECTS and location is not None:
                response.release()
                target = self._follow(ref, target, location.decode("latin-1"))
                redirects += 1
                continue
            refusal = await _read_refusal(method, response)
            if is_renewed or not self._renew(method, ref, refusal):
                return refusal
            target, is_renewed = await self._target(method, ref), True
        raise BadAnswerError(f"more than {_MAX_REDIRECTS} redirects")

    async def _explain(self, ref: ObjectRef, refusal: Refusal) -> Refusal:
        """Return the refusal of a GET if that of a HEAD, which has no document, proves nothing."""
        if self._proves_absence(refusal):
            return refusal
        response = await self._request("GET", ref, b"Range: bytes=0-0\r\n")
        if isinstance(response, Refusal):
            return response
        response.release()
        return refusal

    def _check_absence(self, ref: ObjectRef, refusal: Refusal, if_match: Condition | None) -> None:
        """Return if *ref* is absent, else raise the error for *refusal*."""
        if self._proves_absence(refusal):
            if if_match is None:
                return
            raise VersionChangedError(ref)
        if if_match is not None and refusal.status == _PRECONDITION_FAILED:
            raise VersionChangedError(ref)
        raise refusal.failure(ref)

    async def _satisfiable(
        self, ref: ObjectRef, request: ByteRequest, refusal: Refusal, if_match: Condition | None
    ) -> ByteRange:
        """Return the explicit range of a long suffix, which some servers refuse; else raise."""
        if (size := refusal.size) is None:
            found = await self.stat(ref)
            if found is None:
                raise VersionChangedError(ref)
            size = found.size
        explicit = clamp(ref, request, size, if_match)
        if isinstance(request, ByteRange):
            raise refusal.failure(ref)
        return explicit


@dataclass(slots=True)
class _Body:
    ref: ObjectRef
    response: Response
    byte_range: ByteRange
    skip: int
    """Bytes of the body before *byte_range*, from a server that ignores ``Range``."""
    size: int
    etag: ETag
    modified_s: int | None
    data: bytes | None
    """The body, if it had to be read to learn its length."""

    @classmethod
    def check(
        cls,
        ref: ObjectRef,
        response: Response,
        request: ByteRequest | None,
        if_match: Condition | None,
        data: bytes | None,
    ) -> Self:
        """Check range, length and version of a response, whatever the server did with them."""
        length = response.length if data is None else len(data)
        sent, size = _sent_range(ref, response, length)
        etag = version_of(response.headers, size)
        modified_s = last_modified(response.headers)
        check_condition(ref, if_match, etag, modified_s)
        wanted = clamp(ref, request, size, if_match)
        if sent != wanted and sent.length != size:
            raise StorageUnavailableError(ref, f"the server sent {sent} instead of {wanted}")
        if length is not None and length != sent.length:
            raise TruncatedReadError(ref, f"Content-Length is {length} of {sent.length} bytes")
        return cls(ref, response, wanted, wanted.start - sent.start, size, etag, modified_s, data)

    async def read(self) -> bytes:
        if self.data is not None:
            return self.data[self.skip : self.skip + self.byte_range.length]
        if self.response.length == self.byte_range.length:
            return await self.response.read()
        return b"".join([piece async for piece in self.pieces()])

    async def pieces(self) -> AsyncIterator[bytes]:
        skip, left = self.skip, self.byte_range.length
        try:
            async for piece in self.response.pieces():
                if wanted := piece[skip : skip + left]:
                    left -= len(wanted)
                    yield wanted
                skip = max(0, skip - len(piece))
                if not left:
                    return
        except _FAILURES as error:
            raise _storage_error(self.ref, error) from error
        raise TruncatedReadError(self.ref, f"{left} bytes are missing")


def _sent_range(ref: ObjectRef, response: Response, length: int | None) -> tuple[ByteRange, int]:
    """Return the range in the body and the object's size; a 200 with Content-Range is a 206."""
    content_range = response.headers.get(b"content-range")
    if content_range is not None:
        if (parsed := parse_content_range(content_range)) is not None:
            return parsed
    elif response.status == 200:  # noqa: PLR2004  OK
        if length is not None:
            return ByteRange(0, length), length
        raise StorageUnavailableError(ref, "the response has no Content-Length", lasting=True)
    raise StorageUnavailableError(ref, "the response has no valid Content-Range")


async def _read_refusal(method: HttpMethod, response: Response) -> Refusal:
    document = b""
    try:
        if method == "GET" and response.status not in _WITHOUT_DOCUMENT:
            async for piece in response.pieces():
                document += piece
                if len(document) >= _DOCUMENT_NBYTES:
                    break
    except _FAILURES:
        document = b""  # the status is enough
    finally:
        response.release()
    code, message = _CODE.search(document), _MESSAGE.search(document)
    return Refusal(
        method,
        response.status,
        code[1].decode() if code else "",
        message[1].decode(errors="replace") if message else "",
        parse_unsatisfied(response.headers.get(b"content-range", b"")),
    )


def _storage_error(ref: ObjectRef, error: ExchangeError | OSError) -> StorageError:
    match error:
        case TimeoutError():
            return StorageTimeoutError(ref, "the server is silent")
        case CutOffError():
            return TruncatedReadError(ref, str(error))
        case ForbiddenAddressError():
            return StorageDeniedError(ref, str(error))
        case ExchangeError():
            return StorageUnavailableError(ref, str(error))
    reason = error.strerror or type(error).__name__
    return StorageUnavailableError(ref, reason, lasting=isinstance(error, ssl.SSLError))
