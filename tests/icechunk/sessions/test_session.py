"""Commits of sessions while other requests act, or the replica stops, at every step."""

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest
from zarr.core.buffer import default_buffer_prototype

from shardgate import errors
from shardgate.errors import ShardgateError
from shardgate.formats.icechunk.conflicts import Policy
from shardgate.icechunk.commit import CommitResult
from shardgate.icechunk.sessions.document import Sealed
from shardgate.icechunk.sessions.session_commit import SessionCommit
from shardgate.model import ETag, ObjectRef
from shardgate.storage.contract import Conflict, Found
from shardgate.storage.memory import MemoryStore
from tests.support.clocks import Clock
from tests.support.icechunk.sessions.replicas import (
    ROOT,
    Dying,
    Late,
    Replica,
    document,
    opened_by_library,
    stored,
)
from tests.support.read.stores import settle
from tests.support.records import replaced

DAY_S: Final = 24 * 3600

CHANGES: Final[dict[str, tuple[str, bytes | None]]] = {
    "native": ("a/c/1", b"\x09" * 600),
    "gone": ("a/c/1", None),
    "document": ("h/zarr.json", document(4)),
    "group-gone": ("g/zarr.json", None),
}
moments = pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])


OUT_OF_REACH: Final = errors.StorageUnavailableError(ROOT, "out of reach")


def failing(error: Exception) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Return a call that raises *error*."""

    async def fail(*_: Any) -> Any:
        raise error

    return fail


class Scene:
    """Two replicas of one store, one of them slow, and a session with changes."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.clock = Clock(time.time())
        self.memory = stored(files, self.clock)
        self.store = Late(self.memory)

    async def begin(self) -> str:
        """Start the replicas, and begin the session."""
        self.late = await Replica.of(self.store, self.clock)
        self.other = await Replica.of(self.memory, self.clock)
        session_id = await self.other.begin()
        for at in range(2):
            await self.put(self.other, session_id, at)
        return session_id

    async def put(self, replica: Replica, session_id: str, at: int) -> None:
        """Write a chunk."""
        await replica.write(session_id, f"a/c/{at}", bytes([at + 9] * 2))

    async def sweep(self) -> None:
        """Begin a session on the other replica two seconds later, which removes expired ones."""
        self.clock.now += 2
        await self.other.begin()
        await settle()
        self.clock.now -= 2

    async def demand(self, folder: Path, *chunks: int, commits: int) -> None:
        """Assert that exactly these chunks were committed, in this number of commits."""
        repo = await opened_by_library(self.memory, folder)
        store = repo.readonly_session("main").store
        prototype = default_buffer_prototype()
        found = [await store.get(f"a/c/{at}", prototype=prototype) for at in range(3)]
        values = [chunk.to_bytes()[0] for chunk in found if chunk is not None]
        assert values == [at + 9 if at in chunks else 2 * at + 1 for at in range(3)]
        assert len(list(repo.ancestry(branch="main"))) == 2 + commits


@pytest.fixture
def scene(files: Mapping[str, bytes]) -> Scene:
    """Store a repository of three chunks, with a clock that tests set."""
    return Scene(files)


async def test_renewed_session_is_not_removed(scene: Scene, tmp_path: Path) -> None:
    """A sweep that read a session as expired keeps it if a write has renewed it since."""
    session_id = await scene.begin()
    scene.clock.now += DAY_S - 1

    async def write() -> None:
        scene.clock.now -= 2
        await scene.put(scene.other, session_id, 2)
        scene.clock.now += 2

    scene.clock.now += 2
    scene.store.after("get", ".session", write)
    await scene.late.begin()
    await settle()

    await scene.other.commit(session_id)
    await scene.demand(tmp_path, 0, 1, 2, commits=1)


async def test_write_into_a_removed_session_is_refused(scene: Scene) -> None:
    """A write whose session is removed before it ends raises UnknownSessionError."""
    session_id = await scene.begin()
    scene.clock.now += DAY_S - 1
    scene.store.after("put", f"{session_id}/", scene.sweep)

    with pytest.raises(errors.UnknownSessionError):
        await scene.put(scene.late, session_id, 2)


async def test_session_is_not_discarded_during_its_commit(scene: Scene, tmp_path: Path) -> None:
    """A discard of a session during its commit raises BusyError, and the commit is made."""
    session_id = await scene.begin()

    async def discard() -> None:
        store = await scene.other.enter(session_id)
        with pytest.raises(errors.BusyError, match="being committed"):
            await scene.other.sessions.discard(store.session)

    scene.store.before("get", f"{session_id}/", discard)

    await scene.late.commit(session_id)
    await scene.demand(tmp_path, 0, 1, commits=1)


