"""Layout of repositories: keys in refs of a repository located, listed and surveyed."""

from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, NoReturn

import numpy as np

from shardgate.errors import DamagedError, NotAllowedError, ReadOnlyError, StorageUnusableError
from shardgate.formats.contract import Layout
from shardgate.formats.icechunk.coords import Coords, distinct_rows, inside
from shardgate.formats.icechunk.ids import encode_id
from shardgate.formats.icechunk.keys import (
    DOCUMENT,
    MAIN,
    Branch,
    Ref,
    Tag,
    find_ref,
    spell_ref,
    split_ref,
)
from shardgate.formats.icechunk.manifest import Manifest, Native, Reference, Virtual
from shardgate.formats.icechunk.repository_files import FileRefs, RepoRefs, Repository
from shardgate.formats.icechunk.snapshot import Chunks, Snapshot, SnapshotNode
from shardgate.formats.icechunk.survey import InlineFetch, enclose, enclose_shard, survey_ref
from shardgate.formats.listing import (
    LAST,
    Cell,
    Grid,
    GridAxis,
    GridWalk,
    Item,
    ListingIO,
    ListingRules,
    Name,
    Rows,
    Walk,
    Wanted,
    Window,
)
from shardgate.formats.reading import DecodeError, Fetch, Read, RunInThread
from shardgate.formats.references import Allowed
from shardgate.formats.surveying import (
    ChunkCollection,
    Finding,
    Listing,
    RefDescription,
    Shard,
    Trace,
)
from shardgate.formats.zarr.layout import ShardPlace, locate_entry
from shardgate.formats.zarr.survey import describe
from shardgate.model import (
    MISSING,
    SHARDED,
    ByteRange,
    ETag,
    Inline,
    Location,
    Missing,
    ObjectRef,
    Part,
    Referenced,
    Stored,
    VirtualKey,
)


class KeyBlock[N](NamedTuple):
    """Keys of a node that follow one another: its document, or all its chunks."""

    start: str
    folder: str
    """Path of the node with a trailing slash; empty for the root."""
    node: N
    chunks: Chunks | None


class _OpenedRef(NamedTuple):
    """The ref that a key names, and the rest of the key."""

    ref: Ref
    path: str
    snapshot: Snapshot
    modified_s: int


class _FoundNode(NamedTuple):
    """The node at or above a key, and the rest of the key."""

    ref: Ref
    snapshot: Snapshot
    modified_s: int
    path: str
    node: SnapshotNode
    rest: str


@dataclass(frozen=True, slots=True)
class Icechunk:
    """Format of directories with ``repo``, or with the branch ``main`` below ``refs``."""

    limit_nbytes: int
    whole_index_nbytes: int
    allowed: tuple[Allowed, ...] = ()
    is_named: bool = False
    """True if the settings name the format: then no file is called ``repo`` by chance."""
    name: str = "icechunk"

    def claim(self, key: VirtualKey) -> int | None:
        return find_ref(key)

    def translator(self, _: ObjectRef, __: str) -> None:
        """Return `None`: no documents are translated."""

    def markers(self, directory: ObjectRef) -> tuple[Read[Any], Read[Any]]:
        refs = RepoRefs(directory, self.limit_nbytes)
        files = FileRefs(directory)
        return refs.read, files.read(MAIN)

    async def open(self, directory: ObjectRef, fetch: Fetch) -> Layout | None:
        """Open the repository at *directory*; its existence is cached without expiry."""
        layout = await self._open(directory, fetch)
        # Icechunk before 2.1 wrote ``/repo`` at the root of a bucket; ``memory:`` is for tests.
        has_slash = directory.bucket.startswith(("s3:", "s3+", "memory:"))
        if layout is None and not directory.key and has_slash:
            layout = await self._open(directory._replace(key="/"), fetch)
        return layout

    async def _open(self, directory: ObjectRef, fetch: Fetch) -> Layout | None:
        refs = RepoRefs(directory, self.limit_nbytes)
        found = await fetch(refs.read, allow_stale=True)
        if found is not None and found.value.spec is None:
            found = await fetch(refs.read)  # by now it may be one
        if found is None:
            files = FileRefs(directory)
            main = await fetch(files.read(MAIN), allow_stale=True)
            return None if main is None else self._layout(directory, files)
        if found.value.spec is not None:
            return self._layout(directory, refs)
        if self.is_named:
            raise found.value.refusal(refs.read.ref, "it does not begin like a file of Icechunk")
        return None

    def _layout(self, directory: ObjectRef, refs: RepoRefs | FileRefs) -> "RepositoryLayout":
        repository = Repository(directory, refs, self.limit_nbytes, self.allowed)
        return RepositoryLayout(repository, self.whole_index_nbytes)


