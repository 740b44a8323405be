"""Interface between a format and `read` and `write`: layouts for reading, rewriters for writing.

A format describes its reads and how to decode them; `read.metadata_cache.ReadCache` performs,
caches and shares them. `Format.open` decides whether a directory is a container of the format; its
`Layout` then turns virtual keys into locations. Keys are listed by the rules of `listing`;
``inspect`` and ``verify`` use the `ChunkCollection` of `surveying`.

A format also plans writes: from the indexes of a shard, and the changes that wait for it, it
makes the pieces of the shard that replaces it. It reads no chunk and writes nothing.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from shardgate.errors import DamagedError
from shardgate.formats.listing import PLAIN, UNIFORM, ListingRules, Name
from shardgate.formats.reading import Fetch, Read, RunInThread
from shardgate.formats.surveying import ChunkCollection, Listing, Shard, Shards
from shardgate.model import ByteRange, ETag, Location, ObjectRef, Piece, VirtualKey, Whole

LARGE_NBYTES: Final = 32 * 1024**2
"""Chunks of larger shards keep their order, so that few long ranges are copied; those of smaller
ones lie in the order of the index, so that equal content gives equal bytes."""

type Entry = tuple[int, ...]
"""Identifies an inner chunk within its shard: the number in each index on the way, or an id."""


@dataclass(frozen=True, slots=True)
class Checksummed:
    """Pieces, followed by the CRC-32C of all their bytes: 4 bytes, little-endian. Ranges under a
    new checksum are read, and compared with the old one first.
    """

    pieces: "Sequence[Piece | Checksummed]"
    replaces: ByteRange | None = None
    """The old bytes with their checksum at the end; all ranges in the pieces lie in it."""


class OpenShard(Protocol):
    """The indexes of one version of a shard, as far as writing it needs them."""

    @property
    def etag(self) -> ETag:
        """The version of the object."""

    @property
    def size(self) -> int:
        """Of the object, in bytes."""

    def lookup(self, entry: Entry) -> ByteRange | None:
        """Return the range in the object of *entry*, one of those it was opened for."""


@dataclass(frozen=True, slots=True)
class NewShard:
    """A shard that replaces another, or none."""

    pieces: "Sequence[Piece | Checksummed]"
    places: Mapping[Entry, ByteRange]
    """Ranges in the new object of the chunks that were written."""
    index: tuple[Read[Any], Any]
    """The read of its index, of any version, with the result."""


class ShardRewriter[O: OpenShard](Protocol):
    """Plans the replacement of one shard; rewriters of the same shard are equal."""

    @property
    def ref(self) -> ObjectRef:
        """The object."""

    def encode(self, entry: Entry, body: bytes, *, coding: str) -> bytes:
        """Return the stored form of *body*, the chunk *entry* that a client sent; may be slow.

        *coding* is the ``Content-Encoding`` that it came with, one of `CODINGS` or empty.

        Raises: `BadBodyError` where *body* cannot be this chunk, `UnknownCodingError`.
        """

    async def open(self, entries: Collection[Entry], fetch: Fetch) -> O | None:
        """Read the indexes that a change of *entries* needs; `None` if there is no such shard.

        Raises: `DamagedError` where stored chunks would be lost, `ConflictError` for a form of
        shard that is not written.
        """

    def plan(self, old: O | None, changes: Mapping[Entry, bytes | None]) -> NewShard | None:
        """Plan the shard with *changes*; `None` empties an entry. Pure; may be slow.

        Holes are closed. A shard without any chunk is `None`: it need not exist.

        Raises: `DamagedError`, `ConflictError` where the shard cannot be written.
        """

    def plan_empty(self) -> NewShard:
        """Plan a shard without any chunk, for a store that cannot delete one version only."""


class Slot(NamedTuple):
    """The shard and the entry in it where an inner chunk is written."""

    shard: ShardRewriter[Any]
    entry: Entry


class Translator(Protocol):
    """Turns a document as clients see it into the form that is stored."""

    def is_marker(self, stored: bytes) -> bool:
        """Return whether *stored*, which `translate` returned, gives keys below it a meaning."""

    async def translate(
        self, sent: bytes, stored: bytes | None, fetch: Fetch, run_in_thread: RunInThread
    ) -> bytes:
        """Return what to store for *sent* in place of the document *stored*, if there is one.

        Raises: `BadBodyError` for an invalid document, `ConflictError` for changes that the
        stored shards do not allow.
        """


class Document(NamedTuple):
    """Metadata that may be stored in another form than they are served."""

    ref: ObjectRef
    translator: Translator


class Stray(NamedTuple):
    """An object that is named like a chunk and lies in no array: it can only be deleted."""

    ref: ObjectRef


type Target = Slot | Document | Whole | Stray


class Layout(Protocol):
    """An opened container; all keys are relative to it."""

    async def locate(self, key: VirtualKey, fetch: Fetch) -> Location:
        """Locate *key*. Raises: `DamagedError` where an index contradicts itself or its object."""

    def encloses(self, key: VirtualKey) -> bool:
        """Return whether *key*, or a prefix, cannot lie in a container below this one."""

    def expects(self, _path: str) -> bool:
        """Return whether the metadata describe a sharded array at a path below; by default no."""
        return False

    async def explain_absence(self, _key: VirtualKey, _fetch: Fetch) -> str:
        """Return why no object can have a key, where the metadata tell; empty by default."""
        return ""

    @property
    def is_read_only(self) -> bool:
        """Return whether nothing in it can ever be written; by default no."""
        return False

    async def target(self, key: VirtualKey, fetch: Fetch) -> Target:
        """Find where *key* is written. Raises: `BadKeyError`, `ReadOnlyError`, `DamagedError`."""

    async def listing_rules(self, directory: VirtualKey, fetch: Fetch) -> ListingRules:
        """Return how *directory*, empty or with a final slash, is listed."""

    async def names(
        self, _prefix: VirtualKey, _fetch: Fetch, _run_in_thread: RunInThread
    ) -> Sequence[Name] | None:
        """Return the names right below a prefix; by default `None`, for its `ListingRules`."""
        return None

    def names_below(self) -> Sequence[str] | None:
        """Return the paths of containers below, for stores that cannot list; by default `None`: the
        metadata do not name them, and only a listing would find them.
        """
        return None

    async def collections(
        self, _fetch: Fetch, _listing: Listing, _run_in_thread: RunInThread
    ) -> Sequence[ChunkCollection | DamagedError]:
        """Describe the contents of the container itself; damaged parts are errors."""
        return ()

    async def shards_at(self, _key: VirtualKey, _fetch: Fetch) -> Shards | None:
        """Return the shards that a key, of a chunk or a shard, belongs to; by default `None`."""
        return None

    async def holding(self, key: VirtualKey, fetch: Fetch) -> Shard | None:
        """Return the shard of the chunk *key*; `None` if it is in no shard."""
        shards = await self.shards_at(key, fetch)
        return None if shards is None else shards.holding(key)

    async def shard(self, key: VirtualKey, fetch: Fetch) -> str | None:
        """Return a name of the shard of *key* for `ShardAffinity`, from metadata alone; `None` if
        *key* is in no shard.
        """
        shard = await self.holding(key, fetch)
        return None if shard is None else str(shard.ref)

    def as_stored(self) -> "Layout":
        """Return the layout in which the same keys are served as they are stored."""


@dataclass(frozen=True, slots=True)
class StoredObjects(Layout):
    """Layout of keys that name the objects below *directory*, served as they are stored."""

    directory: ObjectRef

    async def locate(self, key: VirtualKey, _: Fetch) -> Location:
        return Whole(self.directory.join(key))

    async def target(self, key: VirtualKey, _: Fetch) -> Target:
        return Whole(self.directory.join(key))

    def encloses(self, _: VirtualKey) -> bool:
        return False

    async def listing_rules(self, _: VirtualKey, __: Fetch) -> ListingRules:
        return UNIFORM

    def as_stored(self) -> Layout:
        return self


@dataclass(frozen=True, slots=True)
class StoredContainer(StoredObjects):
    """The container *served* as it is stored: shards under their own names."""

    served: Layout

    def encloses(self, key: VirtualKey) -> bool:
        return self.served.encloses(key)

    async def listing_rules(self, directory: VirtualKey, __: Fetch) -> ListingRules:
        return PLAIN if self.served.encloses(directory) else UNIFORM

    async def shard(self, key: VirtualKey, _: Fetch) -> str:
        """Return the name that inner chunks of the shard *key* have too."""
        return str(self.directory.join(key))


class Format(Protocol):
    """A way to lay out containers."""

    @property
    def name(self) -> str:
        """The name in settings and answers: ``zarr``."""

    def claim(self, key: VirtualKey) -> int | None:
        """Return where the first segment of *key* begins that only this format spells, such as
        ``@branch.main``; all before it is the directory of the container.
        """

    def translator(self, directory: ObjectRef, name: str) -> Translator | None:
        """Return the translator of the document *name* in *directory*, if it needs one."""

    def markers(self, directory: ObjectRef) -> Sequence[Read[Any]]:
        """Return the reads that opening *directory* may begin with; see `Read.kind`."""

    async def open(self, directory: ObjectRef, fetch: Fetch) -> Layout | None:
        """Open *directory*; `None` without a marker. Raises: `DamagedError` for an invalid one."""


class WalkedFormat(Protocol):
    """A format whose arrays only walks look for: their objects are served as they are stored, and
    no key needs their metadata.
    """

    @property
    def marker(self) -> str:
        """The name of an object in each directory that is an array."""

    @property
    def catalog(self) -> str:
        """The name of an object that may describe all arrays below its directory."""

    def layout(self, directory: ObjectRef) -> Layout:
        """Return the layout of the array in *directory*, which has the marker."""

    async def read_catalog(
        self, directory: ObjectRef, fetch: Fetch, run_in_thread: RunInThread
    ) -> Mapping[str, Layout]:
        """Return the arrays in the catalog in *directory*, by their paths below it; none without
        one. Raises: `DamagedError`.
        """