async def test_missing_journal_entry_fails_the_commit(scene: Scene, tmp_path: Path) -> None:
    """A commit fails, and commits nothing, while a listed entry of its journal is missing."""
    session_id = await scene.begin()
    [entry] = [each.ref async for each in scene.memory.list(ROOT) if each.ref.key.endswith("/1")]
    shelf, _, name = entry.key.rpartition("/")
    elsewhere = replaced(entry, key=f"{shelf}f/{name}")
    await move(scene.memory, entry, elsewhere)

    with pytest.raises(errors.StorageUnavailableError, match="was listed, and does not exist"):
        await scene.late.commit(session_id)
    await scene.demand(tmp_path / "before", commits=0)

    await move(scene.memory, elsewhere, entry)
    await scene.late.commit(session_id)
    await scene.demand(tmp_path / "after", 0, 1, commits=1)


async def move(store: MemoryStore, source: ObjectRef, target: ObjectRef) -> None:
    """Move an object."""
    found = await store.get(source)
    assert isinstance(found, Found)
    store.place(target, found.data)
    await store.delete(source, expected=None)


async def test_a_session_does_not_expire_while_it_is_committed(
    scene: Scene, tmp_path: Path
) -> None:
    """Sealing a session renews it, so it does not expire during its commit."""
    session_id = await scene.begin()
    scene.clock.now += DAY_S - 1
    scene.store.before("get", f"{session_id}/", scene.sweep)

    made = await scene.late.commit(session_id)
    await scene.demand(tmp_path, 0, 1, commits=1)
    assert await scene.other.commit(session_id) == made


async def test_write_after_a_failed_commit_is_committed(scene: Scene, tmp_path: Path) -> None:
    """A write between a failed commit and a late successful one is in the next commit."""
    session_id, refuse = await scene.begin(), failing(errors.ConflictError("for certain"))

    async def fail() -> None:
        store = await scene.other.enter(session_id)
        with pytest.raises(errors.ConflictError):
            await SessionCommit(store.session, refuse, None).run()
        await scene.put(scene.other, session_id, 2)

    scene.store.before("put", "repo", fail)
    await scene.late.commit(session_id)
    before = await scene.other.contents(session_id)
    assert before["a/c/2"] == bytes([11] * 2)

    await scene.other.commit(session_id, policy=Policy.OURS)
    await scene.demand(tmp_path, 0, 1, 2, commits=2)


async def test_commit_that_is_slow_to_list_its_journal_finds_it_cleared(
    scene: Scene, tmp_path: Path
) -> None:
    """A commit whose journal another replica has committed, and cleared minutes later, before it is
    listed, returns the other's commit.
    """
    session_id, made = await scene.begin(), list[CommitResult]()

    async def overtake() -> None:
        made.append(await scene.other.commit(session_id))
        scene.clock.now += 700
        await scene.sweep()

    scene.store.after("put", ".session", overtake)
    assert [await scene.late.commit(session_id)] == made
    entries = ROOT.join(f"sessions/{session_id}/")
    assert not [each async for each in scene.memory.list(entries)]
    await scene.demand(tmp_path, 0, 1, commits=1)


async def test_write_between_the_seal_and_the_listing_of_a_commit_is_committed(
    scene: Scene, tmp_path: Path
) -> None:
    """A write is not lost that was answered after another replica has opened the session again,
    while a commit had sealed it, and not listed its journal yet.
    """
    session_id = await scene.begin()

    async def reopen_and_write() -> None:
        session = (await scene.other.enter(session_id)).session
        with pytest.raises(errors.ConflictError, match="for certain"):
            await SessionCommit(session, failing(errors.ConflictError("for certain")), None).run()
        await scene.put(scene.other, session_id, 2)

    scene.store.after("put", ".session", reopen_and_write)
    await scene.late.commit(session_id)

    await scene.other.commit(session_id, policy=Policy.OURS)
    await scene.demand(tmp_path, 0, 1, 2, commits=2)


async def test_second_idempotency_key_is_a_conflict(scene: Scene, tmp_path: Path) -> None:
    """If two idempotency keys commit one session at once, one commits and the other is a conflict.

    Repeating either returns the same.
    """
    session_id, made = await scene.begin(), list[CommitResult]()

    async def overtake() -> None:
        made.append(await scene.other.commit(session_id, "other"))

    scene.store.before("put", "repo", overtake)
    with pytest.raises(errors.ConflictError, match="already committed"):
        await scene.late.commit(session_id, "late")

    with pytest.raises(errors.ConflictError, match="already committed"):
        await scene.other.commit(session_id, "late")
    assert [await scene.late.commit(session_id, "other")] == made
    await scene.demand(tmp_path, 0, 1, commits=1)


