"""Objects of a store in memory, and the report of their verification."""

from shardgate.formats.surveying import Report
from shardgate.model import ObjectRef
from shardgate.read.listing import Root
from shardgate.storage.memory import MemoryStore
from shardgate.survey.verify import verify
from tests.support.resolving import reading

BUCKET = "memory://t"


def root_of(objects: dict[str, bytes], store: MemoryStore | None = None) -> Root:
    """Store *objects*, and open their root."""
    store = store or MemoryStore()
    for key, data in objects.items():
        store.place(ObjectRef(BUCKET, key), data)
    return reading(store, root=ObjectRef(BUCKET, "")).root


async def report_of(objects: dict[str, bytes], *, chunks: bool = False) -> Report:
    """Verify *objects*."""
    return await verify(root_of(objects), chunks=chunks)