@dataclass(frozen=True, slots=True)
class RepositoryLayout(Layout):
    """A repository, served as the Zarr hierarchies of its snapshots."""

    repository: Repository
    whole_index_nbytes: int
    is_sharded: bool = False
    """True if nodes and chunks are served as they are stored, also without `SHARDED` in keys."""

    @property
    def is_read_only(self) -> bool:
        """Return whether it follows version 1 of the format, which is only read."""
        return isinstance(self.repository.refs, FileRefs)

    def encloses(self, _: VirtualKey) -> bool:
        return True

    async def shard(self, key: VirtualKey, fetch: Fetch) -> str | None:
        found = await self._find(key, fetch)
        if found is None or not (found.node.document.array or found.snapshot.is_sharded):
            return None
        address = found.node.parse(found.rest)
        return address and f"{self.repository.directory}/{found.path}/{address.coords}"

    async def target(self, _: VirtualKey, __: Fetch) -> NoReturn:
        """Refuse writes: refs change by commits only."""
        raise ReadOnlyError(
            "a repository changes by commits only: write below @session.ID, with an ID from "
            "POST /api/datasets/{dataset}/sessions, or write its files in a raw view"
        )

    async def listing_rules(self, _: VirtualKey, __: Fetch) -> ListingRules:
        """List keys of refs instead of the files of the repository."""

        def walk(wanted: Wanted, io: ListingIO) -> AsyncGenerator[Item | Walk]:
            return self.items(wanted(), io)

        return ListingRules(None, (walk,))

    async def names(self, prefix: VirtualKey, fetch: Fetch, run: RunInThread) -> Sequence[Name]:
        if (found := await self._open_ref(prefix, fetch)) is None:
            return ()
        snapshot = found.snapshot
        path = found.path.rstrip("/")
        if snapshot.is_in_array(path):
            return ()
        names = await run(lambda: [Name(f"{name}/") for name in snapshot.below(path)])
        if path in snapshot.nodes:
            names.append(Name(DOCUMENT))
        if prefix:
            return names
        named = self.repository.refs.named
        refs = [kind(name) for kind in (Branch, Tag) for name in await named(kind, fetch)]
        return [*(Name(f"{spell_ref(each)}/") for each in refs), *names]

    async def locate(self, key: VirtualKey, fetch: Fetch) -> Location:
        """Locate *key*: a ref, by default ``main``, then a path in its Zarr hierarchy.

        1. ``repo``, or the file of the ref, has the id of the snapshot.
        2. The snapshot has the node, whose grid gives the coordinates of the chunk or shard.
        3. A manifest that covers them has the reference.
        4. The index of the shard has the inner chunk.
        """
        if (found := await self._find(key, fetch)) is None:
            return MISSING
        is_immutable = not isinstance(found.ref, Branch)
        modified_s = found.modified_s
        if found.rest == DOCUMENT:
            place = _show(found.snapshot, found.path, found.node)
            return Referenced(place, "", is_immutable, modified_s)
        chunk = await self._locate_chunk(found.node, found.rest, fetch)
        if not isinstance(chunk, Referenced):
            return chunk
        return chunk._replace(
            is_immutable=is_immutable and chunk.is_immutable, modified_s=modified_s
        )

    async def items(self, window: Window, io: ListingIO) -> AsyncGenerator[Item | Walk]:
        """Yield the documents below a ref, by default ``main``, and the walks of arrays."""
        prefix = VirtualKey(window.prefix)
        lead = prefix.removesuffix(self._split(prefix)[1])
        if (lead and not lead.endswith("/")) or window.after > lead + LAST:
            return
        if (found := await self._open_ref(prefix, io.fetch)) is None:
            return
        snapshot = found.snapshot
        modified_s = found.modified_s
        within = window.below(lead)
        folded = None
        for block in await io.run_in_thread(lambda: key_blocks(sound_nodes(snapshot), within)):
            start = within.fold(block.start)
            if start is not None and not within.begins_in(start):
                if start != folded and start > within.after:
                    folded = start
                    yield Item(lead + start, None)
            elif (chunks := block.chunks) is not None:
                folder = lead + block.folder
                yield await self._walk(block.node, chunks, folder, modified_s, io)
            elif within.admits(block.start):
                document = _show(snapshot, block.folder.rstrip("/"), block.node)
                location = Referenced(document, "", is_immutable=False, modified_s=modified_s)
                yield Item(lead + block.start, location)

    async def collections(
        self, fetch: Fetch, _: Listing, run_in_thread: RunInThread
    ) -> Sequence[ChunkCollection | DamagedError]:
        return await self.collections_below(VirtualKey(""), fetch, run_in_thread)

    async def collections_below(
        self, folder: VirtualKey, fetch: Fetch, run_in_thread: RunInThread
    ) -> Sequence[ChunkCollection | DamagedError]:
        found = await self._open_ref(folder, fetch)
        if found is None or found.snapshot.is_sharded:
            return ()
        snapshot = found.snapshot
        name = self.repository.file("snapshots", snapshot.object_id)
        return await run_in_thread(_describe_below, found.path.rstrip("/"), name, snapshot.nodes)

    async def holding(self, key: VirtualKey, fetch: Fetch) -> Shard | None:
        """Return the shard that holds the chunk *key*; `None` if it is inline in a manifest."""
        found = await self._find(key, fetch)
        if found is None or found.node.document.array is None:
            return None
        if found.node.chunks is None or (address := found.node.parse(found.rest)) is None:
            return None
        node = found.node
        coords = address.coords
        referred = await self.repository.find(node.node_id, found.node.chunks, coords, fetch)
        if referred is None or isinstance(place := referred[1].place, Inline):
            return None
        return enclose(node, coords, place)

    def as_stored(self) -> Layout:
        return replace(self, is_sharded=True)

    async def explain_absence(self, key: VirtualKey, fetch: Fetch) -> str:
        """Return how refs are spelled, if *key* begins with none that exists; else the grid."""
        ref, path, _ = self._split(key)
        if ref is None:
            return ""
        is_named = path != key and await self.repository.refs.resolve(ref, fetch) is not None
        if key.startswith("@") and not is_named:
            spelled = key.partition("/")[0]
            hint = await self.repository.suggest_ref(spelled, fetch)
            return f"there is no ref {spelled}: {hint}"
        if (found := await self._find(key, fetch)) is None:
            return ""
        node = found.node
        rest = found.rest
        if node.chunks is None or not node.chunks.keys.owns(rest) or node.parse(rest) is not None:
            return ""
        array = node.document.array
        counts = node.chunks.grid if array is None else [axis.count for axis in array.axes]
        return f"{found.path or 'the array'} has {node.chunks.keys.describe(counts)}"

    async def states(self, fetch: Fetch, listing: Listing) -> list[RefDescription]:
        """Return branches and tags; only ``main`` where the store cannot list files of refs."""
        named = self.repository.refs.named
        try:
            found = [(kind, await named(kind, fetch, listing)) for kind in (Branch, Tag)]
        # A web server lists nothing, but the branch main has a name that is known.
        except StorageUnusableError:
            found = [(kind, await named(kind, fetch)) for kind in (Branch, Tag)]
        return [
            RefDescription("", spell_ref(kind(name)), at)
            for kind, ids in found
            for name, at in ids.items()
        ]

    async def trace(self, key: VirtualKey, fetch: Fetch) -> Trace | None:
        if (found := await self._find(key, fetch)) is None:
            return None
        if (referred := await self._lookup(found.node, found.rest, fetch)) is None:
            return None
        manifest, reference = referred
        name = self.repository.file("manifests", manifest.object_id)
        if isinstance(reference, Virtual):
            return Trace("virtual", name, reference.location)
        return Trace("native" if isinstance(reference, Native) else "inline", name)

    def findings(self, ref: str, fetch: Fetch, *, chunks: bool) -> AsyncIterator[Finding]:
        return survey_ref(self.repository, ref or MAIN.name, fetch, chunks=chunks)

    async def _walk(
        self, node: SnapshotNode, chunks: Chunks, lead: str, modified_s: int, io: ListingIO
    ) -> Walk:
        """Return the walk of the chunks that *node* refers to; their keys begin with *lead*."""
        manifests = await io.bounded_gather(
            lambda object_id: self.repository.manifest(object_id, io.fetch),
            [object_id for object_id, _ in chunks.manifests],
        )
        rows = await io.run_in_thread(_stored_rows, node.node_id, chunks.grid, manifests)
        array = node.document.array
        axes = tuple(map(GridAxis, chunks.grid)) if array is None else array.axes
        grid = Grid(axes, lambda cell: lead + chunks.keys.beginning(cell))

        async def list_rows(_: Cell) -> Rows:
            return rows

        async def walk(wanted: Wanted, _: ListingIO) -> AsyncIterator[Item | str]:
            async for cell in grid.walk(wanted, list_rows):
                if array is not None:
                    yield grid.spell(cell)
                    continue
                found = await self._locate_listed(node, chunks.keys.format(cell), io.fetch)
                if isinstance(found, Referenced):
                    yield Item(grid.spell(cell), found._replace(modified_s=modified_s))

        if array is None:
            return walk
        stored = partial(self._shards, node, chunks, rows)
        return GridWalk(walk, grid, stored, max(index.nbytes for index in array.indexes))

    async def _shards(
        self, node: SnapshotNode, chunks: Chunks, rows: Rows, io: ListingIO
    ) -> AsyncIterator[AsyncIterator[Rows]]:
        """Find the shards of an array by their places in its grid; see `GridWalk`."""
        for row in rows:
            coords: Cell = tuple(row.tolist())
            found = await self.repository.find(node.node_id, chunks, coords, io.fetch)
            if found is None or (array := node.document.array) is None:
                continue
            manifest, (place, *_) = found
            reading = io
            if isinstance(place, Inline):
                reading = io._replace(fetch=InlineFetch(place))
                place = Stored(manifest, ByteRange(0, len(place.data)), place.etag)
            yield enclose_shard(array, coords, place).cells(reading)

    async def _locate_listed(
        self, node: SnapshotNode, key: str, fetch: Fetch
    ) -> Referenced | Missing:
        """Locate the chunk *key*; of a virtual chunk that is not allowed, return the length."""
        try:
            return await self._locate_chunk(node, key, fetch)
        except NotAllowedError:
            found = await self._lookup(node, key, fetch)
            if found is None or node.document.array or not isinstance(found[1], Virtual):
                raise
            # Nothing reads the place; a listing needs its length.
            return Referenced(Part(ObjectRef("", ""), found[1].byte_range), "", is_immutable=False)

    async def _locate_chunk(
        self, node: SnapshotNode, key: str, fetch: Fetch
    ) -> Referenced | Missing:
        """Locate the chunk *key* of an array: an inner chunk, where the array is sharded.
        Raises: `DamagedError`, `NotAllowedError`.
        """
        if node.chunks is None or (address := node.parse(key)) is None:
            return MISSING
        coords, levels, element = address
        found = await self.repository.find(node.node_id, node.chunks, coords, fetch)
        if found is None:
            return MISSING
        manifest, referenced = found
        place: ShardPlace = referenced.place
        for level in levels:
            entry = level.entry(element)
            most_nbytes = self.whole_index_nbytes
            try:
                place = await locate_entry(place, level.index, entry, fetch, most_nbytes)
            except DecodeError as error:
                raise DamagedError(manifest, f"{key}: {error}") from error
        if not isinstance(place, Stored | Part | Inline):
            return MISSING
        return referenced._replace(place=place)

    async def _lookup(
        self, node: SnapshotNode, key: str, fetch: Fetch
    ) -> tuple[Manifest, Reference] | None:
        """Return the reference of the chunk *key*, or of its shard."""
        if node.chunks is None or (address := node.parse(key)) is None:
            return None
        return await self.repository.lookup(node.node_id, node.chunks, address.coords, fetch)

    def _split(self, key: VirtualKey) -> tuple[Ref | None, str, bool]:
        """Split *key* by `split_ref`, and return whether it names nodes as they are stored."""
        ref, path = split_ref(key)
        return ref, path.removeprefix(SHARDED), self.is_sharded or path.startswith(SHARDED)

    async def _open_ref(self, key: VirtualKey, fetch: Fetch) -> _OpenedRef | None:
        ref, path, is_sharded = self._split(key)
        if ref is None:
            return None
        dated = await self.repository.dated_snapshot(ref, fetch, is_sharded=is_sharded)
        return None if dated is None else _OpenedRef(ref, path, *dated)

    async def _find(self, key: VirtualKey, fetch: Fetch) -> _FoundNode | None:
        if (opened := await self._open_ref(key, fetch)) is None:
            return None
        ref, path, snapshot, modified_s = opened
        if (found := snapshot.find(path)) is None:
            return None
        node_path, rest = found
        node = snapshot.nodes[node_path]
        if isinstance(node, DecodeError):
            name = self.repository.file("snapshots", snapshot.object_id)
            raise DamagedError(name, f"/{node_path}: {node}")
        return _FoundNode(ref, snapshot, modified_s, node_path, node, rest)


