"""Archives and reference sets, opened."""

from dataclasses import dataclass

from shardgate.formats.compression import decode_content
from shardgate.formats.members import Members, Place
from shardgate.formats.reading import Fetch
from shardgate.model import ByteRange, Coded, Inline, Missing, ObjectRef, Part, Stored
from shardgate.storage.contract import Found, ObjectReader


@dataclass(frozen=True)
class Opened:
    """A container of members in *store*, which *fetch* reads."""

    members: Members
    store: ObjectReader
    fetch: Fetch

    async def find(self, name: str) -> Place:
        """Find a member."""
        return await self.members.find(name, self.fetch)

    async def read(self, name: str) -> bytes | None:
        """Return the content of a member from where it was found; `None` if it is missing."""
        match await self.find(name):
            case Missing():
                return None
            case Inline(data):
                return data
            case Coded(Stored(ref, place), coding):
                return decode_content(coding, await self._get(ref, place), 2**20)
            case Part(ref, place) | Stored(ref, place):
                return await self._get(ref, place)
            case other:
                raise AssertionError(other)

    async def names(
        self, prefix: str = "", after: str = "", delimiter: str = ""
    ) -> dict[str, int | None]:
        """Return names and sizes below *prefix*, in order."""
        names = self.members.below(prefix, after, delimiter, self.fetch)
        return {name: nbytes async for name, nbytes in names}

    async def _get(self, ref: ObjectRef, place: ByteRange) -> bytes:
        found = await self.store.get(ref, place)
        assert isinstance(found, Found)
        return found.data
