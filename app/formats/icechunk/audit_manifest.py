"""What the references of a manifest say that cannot be right; all of it takes no waiting."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.errors import NotAllowedError
from app.formats.auditing import Counted, Expected, Finding, Flaw, Unchecked
from app.formats.icechunk.audit_snapshot import Source, Wanted
from app.formats.icechunk.chunk_files import ChunkFiles
from app.formats.icechunk.index import Manifest, ManifestDecoder
from app.formats.icechunk.references import Native, Virtual
from app.formats.icechunk.repository import foreign_place, named_by
from app.formats.reading import DecodeError
from app.formats.zarr_sharding_indexed.describe import describe
from app.formats.zarr_sharding_indexed.metadata import Node
from app.model import ByteRange, Condition, ObjectRef, Stored

_BLOCK: Final = 2**15
_MOST_TOLD: Final = 100
"""Of faults of one kind that the references of one array have."""
_MOST_REFUSALS: Final = 10
_LOCATIONS: Final = 4096

type Follow = Callable[[str], ObjectRef]
"""Finds the object of a virtual reference; raises `DecodeError`, `NotAllowedError`."""


class Kept(NamedTuple):
    """The references of an array whose chunks have something to check in them."""

    node_id: bytes
    source: Source
    coords: NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Checked:
    """A manifest, and what came out."""

    manifest: Manifest
    kept: Sequence[Kept]
    findings: Sequence[Finding]

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the value holds."""
        return self.manifest.nbytes + sum(kept.coords.nbytes for kept in self.kept)


@dataclass(frozen=True, slots=True, eq=False)
class ManifestCheck:
    """Decodes the file *ref* of a manifest, and looks through what is *wanted* of it."""

    ref: ObjectRef
    decode: ManifestDecoder
    wanted: Mapping[Wanted, Source]
    chunk_file: Callable[[bytes], ObjectRef]
    files: ChunkFiles | None
    """`None` where they cannot be listed."""
    follow: Follow
    chunks: bool
    """Whether the bytes of chunks are to be checked."""

    def __call__(self, data: bytes) -> Checked:
        """Check a file.

        Raises: `DecodeError` where nothing of it can be used.
        """
        manifest = self.decode(data)
        follow = lru_cache(_LOCATIONS)(lambda location: _try(self.follow, location))
        nodes: defaultdict[tuple[bytes, int], dict[Wanted, Source]] = defaultdict(dict)
        for wanted, source in self.wanted.items():
            nodes[wanted.node_id, len(wanted.grid)][wanted] = source
        kept: list[Kept] = []
        findings: list[Finding] = []
        for (node_id, ndim), states in nodes.items():
            coords = manifest.coords(node_id, ndim)
            source = next(iter(states.values()))
            check = _ArrayCheck(self, manifest, node_id, source, follow)
            for wanted, each in states.items():
                check.check_bounds(coords, wanted, each)
            check.check_tally(ndim)
            sound = check.check_references(coords)
            if self._has_more(source):
                kept.append(Kept(node_id, source, sound))
            findings += check.findings()
        return Checked(manifest, kept, findings)

    def _has_more(self, source: Source) -> bool:
        document = source.node.document
        return document.array is not None or (self.chunks and ends_in_checksum(document))


@dataclass(slots=True)
class _Target:
    """How much of an object references need."""

    stop: int
    key: str


