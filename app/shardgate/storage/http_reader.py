"""Conditional range reads over HTTP (RFC 9110 §13, §14), for the S3 and HTTP stores.

Refusals are classified in this order: the store may have a newer URL; 304, 412 and 416 are about
the version or the range; a refusal that the store accepts as proof is absence; others are failures.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Final

from cachetools import LRUCache, TTLCache

from shardgate.errors import (
    StorageError,
    StorageRedirectError,
    StorageUnusableError,
    TruncatedReadError,
    VersionChangedError,
)
from shardgate.model import ByteRange, ByteRequest, Condition, ETag, ObjectRef, SuffixRange
from shardgate.settings import StoreSettings
from shardgate.storage.contract import (
    NOT_MODIFIED,
    OBJECT,
    Found,
    NotModified,
    Stat,
    check_condition,
    clamp,
    stream_of,
)
from shardgate.storage.http1_client import (
    BadAnswerError,
    HttpClient,
    HttpResponse,
    NoAnswerError,
    RequestTarget,
)
from shardgate.storage.http_headers import (
    VersionWatch,
    content_coding,
    is_derived,
    last_modified,
    object_headers,
    parse_content_range,
    read_headers,
    skew_of,
    version_of,
)
from shardgate.storage.refusals import FAILURES, HttpMethod, Refusal, read_refusal, storage_error

_MAX_REDIRECTS: Final = 5


class HttpReader(ABC):
    """Reads objects over a pool of connections; subclasses know URLs and refusals."""

    requires_etags = False
    """True if every response about an object has an ETag."""
    follows_redirects = False
    is_signed = False
    """True if URLs are signed, and depend on our clock."""
    _authorization: Callable[[], Awaitable[bytes]] | None = None
    """Returns a header line for the server of the object, not for others that it redirects to."""

    def __init__(self, client: HttpClient, settings: StoreSettings) -> None:
        self._http = client
        self._validator = settings.validator
        self._forbidden_is_absent = settings.forbidden_is_absent
        self._without_suffixes: TTLCache[str, bool] = TTLCache(1024, ttl=3600.0)
        """Buckets whose servers were seen to know no suffix ranges."""
        self._sizes: LRUCache[tuple[ObjectRef, bytes], int] = LRUCache(8192)
        """Sizes of versions, by ETag, of servers that do not tell them with a range."""
        self._versions = VersionWatch()

    @abstractmethod
    async def _target(self, method: HttpMethod, ref: ObjectRef) -> RequestTarget:
        """Return the URL for *method* of *ref*."""

    @abstractmethod
    def _proves_absence(self, refusal: Refusal) -> bool:
        """Return whether the store itself answered that there is no such object."""

    def _may_hide_absence(self, refusal: Refusal) -> bool:
        """Return whether 403 can mean that there is no such object."""
        return refusal.may_hide_absence

    @abstractmethod
    def _renew(self, method: HttpMethod, ref: ObjectRef, refusal: Refusal) -> bool:
        """Return whether a new URL could succeed after *refusal*."""

    def _follow(self, ref: ObjectRef, target: RequestTarget, location: str) -> RequestTarget:
        """Return the target of a redirect, or raise."""
        raise NotImplementedError

    async def get(
        self,
        ref: ObjectRef,
        request: ByteRequest | None = None,
        *,
        if_match: Condition | None = None,
        if_none_match: ETag | None = None,
        kind: str = OBJECT,  # noqa: ARG002  the contract's argument
    ) -> Found | NotModified | None:
        if isinstance(request, ByteRange) and request.start == request.stop:
            return await self._get_nothing(ref, request, if_match, if_none_match)
        try:
            body = await self._open(ref, request, if_match, if_none_match, is_eager=True)
            if not isinstance(body, _Body):
                return body
            try:
                data = await body.read()
            finally:
                body.response.release()
        except VersionChangedError as error:
            raise await self._explained(error, if_match) from error
        except FAILURES as error:
            raise storage_error(ref, error) from error
        # Servers may ignore If-None-Match, and do not know derived versions.
        if body.etag == if_none_match:
            return NOT_MODIFIED
        headers = body.response.headers
        return Found(
            data, body.byte_range, body.size, body.etag, body.coding, body.modified_s, headers
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
        except VersionChangedError as error:
            raise await self._explained(error, if_match) from error
        except FAILURES as error:
            raise storage_error(ref, error) from error
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
        etag = version_of(headers, size, self._validator)
        self._versions.note(ref, headers, size, etag)
        stored = object_headers(headers)
        return Stat(size, etag, stored.coding, last_modified(headers), stored)

    async def head(self, ref: ObjectRef) -> tuple[Mapping[bytes, bytes], int] | None:
        """Return the response headers and the size of *ref*, `None` if absent."""
        try:
            response = await self._request("HEAD", ref)
            if isinstance(response, Refusal) and self._is_doubtful(response):
                response = await self._request("GET", ref)
                if isinstance(response, HttpResponse):
                    response.release()  # the headers are enough
        except FAILURES as error:
            raise storage_error(ref, error) from error
        if isinstance(response, Refusal):
            self._check_absence(ref, response, None)
            return None
        if (size := response.length) is None:
            raise StorageUnusableError(ref, "the response has no Content-Length")
        return response.headers, size

    async def aclose(self) -> None:
        await self._http.aclose()

    async def _get_nothing(
        self,
        ref: ObjectRef,
        request: ByteRange,
        if_match: Condition | None,
        if_none_match: ETag | None,
    ) -> Found | NotModified | None:
        """Read an empty range, which ``Range`` cannot express."""
        found = await self._stat_if(ref, if_match, if_none_match)
        if not isinstance(found, Stat):
            return found
        return Found(b"", clamp(ref, request, found.size, if_match), found.size, found.etag)

    async def _stat_if(
        self, ref: ObjectRef, if_match: Condition | None, if_none_match: ETag | None
    ) -> Stat | NotModified | None:
        """Return size and version of *ref* under the conditions of a read."""
        if (stat := await self.stat(ref)) is None:
            check_condition(ref, if_match)
            return None
        check_condition(ref, if_match, stat.etag, stat.modified_s)
        return NOT_MODIFIED if stat.etag == if_none_match else stat

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
        response: HttpResponse | Refusal | None
        if isinstance(request, SuffixRange):
            response = await self._ask_for_end(ref, request, headers, is_eager=is_eager)
            if response is None:
                return await self._open_end(
                    ref, request, if_match, if_none_match, is_eager=is_eager
                )
        else:
            response = await self._request("GET", ref, headers, is_eager=is_eager)
        if isinstance(response, Refusal):
            if response.status == HTTPStatus.NOT_MODIFIED and if_none_match is not None:
                return NOT_MODIFIED
            is_unsatisfied = response.status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE
            if is_unsatisfied and isinstance(request, ByteRange):
                await self._check_range(ref, request, response, if_match)
            self._check_absence(ref, response, if_match)
            return None
        try:
            return await self._checked(ref, response, request, if_match, is_eager=is_eager)
        except BaseException:
            response.release()
            raise

    async def _ask_for_end(
        self, ref: ObjectRef, suffix: SuffixRange, headers: bytes, *, is_eager: bool
    ) -> HttpResponse | Refusal | None:
        """Return the response to a suffix range, `None` from a server that may know none."""
        if ref.bucket in self._without_suffixes:
            return None
        try:
            response = await self._request("GET", ref, headers, is_eager=is_eager)
        except NoAnswerError:  # of a program that fails at them
            if self.requires_etags:
                raise
            return None
        if not _may_lack_suffixes(response, suffix):
            return response
        if isinstance(response, HttpResponse):
            response.release()
        return None

    async def _open_end(
        self,
        ref: ObjectRef,
        suffix: SuffixRange,
        if_match: Condition | None,
        if_none_match: ETag | None,
        *,
        is_eager: bool,
    ) -> "_Body | NotModified | None":
        """Open a suffix as an explicit range of the version that a stat has seen."""
        etag: ETag | None = None
        for _ in range(3):
            stat = await self._stat_if(ref, if_match, if_none_match)
            if not isinstance(stat, Stat):
                return stat
            etag = stat.etag
            wanted = clamp(ref, suffix, stat.size, if_match)
            with suppress(VersionChangedError):
                body = await self._open(ref, wanted, etag, None, is_eager=is_eager)
                if stat.size >= suffix.length:  # a server may refuse longer ones only
                    self._without_suffixes.setdefault(ref.bucket, True)
                return body
        raise await self._explained(VersionChangedError(ref), etag)

    async def _request(
        self, method: HttpMethod, ref: ObjectRef, headers: bytes = b"", *, is_eager: bool = False
    ) -> HttpResponse | Refusal:
        target = await self._target(method, ref)
        own = target.origin
        is_renewed = False
        redirects = 0
        while redirects <= _MAX_REDIRECTS:
            lines = headers
            if self._authorization is not None and target.origin == own:
                lines += await self._authorization()
            response = await self._http.send(method, target, lines, is_eager=is_eager)
            if response.status in {200, 206}:
                if self.requires_etags and b"etag" not in response.headers:
                    response.release()
                    raise BadAnswerError("the response has no ETag, which S3 always sends")
                return response
            location = response.headers.get(b"location") if self.follows_redirects else None
            if location is not None and response.status in {301, 302, 303, 307, 308}:
                response.release()
                target = self._follow(ref, target, location.decode("latin-1"))
                redirects += 1
                continue
            refusal = await read_refusal(method, response)
            if self.is_signed:
                refusal = replace(refusal, skew_s=skew_of(response.headers))
            if is_renewed or not self._renew(method, ref, refusal):
                return refusal
            target = await self._target(method, ref)
            is_renewed = True
        raise StorageRedirectError(ref, f"more than {_MAX_REDIRECTS} redirects")

    def _is_doubtful(self, refusal: Refusal) -> bool:
        """Return whether a GET may find more than the HEAD that got *refusal*, without document."""
        # A GET tells the reason of some, or succeeds: servers may know no HEAD, or sign the URLs
        # of redirects for GET.
        is_doubtful = refusal.status in {400, 403, 404, 405, 501}
        return is_doubtful and not self._proves_absence(refusal)

    def _check_absence(self, ref: ObjectRef, refusal: Refusal, if_match: Condition | None) -> None:
        """Return if *ref* is absent, else raise the error for *refusal*."""
        if self._proves_absence(refusal):
            check_condition(ref, if_match)
            return
        if if_match is None and self._forbidden_is_absent and self._may_hide_absence(refusal):
            return  # with a condition the object was there: it is forbidden now
        if if_match is not None and refusal.status == HTTPStatus.PRECONDITION_FAILED:
            raise VersionChangedError(ref)
        raise refusal.failure(ref)

    async def _checked(
        self,
        ref: ObjectRef,
        response: HttpResponse,
        request: ByteRequest | None,
        if_match: Condition | None,
        *,
        is_eager: bool,
    ) -> "_Body":
        """Check range, length and version of a response, whatever the server did with them."""
        headers = response.headers
        length = response.length
        data = None
        coding = content_coding(headers)
        if coding and request is not None:
            _check_coding(ref, response, coding)
        if length is None and request is None:  # a chunked body shows its size at its end
            data = await response.read()
            length = len(data)
        sent, size = _sent_range(ref, response, length)
        if size is None:
            if is_eager and data is None:
                data = await response.read()  # the connection is free for another request
                length = len(data)
            size = await self._size_of(ref, headers)
        etag = version_of(headers, size, self._validator)
        modified_s = last_modified(headers)
        if if_match is None:
            self._versions.note(ref, headers, size, etag)
        elif if_match != etag:
            check_condition(ref, if_match, etag, modified_s)
        wanted = sent
        if sent != request or sent.stop > size:
            wanted = clamp(ref, request, size, if_match)
            # A server that ignores ``Range`` sends all, of which the range is cut out.
            if sent != wanted and sent.length != size:
                raise StorageUnusableError(ref, f"the server sent {sent} instead of {wanted}")
        nbytes = sent.stop - sent.start
        if length is not None and length != nbytes:
            raise TruncatedReadError(ref, f"Content-Length is {length} of {nbytes} bytes")
        skip = wanted.start - sent.start
        return _Body(ref, response, wanted, skip, size, etag, coding, modified_s, data)

    async def _explained(
        self, error: VersionChangedError, if_match: Condition | None
    ) -> VersionChangedError:
        """Return *error*, with its reason if the server has several ETags for one version."""
        stat = None
        if isinstance(if_match, str) and not self.requires_etags:
            with suppress(StorageError):
                stat = await self.stat(error.ref)
        if (stat is None or stat.etag != if_match) and not self._versions.alternates(error.ref):
            return error
        reason = "the server alternates between ETags of one version"
        if self._validator == "last-modified":
            reason += ", and tells versions apart in no other way"
        else:
            reason += '; the setting validator of its store, "last-modified", tells versions apart '
            reason += "without them"
        return VersionChangedError(error.ref, reason)

    async def _size_of(self, ref: ObjectRef, headers: Mapping[bytes, bytes]) -> int:
        """Return the size of the version with *headers*, which do not tell it, from a HEAD."""
        name = ref, headers.get(b"etag", b"")
        if (size := self._sizes.get(name)) is None:
            if (found := await self.head(ref)) is None:
                raise VersionChangedError(ref)
            current, size = found
            etag = version_of(current, size, self._validator)
            if etag != version_of(headers, size, self._validator):
                self._versions.note(ref, headers, size, version_of(headers, size))
                self._versions.note(ref, current, size, etag)
                raise VersionChangedError(ref)
            if not is_derived(etag):
                self._sizes[name] = size
        return size

    async def _check_range(
        self, ref: ObjectRef, request: ByteRange, refusal: Refusal, if_match: Condition | None
    ) -> None:
        """Raise what `clamp` does if *request* is outside of the object; else return."""
        if (size := refusal.size) is None:
            found = await self.stat(ref)
            if found is None:  # it existed for the refusal, so it was replaced
                raise VersionChangedError(ref)
            size = found.size
        clamp(ref, request, size, if_match)


@dataclass(slots=True)
class _Body:
    ref: ObjectRef
    response: HttpResponse
    byte_range: ByteRange
    skip: int
    """Bytes of the body before *byte_range*, from a server that ignores ``Range``."""
    size: int
    etag: ETag
    coding: str
    modified_s: int | None
    data: bytes | None
    """The body, if it had to be read to learn its length."""

    async def read(self) -> bytes:
        start, stop = self.byte_range
        if self.data is not None:
            return self.data[self.skip : self.skip + stop - start]
        if self.response.length == stop - start:
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
        except FAILURES as error:
            raise storage_error(self.ref, error) from error
        raise TruncatedReadError(self.ref, f"{left} bytes are missing")


def _sent_range(
    ref: ObjectRef, response: HttpResponse, length: int | None
) -> tuple[ByteRange, int | None]:
    """Return the range in the body and the size, if told; a 200 with Content-Range is a 206."""
    content_range = response.headers.get(b"content-range")
    if content_range is not None:
        if (parsed := parse_content_range(content_range)) is not None:
            return parsed
    elif response.status == HTTPStatus.OK:
        if length is not None:
            return ByteRange(0, length), length
        raise StorageUnusableError(ref, "the response has no Content-Length")
    raise StorageUnusableError(ref, "the response has no valid Content-Range")


def _check_coding(ref: ObjectRef, response: HttpResponse, coding: str) -> None:
    """Raise for a range to which the server gave the *coding*: the bytes are not the object's.

    An object that is stored with a coding has ranges of the stored form, of their own length.
    """
    headers = response.headers
    etag = headers.get(b"etag", b"")
    if (parsed := parse_content_range(headers.get(b"content-range", b""))) is not None:
        is_stored = response.length == parsed[0].length
    else:
        is_made = b"accept-encoding" in headers.get(b"vary", b"").lower()
        is_stored = response.length is not None and not (is_made or etag.startswith(b"W/"))
    # Apache cuts ranges of what it has compressed, and says so in the ETag only.
    if not is_stored or etag.endswith(f'-{coding}"'.encode()):
        server = headers.get(b"server", b"without a name").decode("latin-1")
        reason = f"the server ({server}) compressed a range with {coding}, which was not asked for"
        raise StorageUnusableError(ref, reason)


def _may_lack_suffixes(response: HttpResponse | Refusal, suffix: SuffixRange) -> bool:
    """Return whether *response* is no end of an object, or comes with far more of it."""
    if isinstance(response, Refusal):
        return response.may_mean_suffix
    if (content_range := response.headers.get(b"content-range")) is None:
        is_whole = response.status == HTTPStatus.OK and response.length is not None
        # Up to 1 MiB of an object is read to get at its end.
        return not is_whole or (response.length or 0) > suffix.length + 1024**2
    if (parsed := parse_content_range(content_range)) is None:
        return True
    sent, size = parsed
    if size is None:  # of this length it could be the beginning
        return sent.start == 0 and sent.length >= suffix.length
    return sent.stop != size or sent.length not in (size, min(suffix.length, size))
