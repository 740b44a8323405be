"""Objects in memory, for tests and examples."""

import hashlib
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

from app.errors import VersionChangedError
from app.model import ByteRange, ByteRequest, ETag, ObjectRef
from app.storage.contract import NOT_MODIFIED, Found, Listed, NotModified, Stat
from app.storage.ranges import clamp


class MemoryStore:
    """Keeps objects in a dictionary; every bucket exists."""

    def __init__(self) -> None:
        self._objects: dict[ObjectRef, bytes] = {}

    def put(self, ref: ObjectRef, data: bytes) -> ETag:
        """Store *data* in place of what *ref* held."""
        self._objects[ref] = data
        return _etag(data)

    def delete(self, ref: ObjectRef) -> None:
        """Remove *ref*; it need not exist."""
        self._objects.pop(ref, None)

    async def get(
        self,
        ref: ObjectRef,
        request: ByteRequest | None = None,
        *,
        if_match: ETag | None = None,
        if_none_match: ETag | None = None,
    ) -> Found | NotModified | None:
        """Slice the object."""
        whole = self._objects.get(ref)
        etag = None if whole is None else _etag(whole)
        if if_match is not None and etag != if_match:
            raise VersionChangedError(ref)
        if whole is None or etag is None:
            return None
        if etag == if_none_match:
            return NOT_MODIFIED
        found = clamp(ref, request, len(whole), if_match)
        return Found(whole[found.start : found.stop], found, len(whole), etag)

    @asynccontextmanager
    async def stream(
        self, ref: ObjectRef, byte_range: ByteRange, *, if_match: ETag
    ) -> AsyncGenerator[AsyncIterator[bytes]]:
        """Give the range in one piece."""
        found = await self.get(ref, byte_range, if_match=if_match)
        if not isinstance(found, Found) or found.byte_range != byte_range:
            raise VersionChangedError(ref)
        yield _pieces(found.data)

    async def stat(self, ref: ObjectRef) -> Stat | None:
        """Measure the object."""
        whole = self._objects.get(ref)
        return None if whole is None else Stat(len(whole), _etag(whole))

    async def list(self, prefix: ObjectRef, *, delimiter: str = "") -> AsyncIterator[Listed]:
        """Walk the sorted keys."""
        last = None
        for ref in sorted(self._objects, key=lambda ref: ref.key.encode()):
            if ref.bucket != prefix.bucket or not ref.key.startswith(prefix.key):
                continue
            name, found, _ = ref.key[len(prefix.key) :].partition(delimiter or "\0")
            if not found:
                yield Listed(ref, len(self._objects[ref]))
            elif name != last:
                last = name
                yield Listed(ObjectRef(ref.bucket, f"{prefix.key}{name}{delimiter}"), None)

    async def reach(self, root: ObjectRef) -> None:
        """Return: memory is always there."""

    async def aclose(self) -> None:
        """Forget nothing: a closed store can be asked again."""


async def _pieces(data: bytes) -> AsyncIterator[bytes]:
    if data:
        yield data


def _etag(data: bytes) -> ETag:
    return ETag(f'"{hashlib.sha256(data).hexdigest()[:32]}"')
