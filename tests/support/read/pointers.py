"""A made-up format, whose keys are locations that a test chooses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from shardgate.errors import ReadOnlyError
from shardgate.formats.contract import Layout
from shardgate.formats.listing import ListingRules, Name
from shardgate.formats.reading import Fetch, RunInThread
from shardgate.model import MISSING, Location, ObjectRef, VirtualKey


@dataclass(frozen=True)
class Pointers(Layout):
    """A made-up format in which *locations* are the keys of one container."""

    locations: Mapping[str, Location] = field(default_factory=dict)
    name: str = "pointers"

    def claim(self, key: VirtualKey) -> int | None:
        """Return no chunk number."""
        return None

    def translator(self, directory: ObjectRef, name: str) -> None:
        """Return no translator."""

    async def target(self, key: VirtualKey, fetch: Fetch) -> NoReturn:
        """Refuse all writes."""
        raise ReadOnlyError(key)

    def markers(self, directory: ObjectRef) -> tuple[()]:
        """Return no markers."""
        return ()

    async def open(self, directory: ObjectRef, fetch: Fetch) -> "Pointers":
        """Open any directory."""
        return self

    def encloses(self, key: VirtualKey) -> bool:
        """Enclose all keys."""
        return True

    def as_stored(self) -> "Pointers":
        """Return the same, which has no other form."""
        return self

    async def locate(self, key: VirtualKey, fetch: Fetch) -> Location:
        """Look *key* up."""
        return self.locations.get(key, MISSING)

    async def listing_rules(self, directory: VirtualKey, fetch: Fetch) -> ListingRules:
        """Hide all objects."""
        return ListingRules(shows=None)

    async def names(
        self, prefix: VirtualKey, fetch: Fetch, run_in_thread: RunInThread
    ) -> Sequence[Name]:
        """Return all keys."""
        return [Name(key) for key in self.locations]
