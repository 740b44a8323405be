"""What a format owes whoever writes: where a key is stored, and how a shard is made anew.

A format plans: from what the indexes of a shard say, and the changes that wait for it, it makes
the pieces of the shard that takes its place. It reads no chunk and writes nothing.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from app.formats.reading import Fetch, Read
from app.model import ByteRange, ETag, ObjectRef, Piece, Whole

LARGE_NBYTES: Final = 32 * 1024**2
"""Chunks of larger shards stay in the order in which they lie, so that few long ranges are kept;
those of others lie in the order of the index, and equal content gives equal bytes."""

type Entry = tuple[int, ...]
"""Tells apart the inner chunks of a shard: the number in each index on the way, or an id."""


@dataclass(frozen=True, slots=True)
class Sealed:
    """Pieces, and behind them the CRC-32C of all their bytes, 4 bytes, little-endian.

    What is kept under a new checksum is read, and held against the old one before. What is kept as
    it is, its checksum with it, is not: the store may copy it unread, and readers compare it.
    """

    pieces: "Sequence[Piece | Sealed]"
    replaces: ByteRange | None = None
    """What had the old checksum, and that at its end; all ranges in the pieces lie in it."""


class OpenShard(Protocol):
    """The indexes of one version of a shard, as far as they must be known to write it."""

    @property
    def etag(self) -> ETag:
        """The version of the object."""
        ...

    @property
    def size(self) -> int:
        """Of the object, in bytes."""
        ...

    def lookup(self, entry: Entry) -> ByteRange | None:
        """Find the inner chunk *entry* in the object, one of those it was opened for.

        Raises: `DamagedError`.
        """
        ...


@dataclass(frozen=True, slots=True)
class NewShard:
    """A shard that is to take the place of another, or of none."""

    pieces: "Sequence[Piece | Sealed]"
    """Ranges are of the object that is replaced."""
    places: Mapping[Entry, ByteRange]
    """Where the inner chunks lie in it that were written."""
    indexes: Sequence[tuple[Read[Any], Any]]
    """Reads of the new object that need no reading, and what they give.

    They are of whatever version there is.
    """
    indexes_of_version: Sequence[tuple[Read[Any], Any]] = ()
    """Further reads, which readers make of the version that they have found.

    Here they name none: whoever keeps them knows it by then.
    """


class ShardRewriter[O: OpenShard](Protocol):
    """Plans one shard anew; those of the same shard are equal."""

    @property
    def ref(self) -> ObjectRef:
        """The object."""
        ...

    def encode(self, entry: Entry, body: bytes, *, is_gzip: bool) -> bytes:
        """Give what is stored for *body*, which a client sent; it may take long.

        *is_gzip* tells that the client sent it with ``Content-Encoding: gzip``.

        Raises: `BadBodyError` for what cannot be this chunk, `UnknownCodingError`.
        """
        ...

    async def open(self, entries: Collection[Entry], fetch: Fetch) -> O | None:
        """Read the indexes that it takes to change *entries*; `None` if there is no such shard.

        Raises: `DamagedError` where not all that is stored could be kept, `ConflictError` where
        it is stored in a form that is not written.
        """
        ...

    def plan(self, old: O | None, changes: Mapping[Entry, bytes | None]) -> NewShard | None:
        """Plan the shard with *changes*, `None` of which is an empty entry.

        `None` is a shard without any chunk, which need not exist. Holes are closed. It may take
        long, and depends on nothing but its arguments.

        Raises: `DamagedError`, `ConflictError` where the shard cannot be written.
        """
        ...

    def plan_empty(self) -> NewShard:
        """Plan a shard without any chunk, for a store that cannot remove just one version."""
        ...


class Slot(NamedTuple):
    """Where a virtual key of an inner chunk is stored."""

    shard: ShardRewriter[Any]
    entry: Entry


class Translator(Protocol):
    """Turns a document as clients see it into the form that is stored."""

    async def translate(self, given: bytes, stored: bytes | None, fetch: Fetch) -> bytes:
        """Give what to store for *given* in place of the document *stored*, if there is one.

        Raises: `BadBodyError` for no such document, `ConflictError` for changes that what is
        stored in shards does not allow.
        """
        ...


class Document(NamedTuple):
    """Metadata that may be stored in another form than they are served."""

    ref: ObjectRef
    translator: Translator


class Stray(NamedTuple):
    """An object that is named like a chunk and lies in no array: it can only be removed."""

    ref: ObjectRef


type Target = Slot | Document | Whole | Stray
"""Where the bytes of a key are written."""
