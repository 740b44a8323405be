"""Describe datasets: their collections, the location of a key, the state of a shard."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final, NamedTuple

import orjson

from shardgate.concurrency import bounded_gather, run_in_thread
from shardgate.errors import (
    BadKeyError,
    BadParameterError,
    DamagedError,
    NotAllowedError,
    OfflineError,
    ShardgateError,
)
from shardgate.formats.contract import Layout
from shardgate.formats.reading import Opaque, Read
from shardgate.formats.surveying import (
    LEFT_OUT,
    ChunkCollection,
    Description,
    Ranges,
    RefDescription,
    Shard,
    Shards,
    Stateful,
    Survey,
)
from shardgate.icechunk.repository import RefTip, open_repository, read_tips
from shardgate.model import (
    ByteRange,
    Coded,
    Inline,
    Missing,
    Part,
    Referenced,
    Stored,
    VirtualKey,
    Whole,
    etag_of,
    join_path,
)
from shardgate.read.containers import Dataset
from shardgate.read.listing import Root
from shardgate.read.member_store import resolve, survey_shard
from shardgate.read.resolver import Resolver
from shardgate.read.walking import (
    Visited,
    collections_of,
    describe_search,
    explain_emptiness,
    find_collections,
    find_containers,
)
from shardgate.survey.arrays import ArrayView
from shardgate.survey.images import read_ome
from shardgate.survey.verify import CHECKSUM_NBYTES, Sweep

LOOK_S: Final = 2.0  # longest look at a folder
MAX_COLLECTIONS: Final = 8
MAX_REPOSITORIES: Final = 4
MAX_MEASURED: Final = 64  # shards whose indexes are added up
_ROOT: Final = VirtualKey("")
_ATTRIBUTES: Final = ".zattrs"  # of a group of Zarr v2
_DOCUMENT_NBYTES: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class DamageReport:
    """Metadata that cannot be decoded."""

    path: str
    object: str
    reason: str


@dataclass(frozen=True, slots=True)
class IndexReport:
    """Statistics of the indexes of a shard, without those of shards nested in it."""

    shard: str
    nbytes: int
    index_nbytes: int
    index_location: str
    entries: int
    empty: int
    used_nbytes: int
    """Bytes that the entries refer to."""
    gaps: int
    """Stretches of the shard that nothing refers to."""
    gap_nbytes: int


@dataclass(frozen=True, slots=True)
class ChunkReport:
    """Location of the bytes of a virtual key."""

    key: str
    state: str
    """``stored``, ``inline`` (rewritten metadata, or in a manifest), ``absent`` or ``refused``."""
    object: str | None = None
    start: int | None = None
    stop: int | None = None
    etag: str | None = None
    shard: IndexReport | None = None
    reference: str | None = None
    """Kind of the Icechunk reference: ``native``, ``inline``, ``virtual``."""
    manifest: str | None = None
    location: str | None = None
    """Location of a virtual reference, as it is written in the manifest."""
    reason: str | None = None


async def inspect_root(root: Root) -> list[Description | DamageReport]:
    """Describe all collections below *root*."""
    return [_report(visited) async for visited in find_collections(root)]


class DescriptionPage(NamedTuple):
    """Descriptions of collections in the order of a walk."""

    reports: Sequence[Description | DamageReport]
    is_all: bool
    """True if no others follow."""
    reason: str
    """Reason why the walk ended early, and the names that are left out, as they are no keys."""
    next: str | None
    """*after* of the next page: a path, and a number if several have it, such as ``a.zip//2``."""


async def inspect_page(
    root: Root, *, after: str = "", limit: int, within_s: float = 5.0
) -> DescriptionPage:
    """Describe up to *limit* collections below *root* that follow the path *after*, those found
    within *within_s* seconds. Raises: `BadParameterError` if nothing is at *after*.
    """
    reports: list[Description | DamageReport] = []
    last = ""
    # An archive and an array at its top have one path, as have several damaged scales of a volume.
    counts = Counter[str]()
    has_containers = False

    async def look() -> bool:
        nonlocal has_containers, last
        is_behind = not after
        async with aclosing(find_containers(root)) as containers:
            async for opened in containers:
                has_containers = True
                for visited in await collections_of(root, opened):
                    path = visited.path
                    counts[path] += 1
                    is_path = path and counts[path] == 1
                    place = path if is_path else f"{path}//{counts[path]}"
                    if not is_behind:
                        is_behind = place == after
                        continue
                    if len(reports) == limit:
                        return False
                    reports.append(_report(visited))
                    last = place
        if not is_behind:  # removed since the last page: what follows it is not known
            raise BadParameterError(f"after: no collection is called {after!r}")
        return True

    is_all, reason = await _in_time(look(), within_s)
    if is_all and not has_containers:
        reason = "the objects are served as they are stored: nothing was looked for"
        if root.containers.formats:
            reason = describe_search(root)
    left_out = [
        f"{report.path}: {report.why_sharded}"
        for report in reports
        if isinstance(report, Description) and report.kind == LEFT_OUT
    ]
    reason = "; ".join(filter(None, [reason, *left_out]))
    return DescriptionPage(reports, is_all, reason, None if is_all else last or None)


