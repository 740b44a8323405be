"""An open response with bytes of an object, held against what was asked for."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final, Self

from app.errors import StorageUnavailableError, TruncatedReadError
from app.model import ByteRange, ByteRequest, Condition, ETag, ObjectRef
from app.storage.conditions import demand, last_modified
from app.storage.contract import Found
from app.storage.http1.response import Response
from app.storage.ranges import clamp, is_gzip, parse_content_range, version
from app.storage.refusals import translated

_WHOLE: Final = 200


@dataclass(slots=True)
class Answer:
    """The asked *byte_range* of *size* bytes, still to be read from *response*."""

    ref: ObjectRef
    response: Response
    byte_range: ByteRange
    skip: int
    """Bytes of the body before *byte_range*, from a server that ignores ``Range``."""
    size: int
    etag: ETag
    is_gzip: bool
    modified_s: int | None
    data: bytes | None
    """The body, where it had to be read to learn its length."""

    @classmethod
    async def check(
        cls,
        ref: ObjectRef,
        response: Response,
        request: ByteRequest | None,
        if_match: Condition | None,
    ) -> Self:
        """Believe no server: neither its range, nor its length, nor that it saw the condition."""
        length, data = response.length, None
        if length is None and request is None:
            data = await response.read()
            length = len(data)
        given, size = _given(ref, response, length)
        etag = version(response.headers, size)
        modified_s = last_modified(response.headers)
        demand(ref, if_match, etag, modified_s)
        wanted = clamp(ref, request, size, if_match)
        if given != wanted and given.length != size:
            raise StorageUnavailableError(ref, "the server sent another range than was asked for")
        if length is not None and length != given.length:
            raise TruncatedReadError(ref, f"{length} of {given.length} bytes announced")
        skip = wanted.start - given.start
        gzipped = is_gzip(response.headers)
        return cls(ref, response, wanted, skip, size, etag, gzipped, modified_s, data)

    def found(self, data: bytes) -> Found:
        """Give the range, whose bytes are *data*."""
        return Found(
            data,
            self.byte_range,
            self.size,
            self.etag,
            self.is_gzip,
            self.modified_s,
            self.response.headers,
        )

    async def body(self) -> bytes:
        """Read the range into memory."""
        if self.data is not None:
            return self.data[self.skip : self.skip + self.byte_range.length]
        if self.response.length == self.byte_range.length:
            return await self.response.read()
        return b"".join([piece async for piece in self.pieces()])

    async def pieces(self) -> AsyncIterator[bytes]:
        """Pass the range on as it arrives, and read nothing behind it."""
        skip, left = self.skip, self.byte_range.length
        with translated(self.ref):
            async for piece in self.response.pieces():
                if wanted := piece[skip : skip + left]:
                    left -= len(wanted)
                    yield wanted
                skip = max(0, skip - len(piece))
                if not left:
                    return
        raise TruncatedReadError(self.ref, f"{left} bytes are missing")


def _given(ref: ObjectRef, response: Response, length: int | None) -> tuple[ByteRange, int]:
    """Tell which bytes of how many the body holds; a 200 with Content-Range is a 206."""
    content_range = response.headers.get(b"content-range")
    if content_range is not None:
        if (parsed := parse_content_range(content_range)) is not None:
            return parsed
    elif response.status == _WHOLE:
        if length is not None:
            return ByteRange(0, length), length
        raise StorageUnavailableError(ref, "the server tells no length", lasting=True)
    raise StorageUnavailableError(ref, "the server sent no proper Content-Range")
