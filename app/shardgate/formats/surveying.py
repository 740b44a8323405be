"""Vocabulary of ``inspect`` and ``verify``: descriptions of collections, contents of shards."""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from shardgate.errors import DamagedError
from shardgate.formats.reading import Fetch, RunInThread
from shardgate.model import ByteRange, ObjectRef, Part, Stored, VirtualKey, join_path

_BATCH: Final = 4096

LEFT_OUT: Final = "left out"
"""Kind of a description of what has no keys, or may not be read; `why_sharded` has the reason."""

type Column = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Description:
    """A collection as it is stored and served; members are `None` where they do not apply."""

    path: str
    """Unique in its container; empty for a Zarr array."""
    format: str
    kind: str
    """``array``, ``meshes``, ``skeletons``, ``annotations``, ``values`` by numbers, or
    ``hierarchy`` of unknown arrays.
    """
    shape: tuple[int, ...] | None = None
    data_type: str | None = None
    dimension_names: tuple[str | None, ...] | None = None
    inner_chunk_shape: tuple[int, ...] | None = None
    """Of the chunks that are served."""
    codecs: tuple[str, ...] = ()
    """Codecs of a chunk that is served."""
    shard_shape: tuple[int, ...] | None = None
    chunks_per_shard: tuple[int, ...] | None = None
    index_location: tuple[str, ...] = ()
    """Of each index on the way to a chunk, outermost first."""
    sharding: str | None = None
    """Mapping of chunks to shards, where these have no common shape."""
    why_sharded: str = ""
    """Reason why a sharded collection is not served unsharded."""


def uncheckable(description: Description) -> str:
    """Return the reason why the bytes of chunks are not checked."""
    codec = description.codecs[-1] if description.codecs else description.kind
    return f"the bytes of its chunks: no check is known for {codec}"


class IndexEntry(NamedTuple):
    """An index entry: a chunk, or a shard inside of the shard."""

    number: int
    """Number of the entry in the index, or chunk id."""
    place: ByteRange


class Fault(NamedTuple):
    """A fault of a shard, by the virtual key of the first chunk that it affects."""

    key: VirtualKey
    reason: str


class Ranges(NamedTuple):
    """Byte ranges in columns of shape ``(count,)``."""

    starts: Column
    stops: Column

    @classmethod
    def of(cls, *ranges: ByteRange) -> Self:
        starts, stops = np.array(ranges, np.uint64).reshape(-1, 2).T
        return cls(starts, stops)

    @property
    def nbytes(self) -> int:
        """Sum of all lengths, which entries that share bytes can make a large number."""
        return int((self.stops - self.starts).sum(dtype=object))  # as uint64 it could overflow


@dataclass(frozen=True, slots=True, eq=False)
class EntryTable:
    """All entries of the indexes of a shard, in the order of their places; invalid ones are faults
    instead. As there can be very many, objects are made on demand.
    """

    numbers: Column
    places: Ranges
    empty: int = 0
    faults: Sequence[Fault] = ()

    @classmethod
    def by_place(
        cls, numbers: Column, places: Ranges, empty: int = 0, faults: Sequence[Fault] = ()
    ) -> Self:
        """Bring entries into the order of their places."""
        starts, stops = places
        order = np.lexsort((stops, starts))
        return cls(numbers[order], Ranges(starts[order], stops[order]), empty, faults)

    def sound(self, ref: ObjectRef) -> tuple[Column, Ranges]:
        """Return the entries. Raises: `DamagedError` of *ref* for the first fault."""
        if self.faults:
            key, reason = self.faults[0]
            raise DamagedError(ref, f"{key}: {reason}")
        return self.numbers, self.places

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, row: int) -> IndexEntry:
        number, start, stop = (int(column[row]) for column in (self.numbers, *self.places))
        return IndexEntry(number, ByteRange(start, stop))

    def __iter__(self) -> Iterator[IndexEntry]:
        columns = self.numbers, *self.places
        for first in range(0, len(self), _BATCH):
            numbers, *places = (column[first : first + _BATCH].tolist() for column in columns)
            yield from map(IndexEntry, numbers, map(ByteRange, *places))


@dataclass(frozen=True, slots=True)
class Survey:
    """The indexes of one version of a shard, read but not checked."""

    whole: Stored
    """The object of the shard, or the part of one."""
    table: Callable[[], EntryTable]
    """Decodes and checks all entries; may be slow."""
    key: Callable[[int], VirtualKey]
    """Returns the virtual key of the entry with a number, relative to the container."""
    check: Callable[[IndexEntry, bytes], str | None]
    """Returns the fault of the bytes of a chunk, if there is any."""
    indexes: Ranges
    """Ranges of the indexes in the shard, disjoint."""
    index_location: str
    """The end of the shard at which the first index lies: ``start`` or ``end``."""
    checksummed: Sequence[ByteRange] = ()
    """Parts of the shard that end in the CRC-32C of their other bytes."""
    inner: "Callable[[IndexEntry], Shard] | None" = None
    """Returns the shard of an entry; `None` where entries are chunks."""
    data: bytes | None = None
    """All bytes of the object of *whole*, where no store has it so: of a deflated member."""


class Shard(Protocol):
    """One shard, stored or not."""

    @property
    def ref(self) -> ObjectRef:
        """The object of the shard; a survey has the actual one."""

    @property
    def key(self) -> VirtualKey:
        """The virtual key of its first chunk, relative to the container, or its own key."""

    async def survey(self, fetch: Fetch) -> Survey | None:
        """Read the indexes; `None` if there is no such shard. Raises: `DamagedError`.

        Others use `read.member_store.survey_shard`: the shard may lie in an archive.
        """


