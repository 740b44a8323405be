"""Stores to list, and all pages of a listing."""

from collections.abc import Mapping

from shardgate.formats.listing import Window
from shardgate.model import ObjectRef
from shardgate.read.listing import ListedKey
from shardgate.storage.memory import MemoryStore
from tests.support.records import replaced
from tests.support.resolving import Reading

BUCKET = ObjectRef("memory://bucket", "")


def store_of(objects: Mapping[str, bytes]) -> MemoryStore:
    """Store *objects* below `BUCKET`."""
    store = MemoryStore()
    for number, (key, data) in enumerate(objects.items()):
        store.place(BUCKET.join(key), data, modified_s=number)
    return store


async def pages_of(data: Reading, window: Window, limit: int) -> list[list[ListedKey]]:
    """List all pages of *window*, of at most *limit* keys each."""
    pages = []
    after: str | None = window.after
    while after is not None:
        page = await data.page(replaced(window, after=after), limit)
        pages.append(page.entries)
        after = page.after
    return pages