def _report(visited: Visited) -> Description | DamageReport:
    if isinstance(found := visited.found, DamagedError):
        return DamageReport(visited.path, str(found.ref), found.reason)
    return replace(found.description, path=visited.path)


async def _in_time(look: Awaitable[bool], within_s: float) -> tuple[bool, str]:
    """Return whether *look* found all; if it takes longer than *within_s*, why it did not."""
    try:
        async with asyncio.timeout(within_s):
            return await look, ""
    except TimeoutError:
        return False, f"the store took longer than {within_s:g} s"


async def inspect_refs(root: Root) -> list[RefDescription | DamageReport]:
    """List the refs of all repositories below *root*."""
    reports: list[RefDescription | DamageReport] = []
    async for path, layout, listing in find_containers(root):
        if not isinstance(layout, Stateful):
            continue
        try:
            states = await layout.states(root.fetch, listing)
        except DamagedError as error:
            reports.append(DamageReport(path, str(error.ref), error.reason))
        except OfflineError as error:
            reports.append(DamageReport(path, str(root.ref.join(path)), str(error)))
        else:
            reports += [replace(state, path=path) for state in states]
    return reports


async def inspect_all(
    root: Root,
) -> tuple[list[Description | DamageReport], list[RefDescription | DamageReport], str]:
    """Describe all collections and refs below *root*, or explain that there is no container."""
    if nothing := await explain_emptiness(root):
        return [], [], nothing
    return await inspect_root(root), await inspect_refs(root), ""


async def inspect_key(root: Root, key: VirtualKey) -> ChunkReport:
    """Locate *key*, and describe the shard that holds it."""
    layout, rest, *_ = await root.containers.find(root.ref, key, root.fetch)
    trace = await layout.trace(rest, root.fetch) if isinstance(layout, Stateful) else None
    try:
        report = await _locate(root, layout, key, rest)
        if report.state == "absent":
            reason = await layout.explain_absence(rest, root.fetch)
            if layout == root.containers.passthrough(root.ref):
                looked = f"looked in the folders above for {root.containers.markers}"
                reason = f"no such object, and no container: {looked}"
            report = replace(report, reason=reason or "there is no such key")
    except NotAllowedError as error:
        report = ChunkReport(key, "refused", reason=str(error))
    if trace is None:
        return report
    kind, manifest, location = trace
    return replace(report, reference=kind, manifest=str(manifest), location=location)


async def _locate(root: Root, layout: Layout, key: VirtualKey, rest: VirtualKey) -> ChunkReport:
    shard = await layout.holding(rest, root.fetch)
    report = None if shard is None else await _inspect(root, shard)
    location = await resolve(await layout.locate(rest, root.fetch), root.fetch)
    match location.place if isinstance(location, Coded | Referenced) else location:
        case Stored(ref, place, version):
            etag = etag_of(version)
            return ChunkReport(key, "stored", str(ref), place.start, place.stop, etag, report)
        case Part(ref, place):
            return ChunkReport(key, "stored", str(ref), place.start, place.stop, None, report)
        case Inline(data, etag):
            return ChunkReport(key, "inline", None, 0, len(data), etag, report)
        case Missing():
            return ChunkReport(key, "absent", shard=report)
        case Whole(ref):
            if (stat := await root.store.stat(ref)) is None:
                return ChunkReport(key, "absent", str(ref))
            return ChunkReport(key, "stored", str(ref), 0, stat.size, stat.etag)


async def inspect_shard(root: Root, key: VirtualKey) -> IndexReport:
    """Describe the shard in *key*. Raises: `BadKeyError` if it is no shard's, or absent."""
    layout, rest, *_ = await root.containers.find(root.ref, key, root.fetch)
    shards = await layout.shards_at(rest, root.fetch)
    shard = shards.named(rest) if shards is not None else None
    if shard is None:
        raise BadKeyError(f"{key}: is no key of a shard")
    if (report := await _inspect(root, shard)) is None:
        raise BadKeyError(f"{key}: there is no such shard")
    return report


async def _inspect(root: Root, shard: Shard) -> IndexReport | None:
    if (survey := await survey_shard(shard, root.fetch)) is None:
        return None
    return await asyncio.to_thread(report_index, survey)


