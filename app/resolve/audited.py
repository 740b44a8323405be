"""Read for the audit of a container, and ask for objects that something refers to."""

from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass
from itertools import batched
from typing import Final

from app.errors import DamagedError, StorageError, VersionChangedError, lost
from app.formats.reading import Read, Weighable
from app.model import ByteRange, ObjectRef, Part, Stored, condition_of
from app.resolve.perform import DirectFetch
from app.resolve.walk import Root
from app.storage.abreast import abreast
from app.storage.contract import Found, ObjectReader

READS_AT_ONCE: Final = 4
"""Each can bring a hundred megabytes to memory."""


@dataclass(frozen=True, slots=True)
class Reads:
    """Reads in the container at *path* below *root*; see `Auditor`."""

    root: Root
    path: str

    @property
    def fetch(self) -> DirectFetch:
        """Asks the store each time."""
        return DirectFetch(self.root.store)

    async def read_each[T: Weighable](
        self, reads: Iterable[Read[T]]
    ) -> AsyncGenerator[tuple[Read[T], T | DamagedError | StorageError | None]]:
        """Perform *reads*, and give what came of each in their order."""
        for batch in batched(reads, READS_AT_ONCE):
            found = await abreast(self._read, batch, at_a_time=READS_AT_ONCE)
            for read in batch:
                yield read, found.pop(0)

    async def sizes(self, prefix: str) -> AsyncGenerator[tuple[str, int]]:
        """Give the keys of the objects below *prefix*, and their bytes."""
        start = self.root.ref.join(self.path).prefix
        async for listed in self.root.store.list(ObjectRef(start.bucket, start.key + prefix)):
            yield listed.ref.key.removeprefix(start.key), listed.size or 0

    async def _read[T: Weighable](self, read: Read[T]) -> T | DamagedError | StorageError | None:
        try:
            found = await self.fetch(read)
        except (DamagedError, StorageError) as error:
            return error
        return None if found is None else found.value


async def find_fault(store: ObjectReader, place: Stored | Part) -> str | None:
    """Tell why the bytes at *place* cannot be read, as far as one request for none of them can."""
    ref, stop = place.ref, place.byte_range.stop
    try:
        size = await _measure(store, place)
    except VersionChangedError as error:
        return error.reason if place.version is None else lost(ref, place.version).reason
    except StorageError as error:
        return error.reason
    if size is None:
        return "does not exist, though it is referred to"
    return f"has {size} bytes, and bytes up to {stop} are referred to" if size < stop else None


async def _measure(store: ObjectReader, place: Stored | Part) -> int | None:
    """Ask for the size of an object; the condition on its version needs a read."""
    condition = condition_of(place.version)
    if condition is not None:
        found = await store.get(place.ref, ByteRange(0, 1), if_match=condition)
        return found.size if isinstance(found, Found) else None
    stat = await store.stat(place.ref)
    return None if stat is None else stat.size
