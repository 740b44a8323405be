"""From a key in a ref of a repository to the place of its bytes."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NoReturn

from app.errors import DamagedError, ReadOnlyError, StorageUnavailableError
from app.formats.contract import Layout
from app.formats.icechunk.array import ArrayReader
from app.formats.icechunk.ids import encode_id
from app.formats.icechunk.index import Manifest
from app.formats.icechunk.keys import MAIN, Branch, Ref, Tag, find_ref, spell_ref, split_ref
from app.formats.icechunk.listing import DOCUMENT, Block, blocks
from app.formats.icechunk.metadata import Chunks, Node, Snapshot
from app.formats.icechunk.references import Inlined, Native, Reference, Virtual
from app.formats.icechunk.refs import FileRefs, RepoRefs
from app.formats.icechunk.repository import Repository
from app.formats.icechunk.survey import OnlyShard, RefSurvey, enclose
from app.formats.icechunk.virtual import Allowed
from app.formats.listing import (
    LAST,
    Item,
    KeySelection,
    ListingIO,
    ListingRules,
    Name,
    RunInThread,
    Window,
)
from app.formats.reading import DecodeError, Fetch
from app.formats.surveying import Collection, Finding, Listing, Shards, State, Trace
from app.formats.zarr.survey import describe
from app.model import (
    MISSING,
    ETag,
    Inline,
    Location,
    ObjectRef,
    Referenced,
    VirtualKey,
)

_VIEW_REVISION: Final = "u1"
"""Changes when the same snapshot begins to be served in another form."""


@dataclass(frozen=True, slots=True)
class Icechunk:
    """Every directory with ``repo``, or with the branch ``main`` below ``refs``, is a container."""

    limit_nbytes: int
    """A larger file of metadata is refused, before and after it is inflated."""
    whole_index_nbytes: int
    """A larger shard index is read one entry at a time."""
    allowed: tuple[Allowed, ...] = ()
    """Below which virtual references may be followed."""
    name: str = "icechunk"

    def claim(self, key: VirtualKey) -> int | None:
        """Find the segment that names a ref."""
        return find_ref(key)

    def translator(self, _: ObjectRef, __: str) -> None:
        """Know of no such documents."""

    async def open(self, directory: ObjectRef, fetch: Fetch) -> Layout | None:
        """Open the repository at *directory*; one that was there once is taken to be there."""
        refs = RepoRefs(directory, self.limit_nbytes)
        found = await fetch(refs.read, ever=True)
        if found is not None and found.value.info is None:  # by now it may be one
            found = await fetch(refs.read)
        if found is not None:
            return None if found.value.info is None else self._layout(directory, refs)
        files = FileRefs(directory)
        if await fetch(files.read(MAIN), ever=True) is None:
            return None
        return self._layout(directory, files)

    def _layout(self, directory: ObjectRef, refs: RepoRefs | FileRefs) -> "RepositoryLayout":
        repository = Repository(directory, refs, self.limit_nbytes, self.allowed)
        return RepositoryLayout(repository, self.whole_index_nbytes)


@dataclass(frozen=True, slots=True)
class RepositoryLayout:
    """A repository, as the Zarr hierarchies of its snapshots."""

    repository: Repository
    whole_index_nbytes: int

    def encloses(self, _: VirtualKey) -> bool:
        """Know that nothing in a repository is another container."""
        return True

    async def shard(self, key: VirtualKey, fetch: Fetch) -> str | None:
        """Name the place of the shard in its array, which is the same in all refs."""
        if (found := await self._find(key, fetch)) is None:
            return None
        _, _, path, node, rest = found
        if node.chunks is None or node.document.array is None:
            return None
        coords = self._array(node, node.chunks, fetch).shard(rest)
        return None if coords is None else f"{self.repository.directory}/{path}/{coords}"

    async def target(self, _: VirtualKey, __: Fetch) -> NoReturn:
        """Refuse: refs change by commits only."""
        raise ReadOnlyError(
            "a repository changes by commits only: write below @session.ID, where ID is what "
            "POST /api/datasets/{dataset}/sessions answers; its files, where the view is raw"
        )

    async def listing_rules(self, _: VirtualKey, fetch: Fetch) -> ListingRules:
        """Hide the files that a repository consists of; what it holds is in the refs."""

        async def walk(wanted: KeySelection, means: ListingIO) -> AsyncGenerator[Item]:
            if (window := wanted.window) is not None:
                async for item in self.items(window, fetch, means.run_in_thread):
                    yield item

        return ListingRules(None, (walk,))

    async def names(self, prefix: VirtualKey, fetch: Fetch) -> Sequence[Name]:
        """Name the nodes right below a group, beside those of ``main`` also the refs."""
        ref, path = split_ref(prefix)
        if ref is None or (snapshot := await self.repository.snapshot(ref, fetch)) is None:
            return ()
        path = path.rstrip("/")
        if snapshot.is_in_array(path):
            return ()
        names = [Name(f"{name}/") for name in snapshot.below(path)]
        if path in snapshot.nodes:
            names.append(Name(DOCUMENT))
        return names if prefix else [*await self._spelled_refs(fetch), *names]

    async def locate(self, key: VirtualKey, fetch: Fetch) -> Location:
        """Find *key*: a ref, by default ``main``, then a path in its Zarr hierarchy.

        1. The snapshot that the ref is at: told by ``repo``, or by the file of the ref.
        2. The node and, where it is sharded, the shard: told by the snapshot.
        3. The reference to the chunk or shard, in a manifest that covers it.
        4. The inner chunk within the shard, wherever that is.
        """
        if (found := await self._find(key, fetch)) is None:
            return MISSING
        ref, (snapshot, modified_s), node_path, node, rest = found
        is_lasting = not isinstance(ref, Branch)
        if rest == DOCUMENT:
            place = _show(snapshot, node_path, node)
            return Referenced(place, "", is_lasting, modified_s)
        if node.chunks is None:
            return MISSING
        chunk = await self._array(node, node.chunks, fetch).locate(rest)
        if not isinstance(chunk, Referenced):
            return chunk
        return chunk._replace(is_lasting=is_lasting and chunk.is_lasting, modified_s=modified_s)

    async def items(self, window: Window, fetch: Fetch, aside: RunInThread) -> AsyncGenerator[Item]:
        """Give the keys below a ref, by default ``main``."""
        ref, path = split_ref(VirtualKey(window.prefix))
        lead = window.prefix.removesuffix(path)
        if ref is None or (lead and not lead.endswith("/")) or window.after > lead + LAST:
            return
        if (dated := await self.repository.dated_snapshot(ref, fetch)) is None:
            return
        snapshot, modified_s = dated
        after = window.after.removeprefix(lead) if window.after.startswith(lead) else ""
        within = window._replace(prefix=path, after=after)
        folded = None
        for block in blocks(snapshot, within):
            if (start := within.fold(block.start)) is None:
                async for key, location in self._items(snapshot, block, within, fetch, aside):
                    if isinstance(location, Referenced):
                        yield Item(lead + key, location._replace(modified_s=modified_s))
                    else:
                        yield Item(lead + key, location)
            elif start != folded and within.opens(start):
                folded = start
                yield Item(lead + start, None)

    async def collections(self, fetch: Fetch, _: Listing) -> Sequence[Collection | DamagedError]:
        """Describe the arrays of ``main``."""
        if (snapshot := await self.repository.snapshot(MAIN, fetch)) is None:
            return ()
        name = self.repository.file("snapshots", snapshot.object_id)
        return [
            _describe(name, path, node)
            for path, node in snapshot.nodes.items()
            if isinstance(node, DecodeError) or node.chunks is not None
        ]

    async def shards_at(self, key: VirtualKey, fetch: Fetch) -> Shards | None:
        """Find the shard that holds the chunk *key*, unless a manifest holds all of it."""
        if (found := await self._refer(key, fetch)) is None:
            return None
        node, coords, _, reference = found
        if node.document.array is None or node.chunks is None or isinstance(reference, Inlined):
            return None
        referred = await self.repository.find(node.node_id, node.chunks, coords, fetch)
        if referred is None or isinstance(place := referred[1].place, Inline):
            return None
        return OnlyShard(enclose(node, coords, place))

    async def states(self, fetch: Fetch, listing: Listing) -> list[State]:
        """Name branches and tags; where that takes a listing and there is none, only ``main``."""
        refs = self.repository.refs
        try:
            branches, tags = await refs.branches(fetch, listing), await refs.tags(fetch, listing)
        except StorageUnavailableError as error:
            if not error.lasting:
                raise
            branches, tags = await refs.branches(fetch), await refs.tags(fetch)
        return [
            *(State(spell_ref(Branch(name)), at) for name, at in branches.items()),
            *(State(spell_ref(Tag(name)), at) for name, at in tags.items()),
        ]

    async def trace(self, key: VirtualKey, fetch: Fetch) -> Trace | None:
        """Find the reference to a chunk, or to the shard it is in."""
        if (found := await self._refer(key, fetch)) is None:
            return None
        _, _, manifest, reference = found
        name = self.repository.file("manifests", manifest.object_id)
        match reference:
            case Native(chunk_id, _):
                return Trace("native", name, str(self.repository.file("chunks", chunk_id)))
            case Inlined():
                return Trace("inline", name, "")
            case Virtual(location):
                return Trace("virtual", name, location)

    def findings(self, ref: str, fetch: Fetch, *, chunks: bool) -> AsyncIterator[Finding]:
        """Follow all references of *ref*."""
        return RefSurvey(self.repository, ref, fetch, chunks=chunks).findings()

    def expects(self, _: str) -> bool:
        """Expect no arrays below."""
        return False

    def names_below(self) -> Sequence[str] | None:
        """Know that there are no containers below."""
        return ()

    async def _items(
        self, snapshot: Snapshot, block: Block, window: Window, fetch: Fetch, aside: RunInThread
    ) -> AsyncGenerator[Item]:
        """Give the wanted keys of *block*."""
        if block.chunks is not None:
            array = self._array(block.node, block.chunks, fetch)
            async for item in array.items(block.folder, window, aside):
                yield item
        elif window.admits(block.start):
            document = _show(snapshot, block.folder.rstrip("/"), block.node)
            yield Item(block.start, Referenced(document, "", is_lasting=False))

    def _array(self, node: Node, chunks: Chunks, fetch: Fetch) -> ArrayReader:
        return ArrayReader(self.repository, node, chunks, self.whole_index_nbytes, fetch)

    async def _spelled_refs(self, fetch: Fetch) -> list[Name]:
        refs = self.repository.refs
        named: list[Ref] = [Branch(name) for name in await refs.branches(fetch)]
        named += [Tag(name) for name in await refs.tags(fetch)]
        return [Name(f"{spell_ref(ref)}/") for ref in named]

    async def _find(
        self, key: VirtualKey, fetch: Fetch
    ) -> tuple[Ref, tuple[Snapshot, int], str, Node, str] | None:
        """Find the node that *key* leads to or into, its path, and the rest of *key*."""
        ref, path = split_ref(key)
        if ref is None or (dated := await self.repository.dated_snapshot(ref, fetch)) is None:
            return None
        snapshot, _ = dated
        if (found := snapshot.find(path)) is None:
            return None
        node_path, rest = found
        node = snapshot.nodes[node_path]
        if isinstance(node, DecodeError):
            name = self.repository.file("snapshots", snapshot.object_id)
            raise DamagedError(name, f"/{node_path}: {node}")
        return ref, dated, node_path, node, rest

    async def _refer(
        self, key: VirtualKey, fetch: Fetch
    ) -> tuple[Node, tuple[int, ...], Manifest, Reference] | None:
        """Find what refers to the chunk *key*, or to the shard that it is in, by its coords."""
        found = await self._find(key, fetch)
        if found is None or (chunks := found[3].chunks) is None:
            return None
        referred = await self._array(found[3], chunks, fetch).refer(found[4])
        return None if referred is None else (found[3], *referred)


def _show(snapshot: Snapshot, path: str, node: Node) -> Inline:
    """Serve the document of a node; that of the root tells of all."""
    etag = ETag(f'"{encode_id(snapshot.object_id)}-{_VIEW_REVISION}"')
    return Inline(node.document.served if path else snapshot.root_document, etag)


def _describe(
    snapshot: ObjectRef, path: str, node: Node | DecodeError
) -> Collection | DamagedError:
    if isinstance(node, DecodeError):
        return DamagedError(snapshot, f"/{path}: {node}")
    try:
        description = replace(describe(node.document), path=path, format="icechunk")
    except DecodeError as error:
        return DamagedError(snapshot, f"/{path}: {error}")
    return Collection(description, None)