def report_index(survey: Survey) -> IndexReport:
    """Compute the statistics of a shard; raise `DamagedError` for an invalid index."""
    table = survey.table()
    whole = survey.whole
    if table.faults:
        raise DamagedError(whole.ref, table.faults[0].reason)
    checksums = (ByteRange(at.stop - CHECKSUM_NBYTES, at.stop) for at in survey.checksummed)
    length = whole.byte_range.length
    end = ByteRange(length, length)  # what is unused before it is a gap too
    sweep = Sweep.over(table, survey.indexes, Ranges.of(*checksums, end))
    starts, _ = sweep.places
    reached = sweep.reached
    gaps = (starts - reached)[starts > reached]
    return IndexReport(
        shard=str(whole.ref),
        nbytes=length,
        index_nbytes=survey.indexes.nbytes,
        index_location=survey.index_location,
        entries=len(table) + table.empty,
        empty=table.empty,
        used_nbytes=table.places.nbytes,
        gaps=len(gaps),
        gap_nbytes=int(gaps.sum()),
    )


class StoredSize(NamedTuple):
    """Numbers from the indexes of all shards of a collection."""

    shards: int
    """Shards that are stored."""
    chunks: int | None
    """Inner chunks in them; `None` for shards inside of shards."""
    nbytes: int
    """Bytes of the chunks."""


async def measure(root: Root, collection: "CollectionSummary") -> StoredSize | None:
    """Add up the indexes of all shards of *collection*; `None` without shards, or if there may be
    more than `MAX_MEASURED`. Raises: `ShardgateError`.
    """
    every = None if collection.shards is None else collection.shards.every()
    some = [] if every is None else list(islice(every, MAX_MEASURED + 1))
    if every is None or len(some) > MAX_MEASURED:
        return None

    async def add_up(shard: Shard) -> tuple[int, int, bool] | None:
        if (survey := await survey_shard(shard, root.fetch)) is None:
            return None
        report = await run_in_thread(report_index, survey)
        return report.entries - report.empty, report.used_nbytes, survey.inner is not None

    found = await bounded_gather(add_up, some, limit=4)  # indexes may be large
    stored = [numbers for numbers in found if numbers is not None]
    chunks = None if any(is_nested for *_, is_nested in stored) else sum(n for n, *_ in stored)
    return StoredSize(len(stored), chunks, sum(nbytes for _, nbytes, _ in stored))


@dataclass(frozen=True, slots=True)
class CollectionSummary:
    """An array or other collection; of damaged metadata the description has no format."""

    path: str
    """Path below the folder; empty for that itself."""
    container: str
    """Key of the container."""
    node: str | None
    """Key of the Zarr v3 node."""
    image: str | None
    """Key of the OME-Zarr image, version 0.5 or later, that it is a level of."""
    found: ArrayView
    shards: Shards | None = None
    """`None` where shards are not stored as objects."""


@dataclass(frozen=True, slots=True)
class RepositorySummary:
    """An Icechunk repository, and its first refs."""

    path: str
    tips: Sequence[RefTip]
    refs: int


@dataclass(frozen=True, slots=True)
class FolderOverview:
    """The first collections and repositories at and below a folder."""

    collections: Sequence[CollectionSummary]
    repositories: Sequence[RepositorySummary]
    is_all: bool
    """True if there are no others."""
    reason: str = ""
    is_read_only: bool = False
    """Whether the root is a container that is never written."""


async def summarize(
    resolver: Resolver,
    dataset: Dataset,
    folder: VirtualKey = _ROOT,
    *,
    most: int = MAX_COLLECTIONS,
    within_s: float = LOOK_S,
) -> FolderOverview:
    """Summarize up to *most* collections of *folder*, the beginning of keys up to a slash.

    After a failure or *within_s* seconds, return the part that was found.
    """
    summarizer = _Summarizer(resolver, dataset, folder, most)
    try:
        is_all, reason = await _in_time(summarizer.run(), within_s)
    except ShardgateError as error:
        is_all = False
        reason = str(error)
    collections = tuple(summarizer.collections)
    return FolderOverview(collections, tuple(summarizer.repositories), is_all, reason)


