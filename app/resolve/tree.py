"""All keys of a dataset in the order of their bytes: stored ones, and those that indexes know."""

import re
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from app.concurrency import bounded_gather, run_in_thread
from app.formats.contract import Layout
from app.formats.listing import (
    LAST,
    Candidate,
    Cursor,
    Item,
    KeySelection,
    ListingIO,
    ListingRules,
    Walk,
)
from app.model import MISSING, Location, ObjectRef, VirtualKey
from app.resolve.containers import MAX_DEPTH
from app.resolve.walk import Root
from app.storage.contract import Listed, ObjectReader

_MAX_KEY_NBYTES: Final = 1024
_NO_KEY: Final = re.compile(r"[\x00-\x1f\x7f]|^/|//|(?:^|/)\.\.?(?:/|$)")
"""What no client can ask for."""


class Seen(NamedTuple):
    """A key that may name something, or the beginning of several that do."""

    key: str
    found: Location | Listed | Candidate | None
    """Where it is, what is stored, or what to look for; `None` of what was folded."""
    layout: Layout | None = None
    """What locates it where that has to be found out."""
    inside: VirtualKey = VirtualKey("")
    """The key in the container of *layout*."""


@dataclass(frozen=True, slots=True)
class Directory:
    """A directory on the way."""

    path: str
    """Below the root: empty, or with a slash at its end."""
    layout: Layout
    """Of the container it is in."""
    inside: str
    """Its path in that container."""
    depth: int = 0

    @property
    def lead(self) -> str:
        """The path of the container."""
        return self.path.removesuffix(self.inside)


