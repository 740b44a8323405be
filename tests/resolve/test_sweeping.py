"""`app.resolve.icechunk.sweeping`: files that nothing refers to are removed, and counted."""

import os

from app.errors import StorageDeniedError
from app.model import ETag, ObjectRef
from app.resolve.icechunk.sweeping import Swept, Tally, sweep
from app.storage.contract import Conflict
from app.storage.memory import MemoryStore
from tests.formats.icechunk.small import spell

FOLDER = ObjectRef("memory://bucket", "repo/chunks/")
LIMIT_S = 1_600_000_000


class Guarded(MemoryStore):
    """Refuses to remove what is *kept*, or anything."""

    def __init__(self, kept: set[str] | None = None) -> None:
        super().__init__()
        self.kept = kept
        self.asked = 0

    async def delete(self, ref: ObjectRef, *, expected: ETag | None) -> bool | Conflict:
        """Remove an object that may be removed."""
        self.asked += 1
        if self.kept is None or ref.key in self.kept:
            raise StorageDeniedError(ref, "not allowed")
        return await super().delete(ref, expected=expected)


def _fill(store: MemoryStore, count: int, age_s: float = 100) -> list[bytes]:
    ids = [os.urandom(12) for _ in range(count)]
    for each in ids:
        name = FOLDER._replace(key=FOLDER.key + spell(each))
        store.place(name, b"data", modified_s=int(LIMIT_S - age_s))
    return ids


async def _sweep(store: MemoryStore, held: set[bytes]) -> Swept:
    return await sweep(
        store,
        FOLDER,
        limit_us=LIMIT_S * 1_000_000,
        held=lambda ids: [each in held for each in ids],
        execute=True,
    )


async def _left(store: MemoryStore) -> int:
    return len([each async for each in store.list(FOLDER)])


async def test_what_is_held_stays() -> None:
    """However many files there are."""
    store = Guarded(set())
    held = set(_fill(store, 5000)[::2])

    swept = await _sweep(store, held)

    assert swept == Swept(Tally(2500, 10_000), Tally(2500, 10_000))
    assert await _left(store) == 2500


async def test_what_may_have_been_written_later_stays() -> None:
    """Stores tell whole seconds, and leave the rest out."""
    store = Guarded(set())
    _fill(store, 1, age_s=0)
    _fill(store, 1, age_s=1)

    swept = await _sweep(store, set())

    assert (swept.removed.count, swept.kept.count) == (1, 1)


async def test_what_cannot_be_removed_is_told() -> None:
    """The others go all the same."""
    store = Guarded()
    ids = _fill(store, 10)
    store.kept = {FOLDER.key + spell(each) for each in ids[:3]}

    swept = await _sweep(store, set())

    assert (swept.removed.count, swept.kept.count, swept.failed) == (7, 3, 3)
    assert swept.is_complete
    assert "not allowed" in (swept.first_failure or "")


async def test_where_nothing_may_be_removed_not_all_is_tried() -> None:
    """Some dozens are enough to know."""
    store = Guarded()
    _fill(store, 5000)

    swept = await _sweep(store, set())

    assert not swept.is_complete
    assert swept.failed == store.asked < 100
    assert await _left(store) == 5000
