"""Contents of each format's folder for the conformance suite; stores and shards put together."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass

from app.formats.reading import Fetch
from app.formats.surveying import Shard
from app.model import ByteRange, Piece, Stored
from app.storage.memory import MemoryStore
from tests.support.resolving import ROOT


@dataclass(frozen=True)
class Case:
    """A container that code independent of the app has written."""

    name: str
    build: Callable[[Mapping[str, bytes]], dict[str, bytes]]
    """From chunks by virtual key to objects by key; what is not given is empty."""
    chunks: Mapping[str, bytes]
    """Chunks to write, more than one in some shard."""
    absent: tuple[str, ...]
    """Virtual keys that name nothing in the written container."""
    checksummed: bool
    """True if any changed bit of an index is noticed."""
    metadata: tuple[str, ...] = ("zarr.json", "info")
    """How the names of objects end that hold no chunks, or the folders that such objects are in."""
    has_shards: bool = True
    """True if shards are objects of their own, which can be looked through."""
    entry_suffix: str = ""
    """What an index puts behind the key of a chunk: it names manifests, not their fragments."""

    def is_metadata(self, name: str) -> bool:
        """Return whether the object *name* holds no chunks."""
        return name.endswith(self.metadata) or f"{name.partition('/')[0]}/" in self.metadata

    def __str__(self) -> str:
        return self.name


def filled(objects: Mapping[str, bytes], store: MemoryStore | None = None) -> MemoryStore:
    """Place *objects* below the root of a store."""
    store = store or MemoryStore()
    for key, data in objects.items():
        store.place(ROOT.join(key), data)
    return store


async def chunks_of(shard: Shard, fetch: Fetch) -> AsyncIterator[tuple[str, Stored]]:
    """Name the chunks of *shard*, those of shards inside of it too; none of an absent one."""
    if (survey := await shard.survey(fetch)) is None:
        return
    table = survey.table()
    assert table.faults in ([], ())
    assert sorted(table, key=lambda entry: entry.place) == list(table)
    for entry in table:
        if survey.inner is not None:
            async for found in chunks_of(survey.inner(entry), fetch):
                yield found
        else:
            place = survey.whole.byte_range.narrow(entry.place)
            yield survey.key(entry.number), survey.whole._replace(byte_range=place)


def render(pieces: Sequence[Piece], old: bytes = b"") -> bytes:
    """Put *pieces* one behind the other; ranges are of *old*."""
    assert all(piece.stop <= len(old) for piece in pieces if isinstance(piece, ByteRange))
    return b"".join(old[slice(*p)] if isinstance(p, ByteRange) else p for p in pieces)
