"""A container in a watched store, and what was read of it."""

from collections.abc import Mapping
from typing import Any

from app.formats.neuroglancer_precomputed.layout import PrecomputedLayout
from app.model import ByteRange, ByteRequest, Location, VirtualKey
from tests.resolve.stores import WatchedStore
from tests.resolving import ROOT, reading


class Watched:
    """Objects below the root, read by the resolver."""

    def __init__(self, objects: Mapping[str, bytes], **options: Any) -> None:
        self.store = WatchedStore()
        self.etags = {key: self.store.place(ROOT.join(key), data) for key, data in objects.items()}
        self.data = reading(self.store, **options)

    async def read(self, key: str) -> bytes | None:
        """Read all bytes of *key*."""
        return await self.data.read(key)

    async def warm(self, *keys: str) -> None:
        """Read *keys*, and count from zero."""
        for key in keys:
            await self.read(key)
        self.store.calls.clear()

    async def locate(self, key: str) -> Location:
        """Find *key*, a chunk of the container at the root."""
        found, rest = await self.data.dataset.containers.find(
            ROOT, VirtualKey(key), self.data.fetch
        )
        assert isinstance(found, PrecomputedLayout)
        return await found.locate(rest, self.data.fetch)

    @property
    def reads(self) -> list[tuple[str, ByteRequest | None]]:
        """What was read: the key below the root, and which part."""
        return [
            (call.ref.key.removeprefix(f"{ROOT.key}/"), call.request) for call in self.store.calls
        ]

    @property
    def keys(self) -> list[str]:
        """The keys of `reads`."""
        return [key for key, _ in self.reads]


def part(start: int, length: int) -> ByteRange:
    """Name *length* bytes from *start* on."""
    return ByteRange(start, start + length)
