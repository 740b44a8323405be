"""What is there: collections with their shards, the place of a chunk, the state of a shard."""

from dataclasses import dataclass, replace

from app.errors import BadKeyError, DamagedError, NotAllowedError, OfflineError
from app.formats.contract import Layout
from app.formats.surveying import Collection, Description, Shard, Stateful, Survey
from app.model import (
    Gzipped,
    Inline,
    Missing,
    Part,
    Referenced,
    Stored,
    VirtualKey,
    Whole,
    etag_of,
)
from app.resolve.audit import find_gaps, look_through
from app.resolve.walk import Root, find_collections, find_containers, listing_of


@dataclass(frozen=True, slots=True)
class DamageReport:
    """Metadata that cannot be understood."""

    path: str
    object: str
    reason: str


@dataclass(frozen=True, slots=True)
class IndexReport:
    """What the indexes of a shard say, those of shards inside of it apart."""

    shard: str
    nbytes: int
    """Bytes of the whole shard."""
    index_nbytes: int
    index_location: str
    entries: int
    empty: int
    used_nbytes: int
    """Bytes that the entries name."""
    gaps: int
    """Stretches of the shard that nothing names."""
    gap_nbytes: int


@dataclass(frozen=True, slots=True)
class ChunkReport:
    """Where the bytes of a virtual key are."""

    key: str
    state: str
    """``stored``, ``inline`` (what is at hand: rewritten metadata), ``absent`` or ``refused``."""
    object: str | None = None
    start: int | None = None
    stop: int | None = None
    etag: str | None = None
    shard: IndexReport | None = None
    """The shard that holds the chunk, or would."""
    reference: str | None = None
    """What leads to it: ``native``, ``inline``, ``virtual``."""
    manifest: str | None = None
    """The object that holds the reference."""
    location: str | None = None
    """What a virtual reference names, as it says so itself."""
    reason: str | None = None
    """Why it is refused."""


@dataclass(frozen=True, slots=True)
class RefReport:
    """A ref of a container that keeps its states."""

    path: str
    """Of the container."""
    ref: str
    """As keys spell it: ``@tag.v1``."""
    snapshot_id: str


async def inspect_root(
    root: Root, *, after: str = "", limit: int | None = None
) -> list[Description | DamageReport]:
    """Describe the collections below *root*, up to *limit* of those behind the path *after*."""
    reports: list[Description | DamageReport] = []
    is_behind = not after
    async for visited in find_collections(root):
        if not is_behind:
            is_behind = visited.path == after
            continue
        if len(reports) == limit:
            break
        match visited.found:
            case DamagedError(ref=ref, reason=reason):
                reports.append(DamageReport(visited.path, str(ref), reason))
            case Collection(description, _):
                reports.append(replace(description, path=visited.path))
    return reports


async def inspect_refs(root: Root) -> list[RefReport | DamageReport]:
    """Name the refs of all containers below *root*."""
    reports: list[RefReport | DamageReport] = []
    async for path, layout in find_containers(root):
        if not isinstance(layout, Stateful):
            continue
        try:
            states = await layout.states(root.fetch, listing_of(root, path))
        except DamagedError as error:
            reports.append(DamageReport(path, str(error.ref), error.reason))
        except OfflineError as error:
            reports.append(DamageReport(path, str(root.ref.join(path)), str(error)))
        else:
            reports += [RefReport(path, *state) for state in states]
    return reports


async def inspect_key(root: Root, key: VirtualKey) -> ChunkReport:
    """Find the bytes of *key*, and describe the shard that holds them."""
    layout, rest = await root.containers.find(root.ref, key, root.fetch)
    trace = await layout.trace(rest, root.fetch) if isinstance(layout, Stateful) else None
    try:
        report = await _find(root, layout, key, rest)
    except NotAllowedError as error:
        report = ChunkReport(key, "refused", reason=str(error))
    if trace is None:
        return report
    kind, manifest, location = trace
    virtual = location if kind == "virtual" else None
    return replace(report, reference=kind, manifest=str(manifest), location=virtual)


async def _find(root: Root, layout: Layout, key: VirtualKey, rest: VirtualKey) -> ChunkReport:
    shards = await layout.shards_at(rest, root.fetch)
    shard = shards.holding(rest) if shards is not None else None
    report = None if shard is None else await _report(root, shard)
    location = await layout.locate(rest, root.fetch)
    match location.place if isinstance(location, Gzipped | Referenced) else location:
        case Stored(ref, place, version):
            etag = etag_of(version)
            return ChunkReport(key, "stored", str(ref), place.start, place.stop, etag, report)
        case Part(ref, place):
            return ChunkReport(key, "stored", str(ref), place.start, place.stop, None, report)
        case Inline(data, etag):
            return ChunkReport(key, "inline", None, 0, len(data), etag)
        case Missing():
            return ChunkReport(key, "absent", shard=report)
        case Whole(ref):
            if (stat := await root.store.stat(ref)) is None:
                return ChunkReport(key, "absent", str(ref))
            return ChunkReport(key, "stored", str(ref), 0, stat.size, stat.etag)


async def inspect_shard(root: Root, key: VirtualKey) -> IndexReport | None:
    """Describe the shard in the object *key*; `None` if there is none.

    Raises: `BadKeyError` if *key* cannot be a shard's.
    """
    layout, rest = await root.containers.find(root.ref, key, root.fetch)
    shards = await layout.shards_at(rest, root.fetch)
    shard = shards.named(rest) if shards is not None else None
    if shard is None:
        raise BadKeyError(f"{key}: is no key of a shard")
    return await _report(root, shard)


async def _report(root: Root, shard: Shard) -> IndexReport | None:
    """Describe *shard*.

    Raises: `DamagedError` for an index or entry that cannot be right.
    """
    survey = await shard.survey(root.fetch)
    return None if survey is None else await look_through(survey, report_index)


def report_index(survey: Survey) -> IndexReport:
    """Count what the indexes name, and what they leave over.

    Raises: `DamagedError` for an index or entry that cannot be right.
    """
    table, whole = survey.table(), survey.whole
    if table.faults:
        raise DamagedError(whole.ref, table.faults[0].reason)
    gaps = find_gaps(survey, table)
    return IndexReport(
        shard=str(whole.ref),
        nbytes=whole.byte_range.length,
        index_nbytes=sum(index.length for index in survey.indexes),
        index_location=survey.index_location,
        entries=len(table.entries) + table.empty,
        empty=table.empty,
        used_nbytes=sum(entry.place.length for entry in table.entries),
        gaps=len(gaps),
        gap_nbytes=sum(gaps),
    )
