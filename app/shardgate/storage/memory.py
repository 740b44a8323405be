"""Objects in memory, for tests and examples."""

import hashlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

from shardgate.errors import RangeNotSatisfiedError
from shardgate.model import ByteRange, ByteRequest, Condition, ETag, ObjectRef, Piece
from shardgate.storage.contract import (
    CONFLICT,
    NO_HEADERS,
    NOT_MODIFIED,
    OBJECT,
    Conflict,
    Expected,
    Found,
    Listed,
    NotModified,
    ObjectHeaders,
    Stat,
    assemble,
    check_condition,
    check_write,
    clamp,
    is_as_expected,
    is_unfinished,
    read_exactly,
    stream_of,
)


class _Object(NamedTuple):
    data: bytes
    etag: ETag
    modified_s: int
    headers: ObjectHeaders


class MemoryStore:
    """Keeps objects in a dictionary, dated by *clock*; every bucket exists."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._objects: dict[ObjectRef, _Object] = {}

    def place(
        self,
        ref: ObjectRef,
        data: bytes,
        *,
        modified_s: int | None = None,
        headers: ObjectHeaders = NO_HEADERS,
    ) -> ETag:
        """Store *data* as *ref*, modified at *modified_s* (default: now), whatever it held."""
        # The ETag is that of S3: clients compare it with the MD5 of the body.
        etag = ETag(f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"')
        time_s = int(self._clock()) if modified_s is None else modified_s
        self._objects[ref] = _Object(data, etag, time_s, headers)
        return etag

    def remove(self, ref: ObjectRef) -> None:
        self._objects.pop(ref, None)

    async def verify_conditional_writes(self, root: ObjectRef) -> None:
        """Return: nothing runs between a comparison and a change."""

    def keeps_headers(self, ref: ObjectRef) -> bool:  # noqa: ARG002  the contract's argument
        return True

    async def put(
        self,
        ref: ObjectRef,
        pieces: Sequence[Piece],
        *,
        expected: Expected,
        headers: ObjectHeaders = NO_HEADERS,
    ) -> ETag | Conflict:
        check_write(ref, pieces, expected)
        old = self._objects.get(ref)
        if not is_as_expected(old and old.etag, expected):
            return CONFLICT
        source = b"" if old is None else old.data
        for piece in pieces:
            if isinstance(piece, ByteRange) and piece.stop > len(source):
                raise RangeNotSatisfiedError(ref, len(source))
        data = assemble(pieces, [ByteRange(0, len(source))], [source])
        return self.place(ref, data, headers=headers)

    async def delete(self, ref: ObjectRef, *, expected: Expected) -> bool | Conflict:
        check_write(ref, (), expected)
        old = self._objects.get(ref)
        if not is_as_expected(old and old.etag, expected):
            return CONFLICT
        self.remove(ref)
        return True

    async def get(
        self,
        ref: ObjectRef,
        request: ByteRequest | None = None,
        *,
        if_match: Condition | None = None,
        if_none_match: ETag | None = None,
        kind: str = OBJECT,  # noqa: ARG002  the contract's argument
    ) -> Found | NotModified | None:
        if (found := self._objects.get(ref)) is None:
            check_condition(ref, if_match)
            return None
        data, etag, modified_s, headers = found
        check_condition(ref, if_match, etag, modified_s)
        if etag == if_none_match:
            return NOT_MODIFIED
        within = clamp(ref, request, len(data), if_match)
        piece = data[within.start : within.stop]
        return Found(piece, within, len(data), etag, headers.coding, modified_s, headers)

    @asynccontextmanager
    async def stream(
        self, ref: ObjectRef, byte_range: ByteRange, *, if_match: Condition | None
    ) -> AsyncGenerator[AsyncIterator[bytes]]:
        yield stream_of((await read_exactly(self, ref, byte_range, if_match)).data)

    async def stat(self, ref: ObjectRef) -> Stat | None:
        if (found := self._objects.get(ref)) is None:
            return None
        data, etag, modified_s, headers = found
        return Stat(len(data), etag, headers.coding, modified_s, headers)

    async def list(
        self, prefix: ObjectRef, *, delimiter: str = "", after: str = ""
    ) -> AsyncGenerator[Listed]:
        last = None
        for ref in sorted(self._objects, key=lambda ref: ref.key.encode()):
            if ref.bucket != prefix.bucket or not ref.key.startswith(prefix.key):
                continue
            if is_unfinished(prefix, ref):
                continue
            # Without a delimiter by a zero byte, which no key has.
            name, is_below, _ = ref.key[len(prefix.key) :].partition(delimiter or "\0")
            key = f"{prefix.key}{name}{delimiter}" if is_below else ref.key
            if key <= after or key == last:
                continue
            last = key
            if is_below:
                yield Listed(ObjectRef(ref.bucket, key), None)
            else:
                data, etag, modified_s, _ = self._objects[ref]
                yield Listed(ref, len(data), etag, modified_s)

    async def check_reachable(self, root: ObjectRef) -> None:
        """Return: memory is always reachable."""

    async def aclose(self) -> None:
        """Keep the objects: a closed store can be used again."""