@dataclass(frozen=True, slots=True)
class Tree:
    """Walks what is below a root as far as *cursor* wants it."""

    root: Root
    cursor: Cursor
    delimiter: str = ""

    async def walk(self) -> AsyncGenerator[Seen]:
        """Give the wanted keys, and some others.

        Folders behind the prefix are folded where there is a delimiter, unless the walk begins
        inside of one; what is in them then is to be folded by whoever asked.

        Raises: `StorageError`, `DamagedError`.
        """
        root, prefix = self.root, self.cursor.prefix
        containers = root.containers
        claimed = await containers.claimed(root.ref, VirtualKey(prefix), root.fetch)
        if claimed is not None:
            layout, rest = claimed
            path = prefix.removesuffix(rest)
            async for seen in self._directory(Directory(path, layout, "")):
                yield seen
            return
        layout = await containers.open(root.ref, root.fetch) or containers.around(root.ref)
        async for seen in self._directory(Directory("", layout, "")):
            yield seen

    async def _directory(self, directory: Directory) -> AsyncGenerator[Seen]:
        inside = VirtualKey(directory.inside)
        shelf = await directory.layout.listing_rules(inside, self.root.fetch)
        streams = [self._found(directory, walk) for walk in shelf.walks]
        if shelf.shows is not None:
            streams.append(self._stored(directory, shelf))
        async for seen in streams[0] if len(streams) == 1 else merged(streams):
            yield seen

    async def _found(self, directory: Directory, walk: Walk) -> AsyncGenerator[Seen]:
        """Give what a layout finds besides the objects that it shows."""
        lead, layout = directory.lead, directory.layout
        look = partial(look_into, self.root.store, self.root.ref.join(lead.rstrip("/")))
        is_inside = self.cursor.prefix.startswith(lead)
        wanted = KeySelection(self.cursor, lead, self.delimiter if is_inside else "")
        async for found in walk(wanted, ListingIO(look, run_in_thread, bounded_gather)):
            if isinstance(found, Item):
                yield Seen(lead + found.key, found.location)
            else:
                yield Seen(lead + found.key, found, layout, VirtualKey(found.key))
            if not self.cursor.meets(directory.path):
                return

    async def _stored(self, directory: Directory, shelf: ListingRules) -> AsyncGenerator[Seen]:
        """Give what is stored below *directory*."""
        cursor, path, after = self.cursor, directory.path, self.cursor.after
        if (child := _child(path, cursor.prefix)) is not None:
            async for seen in self._enter(directory, shelf, child):
                yield seen
            return
        if (child := _child(path, after)) is not None:
            async for seen in self._enter(directory, shelf, child):
                yield seen
            after = child + LAST
        is_rolled = bool(self.delimiter) and cursor.prefix.startswith(path)
        is_deep = shelf.is_plain and not is_rolled
        async for key, listed in self._list(max(path, cursor.prefix), after, is_deep=is_deep):
            if listed.size is None and not is_rolled:
                async for seen in self._enter(directory, shelf, key):
                    yield seen
            elif (found := self._seen(directory, shelf, key, listed)) is not None:
                yield found
            if not cursor.meets(path):
                return

    async def _list(
        self, prefix: str, after: str, *, is_deep: bool
    ) -> AsyncGenerator[tuple[str, Listed]]:
        bucket, start = self.root.ref.prefix
        listing = self.root.store.list(
            ObjectRef(bucket, start + prefix),
            delimiter="" if is_deep else "/",
            after=start + after if after else "",
        )
        async for listed in listing:
            yield listed.ref.key.removeprefix(start), listed

    def _seen(
        self, directory: Directory, shelf: ListingRules, key: str, listed: Listed
    ) -> Seen | None:
        """Show what is right below; what is hidden is looked for in vain, unless it is a folder."""
        is_shown = _has(directory, shelf, key)
        if listed.size is None:
            return Seen(key, None) if is_shown else None
        if key.endswith("/") or not is_shown:
            return Seen(key, MISSING)
        if shelf.is_plain:
            return Seen(key, listed)
        inside = VirtualKey(directory.inside + key.removeprefix(directory.path))
        return Seen(key, listed, directory.layout, inside)

    async def _enter(
        self, directory: Directory, shelf: ListingRules, key: str
    ) -> AsyncGenerator[Seen]:
        """Go down into the folder *key*, which may be a container of its own."""
        if not self.cursor.meets(key) or not _has(directory, shelf, key):
            return
        inside = directory.inside + key.removeprefix(directory.path)
        below = Directory(key, directory.layout, inside, directory.depth + 1)
        if below.depth < MAX_DEPTH and not below.layout.encloses(VirtualKey(inside)):
            ref = self.root.ref.join(key.removesuffix("/"))
            layout = await self.root.containers.open(ref, self.root.fetch)
            if layout is not None:
                below = Directory(key, layout, "", below.depth)
        async for seen in self._directory(below):
            yield seen


async def look_into(store: ObjectReader, container: ObjectRef, prefix: str) -> AsyncGenerator[str]:
    """Name what is stored right below *prefix* in *container*; see `Look`."""
    start = container.prefix
    async for listed in store.list(ObjectRef(start.bucket, start.key + prefix), delimiter="/"):
        yield listed.ref.key.removeprefix(start.key)


async def merged(streams: Sequence[AsyncIterator[Seen]]) -> AsyncGenerator[Seen]:
    """Put streams together by their keys."""
    heads = [(await anext(stream, None), stream) for stream in streams]
    waiting = [(head.key, number, head) for number, (head, _) in enumerate(heads) if head]
    while waiting:
        first = min(waiting, key=lambda each: each[:2])
        _, number, head = first
        yield head
        waiting.remove(first)
        if (following := await anext(streams[number], None)) is not None:
            waiting.append((following.key, number, following))


def _child(path: str, key: str) -> str | None:
    """Name the folder right below *path* that *key* leads through."""
    if not key.startswith(path) or (slash := key.find("/", len(path))) < 0:
        return None
    return key[: slash + 1]


def _has(directory: Directory, shelf: ListingRules, key: str) -> bool:
    """Tell whether a client can ask for *key*, an object or a folder, or for what is in it."""
    if _NO_KEY.search(key) or len(key.encode(errors="replace")) > _MAX_KEY_NBYTES:
        return False
    return shelf.shows is not None and shelf.shows(key.removeprefix(directory.path))