class Shards(Protocol):
    """The shards of a collection; all keys are relative to the container."""

    @property
    def prefix(self) -> str:
        """The prefix of the shards: empty, or with a final slash."""

    @property
    def is_checkable(self) -> bool:
        """True if `Survey.check` looks at the bytes of chunks."""

    def named(self, key: str) -> Shard | None:
        """Return the shard that is stored under *key*; `None` if it cannot be one."""

    def holding(self, key: VirtualKey) -> Shard | None:
        """Return the shard of the chunk *key*; `None` if it names no chunk."""

    def every(self) -> Iterator[Shard] | None:
        """Yield every possible shard; `None` if they are too many."""


@dataclass(frozen=True, slots=True)
class ChunkCollection:
    """Chunks of one kind in a container: an array, the meshes of a volume."""

    description: Description
    shards: Shards | None
    """`None` if it is not served unsharded."""


type Listing = Callable[[str], AsyncIterator[str]]
"""Lists the keys of the objects below a prefix, both relative to the container. Raises:
`StorageUnusableError` where the store cannot list, and any other `StorageError`.
"""


@dataclass(frozen=True, slots=True)
class RefDescription:
    """A ref that keys can begin with, and its state of the container."""

    path: str
    """Of the container below the root; empty until that is known."""
    ref: str
    """Spelled as in keys: ``@tag.v1``."""
    snapshot_id: str


class Trace(NamedTuple):
    """The reference that leads to the bytes of a chunk."""

    reference: str
    """``native``, ``inline`` or ``virtual``."""
    manifest: ObjectRef
    location: str | None = None
    """Location of a virtual reference."""


@dataclass(frozen=True, slots=True)
class Damage:
    """Damage of *object*, with the virtual key of the first chunk that it concerns."""

    object: str
    key: str
    reason: str


class MissingBytes(str):
    """Reason that an object does not exist, or is too short: one for all that refers to it."""

    __slots__ = ()


ABSENT_SOURCE: Final = MissingBytes("does not exist, though it is referred to")


def misfit(size: int | None, stop: int) -> MissingBytes:
    """Return why an object of *size*, `None` if it is absent, lacks bytes up to *stop*."""
    if size is None:
        return ABSENT_SOURCE
    return MissingBytes(f"has {size} bytes, and bytes up to {stop} are referred to")


@dataclass(slots=True)
class Report:
    """Counts and damages of all that was checked, or of a part."""

    arrays: int = 0
    shards: int = 0
    chunks: int = 0
    nbytes: int = 0
    reads_chunks: bool = False
    """Whether chunks were read, and not only indexes."""
    counts: dict[str, int] = field(default_factory=dict)
    """Counts of other things in repositories: snapshots, manifests, references."""
    not_checked: dict[str, str] = field(default_factory=dict)
    """Reasons, by path, why something could not be checked, such as arrays without shards."""
    damages: list[Damage] = field(default_factory=list)

    @classmethod
    def of_damage(cls, ref: ObjectRef, key: str, reason: str) -> Self:
        return cls(damages=[Damage(str(ref), key, reason)])

    def add(self, part: "Report", path: str) -> None:
        """Add *part*, whose paths and keys are relative to *path*."""
        self.arrays += part.arrays
        self.shards += part.shards
        self.chunks += part.chunks
        self.nbytes += part.nbytes
        for things, number in part.counts.items():
            self.counts[things] = self.counts.get(things, 0) + number
        for below, reason in part.not_checked.items():
            known = self.not_checked.get(name := join_path(path, below))
            self.not_checked[name] = f"{known}; {reason}" if known else reason
        self.damages += (replace(each, key=join_path(path, each.key)) for each in part.damages)


class Unreadable(Report):
    """Report of what leads to shards and could not be read this time."""

    __slots__ = ()


class NeededObject(NamedTuple):
    """An object that must exist in the version and length that a reference names."""

    key: str
    place: Stored | Part


class Enclosed(NamedTuple):
    """A shard that a reference leads to."""

    path: str
    """The prefix of the shard's keys, below the container."""
    shard: Shard
    data: bytes | None = None
    """All bytes of an inline shard, whose object is that of the reference."""


type Finding = Report | NeededObject | Enclosed
"""A part that is checked, or something to check; all keys are relative to the container."""


@runtime_checkable
class Stateful(Protocol):
    """Layout of a container that has refs."""

    async def states(self, fetch: Fetch, listing: Listing) -> list[RefDescription]:
        """Return the states of all refs. Raises: `DamagedError`, `OfflineError`."""

    async def collections_below(
        self, folder: VirtualKey, fetch: Fetch, run_in_thread: RunInThread
    ) -> Sequence[ChunkCollection | DamagedError]:
        """Describe the arrays at and below *folder*: a ref, by default ``main``, and a path.

        Their paths begin at the root of the ref. There are none if there is no such ref.
        """

    async def trace(self, key: VirtualKey, fetch: Fetch) -> Trace | None:
        """Return the reference to the chunk *key*; `None` where there is none."""

    def findings(self, ref: str, fetch: Fetch, *, chunks: bool) -> AsyncIterator[Finding]:
        """Check all references of *ref*; with *chunks*, yield chunks with frames as well.

        Raises: `UnknownRefError`, `OfflineError`, `DamagedError`, `StorageError` where the
        references cannot be read.
        """