class _Summarizer:
    def __init__(self, resolver: Resolver, dataset: Dataset, folder: VirtualKey, most: int) -> None:
        self._resolver = resolver
        self._dataset = dataset
        self._folder = folder
        self._path = folder.rstrip("/")
        self._most = most
        self._root = resolver.root(dataset)
        self._images: dict[str, bool] = {}
        self.collections: list[CollectionSummary] = []
        self.repositories: list[RepositorySummary] = []

    async def run(self) -> bool:
        """Find collections and repositories; return whether these are all."""
        if not self._dataset.containers.formats:
            await self._resolver.check_reachable(self._dataset)
            return True
        if self._folder:
            layout, rest, *_ = await self._resolver.find_container(self._dataset, self._folder)
            if rest and isinstance(layout, Stateful):
                return await self._add_below_ref(layout, rest)
            if rest and layout.encloses(rest):
                return True
        below = await self._enter()
        async with aclosing(find_containers(below)) as containers:
            async for opened in containers:
                path, found, _ = opened
                if isinstance(found, Stateful):
                    if len(self.repositories) == MAX_REPOSITORIES:
                        return False
                    await self._add_repository(path, found)
                for visited in await collections_of(below, opened):
                    if len(self.collections) == self._most:
                        return False
                    await self._add(visited, is_versioned=isinstance(found, Stateful))
        return True

    async def _enter(self) -> Root:
        """Return the root at the folder. An archive is left where it lies, to be described too."""
        root = self._root
        path = self._path
        archive = await root.containers.find_archive(root.ref, self._folder, root.fetch)
        if archive is not None and archive[1] < len(self._folder):
            members, start = archive
            root = root.within(members)
            path = path[start:]
        return replace(root, ref=root.ref.join(path))

    async def _add_repository(self, path: str, layout: Stateful) -> None:
        repository = await open_repository(self._root, join_path(self._path, path))
        states = await layout.states(repository.fetch, repository.listing)
        tips = await read_tips(repository, islice(states, 8))  # few are shown
        self.repositories.append(RepositorySummary(path, tips, len(states)))

    async def _add_below_ref(self, layout: Stateful, rest: VirtualKey) -> bool:
        """Add the arrays of a repository below *rest*: a ref, by default ``main``, and a path."""
        found = await layout.collections_below(rest, self._root.fetch, run_in_thread)
        ref = ""
        path = rest.rstrip("/")
        if path.startswith("@"):
            ref, _, path = path.partition("/")
        container = self._folder.removesuffix(rest).rstrip("/")
        for each in found[: self._most]:
            if isinstance(each, DamagedError):
                self._add_damaged("", container, each)
                continue
            node = join_path(container, join_path(ref, each.description.path))
            below = each.description.path.removeprefix(path).lstrip("/")
            await self._append(below, container, node, each)
        return len(found) <= self._most

    async def _add(self, visited: Visited, *, is_versioned: bool) -> None:
        path, container, found = visited
        below = path.removeprefix(container).strip("/")
        container = join_path(self._path, container)
        if isinstance(found, DamagedError):
            self._add_damaged(path, container, found)
            return
        node = None
        if is_versioned:
            node = join_path(container, join_path("@branch.main", below))
        elif found.description.format.startswith("zarr") and not below:  # the draft has one root
            node = join_path(self._path, path)
        await self._append(path, container, node, found)

    def _add_damaged(self, path: str, container: str, damage: DamagedError) -> None:
        found = ArrayView(path, "", "damaged", why_sharded=damage.reason)
        self.collections.append(CollectionSummary(path, container, None, None, found))

    async def _append(
        self, path: str, container: str, node: str | None, found: ChunkCollection
    ) -> None:
        """Add the collection at *path* below the folder."""
        image = None
        view = ArrayView.of(found.description)
        name = _ATTRIBUTES if view.format == "zarr2" else "zarr.json"
        if node is not None and path and await self._is_image(node.rpartition("/")[0], name):
            image = node.rpartition("/")[0]
        each = CollectionSummary(path, container, node, image, view, found.shards)
        self.collections.append(each)

    async def _is_image(self, group: str, name: str) -> bool:
        """Return whether the document *name* of *group* has OME-Zarr multiscales."""
        if group not in self._images:
            self._images[group] = False
            with suppress(DamagedError, ValueError):  # of the group: the array may be sound
                data = await self._read(VirtualKey(join_path(group, name)))
                if 0 < len(data) <= _DOCUMENT_NBYTES:
                    members = orjson.loads(data)
                    if name == _ATTRIBUTES:
                        members = {"zarr_format": 2, "attributes": members}
                    self._images[group] = read_ome(members) is not None
        return self._images[group]

    async def _read(self, key: VirtualKey) -> bytes:
        """Read a document, of a very long one a part; return nothing if it is absent."""
        root = self._root
        layout, rest, *_ = await root.containers.find(root.ref, key, root.fetch)
        match await resolve(await layout.locate(rest, root.fetch), root.fetch):
            case Inline(data) | Referenced(Inline(data)):
                return data
            case Whole(ref):
                request = ByteRange(0, _DOCUMENT_NBYTES + 1)
                found = await root.fetch(Read("metadata", ref, request, Opaque))
                return b"" if found is None else found.value.data
            case _:
                return b""
