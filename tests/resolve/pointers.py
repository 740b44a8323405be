"""A made-up format whose keys refer to what a test says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from app.errors import DamagedError, ReadOnlyError
from app.formats.listing import NOTHING, ListingRules, Name
from app.formats.reading import Fetch
from app.formats.surveying import Collection, Listing, Shards
from app.model import MISSING, Location, ObjectRef, VirtualKey


@dataclass(frozen=True)
class Pointers:
    """The format: everything is one container, in which *locations* are found."""

    locations: Mapping[str, Location] = field(default_factory=dict)
    name: str = "pointers"

    def claim(self, key: VirtualKey) -> int | None:
        """Know of no such spelling."""
        return None

    def translator(self, directory: ObjectRef, name: str) -> None:
        """Know of no documents."""

    async def target(self, key: VirtualKey, fetch: Fetch) -> NoReturn:
        """Refuse."""
        raise ReadOnlyError(key)

    async def open(self, directory: ObjectRef, fetch: Fetch) -> "Pointers":
        """Open any directory."""
        return self

    def encloses(self, key: VirtualKey) -> bool:
        """Hold everything."""
        return True

    async def locate(self, key: VirtualKey, fetch: Fetch) -> Location:
        """Look *key* up."""
        return self.locations.get(key, MISSING)

    async def shard(self, key: VirtualKey, fetch: Fetch) -> None:
        """Know of none."""

    async def listing_rules(self, directory: VirtualKey, fetch: Fetch) -> ListingRules:
        """Hide everything."""
        return NOTHING

    async def names(self, prefix: VirtualKey, fetch: Fetch) -> Sequence[Name]:
        """Name the keys."""
        return [Name(key) for key in self.locations]

    async def collections(
        self, fetch: Fetch, listing: Listing
    ) -> Sequence[Collection | DamagedError]:
        """Describe nothing."""
        return ()

    async def shards_at(self, key: VirtualKey, fetch: Fetch) -> Shards | None:
        """Know of none."""
        return None

    def expects(self, path: str) -> bool:
        """Expect none."""
        return False

    def names_below(self) -> Sequence[str] | None:
        """Know of none."""
        return ()
