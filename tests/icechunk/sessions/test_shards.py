"""Shards of sessions that are changed in parts: each byte is written once, and by the commit."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest
from zarr.core.buffer import default_buffer_prototype

from shardgate.errors import DamagedError, ShardgateError, UnknownSessionError
from shardgate.icechunk.commit import CommitResult
from shardgate.icechunk.sessions.entries import MAX_FRAGMENTS
from shardgate.icechunk.sessions.store import SessionStore
from shardgate.model import ByteRange, ETag, ObjectRef, Piece
from shardgate.storage.contract import CONFLICT, Conflict
from shardgate.storage.memory import MemoryStore
from tests.support.icechunk.sessions.replicas import (
    ROOT,
    Dying,
    Late,
    Replica,
    opened_by_library,
    stored,
)

KEY: Final = "a/c/1"
SHARD: Final = ObjectRef("", KEY)
FIRST: Final = bytes(range(200)) * 3
NEW: Final = b"\xf1" * 300
LAST: Final = b"\xf2" * 50
PIECES: Final[tuple[list[Piece], ...]] = (
    [FIRST],
    [ByteRange(100, 600), NEW],
    [LAST, ByteRange(250, 800), ByteRange(0, 20)],
)
CHANGED: Final = LAST + (FIRST[100:] + NEW)[250:800] + FIRST[100:120]


async def put(store: SessionStore, pieces: list[Piece]) -> ETag | Conflict:
    """Replace the shard by *pieces*, whose ranges are of its current version."""
    current = await store.stat(SHARD)
    return await store.put(SHARD, pieces, expected=None if current is None else current.etag)


async def begin(replica: Replica) -> str:
    """Begin a session that writes a shard, and changes it twice."""
    session_id = await replica.begin()
    store = await replica.enter(session_id)
    for pieces in PIECES:
        assert isinstance(await put(store, pieces), str)
    return session_id


async def committed(memory: MemoryStore, folder: Path, made: CommitResult) -> bytes:
    """Read the shard of a snapshot by the library."""
    repo = await opened_by_library(memory, folder)
    store = repo.readonly_session(snapshot_id=made.snapshot_id).store
    found = await store.get(KEY, prototype=default_buffer_prototype())
    assert found is not None
    return found.to_bytes()


async def nbytes_below(memory: MemoryStore, folder: str) -> int:
    """Return the size of all objects in a folder."""
    return sum([each.size or 0 async for each in memory.list(ROOT.join(folder))])


async def test_change_of_a_shard_writes_its_new_bytes_only(
    files: Mapping[str, bytes], tmp_path: Path
) -> None:
    """A change writes the new bytes, and the commit the shard; both have one version."""
    replica = await Replica.of(memory := stored(files))
    before = await nbytes_below(memory, "chunks/")
    session_id = await begin(replica)
    open_etag = (await (await replica.enter(session_id)).stat(SHARD)).etag  # type: ignore[union-attr]

    assert await nbytes_below(memory, f"sessions/{session_id}/fragments/") == len(NEW + LAST)
    assert await nbytes_below(memory, "chunks/") - before == len(FIRST)
    made = await replica.commit(session_id)
    assert await nbytes_below(memory, "chunks/") - before == len(FIRST + CHANGED)
    assert await committed(memory, tmp_path, made) == CHANGED
    assert (await (await replica.enter(session_id)).stat(SHARD)).etag == open_etag  # type: ignore[union-attr]


async def test_changed_shard_is_read_in_any_range(files: Mapping[str, bytes]) -> None:
    """Ranges and streams of a changed shard have its bytes, on another replica too."""
    memory = stored(files)
    session_id = await begin(await Replica.of(memory))
    store = await (await Replica.of(memory)).enter(session_id)

    for start in range(0, len(CHANGED), 30):
        for stop in (start + 1, start + 60, len(CHANGED)):
            wanted = ByteRange(start, min(stop, len(CHANGED)))
            found: Any = await store.get(SHARD, wanted)
            assert found.data == CHANGED[wanted.start : wanted.stop]
            async with store.stream(SHARD, wanted, if_match=found.etag) as pieces:
                assert b"".join([piece async for piece in pieces]) == found.data
    assert (await (await Replica.of(memory)).contents(session_id))[KEY] == CHANGED


async def test_scattered_shard_is_written_as_a_whole(
    files: Mapping[str, bytes], tmp_path: Path
) -> None:
    """A shard of too many fragments is written as one chunk file, with all its bytes."""
    replica = await Replica.of(memory := stored(files))
    session_id = await replica.begin()
    store = await replica.enter(session_id)
    whole = bytes(range(256)) * 10
    scattered: list[Piece] = [ByteRange(at, at + 1) for at in range(0, 2 * MAX_FRAGMENTS + 2, 2)]
    for pieces in ([whole], scattered):
        await put(store, list(pieces))

    assert await nbytes_below(memory, f"sessions/{session_id}/fragments/") == 0
    made = await replica.commit(session_id)
    assert await committed(memory, tmp_path, made) == whole[: 2 * MAX_FRAGMENTS + 2 : 2]


@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
async def test_commit_of_shards_by_a_failing_replica_is_made_once(
    files: Mapping[str, bytes], tmp_path: Path, *, is_done: bool
) -> None:
    """A commit of a changed shard that fails at any call has all bytes when it is repeated."""
    nth, is_dead = 0, True
    while is_dead:
        memory = stored(files)
        healthy = await Replica.of(memory)
        session_id = await begin(healthy)
        dying = Dying(memory, is_done=is_done)
        doomed, acknowledged = await Replica.of(dying), None
        dying.left = nth
        with suppress(ShardgateError):
            acknowledged = await doomed.commit(session_id)
        made = await healthy.commit(session_id)

        assert acknowledged in (None, made)
        assert await committed(memory, tmp_path / str(nth), made) == CHANGED
        is_dead, nth = dying.left < 0, nth + 1
    assert nth > 8


async def test_change_of_a_shard_that_fails_is_made_or_not(files: Mapping[str, bytes]) -> None:
    """A change that fails at any call leaves the old shard or the new one."""
    nth, is_dead = 0, True
    while is_dead:
        memory = stored(files)
        healthy = await Replica.of(memory)
        session_id = await healthy.begin()
        await put(await healthy.enter(session_id), [FIRST])
        dying = Dying(memory, is_done=True)
        store = await (await Replica.of(dying)).enter(session_id)
        dying.left = nth
        outcome = None
        with suppress(ShardgateError):
            outcome = await put(store, PIECES[1])

        found = (await healthy.contents(session_id))[KEY]
        assert found == FIRST[100:] + NEW if outcome else found in {FIRST, FIRST[100:] + NEW}
        is_dead, nth = dying.left < 0, nth + 1
    assert nth > 3


async def test_change_whose_session_is_committed_before_its_answer_is_in_the_commit(
    files: Mapping[str, bytes], tmp_path: Path
) -> None:
    """A change is acknowledged if its session is committed after its entry was stored."""
    memory = stored(files)
    other = await Replica.of(memory)
    session_id = await begin(other)
    late = Late(memory)
    store = await (await Replica.of(late)).enter(session_id)
    made: list[CommitResult] = []

    async def commit() -> None:
        made.append(await other.commit(session_id))

    late.after("put", f"{session_id}/", lambda: late_entry(late, commit))
    assert isinstance(await put(store, [ByteRange(0, 300), b"\xf3" * 400]), str)
    assert await committed(memory, tmp_path, made[0]) == CHANGED[:300] + b"\xf3" * 400


async def late_entry(late: Late, commit: Any) -> None:
    """Commit after the next write: the file of new bytes is written before the entry."""
    late.after("put", "", commit)


async def test_lost_bytes_of_a_shard_fail_its_commit(files: Mapping[str, bytes]) -> None:
    """A commit of a shard whose new bytes are lost is damage, and the session stays open."""
    replica = await Replica.of(memory := stored(files))
    session_id = await begin(replica)
    async for each in memory.list(ROOT.join(f"sessions/{session_id}/fragments/")):
        await memory.delete(each.ref, expected=None)

    with pytest.raises(DamagedError, match=r"fragments/.* is missing or too short"):
        await replica.commit(session_id)
    await put(await replica.enter(session_id), [NEW])
    await replica.commit(session_id)
    assert (await replica.contents(session_id))[KEY] == NEW


async def test_files_of_a_session_are_removed_with_its_journal(
    files: Mapping[str, bytes],
) -> None:
    """A discarded session leaves no files of new bytes."""
    replica = await Replica.of(memory := stored(files))
    session_id = await begin(replica)

    await replica.sessions.discard((await replica.enter(session_id)).session)

    assert await nbytes_below(memory, "sessions/") == 0


async def test_late_change_of_a_shard_leaves_no_files(files: Mapping[str, bytes]) -> None:
    """A change of a shard whose session is discarded meanwhile is refused, and leaves nothing."""
    memory = stored(files)
    other = await Replica.of(memory)
    await other.commit(await begin(other))
    session_id = await other.begin()
    late = Late(memory)
    store = await (await Replica.of(late)).enter(session_id)

    async def discard() -> None:
        await other.sessions.discard((await other.enter(session_id)).session)

    late.after("put", "fragments/", discard)
    with pytest.raises(UnknownSessionError):
        await put(store, PIECES[1])

    assert await nbytes_below(memory, f"sessions/{session_id}") == 0


async def test_overtaken_change_of_a_shard_leaves_no_files(files: Mapping[str, bytes]) -> None:
    """A change of a shard that another one overtakes is a conflict, and leaves no new bytes."""
    memory = stored(files)
    other = await Replica.of(memory)
    session_id = await begin(other)
    late = Late(memory)
    store = await (await Replica.of(late)).enter(session_id)

    async def overtake() -> None:
        await put(await other.enter(session_id), [ByteRange(0, 600), LAST])

    late.after("put", "fragments/", overtake)
    assert await put(store, [ByteRange(0, 300), NEW]) == CONFLICT

    fragments = await nbytes_below(memory, f"sessions/{session_id}/fragments/")
    assert fragments == len(NEW + LAST + LAST)


async def test_commit_whose_files_are_gone_returns_the_commit_of_another(
    files: Mapping[str, bytes],
) -> None:
    """A commit that finds no new bytes, since another one was made and swept, returns that one."""
    memory = stored(files)
    other = await Replica.of(memory)
    session_id = await begin(other)
    late = Late(memory)
    made: list[CommitResult] = []

    async def commit() -> None:
        made.append(await other.commit(session_id))
        await (await other.enter(session_id)).session.journal.clear()

    late.after("stat", "chunks/", commit)
    assert [await (await Replica.of(late)).commit(session_id)] == made