@dataclass(slots=True)
class _ArrayCheck:
    """Checks the references of one array."""

    check: ManifestCheck
    manifest: Manifest
    node_id: bytes
    source: Source
    follow: Callable[[str], ObjectRef | Exception]
    _flaws: list[Flaw] = field(default_factory=list)
    _told: Counter[str] = field(default_factory=Counter)
    _refused: Counter[str] = field(default_factory=Counter)
    _virtual: dict[tuple[ObjectRef, Condition | None], _Target] = field(default_factory=dict)
    _native: dict[bytes, _Target] = field(default_factory=dict)
    """Where the files of chunks cannot be listed."""
    _nbytes: int = 0
    _count: int = 0

    def findings(self) -> Iterator[Finding]:
        """Give all that came out."""
        yield from self._flaws
        for kind, count in self._told.items():
            if count > _MOST_TOLD:
                reason = f"{count - _MOST_TOLD} chunks more like this: {kind}"
                yield Flaw(self.check.ref, self.source.key, reason)
        for why, count in self._refused.items():
            yield Unchecked(self.source.key, f"{count} of its chunks: {why}")
        yield Counted("references", self._count)
        if self.source.node.document.array is not None:
            return  # whoever reads the index of a shard learns all this
        for (ref, condition), target in self._virtual.items():
            place = foreign_place(ref, ByteRange(0, target.stop), condition)
            yield Expected(target.key, place)
        for chunk_id, target in self._native.items():
            file = self.check.chunk_file(chunk_id)
            native = Stored(file, ByteRange(0, target.stop), named_by(chunk_id))
            yield Expected(target.key, native)

    def check_bounds(self, coords: NDArray[np.uint32], wanted: Wanted, source: Source) -> None:
        """Tell the chunks that nobody finds, because they are out of the grid or the extents."""
        inside = (coords < np.array(wanted.grid, np.uint64)).all(axis=1)
        self._tell_all(coords[~inside], source, "it is out of the chunk grid")
        if len(wanted.extents) == len(wanted.grid):
            boxes = np.array(wanted.extents, np.uint64).reshape(-1, 2)
            covered = ((coords >= boxes[:, 0]) & (coords < boxes[:, 1])).all(axis=1)
            reason = "it is out of the extents that the snapshot tells of the manifest"
            self._tell_all(coords[inside & ~covered], source, reason)

    def check_tally(self, ndim: int) -> None:
        """Tell the references that nobody finds, because others are before them."""
        tally, key = self.manifest.tally(self.node_id, ndim), self.source.key
        if tally.repeated:
            self._flaw(key, f"{tally.repeated} references are of chunks that have one already")
        if tally.alien:
            self._flaw(key, f"{tally.alien} references have not {ndim} coordinates")
        if not tally.is_sorted and not tally.repeated:
            self._flaw(key, "the references are not in order")

    def check_references(self, coords: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Read all references; give the coords of those that can be followed."""
        is_sound = np.ones(len(coords), np.bool_)
        self._count += len(coords)
        for start in range(0, len(coords), _BLOCK):
            block = coords[start : start + _BLOCK]
            is_sound[start : start + _BLOCK] = self._check_block(list(map(tuple, block.tolist())))
        return coords[is_sound]

    def _check_block(self, block: Sequence[tuple[int, ...]]) -> NDArray[np.bool_]:
        is_sound = np.ones(len(block), np.bool_)
        natives: list[int] = []
        ids: list[bytes] = []
        stops: list[int] = []
        for at, coords in enumerate(block):
            try:
                match self.manifest.lookup(self.node_id, coords):
                    case Native(chunk_id, byte_range):
                        natives.append(at)
                        ids.append(chunk_id)
                        stops.append(byte_range.stop)
                    case Virtual() as reference:
                        is_sound[at] = self._check_virtual(coords, reference)
            except DecodeError as error:
                is_sound[at] = False
                self._tell(coords, "the reference is damaged", str(error))
        if self.check.files is None:
            for at, chunk_id, stop in zip(natives, ids, stops, strict=True):
                self._need(self._native, chunk_id, stop, block[at])
            return is_sound
        for bad, size in self.check.files.too_short(ids, stops):
            is_sound[natives[bad]] = False
            has = "does not exist" if size is None else f"has {size} bytes"
            ref = self.check.chunk_file(ids[bad])
            reason = f"{has}, and bytes up to {stops[bad]} are referred to"
            self._tell(block[natives[bad]], "its file is missing or short", reason, ref)
        return is_sound

    def _check_virtual(self, coords: tuple[int, ...], reference: Virtual) -> bool:
        match self.follow(reference.location):
            case ObjectRef() as ref:
                target = (ref, reference.checksum)
                self._need(self._virtual, target, reference.byte_range.stop, coords)
                return True
            case NotAllowedError() as refused:
                why = str(refused)
                is_room = len(self._refused) < _MOST_REFUSALS or why in self._refused
                self._refused[why if is_room else "other virtual references"] += 1
            case error:
                self._tell(coords, "the reference is damaged", str(error))
        return False

    def _need[K](
        self, targets: dict[K, _Target], target: K, stop: int, coords: tuple[int, ...]
    ) -> None:
        known = targets.get(target)
        if known is None:
            targets[target] = _Target(stop, self._key(coords, self.source))
        elif stop > known.stop:
            known.stop, known.key = stop, self._key(coords, self.source)

    def _tell_all(self, coords: NDArray[np.uint32], source: Source, reason: str) -> None:
        for each in coords[:_MOST_TOLD].tolist():
            self._flaw(self._key(tuple(each), source), reason)
        if len(coords):
            self._told[reason] = max(self._told[reason], len(coords))

    def _tell(
        self, coords: tuple[int, ...], kind: str, reason: str, ref: ObjectRef | None = None
    ) -> None:
        self._told[kind] += 1
        if self._told[kind] <= _MOST_TOLD:
            self._flaw(self._key(coords, self.source), reason, ref)

    def _flaw(self, key: str, reason: str, ref: ObjectRef | None = None) -> None:
        self._flaws.append(Flaw(ref or self.check.ref, key, reason))

    def _key(self, coords: tuple[int, ...], source: Source) -> str:
        return f"{source.key}/{chunk_key(source, coords)}"


def chunk_key(source: Source, coords: tuple[int, ...]) -> str:
    """Spell the key of a chunk in its array; of a shard, that of its first inner chunk."""
    node = source.node
    if node.document.array is None or node.chunks is None:
        return node.chunks.keys.format(coords) if node.chunks else ""
    array = node.document.array
    first = zip(coords, array.shard_shape, array.inner_chunk_shape, strict=True)
    return array.keys.format(tuple(at * shard // inner for at, shard, inner in first))


def ends_in_checksum(document: Node) -> bool:
    """Tell whether the last codec of the chunks that are served is a checksum."""
    try:
        return describe(document).codecs[-1:] == ("crc32c",)
    except DecodeError:
        return False


def _try(follow: Follow, location: str) -> ObjectRef | Exception:
    try:
        return follow(location)
    except (DecodeError, NotAllowedError) as error:
        return error
