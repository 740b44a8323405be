"""Reads ranges of objects behind URLs: the hot path of the S3 and HTTP stores.

A refusal is classed in steps: the source may know a newer URL; 304, 412 and 416 are about the
version or the range; a refusal that the source accepts as proof is absence; the rest is a failure.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final, Protocol

from app.errors import StorageUnavailableError, VersionChangedError
from app.model import ByteRange, ByteRequest, Condition, ETag, ObjectRef, UnmodifiedSince
from app.storage.answers import Answer
from app.storage.conditions import demand, http_date, last_modified
from app.storage.contract import NOT_MODIFIED, Found, NotModified, Stat
from app.storage.http1.client import Client
from app.storage.http1.errors import BadAnswerError
from app.storage.http1.response import Response
from app.storage.http1.target import Target
from app.storage.ranges import clamp, is_derived, is_gzip, object_headers, range_header, version
from app.storage.refusals import Method, Refusal, read_refusal, translated

_OK: Final = frozenset({200, 206})
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_MOST_REDIRECTS: Final = 5
_NOT_MODIFIED: Final = 304
_NOT_FOUND: Final = 404
_PRECONDITION_FAILED: Final = 412
_UNSATISFIED: Final = 416


class Source(Protocol):
    """Knows where objects are and what a refusal means there."""

    sends_etags: bool
    """Whether every answer with an object, or about one, has an ETag."""

    async def target(self, method: Method, ref: ObjectRef, /) -> Target:
        """Give the URL to ask."""
        ...

    def renew(self, method: Method, ref: ObjectRef, refusal: Refusal, /) -> bool:
        """Tell whether a new URL could succeed where this one was refused."""
        ...

    def proves_absence(self, refusal: Refusal, /) -> bool:
        """Return whether the store itself has answered that there is no such object."""
        ...


class RangeReader:
    """One pool of connections, and the rules of RFC 9110 §13 and §14 over it."""

    def __init__(
        self,
        source: Source,
        client: Client,
        *,
        follow: Callable[[ObjectRef, Target, str], Target] | None = None,
    ) -> None:
        """Take over *client*; *follow* returns where a ``Location`` leads, or raises."""
        self._source = source
        self._sends_etags = source.sends_etags
        self._client = client
        self._follow = follow

    async def get(
        self,
        ref: ObjectRef,
        request: ByteRequest | None,
        if_match: Condition | None,
        if_none_match: ETag | None,
    ) -> Found | NotModified | None:
        """Read as `ObjectReader.get` promises."""
        if isinstance(request, ByteRange) and not request.length:
            return await self._get_nothing(ref, request, if_match, if_none_match)
        with translated(ref):
            answer = await self._open(ref, request, if_match, if_none_match, is_eager=True)
            if not isinstance(answer, Answer):
                return answer
            try:
                data = await answer.body()
            finally:
                answer.response.release()
        if answer.etag == if_none_match:
            return NOT_MODIFIED
        return answer.found(data)

    @asynccontextmanager
    async def stream(
        self, ref: ObjectRef, byte_range: ByteRange, if_match: Condition | None
    ) -> AsyncGenerator[AsyncIterator[bytes]]:
        """Read as `ObjectReader.stream` promises."""
        if not byte_range.length:
            if await self._get_nothing(ref, byte_range, if_match, None) is None:
                raise VersionChangedError(ref)
            yield _nothing()
            return
        with translated(ref):
            answer = await self._open(ref, byte_range, if_match, None)
        if not isinstance(answer, Answer):
            raise VersionChangedError(ref)
        try:
            if answer.byte_range != byte_range:
                raise VersionChangedError(ref)
            yield answer.pieces()
        finally:
            answer.response.release()

    async def stat(self, ref: ObjectRef) -> Stat | None:
        """Ask for the headers alone."""
        with translated(ref):
            answer = await self._ask("HEAD", ref)
            if isinstance(answer, Refusal) and answer.status == _NOT_FOUND:
                answer = await self._explained(ref, answer)
        if isinstance(answer, Refusal):
            self._refused(ref, answer, None)
            return None
        if (size := answer.length) is None:
            raise StorageUnavailableError(ref, "the server tells no length", lasting=True)
        etag, gzipped = version(answer.headers, size), is_gzip(answer.headers)
        kept = object_headers(answer.headers)
        return Stat(size, etag, gzipped, last_modified(answer.headers), kept)

    async def probe(self, ref: ObjectRef) -> int:
        """Ask for the headers alone, and tell the status whatever it is."""
        with translated(ref):
            return (await self._ask("HEAD", ref)).status

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _get_nothing(
        self,
        ref: ObjectRef,
        request: ByteRange,
        if_match: Condition | None,
        if_none_match: ETag | None,
    ) -> Found | NotModified | None:
        """Answer an empty range, which HTTP has no words for."""
        found = await self.stat(ref)
        if found is None:
            if if_match is not None:
                raise VersionChangedError(ref)
            return None
        demand(ref, if_match, found.etag, found.modified_s)
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
    ) -> Answer | NotModified | None:
        """Ask for *request* and hold the answer's headers against it."""
        headers = _headers(request, if_match, if_none_match)
        answer = await self._ask("GET", ref, headers, is_eager=is_eager)
        if isinstance(answer, Refusal):
            if answer.status == _NOT_MODIFIED and if_none_match is not None:
                return NOT_MODIFIED
            if answer.status == _UNSATISFIED and request is not None:
                explicit = await self._satisfiable(ref, request, answer, if_match)
                return await self._open(ref, explicit, if_match, if_none_match, is_eager=is_eager)
            self._refused(ref, answer, if_match)
            return None
        try:
            return await Answer.check(ref, answer, request, if_match)
        except BaseException:
            answer.release()
            raise

    async def _ask(
        self, method: Method, ref: ObjectRef, headers: bytes = b"", *, is_eager: bool = False
    ) -> Response | Refusal:
        """Send one request, and once more if there is a newer URL."""
        answer = await self._send(method, ref, headers, is_eager=is_eager)
        if isinstance(answer, Refusal) and self._source.renew(method, ref, answer):
            return await self._send(method, ref, headers, is_eager=is_eager)
        return answer

    async def _send(
        self, method: Method, ref: ObjectRef, headers: bytes, *, is_eager: bool
    ) -> Response | Refusal:
        target = await self._source.target(method, ref)
        for _ in range(_MOST_REDIRECTS + 1):
            response = await self._client.send(method, target, headers, is_eager=is_eager)
            if response.status in _OK:
                if self._sends_etags and b"etag" not in response.headers:
                    response.release()
                    raise BadAnswerError("the answer has no ETag, which S3 always sends")
                return response
            location = response.headers.get(b"location")
            if response.status not in _REDIRECTS or location is None or self._follow is None:
                return await read_refusal(method, response)
            response.release()
            target = self._follow(ref, target, location.decode("latin-1"))
        raise BadAnswerError("redirected too often")

    async def _explained(self, ref: ObjectRef, refusal: Refusal) -> Refusal:
        """Return the refusal of a GET where that of a HEAD, without a document, proves nothing."""
        if self._source.proves_absence(refusal):
            return refusal
        answer = await self._ask("GET", ref, b"Range: bytes=0-0\r\n")
        if isinstance(answer, Refusal):
            return answer
        answer.release()
        return refusal

    def _refused(self, ref: ObjectRef, refusal: Refusal, if_match: Condition | None) -> None:
        """Return if *ref* is absent, else raise what the refusal means."""
        if self._source.proves_absence(refusal):
            if if_match is None:
                return
            raise VersionChangedError(ref)
        if if_match is not None and refusal.status == _PRECONDITION_FAILED:
            raise VersionChangedError(ref)
        raise refusal.failure(ref)

    async def _satisfiable(
        self, ref: ObjectRef, request: ByteRequest, refusal: Refusal, if_match: Condition | None
    ) -> ByteRange:
        """Raise what a 416 means, but spell out a long suffix, which some servers refuse."""
        if (size := refusal.size) is None:
            found = await self.stat(ref)
            if found is None:
                raise VersionChangedError(ref)
            size = found.size
        explicit = clamp(ref, request, size, if_match)
        if isinstance(request, ByteRange):
            raise refusal.failure(ref)
        return explicit


def _headers(
    request: ByteRequest | None, if_match: Condition | None, if_none_match: ETag | None
) -> bytes:
    lines = ""
    if request is not None:
        lines += f"Range: {range_header(request)}\r\n"
    if isinstance(if_match, UnmodifiedSince):
        lines += f"If-Unmodified-Since: {http_date(if_match.epoch_s)}\r\n"
    elif if_match is not None and not is_derived(if_match):
        lines += f"If-Match: {if_match}\r\n"
    if if_none_match is not None and not is_derived(if_none_match):
        lines += f"If-None-Match: {if_none_match}\r\n"
    return lines.encode("latin-1")


async def _nothing() -> AsyncIterator[bytes]:
    for piece in tuple[bytes, ...]():
        yield piece
