"""A made-up format, unlike any that is served: boxes of pebbles, found by their ids.

A directory with an object ``boxes`` is a container; the lines of that name its collections, and
``>`` before a name says that it is another container. A box has up to 9 pebbles: a digit for how
many, and for each its id, where it begins and where it ends in the box, a digit each.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from app.errors import DamagedError, ReadOnlyError
from app.formats.listing import ListingRules, Name
from app.formats.reading import Fetch, Opaque, Read
from app.formats.surveying import (
    Collection,
    Description,
    Entry,
    Fault,
    Listing,
    Shard,
    Shards,
    Table,
)
from app.model import MISSING, ByteRange, Location, ObjectRef, Stored, VirtualKey


@dataclass(frozen=True)
class Boxes:
    """The format."""

    name: str = "boxes"

    def translator(self, directory: ObjectRef, name: str) -> None:
        """Know of no documents."""

    def claim(self, key: VirtualKey) -> int | None:
        """Know of no such spelling."""
        return None

    async def open(self, directory: ObjectRef, fetch: Fetch) -> "BoxLayout | None":
        """Read the lines."""
        found = await fetch(Read("metadata", directory.join("boxes"), None, Opaque))
        return None if found is None else BoxLayout(directory, found.value.data.decode().split())


@dataclass(frozen=True)
class BoxLayout:
    """A container."""

    directory: ObjectRef
    lines: list[str]

    def encloses(self, key: VirtualKey) -> bool:
        """Only a collection does."""
        return key.partition("/")[0] in self.lines

    async def locate(self, key: VirtualKey, fetch: Fetch) -> Location:
        """Nobody asks for pebbles here."""
        return MISSING

    async def shard(self, key: VirtualKey, fetch: Fetch) -> None:
        """Know of none."""

    async def target(self, key: VirtualKey, fetch: Fetch) -> NoReturn:
        """Refuse."""
        raise ReadOnlyError(key)

    async def listing_rules(self, directory: VirtualKey, fetch: Fetch) -> ListingRules:
        """Hide nothing."""
        return ListingRules()

    async def collections(
        self, fetch: Fetch, listing: Listing
    ) -> Sequence[Collection | DamagedError]:
        """Give those that can be there, ``bad`` as damaged and ``loose`` as it is."""
        return [self._collection(name) for name in self.lines if not name.startswith(">")]

    def _collection(self, name: str) -> Collection | DamagedError:
        if name == "bad":
            return DamagedError(self.directory.join("bad/label"), "is smudged")
        description = Description(name, "boxes", "pebbles", sharding="by id")
        return Collection(description, None if name == "loose" else BoxShards(self.directory, name))

    async def shards_at(self, key: VirtualKey, fetch: Fetch) -> Shards | None:
        """Go by the first part of the key."""
        return BoxShards(self.directory, key.partition("/")[0])

    async def names(self, prefix: VirtualKey, fetch: Fetch) -> Sequence[Name] | None:
        """Boxes are listed as they are stored."""
        return None

    def expects(self, _: str) -> bool:
        """Expect no arrays below."""
        return False

    def names_below(self) -> Sequence[str] | None:
        """Tell the names after ``>``."""
        return [name[1:] for name in self.lines if name.startswith(">")]


@dataclass(frozen=True)
class BoxShards:
    """The boxes of a collection; of one called ``many`` there could be too many."""

    directory: ObjectRef
    collection: str

    @property
    def prefix(self) -> str:
        """Where they are."""
        return f"{self.collection}/"

    def named(self, key: str) -> "Box | None":
        """Know a box by its ending."""
        return Box(self.directory, key) if key.endswith(".box") else None

    def holding(self, key: VirtualKey) -> "Box | None":
        """Put all into the first box."""
        return Box(self.directory, f"{self.collection}/0.box")

    def every(self) -> Iterator[Shard] | None:
        """Give two."""
        if self.collection == "many":
            return None
        return iter([Box(self.directory, f"{self.collection}/{n}.box") for n in range(2)])


@dataclass(frozen=True)
class Box:
    """A shard."""

    directory: ObjectRef
    name: str

    @property
    def ref(self) -> ObjectRef:
        """The object."""
        return self.directory.join(self.name)

    @property
    def key(self) -> VirtualKey:
        """Its own name: no pebble is the first."""
        return VirtualKey(self.name)

    async def survey(self, fetch: Fetch) -> "BoxSurvey | None":
        """Read all of it."""
        found = await fetch(Read("box", self.ref, None, Opaque))
        if found is None:
            return None
        whole = Stored(self.ref, ByteRange(0, found.size), found.etag)
        return BoxSurvey(self, whole, found.value.data)


@dataclass(frozen=True)
class BoxSurvey:
    """The bytes of a box."""

    box: Box
    whole: Stored
    data: bytes
    index_location: str = "start"
    checksummed: tuple[ByteRange, ...] = ()
    inner: Callable[[Entry], Shard] | None = None

    @property
    def count(self) -> int:
        """The first digit."""
        return int(self.data[:1])

    @property
    def indexes(self) -> Sequence[ByteRange]:
        """Behind the first digit."""
        return [ByteRange(0, 1 + 3 * self.count)]

    def table(self) -> Table:
        """Read the digits; id 0 is nothing, and id 9 cannot be."""
        numbers = [int(self.data[at : at + 1]) for at in range(1, self.indexes[0].stop)]
        triples = list(zip(*[iter(numbers)] * 3, strict=True))
        entries = [Entry(n, ByteRange(a, b)) for n, a, b in triples if n not in {0, 9}]
        faults = [Fault(self.key(Entry(n, ByteRange(0, 0))), "no id") for n, *_ in triples if n > 8]
        empty = len(triples) - len(entries) - len(faults)
        return Table(sorted(entries, key=lambda entry: entry.place), empty, faults)

    def key(self, entry: Entry) -> VirtualKey:
        """Spell the id."""
        return VirtualKey(f"{self.box.name.partition('/')[0]}/{entry.number}")

    def check(self, entry: Entry, data: bytes) -> str | None:
        """Want them dry."""
        return "is wet" if b"~" in data else None
