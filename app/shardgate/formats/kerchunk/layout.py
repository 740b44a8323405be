"""The format of reference sets, in JSON and in Parquet."""

from dataclasses import dataclass
from typing import Any, Final

from shardgate.formats.contract import Layout
from shardgate.formats.kerchunk.json_set import JsonSet
from shardgate.formats.kerchunk.parquet_set import ParquetSet
from shardgate.formats.members import MemberLayout
from shardgate.formats.reading import Fetch, Read
from shardgate.formats.references import Allowed
from shardgate.model import ObjectRef, VirtualKey

_JSON: Final = ".json"


@dataclass(frozen=True, slots=True)
class Kerchunk:
    """Format of objects ``*.json``, and of directories with ``.zmetadata`` that has a
    ``record_size``. References lead to objects below the *allowed* prefixes.
    """

    limit_nbytes: int
    """Most bytes of a set in JSON, of a catalog, and of a table, also once it is inflated."""
    allowed: tuple[Allowed, ...] = ()
    name: str = "kerchunk"

    def claim(self, _: VirtualKey) -> int | None:
        return None

    def translator(self, _: ObjectRef, __: str) -> None:
        """Return `None`: no documents are translated."""

    def markers(self, directory: ObjectRef) -> tuple[Read[Any]]:
        return (self._members(directory).read,)

    async def open(self, directory: ObjectRef, fetch: Fetch) -> Layout | None:
        members = self._members(directory)
        read: Read[Any] = members.read
        found = await fetch(read)
        return MemberLayout(directory, members) if found and found.value.is_metadata else None

    def _members(self, directory: ObjectRef) -> JsonSet | ParquetSet:
        if str(directory).rstrip("/").lower().endswith(_JSON):
            return JsonSet(directory, self.limit_nbytes, self.allowed)
        return ParquetSet(directory, self.limit_nbytes, self.allowed)
