"""A replica dies at each request that a write or a commit takes; another one goes on."""

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest

from app.errors import ShardgateError
from tests.resolve.sessions import (
    Dying,
    Replica,
    contents,
    document,
    files_of_repository,
    opened_by_library,
    ref,
    stored,
)
from tests.resolve.stores import Clock

CHANGES: Final[dict[str, tuple[str, bytes | None]]] = {
    "inline": ("a/c/1", b"\x09\x09"),
    "native": ("a/c/1", b"\x09" * 600),
    "gone": ("a/c/1", None),
    "document": ("h/zarr.json", document(4)),
    "group-gone": ("g/zarr.json", None),
}
moments = pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, bytes]:
    """Write the repository that all begins with."""
    return files_of_repository(tmp_path_factory.mktemp("dying") / "repo")


@moments
@pytest.mark.parametrize("name", CHANGES)
async def test_a_write_is_done_or_not(
    files: Mapping[str, bytes], tmp_path: Path, name: str, *, is_done: bool
) -> None:
    """What was acknowledged is seen by the other replica, and is in the commit."""
    key, data = CHANGES[name]
    nth, is_dead = 0, True
    while is_dead:
        memory = stored(files)
        healthy = await Replica.of(memory)
        session_id = await healthy.begin()
        before = await contents(await healthy.enter(session_id))
        dying = Dying(memory, is_done=is_done)
        store = await (await Replica.of(dying)).enter(session_id)
        dying.die_at(nth)
        is_acknowledged = True
        try:
            if data is None:
                await store.delete(ref(key), expected=None)
            else:
                await store.put(ref(key), [data], expected=None)
        except ShardgateError:
            is_acknowledged = False

        after = await contents(await healthy.enter(session_id))
        assert after != before if is_acknowledged else True
        assert (after.get(key) == data) or (not is_acknowledged and after == before)
        made = await healthy.commit(session_id)
        repo = await opened_by_library(memory, tmp_path / str(nth))
        listed = repo.readonly_session(snapshot_id=made.snapshot_id).store.list()
        assert sorted([each async for each in listed]) == sorted(after)
        is_dead, nth = dying.is_dead, nth + 1
    assert nth > 1


@moments
async def test_a_commit_is_made_once(
    files: Mapping[str, bytes], tmp_path: Path, *, is_done: bool
) -> None:
    """The one who goes on when the lease is over finds what was done, or does it."""
    nth, is_dead = 0, True
    while is_dead:
        memory = stored(files, clock := Clock(time.time()))
        healthy = await Replica.of(memory, clock)
        session_id = await healthy.begin()
        store = await healthy.enter(session_id)
        await store.put(ref("a/c/1"), [b"\x09\x09"], expected=None)
        await store.put(ref("a/c/2"), [b"\x09" * 600], expected=None)
        before = await contents(store)
        dying = Dying(memory, is_done=is_done)
        doomed, acknowledged = await Replica.of(dying, clock), None
        dying.die_at(nth)
        with suppress(ShardgateError):
            acknowledged = await doomed.commit(session_id)
        clock.now += 30
        made = await healthy.commit(session_id)

        assert acknowledged in (None, made)
        assert await contents(await healthy.enter(session_id)) == before
        repo = await opened_by_library(memory, tmp_path / str(nth))
        history = [each.id for each in repo.ancestry(branch="main")]
        assert len(history) == 3
        assert history[0] == made.snapshot_id
        is_dead, nth = dying.is_dead, nth + 1
    assert nth > 8


async def test_a_session_expires(files: Mapping[str, bytes]) -> None:
    """Unless it is written to; then nothing is left of it once another one begins."""
    memory = stored(files, clock := Clock(time.time()))
    replica = await Replica.of(memory, clock)
    kept, left = await replica.begin(), await replica.begin()
    for store in (await replica.enter(kept), await replica.enter(left)):
        await store.put(ref("a/c/1"), [b"\x09\x09"], expected=None)
    clock.now += 20 * 3600
    await (await replica.enter(kept)).put(ref("a/c/0"), [b"\x09\x09"], expected=None)
    clock.now += 20 * 3600

    assert b"\x09\x09" in (await contents(await replica.enter(kept))).values()
    with pytest.raises(ShardgateError, match="expired"):
        await replica.enter(left)
    await replica.begin()
    names = [each.ref.key async for each in memory.list(ref("")._replace(bucket="memory://repo"))]
    assert not [name for name in names if left in name]
    assert [name for name in names if kept in name]
