"""Walk the keys below a root, and list them in pages."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Final, NamedTuple

import numpy as np

from shardgate.concurrency import bounded_gather, run_in_thread, take, yield_to_loop
from shardgate.errors import DamagedError, NotAllowedError
from shardgate.formats.contract import Layout
from shardgate.formats.listing import (
    LAST,
    GridWalk,
    Item,
    ListingIO,
    ListingRules,
    Rows,
    Walk,
    Wanted,
    Window,
)
from shardgate.formats.members import Members, members_of
from shardgate.formats.reading import Fetch
from shardgate.model import (
    MISSING,
    Coded,
    ETag,
    Inline,
    Location,
    Missing,
    ObjectRef,
    Part,
    Referenced,
    Stored,
    VirtualKey,
    Whole,
    is_key,
)
from shardgate.read.bodies import Entity
from shardgate.read.containers import MAX_DEPTH, Containers
from shardgate.read.member_store import list_members, resolve
from shardgate.storage.contract import Listed, ObjectReader

# After so many missing keys in a row those that exist are taken from all indexes of a collection,
# if it has few enough shards and chunks; other collections are examined cell by cell.
_SPARSE: Final = 64
_MAX_SHARDS: Final = 16_384
_MAX_CHUNKS: Final = 2**20
_INDEXES_NBYTES: Final = 64 * 1024**2
_READING_S: Final = 10


@dataclass(frozen=True, slots=True)
class Root:
    """A root, with everything needed to list and read below it."""

    ref: ObjectRef
    store: ObjectReader
    containers: Containers
    fetch: Fetch

    def within(self, members: Members) -> "Root":
        """Return the root of *members*, the container of which lies below this one."""
        return Root(members.root, self.store, self.containers.inside_archives, self.fetch)

    def list(
        self, prefix: ObjectRef, *, delimiter: str = "", after: str = ""
    ) -> AsyncGenerator[Listed]:
        """List objects, or members; see `ObjectReader.list`."""
        if (members := members_of(prefix)) is not None:
            return list_members(members, prefix, self.fetch, delimiter=delimiter, after=after)
        return self.store.list(prefix, delimiter=delimiter, after=after)


async def list_names(
    store: Root | ObjectReader, container: ObjectRef, prefix: str, *, delimiter: str = ""
) -> AsyncGenerator[str]:
    """Yield the names below *prefix*, relative to *container*; see `Listing`."""
    start = container.prefix
    below = ObjectRef(start.bucket, start.key + prefix)
    async for listed in store.list(below, delimiter=delimiter):
        yield listed.ref.key.removeprefix(start.key)


class FoundKey(NamedTuple):
    """A key that may name something, or a common prefix of several that do."""

    key: str
    found: Location | Listed | None
    """Location, or stored object; `None` for a common prefix, or where *layout* tells."""
    layout: Layout | None = None
    """Locates the key, which it knows as *inside*, if set."""
    inside: VirtualKey = VirtualKey("")
    modified_s: float | None = None
    """Time of the archive, of a key in one that is no member."""


type Stream = AsyncIterator[FoundKey | Streams]
"""Keys in order, and streams in place of the keys that they yield."""
type Streams = Sequence[Stream]
type _Place = Location | Listed | None


@dataclass(frozen=True, slots=True)
class _Directory:
    root: Root
    """The root of the tree, or that of an archive in it."""
    lead: str
    """The key of that root: empty, or with a final slash, as that of the folder."""
    path: str
    layout: Layout
    inside: str
    """The key of the folder in its container."""
    depth: int = 0

    def ref_of(self, key: str) -> ObjectRef:
        return self.root.ref.join(key[len(self.lead) :].rstrip("/"))

    def name(self, key: str) -> VirtualKey:
        return VirtualKey(self.inside + key.removeprefix(self.path))

    def shows(self, rules: ListingRules, key: str) -> bool:
        shows = rules.shows
        if shows is None or not is_key(key) or not shows(key.removeprefix(self.path)):
            return False
        # A key below a stored folder with the name of `SHARDED` would name another object.
        return self.root.containers.split_sharded(key)[1] == key


@dataclass(slots=True)
class Tree:
    """Walks the keys of stored objects, indexes and manifests in byte order."""

    root: Root
    window: Window
    """The keys that are still wanted; the caller moves it on while they are walked."""
    misses: int = 0
    """Keys that the caller has found missing since the last one that exists."""
    is_late: bool = False
    """True once a page should end, though few keys have been examined."""

    async def walk(self) -> AsyncGenerator[FoundKey]:
        """Yield the wanted keys, and some others.

        With a delimiter, folders below the prefix become common prefixes, unless the walk begins
        inside of one; keys in that are for the caller to fold.
        """
        prefix = self.window.prefix
        containers, rest = self.root.containers.split_sharded(prefix)
        root = replace(self.root, containers=containers)
        lead = prefix.removesuffix(rest)
        archive = await containers.find_archive(root.ref, rest, root.fetch)
        if archive is not None:
            members, start = archive
            root = root.within(members)
            lead += rest[:start]
        key = VirtualKey(prefix[len(lead) :])
        claimed = await root.containers.open_claimed(root.ref, key, root.fetch)
        if claimed is None:
            folder = await self._top(root, lead)
        else:
            folder = _Directory(root, lead, prefix.removesuffix(claimed.rest), claimed.layout, "")
        async for found in _merge(await self._streams(folder)):
            yield found

    async def _top(self, root: Root, lead: str) -> _Directory:
        """Return the folder that is *root*."""
        layout = await _if_sound(root.containers.open(root.ref, root.fetch))
        return _Directory(root, lead, lead, layout or root.containers.passthrough(root.ref), "")

    async def _streams(self, folder: _Directory) -> Streams:
        """Return the streams of the keys in *folder*, those of its stored objects last."""
        rules = await folder.layout.listing_rules(VirtualKey(folder.inside), folder.root.fetch)
        streams: list[Stream] = [self._virtual(folder, walk) for walk in rules.walks]
        if rules.shows is not None:
            streams.append(self._stored(folder, rules))
        return streams

    async def _virtual(self, folder: _Directory, walk: Walk) -> AsyncGenerator[FoundKey]:
        root = folder.root
        path = folder.path.removesuffix(folder.inside)  # of the container
        objects = partial(list_names, root, folder.ref_of(path))
        names = partial(objects, delimiter="/")
        io = ListingIO(names, objects, root.fetch, run_in_thread, bounded_gather)
        members = members_of(root.ref)
        modified_s = None if members is None else members.modified_s
        async for found in self._chunks(walk, lambda: self.window.below(path), io):
            if isinstance(found, Item):
                yield FoundKey(path + found.key, found.location)
            else:
                yield FoundKey(path + found, None, folder.layout, VirtualKey(found), modified_s)
            if not self.window.meets(folder.path):
                return

    async def _chunks(
        self, walk: Walk, wanted: Wanted, io: ListingIO
    ) -> AsyncGenerator[Item | str]:
        """Walk chunks; where a grid turns out to be sparse, those in the indexes of its shards."""
        was_sparse = False
        async for found in walk(wanted, io):
            if not isinstance(found, Item | str):
                async for chunk in self._chunks(found, wanted, io):
                    yield chunk
                continue
            if isinstance(walk, GridWalk) and self.misses >= _SPARSE and not was_sparse:
                was_sparse = True
                if (cells := await self._stored_cells(walk, io)) is not None:
                    start = found.key if isinstance(found, Item) else found
                    for key in walk.grid.select(cells, start, wanted):
                        yield key
                    return
            yield found

    async def _stored_cells(self, walk: GridWalk, io: ListingIO) -> Rows | None:
        """Return the cells of all chunks in stored shards, in the order of their keys; `None` where
        they are too many, reading takes too long, or an index is too large or damaged.
        """
        if not (at_once := min(64, _INDEXES_NBYTES // walk.index_nbytes)):
            return None
        shards: list[AsyncIterator[Rows]] = []
        found: list[Rows] = [np.empty((0, len(walk.grid.axes)), np.uint64)]
        room = _MAX_CHUNKS

        async def read(shard: AsyncIterator[Rows]) -> None:
            nonlocal room
            while room >= 0 and (cells := await anext(shard, None)) is not None:
                found.append(cells)
                room -= len(cells)
                await asyncio.sleep(0)  # most are in the cache, and many are read at once

        try:
            # They stay in the cache, so that the next page gets further.
            async with asyncio.timeout(_READING_S):
                async for shard in walk.stored(io):
                    shards.append(shard)
                    if len(shards) > _MAX_SHARDS:
                        return None
                    await yield_to_loop(len(shards))
                await bounded_gather(read, shards, limit=at_once)
        except TimeoutError:
            self.is_late = True
            return None
        except (DamagedError, NotAllowedError):  # they matter only to who wants keys of the shard
            return None
        if room < 0:
            return None
        return await asyncio.to_thread(lambda: walk.grid.sort(np.concatenate(found)))

    async def _stored(
        self, folder: _Directory, rules: ListingRules
    ) -> AsyncGenerator[FoundKey | Streams]:
        path = folder.path
        prefix, after, delimiter = self.window
        if (child := _child(path, prefix)) is not None:
            yield await self._enter(folder, rules, child)
            return
        if (child := _child(path, after)) is not None:
            yield await self._enter(folder, rules, child)
            after = child + LAST
        is_folded = bool(delimiter) and prefix.startswith(path)
        is_deepest = rules.is_uniform and folder.depth + 1 >= MAX_DEPTH
        bucket, start = folder.root.ref.prefix
        # The store knows keys without that of an archive.
        after = Window("", after).below(folder.lead).after
        async for listed in folder.root.list(
            ObjectRef(bucket, start + max(path, prefix)[len(folder.lead) :]),
            delimiter="" if (rules.is_plain or is_deepest) and not is_folded else "/",
            after=start + after if after else "",
        ):
            key = folder.lead + listed.ref.key.removeprefix(start)
            if listed.size is None and not is_folded:
                yield await self._enter(folder, rules, key)
            elif (shown := _show(folder, rules, key, listed)) is not None:
                yield shown
            if not self.window.meets(path):
                return

    async def _enter(self, folder: _Directory, rules: ListingRules, key: str) -> Streams:
        """Return the streams of the keys in *key*, a folder in *folder*."""
        if not self.window.meets(key) or not folder.shows(rules, key):
            return ()
        root = folder.root
        inside = folder.name(key)
        below = replace(folder, path=key, inside=inside, depth=folder.depth + 1)
        if below.depth < MAX_DEPTH and not below.layout.encloses(inside):
            ref = folder.ref_of(key)
            members = await _if_sound(root.containers.open_archive(ref, root.fetch))
            if members is not None:
                if root.containers.is_archive(ref.key):
                    return ()  # from above it is one object
                return await self._streams(await self._top(root.within(members), key))
            layout = await _if_sound(root.containers.open(ref, root.fetch))
            if layout is not None:
                below = replace(below, layout=layout, inside="")
        return await self._streams(below)


async def _if_sound[T](opening: Awaitable[T | None]) -> T | None:
    """Await a container; the objects of a damaged one are listed as they are stored."""
    with suppress(DamagedError, NotAllowedError):
        return await opening
    return None


def _show(folder: _Directory, rules: ListingRules, key: str, listed: Listed) -> FoundKey | None:
    is_shown = folder.shows(rules, key)
    if listed.size is None:
        return FoundKey(key, None) if is_shown else None
    if key.endswith("/") or not is_shown:
        return FoundKey(key, MISSING)
    if rules.is_plain:
        return FoundKey(key, listed)
    return FoundKey(key, listed, folder.layout, folder.name(key))


@dataclass(slots=True, eq=False)
class _MergedStream:
    stream: Stream
    number: int
    outer: "_MergedStream | None"
    """The stream in whose place it is."""
    inner: int = 0
    """Streams in its own place that have not ended."""


async def _merge(streams: Streams) -> AsyncGenerator[FoundKey]:
    """Yield the keys of *streams* in order, of equal ones that of the stream that began first.

    Streams nest as deep as folders: generators within generators would pass each key on.
    """
    numbers = count()
    heads: list[tuple[str, int, FoundKey, _MergedStream]] = []
    waiting = [_MergedStream(stream, next(numbers), None) for stream in streams]
    while waiting or heads:
        while waiting:
            merged = waiting.pop()
            match await anext(merged.stream, None):
                case None:
                    if (outer := merged.outer) is not None:
                        outer.inner -= 1
                        waiting += [] if outer.inner else [outer]
                case FoundKey(key) as found:
                    heappush(heads, (key, merged.number, found, merged))
                case inner:
                    merged.inner = len(inner)
                    below = [_MergedStream(each, next(numbers), merged) for each in inner]
                    waiting += below or [merged]
        if heads:
            _, _, found, merged = heappop(heads)
            yield found
            waiting.append(merged)


def _child(path: str, key: str) -> str | None:
    slash = key.find("/", len(path)) if key.startswith(path) else -1
    return None if slash < 0 else key[: slash + 1]


class ListedKey(NamedTuple):
    """A key of a page, or a common prefix."""

    key: str
    nbytes: int | None
    """Stored bytes, with their content coding. `None` for a common prefix."""
    etag: ETag | None
    """`None` too where only reading the object would tell."""
    modified_s: float | None = None
    """Time of the last modification, if known, in seconds since 1970 in UTC."""


class Page(NamedTuple):
    """Consecutive keys of a listing."""

    entries: list[ListedKey]
    after: str | None
    """Key after which the next page begins, which need not be an entry; `None` at the end."""


async def list_page(
    root: Root, window: Window, limit: int, modified_s: Callable[[ObjectRef], int | None]
) -> Page:
    """List up to *limit* wanted keys below *root*, fewer if too many had to be examined.

    *modified_s* returns when an object that ``root.fetch`` read was last modified. Keys that
    exist all the time are listed exactly once, whatever else changes between pages.

    Raises: `StorageError`, and `DamagedError` of anything that names keys: to leave keys out
    would say that they are absent.
    """
    if not limit:
        return Page([], None)
    if window.fold(window.after) == window.after:
        window = window._replace(after=window.after + LAST)
    entries: list[ListedKey] = []
    tree = Tree(root, window)
    examined = 0
    most = limit + 10_000  # shards may hold few of the chunks they could
    last = None
    async with aclosing(_locate_all(tree, entries, limit)) as located:
        async for found, place in located:
            # Keys below a common prefix, and keys that come twice, are not wanted again.
            window = tree.window
            key = found.key
            if not (window.meets(key) if place is None else window.admits(key)):
                continue
            if len(entries) == limit or examined >= (1 if tree.is_late else most):
                return Page(entries, last)
            folded = key if place is None else window.fold(key)
            examined += 1
            last = after = key
            tree.misses = tree.misses + 1 if isinstance(place, Missing) else 0
            if folded is not None and not isinstance(place, Missing):
                entries.append(ListedKey(folded, None, None))
                last = folded
                after = folded + LAST
            elif place is not None and not isinstance(place, Missing):
                entries.append(_entry(found, place, modified_s))
            tree.window = window._replace(after=after)
    return Page(entries, None)


async def _locate_all(
    tree: Tree, entries: Sequence[ListedKey], limit: int
) -> AsyncGenerator[tuple[FoundKey, _Place]]:
    """Locate the keys in *tree*; while a batch adds nothing to *entries*, the next is larger."""
    fetch = tree.root.fetch

    async def locate(each: FoundKey) -> _Place:
        place: _Place = each.found
        if each.layout is not None:
            place = await each.layout.locate(each.inside, fetch)
            if isinstance(place, Whole):  # served unchanged: it is as it was listed
                return each.found if isinstance(each.found, Listed) else MISSING
        return place if isinstance(place, Listed | None) else await resolve(place, fetch)

    size = 0
    async with aclosing(tree.walk()) as walk:
        while True:
            # Of folded keys the first may be enough.
            fewest = 1 if tree.window.delimiter else limit - len(entries) + 1
            if not (batch := await take(walk, min(128, max(fewest, size)))):
                return
            before = len(entries)
            # Neighbours share an index, which is read once for all that wait for it.
            places = await bounded_gather(locate, batch, limit=64)
            for each in zip(batch, places, strict=True):
                yield each
            size = 2 * len(batch) if len(entries) == before else 0


def _entry(
    found: FoundKey, place: Location | Listed, object_modified_s: Callable[[ObjectRef], int | None]
) -> ListedKey:
    modified_s = found.found.modified_s if isinstance(found.found, Listed) else found.modified_s
    match place:
        case Listed(_, size, etag, modified_s):
            return ListedKey(found.key, size, etag, modified_s)
        case Referenced(Part(_, byte_range), modified_s=modified_s):
            return ListedKey(found.key, byte_range.length, None, modified_s)
        case Referenced((Stored() | Inline()) as source, reference_id, is_immutable, modified_s):
            entity = Entity.at(source).referenced(reference_id, is_immutable=is_immutable)
        case (Stored(ref) as source) | (Coded(Stored(ref)) as source):
            entity = Entity.at(source)
            modified_s = object_modified_s(ref)
        case (Inline() | Coded()) as source:
            entity = Entity.at(source)
        case _:
            return ListedKey(found.key, None, None, modified_s)
    return ListedKey(found.key, entity.length, entity.etag, modified_s)
