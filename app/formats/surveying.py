"""What ``inspect`` and ``verify`` ask of a format: how things are laid out, what is in a shard."""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, runtime_checkable

from app.formats.reading import Fetch
from app.model import ByteRange, ObjectRef, Part, Stored, VirtualKey

ARRAYS: Final = "arrays"


@dataclass(frozen=True, slots=True)
class Description:
    """What a collection is, as it is stored and as it is served; `None` has no meaning there."""

    path: str
    """Unlike that of any other collection of its container; empty for a Zarr array."""
    format: str
    """The name of the format: ``zarr``."""
    kind: str
    """``array``, ``meshes``, ``skeletons``, ``annotations``; a ``hierarchy`` of unknown things."""
    shape: tuple[int, ...] | None = None
    data_type: str | None = None
    dimension_names: tuple[str | None, ...] | None = None
    inner_chunk_shape: tuple[int, ...] | None = None
    """Of the chunks that are served."""
    codecs: tuple[str, ...] = ()
    """What encodes a chunk that is served."""
    shard_shape: tuple[int, ...] | None = None
    chunks_per_shard: tuple[int, ...] | None = None
    index_location: tuple[str, ...] = ()
    """Of each index on the way to a chunk, outermost first."""
    sharding: str | None = None
    """How chunks are spread over shards, where a grid of shards does not say it."""
    why_sharded: str = ""
    """Why a sharded collection is served as it is."""


class Entry(NamedTuple):
    """What a shard names: a chunk, or a shard inside of the shard."""

    number: int
    """Its place in the index, or its id."""
    place: ByteRange
    """Counted from the beginning of the shard, and inside of it."""


class Fault(NamedTuple):
    """What is wrong in a shard, by the virtual key of the first chunk it hurts."""

    key: VirtualKey
    reason: str


@dataclass(frozen=True, slots=True)
class Table:
    """All that the indexes of a shard name."""

    entries: Sequence[Entry]
    """By their places. Those that cannot be right are faults instead."""
    empty: int
    """How many entries name nothing."""
    faults: Sequence[Fault]


class Survey(Protocol):
    """The indexes of one version of a shard, read but not looked through."""

    @property
    def whole(self) -> Stored:
        """Where the shard lies: an object, or a part of one."""
        ...

    @property
    def indexes(self) -> Sequence[ByteRange]:
        """Where in the shard its indexes lie, none over another."""
        ...

    @property
    def index_location(self) -> str:
        """At which end of the shard the first index lies: ``start`` or ``end``."""
        ...

    @property
    def checksummed(self) -> Sequence[ByteRange]:
        """Parts of the shard that end in the CRC-32C of all that is before it in them."""
        ...

    @property
    def count(self) -> int:
        """How many entries the indexes have, about: where it is large, so is the work below."""
        ...

    def table(self) -> Table:
        """Look through all entries."""
        ...

    def key(self, entry: Entry) -> VirtualKey:
        """Spell the virtual key of *entry*, relative to the container."""
        ...

    @property
    def inner(self) -> "Callable[[Entry], Shard] | None":
        """Gives the shard that an entry names; `None` where entries name chunks."""
        ...

    def check(self, entry: Entry, data: bytes) -> str | None:
        """Tell what is wrong with *data*, the bytes of the chunk *entry*."""
        ...


class Shard(Protocol):
    """One shard, which may exist or not."""

    @property
    def ref(self) -> ObjectRef:
        """The object it is in, or would be; where it lies, only a survey tells."""
        ...

    @property
    def key(self) -> VirtualKey:
        """The virtual key of its first chunk, relative to the container, or its own name."""
        ...

    async def survey(self, fetch: Fetch) -> Survey | None:
        """Read the indexes; `None` means that there is no such shard.

        Raises: what *fetch* does, and `DamagedError` where no index can be found.
        """
        ...


class Shards(Protocol):
    """The shards of a collection; all keys are relative to the container."""

    @property
    def prefix(self) -> str:
        """Below which the shards are stored: empty, or with a final slash."""
        ...

    def named(self, key: str) -> Shard | None:
        """Take the stored object *key* for a shard; `None` if it cannot be one."""
        ...

    def holding(self, key: VirtualKey) -> Shard | None:
        """Find the shard that holds the chunk *key*, or would; `None` if it names no chunk."""
        ...

    def every(self) -> Iterator[Shard] | None:
        """Give each shard that could be stored; `None` if they are too many to ask for each."""
        ...


@dataclass(frozen=True, slots=True)
class Collection:
    """Things of one kind in a container, sharded in one way: an array, the meshes of a volume."""

    description: Description
    shards: Shards | None
    """`None` where it is served as it is."""


class Listing(Protocol):
    """Name what is stored in a container."""

    def __call__(self, prefix: str, /) -> AsyncIterator[str]:
        """List the keys of the objects below *prefix*, both relative to the container.

        Raises: `StorageError`, where the store cannot list one that is ``lasting``.
        """
        ...


class State(NamedTuple):
    """A state of a container, by a name that keys can begin with."""

    ref: str
    """As keys spell it: ``@tag.v1``."""
    snapshot_id: str


class Trace(NamedTuple):
    """The reference that leads to the bytes of a chunk."""

    reference: str
    """Its kind: ``native``, ``inline``, ``virtual``."""
    manifest: ObjectRef
    """The object that holds the reference."""
    location: str
    """The object or URL that is referred to; empty where the manifest holds the bytes."""


class Flaw(NamedTuple):
    """A fault of the object *ref*, found by *key*, which is relative to the container."""

    ref: ObjectRef
    key: str
    reason: str


class Unchecked(NamedTuple):
    """Keys that cannot be checked, and the reason."""

    key: str
    reason: str


class Counted(NamedTuple):
    """More that was looked at of a kind of things."""

    things: str
    number: int


class NeededObject(NamedTuple):
    """An object that has to exist, in the version and of the length that a reference names."""

    key: str
    place: Stored | Part


class Enclosed(NamedTuple):
    """A shard that a reference leads to, wherever it is."""

    path: str
    """The prefix of the shard's keys, below the container."""
    shard: Shard
    data: bytes | None = None
    """All bytes of the shard, where its object is only what holds them."""


type Finding = Flaw | Unchecked | Counted | NeededObject | Enclosed


@runtime_checkable
class Stateful(Protocol):
    """The layout of a container that keeps its states under refs."""

    async def states(self, fetch: Fetch, listing: Listing) -> list[State]:
        """Name the states that a ref is at.

        Raises: `DamagedError`, `OfflineError`.
        """
        ...

    async def trace(self, key: VirtualKey, fetch: Fetch) -> Trace | None:
        """Return the reference to the chunk *key*; `None` where there is none."""
        ...

    def findings(self, ref: str, fetch: Fetch, *, chunks: bool) -> AsyncIterator[Finding]:
        """Follow all references of *ref*; *chunks* hands over chunks with checksums as well.

        Raises: `UnknownRefError`, `OfflineError`, `DamagedError`, `StorageError` where the
        references cannot be found out.
        """
        ...
