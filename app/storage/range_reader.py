"""Reads ranges of objects behind URLs with aiohttp: the hot path of the S3 and HTTP stores.

A refusal is classed in steps: the source may know a newer URL; 304, 412 and 416 are about the
version or the range; 404 is absence once the source confirms that only the object is missing;
the rest is a failure.
"""

import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, Protocol

import aiohttp
from yarl import URL

from app.errors import StorageUnavailableError, VersionChangedError
from app.model import ByteRange, ByteRequest, ETag, ObjectRef
from app.storage.answers import Answer
from app.storage.contract import NOT_MODIFIED, Found, NotModified, Stat
from app.storage.ranges import clamp, is_derived, range_header, version
from app.storage.refusals import Method, Refusal, read_refusal, translated

_BUFFER_BYTES: Final = 512 * 1024
_OK: Final = frozenset({200, 206})
_NOT_MODIFIED: Final = 304
_ABSENT: Final = frozenset({404, 410})
_PRECONDITION_FAILED: Final = 412
_UNSATISFIED: Final = 416


class Source(Protocol):
    """Knows where objects are and what a refusal means there."""

    async def url(self, method: Method, ref: ObjectRef, /) -> URL:
        """Give the encoded URL to ask; it may hold a signature, so nobody repeats it."""
        ...

    def renew(self, method: Method, ref: ObjectRef, refusal: Refusal, /) -> bool:
        """Tell whether a new URL could succeed where this one was refused."""
        ...

    async def confirm(self, ref: ObjectRef, refusal: Refusal, /) -> None:
        """Raise if a 404 means that more than the object is missing."""
        ...


class RangeReader:
    """One pool of connections, and the rules of RFC 9110 §13 and §14 over it."""

    def __init__(
        self,
        source: Source,
        *,
        connections: int,
        timeout_s: float,
        redirects: int = 0,
        ca_file: str | None = None,
    ) -> None:
        self._source = source
        self._connections = connections
        self._timeout = aiohttp.ClientTimeout(sock_connect=timeout_s, sock_read=timeout_s)
        self._redirects = redirects
        self._ca_file = ca_file
        self._opened: aiohttp.ClientSession | None = None

    async def get(
        self,
        ref: ObjectRef,
        request: ByteRequest | None,
        if_match: ETag | None,
        if_none_match: ETag | None,
    ) -> Found | NotModified | None:
        """Read as `ObjectReader.get` promises."""
        if isinstance(request, ByteRange) and not request.length:
            return await self._get_nothing(ref, request, if_match, if_none_match)
        with translated(ref):
            answer = await self._open(ref, request, if_match, if_none_match)
            if not isinstance(answer, Answer):
                return answer
            try:
                data = await answer.body()
            finally:
                answer.response.release()
        if answer.etag == if_none_match:
            return NOT_MODIFIED
        return Found(data, answer.byte_range, answer.size, answer.etag)

    @asynccontextmanager
    async def stream(
        self, ref: ObjectRef, byte_range: ByteRange, if_match: ETag
    ) -> AsyncGenerator[AsyncIterator[bytes]]:
        """Read as `ObjectReader.stream` promises."""
        if not byte_range.length:
            await self._get_nothing(ref, byte_range, if_match, None)
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
            answer = await self._ask("HEAD", ref, {})
            if isinstance(answer, Refusal):
                await self._refused(ref, answer, None)
                return None
            answer.release()
        if (size := answer.content_length) is None:
            raise StorageUnavailableError(ref, "the server tells no length", lasting=True)
        return Stat(size, version(answer.headers, size))

    async def probe(self, ref: ObjectRef) -> int:
        """Ask for the headers alone, and tell the status whatever it is."""
        with translated(ref):
            answer = await self._ask("HEAD", ref, {})
        if isinstance(answer, aiohttp.ClientResponse):
            answer.release()
        return answer.status

    async def aclose(self) -> None:
        """Close the connections."""
        if self._opened is not None:
            await self._opened.close()

    async def _get_nothing(
        self,
        ref: ObjectRef,
        request: ByteRange,
        if_match: ETag | None,
        if_none_match: ETag | None,
    ) -> Found | NotModified | None:
        """Answer an empty range, which HTTP has no words for."""
        found = await self.stat(ref)
        if if_match is not None and (found is None or found.etag != if_match):
            raise VersionChangedError(ref)
        if found is None:
            return None
        if found.etag == if_none_match:
            return NOT_MODIFIED
        return Found(b"", clamp(ref, request, found.size, if_match), found.size, found.etag)

    async def _open(
        self,
        ref: ObjectRef,
        request: ByteRequest | None,
        if_match: ETag | None,
        if_none_match: ETag | None,
    ) -> Answer | NotModified | None:
        """Ask for *request* and hold the answer's headers against it."""
        answer = await self._ask("GET", ref, _headers(request, if_match, if_none_match))
        if isinstance(answer, Refusal):
            if answer.status == _NOT_MODIFIED and if_none_match is not None:
                return NOT_MODIFIED
            if answer.status == _UNSATISFIED and request is not None:
                explicit = await self._satisfiable(ref, request, answer, if_match)
                return await self._open(ref, explicit, if_match, if_none_match)
            await self._refused(ref, answer, if_match)
            return None
        try:
            return await Answer.check(ref, answer, request, if_match)
        except BaseException:
            answer.release()
            raise

    async def _ask(
        self, method: Method, ref: ObjectRef, headers: dict[str, str]
    ) -> aiohttp.ClientResponse | Refusal:
        """Send one request, and once more if there is a newer URL."""
        answer = await self._send(method, ref, headers)
        if isinstance(answer, Refusal) and self._source.renew(method, ref, answer):
            return await self._send(method, ref, headers)
        return answer

    async def _send(
        self, method: Method, ref: ObjectRef, headers: dict[str, str]
    ) -> aiohttp.ClientResponse | Refusal:
        response = await self._session().request(
            method,
            await self._source.url(method, ref),
            headers=headers,
            allow_redirects=self._redirects > 0,
            max_redirects=self._redirects,
        )
        return response if response.status in _OK else await read_refusal(method, response)

    async def _refused(self, ref: ObjectRef, refusal: Refusal, if_match: ETag | None) -> None:
        """Return if *ref* is absent, else raise what the refusal means."""
        if refusal.status in _ABSENT:
            await self._source.confirm(ref, refusal)
            if if_match is None:
                return
            raise VersionChangedError(ref)
        if if_match is not None and refusal.status == _PRECONDITION_FAILED:
            raise VersionChangedError(ref)
        raise refusal.failure(ref)

    async def _satisfiable(
        self, ref: ObjectRef, request: ByteRequest, refusal: Refusal, if_match: ETag | None
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

    def _session(self) -> aiohttp.ClientSession:
        if self._opened is None:
            context = ssl.create_default_context(cafile=self._ca_file) if self._ca_file else True
            self._opened = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._connections, ssl=context),
                headers={"Accept-Encoding": "identity", "User-Agent": "shardgate"},
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=self._timeout,
                auto_decompress=False,
                read_bufsize=_BUFFER_BYTES,
            )
        return self._opened


def _headers(
    request: ByteRequest | None, if_match: ETag | None, if_none_match: ETag | None
) -> dict[str, str]:
    headers = {}
    if request is not None:
        headers["Range"] = range_header(request)
    if if_match is not None and not is_derived(if_match):
        headers["If-Match"] = if_match
    if if_none_match is not None and not is_derived(if_none_match):
        headers["If-None-Match"] = if_none_match
    return headers


async def _nothing() -> AsyncIterator[bytes]:
    for piece in tuple[bytes, ...]():
        yield piece