async def begin_to_commit(replica: Replica, session_id: str, key: str) -> None:
    """Seal a session, and fail."""
    session = (await replica.enter(session_id)).session
    with pytest.raises(errors.StorageUnavailableError):
        await SessionCommit(session, failing(OUT_OF_REACH), key).run()


async def test_repeated_commit_is_found_after_another_seal(scene: Scene, tmp_path: Path) -> None:
    """A key that committed gets its commit again, though another key sealed the session since."""
    session_id = await scene.begin()
    scene.store.before("put", "repo", lambda: begin_to_commit(scene.other, session_id, "other"))
    made = await scene.late.commit(session_id, "late")

    assert await scene.other.commit(session_id, "late") == made
    with pytest.raises(errors.ConflictError, match="already committed"):
        await scene.other.commit(session_id, "other")
    await scene.demand(tmp_path, 0, 1, commits=1)


async def test_failed_commit_keeps_the_seal_of_another_key(scene: Scene) -> None:
    """A commit that fails does not reopen a session that another key has sealed."""
    session_id = await scene.begin()
    session = (await scene.late.enter(session_id)).session

    async def refuse(*_: Any) -> Any:
        await begin_to_commit(scene.other, session_id, "other")
        raise errors.ConflictError("for certain")

    with pytest.raises(errors.ConflictError, match="for certain"):
        await SessionCommit(session, refuse, "late").run()
    assert (await session.read()).state == Sealed("other")


async def test_invalid_commit_does_not_reopen_a_committed_session(
    scene: Scene, tmp_path: Path
) -> None:
    """An invalid commit does not reopen a session that was committed but not marked as such."""
    session_id = await scene.begin()

    async def die_next() -> None:
        scene.store.before("put", ".session", failing(OUT_OF_REACH))

    scene.store.after("put", "repo", die_next)
    made = await scene.late.commit(session_id)

    with suppress(errors.BadBodyError):
        await scene.other.commit(session_id, metadata={"__icechunk": 1})
    assert await scene.other.commit(session_id) == made
    await scene.demand(tmp_path, 0, 1, commits=1)


async def test_overtaken_commit_returns_the_first_commit(
    files: Mapping[str, bytes], tmp_path: Path
) -> None:
    """A commit that another replica overtakes at any call returns the other's commit."""
    nth, is_reached = 0, True
    while is_reached:
        scene = Scene(files)
        session_id, made = await scene.begin(), list[CommitResult]()

        async def overtake(
            made: list[CommitResult] = made, scene: Scene = scene, session_id: str = session_id
        ) -> None:
            made.append(await scene.other.commit(session_id))

        scene.store.before_call(nth, overtake)
        found = await scene.late.commit(session_id)
        await scene.demand(tmp_path / str(nth), 0, 1, commits=1)
        is_reached, nth = bool(made), nth + 1
        assert made in ([], [found])
    assert nth > 5


AMID: Final = {"a/c/0": b"\x08" * 2, "a/c/2": b"\x08" * 600, "h/zarr.json": document(4)}


async def test_write_during_a_commit_is_included_or_refused(
    files: Mapping[str, bytes], tmp_path: Path
) -> None:
    """A write at any call of a commit is either in the commit or refused, on both replicas."""
    nth, is_reached, kinds = 0, True, set[type]()
    while is_reached:
        scene = Scene(files)
        session_id = await scene.begin()
        both = itertools.cycle([scene.late, scene.other])
        replicas = itertools.islice(both, nth % 2, None)
        writes: list[asyncio.Task[ETag | Conflict | bool]] = []

        async def begin(
            writes: list[asyncio.Task[ETag | Conflict | bool]] = writes,
            replicas: Iterator[Replica] = replicas,
            session_id: str = session_id,
        ) -> None:
            for key, data in AMID.items():
                writing = next(replicas).write(session_id, key, data)
                writes.append(asyncio.create_task(writing))
            await settle()

        scene.store.before_call(nth, begin)
        made = await scene.late.commit(session_id)
        outcomes = await asyncio.gather(*writes, return_exceptions=True)
        repo = await opened_by_library(scene.memory, tmp_path / str(nth))
        committed = repo.readonly_session(snapshot_id=made.snapshot_id).store
        for (key, data), outcome in zip(AMID.items(), outcomes, strict=False):
            found = await committed.get(key, prototype=default_buffer_prototype())
            is_in_it = found is not None and found.to_bytes() == data
            assert is_in_it == isinstance(outcome, str), (nth, key, outcome)
        kinds |= set(map(type, outcomes))
        is_reached, nth = bool(writes), nth + 1
    assert nth > 8
    assert kinds == {str, errors.BusyError, errors.ConflictError}


