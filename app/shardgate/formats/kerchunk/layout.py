"""The format of reference sets, in JSON and in Parquet."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardgate.formats.kerchunk.json_set import JsonSet
from shardgate.formats.kerchunk.parquet_set import ParquetSet
from shardgate.formats.kerchunk.reference_table import CONSOLIDATED
from shardgate.formats.members import SET_SUFFIXES, MemberLayout
from shardgate.formats.reading import Fetch, Read
from shardgate.formats.references import Allowed
from shardgate.model import ObjectRef


@dataclass(frozen=True, slots=True)
class Kerchunk:
    """Format of objects ``*.json``, perhaps compressed, and of directories with ``.zmetadata`` that
    has a ``record_size``. References lead to objects below the *allowed* prefixes.
    """

    limit_nbytes: int
    """Most bytes of a set in JSON, of a catalog, and of a table, also once it is inflated."""
    decoded_nbytes: int
    """See `MemberLayout`."""
    allowed: tuple[Allowed, ...] = ()

    @property
    def patterns(self) -> Sequence[str]:
        return [*(f"*{suffix}" for suffix in SET_SUFFIXES), CONSOLIDATED]

    def is_container(self, name: str) -> bool:
        return name.lower().endswith(SET_SUFFIXES)

    async def open(self, directory: ObjectRef, fetch: Fetch) -> MemberLayout | None:
        set_of = JsonSet if self.is_container(directory.key) else ParquetSet
        members = set_of(directory, self.limit_nbytes, self.allowed)
        read: Read[Any] = members.read
        if (found := await fetch(read)) is None or not found.value.is_metadata:
            return None
        return MemberLayout(directory, members, self.decoded_nbytes)
