"""Objects in memory, for tests and examples."""

import hashlib
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

from app.errors import VersionChangedError
from app.model import ByteRange, ByteRequest, Condition, ETag, ObjectRef
from app.storage.conditions import demand
from app.storage.contract import NOT_MODIFIED, Found, Listed, NotModified, Stat
from app.storage.ranges import clamp


class MemoryStore:
    """Keeps objects in a dictionary; every bucket exists."""

    def __init__(self) -> None:
        self._objects: dict[ObjectRef, bytes] = {}
        self._modified_s: dict[ObjectRef, int] = {}

    def put(self, ref: ObjectRef, data: bytes, *, modified_s: int | None = None) -> ETag:
        """Store *data* in place of what *ref* held, as if at *modified_s* instead of now."""
        self._objects[ref] = data
        self._modified_s[ref] = int(time.time()) if modified_s is None else modified_s
        return _etag(data)

    def delete(self, ref: ObjectRef) -> None:
        """Remove *ref*; it need not exist."""
        self._objects.pop(ref, None)

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
        return Found(whole[found.start : found.stop], found, len(whole), etag)

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