@pytest.mark.parametrize(
    "data", [b"\x0b" * 2, b"\x0b" * 600, None], ids=["inline", "native", "gone"]
)
async def test_write_whose_session_is_committed_before_its_answer_is_in_the_commit(
    scene: Scene, data: bytes | None
) -> None:
    """A write is acknowledged if its session is committed after its entry was stored."""
    session_id = await scene.begin()
    scene.store.after("put", f"{session_id}/", lambda: scene.other.commit(session_id))

    await scene.late.write(session_id, "a/c/2", data)

    committed = await scene.other.contents(session_id)
    assert committed.get("a/c/2") == data


async def test_write_after_the_commit_of_its_session_is_refused(scene: Scene) -> None:
    """A write fails with ConflictError if its session is committed before its entry is stored."""
    session_id = await scene.begin()
    scene.store.before("put", f"{session_id}/", lambda: scene.other.commit(session_id))

    with pytest.raises(errors.ConflictError, match="committed before this write"):
        await scene.late.write(session_id, "a/c/2", b"\x0b" * 2)

    committed = await scene.other.contents(session_id)
    assert committed["a/c/2"] == b"\x05\x06"


async def test_write_waits_for_a_commit_that_another_request_finishes(
    scene: Scene, tmp_path: Path
) -> None:
    """A write whose session is sealed before its answer waits for the commit, which includes it."""
    session_id, is_sealed = await scene.begin(), asyncio.Event()

    async def seal() -> None:
        await begin_to_commit(scene.other, session_id, "k")
        is_sealed.set()

    scene.store.after("put", f"{session_id}/", seal)
    writing = asyncio.create_task(scene.put(scene.late, session_id, 2))
    await is_sealed.wait()
    await settle()
    assert not writing.done()
    await scene.other.commit(session_id, "k")
    await writing
    await scene.demand(tmp_path, 0, 1, 2, commits=1)


async def test_write_during_an_interrupted_commit_is_busy(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write whose session stays sealed fails with BusyError; the commit includes it later."""
    monkeypatch.setattr("shardgate.icechunk.sessions.session._COMMIT_S", 0.05)
    session_id = await scene.begin()
    scene.store.after(
        "put", f"{session_id}/", lambda: begin_to_commit(scene.other, session_id, "k")
    )

    with pytest.raises(errors.BusyError, match="commit of the session was interrupted"):
        await scene.put(scene.late, session_id, 2)
    await scene.other.commit(session_id, "k")
    await scene.demand(tmp_path, 0, 1, 2, commits=1)


@moments
@pytest.mark.parametrize("name", CHANGES)
async def test_write_of_a_failing_replica_is_atomic(
    files: Mapping[str, bytes], tmp_path: Path, name: str, *, is_done: bool
) -> None:
    """A write that fails at any call is done or not done; an acknowledged write is committed."""
    key, data = CHANGES[name]
    nth, is_dead = 0, True
    while is_dead:
        memory = stored(files)
        healthy = await Replica.of(memory)
        session_id = await healthy.begin()
        before = await healthy.contents(session_id)
        dying = Dying(memory, is_done=is_done)
        doomed = await Replica.of(dying)
        await doomed.enter(session_id)
        dying.left = nth
        is_acknowledged = True
        try:
            await doomed.write(session_id, key, data)
        except ShardgateError:
            is_acknowledged = False

        after = await healthy.contents(session_id)
        assert after != before if is_acknowledged else True
        assert (after.get(key) == data) or (not is_acknowledged and after == before)
        made = await healthy.commit(session_id)
        repo = await opened_by_library(memory, tmp_path / str(nth))
        listed = repo.readonly_session(snapshot_id=made.snapshot_id).store.list()
        assert sorted([each async for each in listed]) == sorted(after)
        is_dead, nth = dying.left < 0, nth + 1
    assert nth > 1


@moments
async def test_commit_of_a_failing_replica_is_made_once(
    files: Mapping[str, bytes], tmp_path: Path, *, is_done: bool
) -> None:
    """A commit whose replica fails at any call is made once when another replica repeats it."""
    nth, is_dead = 0, True
    while is_dead:
        scene = Scene(files)
        session_id = await scene.begin()
        dying = Dying(scene.memory, is_done=is_done)
        doomed, acknowledged = await Replica.of(dying, scene.clock), None
        dying.left = nth
        with suppress(ShardgateError):
            acknowledged = await doomed.commit(session_id)
        made = await scene.other.commit(session_id)

        assert acknowledged in (None, made)
        await scene.demand(tmp_path / str(nth), 0, 1, commits=1)
        is_dead, nth = dying.left < 0, nth + 1
    assert nth > 8
