"""Objects in memory, for tests and examples."""

import hashlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager

from app.errors import VersionChangedError
from app.model import ByteRange, ByteRequest, Condition, ETag, ObjectRef, Piece
from app.storage.conditions import demand
from app.storage.contract import (
    CONFLICT,
    NO_HEADERS,
    NOT_MODIFIED,
    Conflict,
    Expected,
    Found,
    Listed,
    NotModified,
    ObjectHeaders,
    Stat,
)
from app.storage.ranges import clamp
from app.storage.writes import demand_inside, demand_writable, is_as_expected, is_ours


class MemoryStore:
    """Keeps objects in a dictionary, with the times of *clock*; every bucket exists."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._objects: dict[ObjectRef, bytes] = {}
        self._modified_s: dict[ObjectRef, int] = {}
        self._headers: dict[ObjectRef, ObjectHeaders] = {}

    def place(
        self,
        ref: ObjectRef,
        data: bytes,
        *,
        modified_s: int | None = None,
        headers: ObjectHeaders = NO_HEADERS,
    ) -> ETag:
        """Store *data* in place of what *ref* held, as if at *modified_s* instead of now."""
        self._objects[ref] = data
        self._modified_s[ref] = int(self._clock()) if modified_s is None else modified_s
        self._headers[ref] = headers
        return _etag(data)

    def remove(self, ref: ObjectRef) -> None:
        """Remove *ref*; it need not exist."""
        self._objects.pop(ref, None)

    async def demand_safety(self, root: ObjectRef) -> None:
        """Return: nothing comes between a look and a change here."""

    def keeps_headers(self, ref: ObjectRef) -> bool:  # noqa: ARG002  the contract's argument
        """Say yes."""
        return True

    async def put(
        self,
        ref: ObjectRef,
        pieces: Sequence[Piece],
        *,
        expected: Expected,
        headers: ObjectHeaders = NO_HEADERS,
    ) -> ETag | Conflict:
        """Look at the version, and replace the object."""
        demand_writable(ref, pieces, expected)
        old = self._objects.get(ref)
        if not is_as_expected(None if old is None else _etag(old), expected):
            return CONFLICT
        return self.place(ref, b"".join(_given(ref, pieces, old or b"")), headers=headers)

    async def delete(self, ref: ObjectRef, *, expected: ETag | None) -> bool | Conflict:
        """Look at the version, and remove the object."""
        demand_writable(ref, (), expected)
        old = self._objects.get(ref)
        if not is_as_expected(None if old is None else _etag(old), expected):
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
    ) -> Found | NotModified | None:
        """Slice the object."""
        whole = self._objects.get(ref)
        if whole is None:
            if if_match is not None:
                raise VersionChangedError(ref)
            return None
        etag = _etag(whole)
        demand(ref, if_match, etag, self._modified_s[ref])
        if etag == if_none_match:
            return NOT_MODIFIED
        found = clamp(ref, request, len(whole), if_match)
        headers = self._headers[ref]
        return Found(
            whole[found.start : found.stop],
            found,
            len(whole),
            etag,
            headers.is_gzip,
            self._modified_s[ref],
            headers,
        )

    @asynccontextmanager
    async def stream(
        self, ref: ObjectRef, byte_range: ByteRange, *, if_match: Condition | None
    ) -> AsyncGenerator[AsyncIterator[bytes]]:
        """Give the range in one piece."""
        found = await self.get(ref, byte_range, if_match=if_match)
        if not isinstance(found, Found) or found.byte_range != byte_range:
            raise VersionChangedError(ref)
        yield _pieces(found.data)

    async def stat(self, ref: ObjectRef) -> Stat | None:
        """Measure the object."""
        whole = self._objects.get(ref)
        if whole is None:
            return None
        headers = self._headers[ref]
        return Stat(len(whole), _etag(whole), headers.is_gzip, self._modified_s[ref], headers)

    async def list(
        self, prefix: ObjectRef, *, delimiter: str = "", after: str = ""
    ) -> AsyncIterator[Listed]:
        """Walk the sorted keys."""
        last = None
        for ref in sorted(self._objects, key=lambda ref: ref.key.encode()):
            if ref.bucket != prefix.bucket or not ref.key.startswith(prefix.key):
                continue
            if is_ours(prefix, ref):
                continue
            name, found, _ = ref.key[len(prefix.key) :].partition(delimiter or "\0")
            key = f"{prefix.key}{name}{delimiter}" if found else ref.key
            if key <= after or key == last:
                continue
            last = key
            yield Listed(ObjectRef(ref.bucket, key), None) if found else self._listed(ref)

    def _listed(self, ref: ObjectRef) -> Listed:
        whole = self._objects[ref]
        return Listed(ref, len(whole), _etag(whole), self._modified_s[ref])

    async def reach(self, root: ObjectRef) -> None:
        """Return: memory is always there."""

    async def aclose(self) -> None:
        """Forget nothing: a closed store can be asked again."""


def _given(ref: ObjectRef, pieces: Sequence[Piece], old: bytes) -> Iterator[bytes]:
    for piece in pieces:
        if isinstance(piece, ByteRange):
            demand_inside(ref, piece, len(old))
        yield old[piece.start : piece.stop] if isinstance(piece, ByteRange) else piece


async def _pieces(data: bytes) -> AsyncIterator[bytes]:
    if data:
        yield data


def _etag(data: bytes) -> ETag:
    """Make the ETag that S3 would: clients compare it with the MD5 of the body."""
    return ETag(f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"')