def sound_nodes(snapshot: Snapshot) -> Iterator[tuple[str, SnapshotNode, Chunks | None]]:
    """Iterate over the nodes that have keys: their paths, and the chunks of those that have any."""
    for path, node in snapshot.nodes.items():
        if isinstance(node, SnapshotNode) and path not in snapshot.orphans:
            chunks = node.chunks
            yield path, node, chunks if chunks and chunks.manifests else None


def key_blocks[N](
    nodes: Iterable[tuple[str, N, Chunks | None]], window: Window
) -> list[KeyBlock[N]]:
    """Return the blocks of *nodes*, with their paths, that may have keys in *window*, in order."""
    found = []
    for path, node, chunks in nodes:
        folder = f"{path}/" if path else ""
        found.append(KeyBlock(folder + DOCUMENT, folder, node, None))
        if chunks is not None:
            found.append(KeyBlock(folder + chunks.keys.beginning(), folder, node, chunks))
    wanted = (block for block in found if window.meets(block.start))
    return sorted(wanted, key=attrgetter("start"))


def _show(snapshot: Snapshot, path: str, node: SnapshotNode) -> Inline:
    # These are to be changed when the same snapshot is served in another form.
    form = "s1" if snapshot.is_sharded else "u1"
    etag = ETag(f'"{encode_id(snapshot.object_id)}-{form}"')
    return Inline(node.document.served if path else snapshot.root_document, etag)


def _describe_below(
    folder: str, name: ObjectRef, nodes: Mapping[str, SnapshotNode | DecodeError]
) -> list[ChunkCollection | DamagedError]:
    below = f"{folder}/" if folder else ""
    return [
        _describe(name, path, node)
        for path, node in nodes.items()
        if (path == folder or path.startswith(below))
        and (isinstance(node, DecodeError) or node.chunks is not None)
    ]


def _describe(
    snapshot: ObjectRef, path: str, node: SnapshotNode | DecodeError
) -> ChunkCollection | DamagedError:
    if isinstance(node, DecodeError):
        return DamagedError(snapshot, f"/{path}: {node}")
    try:
        description = replace(describe(node.document), path=path, format="icechunk")
    except DecodeError as error:
        return DamagedError(snapshot, f"/{path}: {error}")
    return ChunkCollection(description, None)


def _stored_rows(node_id: bytes, grid: tuple[int, ...], manifests: Sequence[Manifest]) -> Coords:
    """Return the chunks, or shards, of an array that *manifests* refer to, in C order."""
    stored = [manifest.coords(node_id, len(grid)) for manifest in manifests]
    rows = stored[0] if len(stored) == 1 else distinct_rows(np.concatenate(stored))
    return rows[inside(rows, grid)]
