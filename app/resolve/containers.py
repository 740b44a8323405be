"""Which container a key belongs to: the nearest ancestor that holds a marker."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from app.errors import DamagedError
from app.formats.contract import Format, Layout, Listing
from app.formats.naming import PLAIN, Name, Shelf
from app.formats.reading import Fetch
from app.formats.surveying import Collection, Shards
from app.formats.writing import Document, Target
from app.model import Location, ObjectRef, VirtualKey, Whole


@dataclass(frozen=True, slots=True)
class PassThrough:
    """What lies in no container: objects, as they are."""

    root: ObjectRef
    is_everything: bool = False
    """Whether there can be no container below."""

    def encloses(self, _: VirtualKey) -> bool:
        """Anything can be below."""
        return False

    async def locate(self, key: VirtualKey, _: Fetch) -> Location:
        """Take *key* for the name of an object."""
        return Whole(self.root.join(key))

    async def shard(self, _: VirtualKey, __: Fetch) -> None:
        """Know of no shards."""

    async def target(self, key: VirtualKey, _: Fetch) -> Target:
        """Take *key* for the name of an object."""
        return Whole(self.root.join(key))

    async def shelf(self, _: VirtualKey, __: Fetch) -> Shelf:
        """Hide nothing."""
        return PLAIN if self.is_everything else Shelf()

    async def names(self, _: VirtualKey, __: Fetch) -> Sequence[Name] | None:
        """Know of nothing but what is stored."""
        return None

    async def collections(self, _: Fetch, __: Listing) -> Sequence[Collection | DamagedError]:
        """Know of nothing."""
        return ()

    async def shards_at(self, _: VirtualKey, __: Fetch) -> Shards | None:
        """Know of no shards."""
        return None

    def names_below(self) -> Sequence[str] | None:
        """Know of nothing below."""
        return None


MAX_DEPTH: Final = 32
"""Below so many directories no container is looked for: each costs a read of every marker."""


@dataclass(frozen=True, slots=True)
class Containers:
    """Opens containers below a root; what was found, absence too, *fetch* keeps.

    The search goes down from the root and ends where a container encloses the key, so that chunk
    keys, however deep, cost no look-ups of their own.
    """

    formats: Sequence[Format]

    async def find(
        self, root: ObjectRef, key: VirtualKey, fetch: Fetch
    ) -> tuple[Layout, VirtualKey]:
        """Find the container of *key*, and the rest of *key* in it."""
        if (claimed := await self.claimed(root, key, fetch)) is not None:
            return claimed
        found = self.around(root)
        rest = key
        directory, start = root, 0
        for _ in range(MAX_DEPTH):
            if (layout := await self.open(directory, fetch)) is not None:
                found, rest = layout, VirtualKey(key[start:])
            slash = key.find("/", start)
            if found.encloses(rest) or slash < 0:
                break
            start = slash + 1
            directory = root.join(key[:slash])
        return found, rest

    async def shard(self, root: ObjectRef, key: VirtualKey, fetch: Fetch) -> str | None:
        """Name the shard that *key* is in; see `Layout.shard`."""
        layout, rest = await self.find(root, key, fetch)
        return await layout.shard(rest, fetch)

    async def target(self, root: ObjectRef, key: VirtualKey, fetch: Fetch) -> Target:
        """Find where *key* is written; see `Layout.target`."""
        layout, rest = await self.find(root, key, fetch)
        target = await layout.target(rest, fetch)
        if isinstance(target, Whole):
            path, _, name = key.rpartition("/")
            for fmt in self.formats:
                if (translator := fmt.translator(root.join(path), name)) is not None:
                    return Document(target.ref, translator)
        return target

    async def open(self, directory: ObjectRef, fetch: Fetch) -> Layout | None:
        """Open *directory* if it is a container.

        Raises: `DamagedError`.
        """
        for fmt in self.formats:
            if (layout := await fmt.open(directory, fetch)) is not None:
                return layout
        return None

    def around(self, root: ObjectRef) -> Layout:
        """Give what the keys are in that are in no container below *root*."""
        return PassThrough(root, is_everything=not self.formats)

    async def claimed(
        self, root: ObjectRef, key: VirtualKey, fetch: Fetch
    ) -> tuple[Layout, VirtualKey] | None:
        """Find the container that the spelling of *key* tells of, without a search."""
        for fmt in self.formats:
            if (start := fmt.claim(key)) is not None:
                directory = root.join(key[: max(0, start - 1)])
                if (layout := await fmt.open(directory, fetch)) is not None:
                    return layout, VirtualKey(key[start:])
        return None
