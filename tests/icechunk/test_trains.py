"""`shardgate.icechunk.trains`: commits that wait for one branch share a swap."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import icechunk
import numpy as np
import pytest
import zarr

from shardgate.errors import (
    BusyError,
    CommitConflictError,
    ConflictError,
    StorageUnavailableError,
)
from shardgate.icechunk.commit import CommitResult
from shardgate.icechunk.repo_swap import RefUpdates
from tests.support.formats.icechunk.peer import read
from tests.support.icechunk.sessions.replicas import ROOT, Dying, Late, Replica
from tests.support.icechunk.train_repository import (
    CHUNKS,
    Outcome,
    TrainRepository,
    Update,
    commit,
    commit_all,
    is_conflict,
    snapshot_ids,
)
from tests.support.read.stores import settle

type CommitUpdates = Callable[..., Coroutine[Any, Any, list[Outcome]]]


async def commit_in_two_trains(
    replica: Replica, parent_id: str, first: Update, *updates: Update
) -> list[Outcome]:
    """Commit *first*, and *updates* by the train that follows."""
    leading = asyncio.create_task(commit(replica, parent_id, first))
    for _ in range(2):  # the task, and its train
        await asyncio.sleep(0)
    following = await commit_all(replica, parent_id, *updates)
    return [*await asyncio.gather(leading, return_exceptions=True), *following]


@pytest.fixture
def repository(tmp_path: Path) -> TrainRepository:
    """Make a repository."""
    return TrainRepository(tmp_path)


async def test_waiting_commits_share_files_and_one_swap(repository: TrainRepository) -> None:
    """Commits that wait for a branch become visible by one swap, each with its own snapshot.

    The manifest that all of them change is read once.
    """
    updates = [Update(0, (chunk,)) for chunk in range(CHUNKS)]
    replica, calls = await repository.replica(), repository.counting.calls
    calls.clear()
    made = await commit_all(replica, await repository.tip(), *updates)

    await repository.expect(*updates)
    assert len(set(snapshot_ids(made))) == CHUNKS
    assert calls["put", "repo"] == calls["put", "overwritten"] == calls["get", "manifests"] == 1
    assert calls["put", "snapshots"] == calls["put", "manifests"] == CHUNKS
    assert calls["get", "repo"] == 1


async def test_library_goes_on_with_a_train(repository: TrainRepository) -> None:
    """The library commits, rebases, expires and collects garbage on top of a train."""
    updates = [Update(number % 2, (number,)) for number in range(6)]
    made = snapshot_ids(
        await commit_all(await repository.replica(), await repository.tip(), *updates)
    )
    repo = await repository.expect(*updates)

    late = repo.writable_session("main")
    _write(late, "a", 7, 1)
    _write(session := repo.writable_session("main"), "b", 7, 2)
    session.commit("theirs")
    late.commit("rebased", rebase_with=icechunk.ConflictDetector())
    repo.create_tag("amid", made[2])
    later = datetime.now(UTC) + timedelta(days=1)
    repo.expire_snapshots(later)
    repo.garbage_collect(later)

    messages = [each.message for each in repo.ancestry(branch="main")]
    assert messages == ["rebased", "Repository initialized"]
    assert next(each.message for each in repo.ancestry(tag="amid")) == updates[2].key
    main, tag = repo.readonly_session(branch="main"), repo.readonly_session(tag="amid")
    for session, stop, last in ((main, 6, 2), (tag, 3, 0)):
        values: Any = zarr.open_array(session.store, path="b", mode="r")[...]
        expected = [update.value if at % 2 else 0 for at, update in enumerate(updates[:stop])]
        assert values.tolist() == [*expected, *[0] * (7 - stop), last]
    kinds = [type(each.kind).__name__ for each in repo.ops_log()]
    assert (len(kinds), kinds.count("NewCommit")) == (2 + 6 + 2 + 3, 9)


def _write(session: icechunk.Session, path: str, chunk: int, value: int) -> None:
    zarr.open_array(session.store, path=path)[chunk] = np.uint8(value)


async def test_conflict_fails_one_commit_of_a_train(repository: TrainRepository) -> None:
    """A commit that conflicts with an earlier one of its train fails alone, and names that one."""
    first, second, third = Update(0, (1, 2)), Update(0, (2, 3)), Update(0, (3, 4))
    parent_id = await repository.tip()
    made = await commit_all(await repository.replica(), parent_id, first, second, third)

    await repository.expect(first, third)
    ours, refused, _ = made
    assert isinstance(refused, CommitConflictError)
    assert refused.actual_parent == getattr(ours, "snapshot_id", None)
    assert refused.expected_parent == parent_id
    assert [each["chunks"] for each in refused.conflicts] == [[[2]]]


async def test_repeated_request_joins_the_commit_of_its_train(repository: TrainRepository) -> None:
    """Requests with one id in one train, or in a later one, get one commit; with other content,
    `ConflictError`.
    """
    update, replica, parent_id = Update(), await repository.replica(), await repository.tip()
    other = Update(0, (5,), key=update.key)

    first, second, third = await commit_all(replica, parent_id, update, update, other)
    fourth, fifth = await commit_all(replica, parent_id, update, neighbour := Update(1))

    await repository.expect(update, neighbour)
    assert first == second == fourth != fifth
    assert isinstance(third, ConflictError)


async def test_only_the_first_commit_of_a_train_can_amend(repository: TrainRepository) -> None:
    """An amend is the first commit of its train, or fails; neighbours then have lost their parent.

    A neighbour that started from the parent of the amended commit is rebased.
    """
    replica, root = await repository.replica(), await repository.tip()
    tip = (await commit(replica, root, gone := Update(0, (0,)))).snapshot_id
    amends = [Update(0, (number,), amend=True) for number in (1, 2)]

    made = await asyncio.gather(
        commit(replica, tip, amends[0]),
        commit(replica, tip, amends[1]),
        commit(replica, tip, Update(0, (3,))),
        commit(replica, root, above := Update(0, (4,))),
        return_exceptions=True,
    )

    kinds = [
        each.conflicts[0]["kind"] if isinstance(each, CommitConflictError) else type(each).__name__
        for each in made
    ]
    moved, lost = "branch_moved", "parent_not_in_history"
    assert kinds == ["CommitResult", moved, lost, "CommitResult"]
    repo = await repository.library()
    messages = [each.message for each in repo.ancestry(branch="main")][:2]
    assert messages == [above.key, amends[0].key]
    diff = repo.diff(from_snapshot_id=root, to_branch="main")
    assert diff.updated_chunks == {"/a": [[0], [1], [4]]}
    assert gone.key not in messages
    assert [type(each.kind).__name__ for each in repo.ops_log()][:2] == [
        "NewCommit",
        "CommitAmended",
    ]


@pytest.mark.parametrize("commit_updates", [commit_all, commit_in_two_trains])
async def test_overtaken_train_is_rebased(tmp_path: Path, commit_updates: CommitUpdates) -> None:
    """A train that another replica overtakes at any call is rebased; each commit is made once."""
    nth, is_reached = 0, True
    while is_reached:
        own = TrainRepository(tmp_path / f"at {nth}")
        store, parent_id = Late(own.memory), await own.tip()
        late, other = await own.replica(store), await own.replica()
        theirs, updates = Update(0, (6,)), [Update(0, (chunk,)) for chunk in range(3)]
        overtaking: list[Outcome] = []

        async def overtake(
            other: Any = other, made: Any = overtaking, update: Any = theirs
        ) -> None:
            made.append(await commit(other, await _tip(other), update))

        store.before_call(nth, overtake)
        snapshot_ids(await commit_updates(late, parent_id, *updates))
        if is_reached := bool(overtaking):
            repo = await own.library()
            place = [each.message for each in repo.ancestry(branch="main")].index(theirs.key)
            assert place in ((0, 3) if commit_updates is commit_all else (0, 2, 3))
            await own.expect(*updates[: 3 - place], theirs, *updates[3 - place :], repo=repo)
        nth += 1
    assert nth > 12


async def test_following_train_does_not_read_repo(repository: TrainRepository) -> None:
    """A train begins with the version of ``repo`` that the one before has written."""
    updates = [Update(0, (chunk,)) for chunk in range(3)]
    replica, calls = await repository.replica(), repository.counting.calls
    parent_id = await repository.tip()
    calls.clear()
    await commit_in_two_trains(replica, parent_id, *updates)

    await repository.expect(*updates)
    assert (calls["get", "repo"], calls["put", "repo"], calls["put", "overwritten"]) == (1, 2, 2)


async def test_conflict_with_a_version_that_was_replaced_is_looked_at_again(
    repository: TrainRepository,
) -> None:
    """A commit that conflicts with the train before is made if the branch was reset since."""
    store, parent_id = Late(repository.memory), await repository.tip()
    late, other = await repository.replica(store), await repository.replica()
    first, second = Update(0, (0,)), Update(0, (0,))

    async def reset() -> None:
        refs = RefUpdates(other.committer.swaps, other.opened)
        await refs.reset_branch("main", parent_id, lambda _: None)

    async def arm() -> None:
        store.after("put", "repo", reset)

    store.after("put", "overwritten/", arm)
    snapshot_ids(await commit_in_two_trains(late, parent_id, first, second))

    await repository.expect(second)


async def test_conflict_with_the_train_before_is_raised(repository: TrainRepository) -> None:
    """A commit that conflicts with the train before is refused, alone and beside others."""
    replica, parent_id = await repository.replica(), await repository.tip()
    first, second, third = Update(0, (0,)), Update(0, (0,)), Update(0, (1,))

    alone = await commit_in_two_trains(replica, parent_id, first, second)
    beside = await commit_in_two_trains(replica, parent_id, third, second, last := Update(1))

    assert [is_conflict(outcome) for outcome in alone] == [False, True]
    assert [is_conflict(outcome) for outcome in beside] == [False, True, False]
    await repository.expect(first, third, last)


async def _tip(replica: Replica) -> str:
    info = await replica.opened.info()
    assert info is not None
    return info.branches["main"]


async def _messages(replica: Replica) -> list[str]:
    info = await replica.opened.info()
    assert info is not None
    return [each.message for each in info.ancestry(info.branches["main"]) or ()]


async def test_conflict_with_a_commit_that_is_not_made_is_forgotten(
    repository: TrainRepository,
) -> None:
    """A commit that conflicts with one of its train is made if that one fails after a lost race."""
    store, parent_id = Late(repository.memory), await repository.tip()
    late, other = await repository.replica(store), await repository.replica()
    theirs, first, second = Update(0, (0,)), Update(0, (0, 1)), Update(0, (1,))
    store.before("put", "overwritten/", lambda: commit(other, parent_id, theirs))

    made = await commit_all(late, parent_id, first, second)

    assert [is_conflict(outcome) for outcome in made] == [True, False]
    await repository.expect(theirs, second)


@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
async def test_train_of_a_failing_replica_is_atomic(tmp_path: Path, *, is_done: bool) -> None:
    """A train whose replica fails at any call is visible as a whole or not at all.

    Each request that another replica repeats is made once.
    """
    nth, is_dead = 0, True
    while is_dead:
        repository = TrainRepository(tmp_path / f"{nth}")
        parent_id, dying = await repository.tip(), Dying(repository.memory, is_done=is_done)
        doomed, healthy = await repository.replica(dying), await repository.replica()
        updates = [Update(0, (0,)), Update(0, (0,)), Update(0, (1,)), Update(1, (0,))]
        dying.left = nth
        outcomes = await commit_all(doomed, parent_id, *updates)

        history = await _messages(await repository.replica())
        assert history[:-2] in ([], [update.key for update in (updates[3], updates[2], updates[0])])
        for outcome in outcomes:
            assert not is_conflict(outcome) or len(history) > 2
        again = await commit_all(healthy, parent_id, *updates)
        assert [is_conflict(outcome) for outcome in again] == [False, True, False, False]
        for outcome, repeated in zip(outcomes, again, strict=True):
            if not isinstance(outcome, Exception):
                assert outcome == repeated
        await repository.expect(updates[0], updates[2], updates[3])
        is_dead, nth = dying.left < 0, nth + 1
    assert nth > 12


@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
async def test_following_train_of_a_failing_replica_is_made_once(
    tmp_path: Path, *, is_done: bool
) -> None:
    """Commits of two trains whose replica fails at any call are made once when they are repeated by
    another; those that were acknowledged are among them.
    """
    nth, is_dead = 0, True
    while is_dead:
        repository = TrainRepository(tmp_path / f"{nth}")
        parent_id, dying = await repository.tip(), Dying(repository.memory, is_done=is_done)
        doomed, healthy = await repository.replica(dying), await repository.replica()
        updates = [Update(0, (0,)), Update(0, (1,)), Update(1, (0,))]
        dying.left = nth
        outcomes = await commit_in_two_trains(doomed, parent_id, *updates)

        again = await commit_all(healthy, parent_id, *updates)
        snapshot_ids(again)
        for outcome, repeated in zip(outcomes, again, strict=True):
            assert isinstance(outcome, StorageUnavailableError) or outcome == repeated
        await repository.expect(*updates)
        is_dead, nth = dying.left < 0, nth + 1
    assert nth > 12


async def test_lost_answer_of_a_swap_is_found(repository: TrainRepository) -> None:
    """All commits of a train are acknowledged though the answer to its swap was lost."""
    store, parent_id = Late(repository.memory), await repository.tip()

    async def fail() -> None:
        raise StorageUnavailableError(ROOT, "the connection broke")

    async def arm() -> None:
        store.after("put", "repo", fail)

    store.after("put", "overwritten/", arm)
    updates = [Update(0, (0,)), Update(0, (0,)), Update(0, (1,))]
    made = await commit_all(await repository.replica(store), parent_id, *updates)

    assert [is_conflict(outcome) for outcome in made] == [False, True, False]
    await repository.expect(updates[0], updates[2])


async def test_commit_that_another_replica_made_is_found_after_a_failed_swap(
    repository: TrainRepository,
) -> None:
    """A commit of a train whose swap failed is acknowledged if another replica has made it; others
    of the train are not.
    """
    store, parent_id = Late(repository.memory), await repository.tip()
    other, first, second = await repository.replica(), Update(0, (0,)), Update(0, (1,))

    async def overtake() -> None:
        await commit(other, parent_id, first)
        raise StorageUnavailableError(ROOT, "out of reach")

    async def arm() -> None:
        store.before("put", "repo", overtake)

    store.after("put", "overwritten/", arm)
    made = await commit_all(await repository.replica(store), parent_id, first, second)

    assert [type(outcome) for outcome in made] == [CommitResult, StorageUnavailableError]
    await repository.expect(first)


async def test_train_that_is_always_overtaken_gives_up(
    repository: TrainRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A train that other writers overtake each time fails with `BusyError`, which names the branch;
    it is not made.
    """
    monkeypatch.setattr("shardgate.concurrency._SWAPS", 3)
    store, parent_id = Late(repository.memory), await repository.tip()
    other, theirs = await repository.replica(), [Update(0, (number,)) for number in range(3)]
    waiting = iter(theirs)

    async def overtake() -> None:
        await commit(other, await _tip(other), next(waiting))
        store.before("put", "overwritten/", overtake)

    store.before("put", "overwritten/", overtake)
    (made,) = await commit_all(await repository.replica(store), parent_id, Update(1))

    assert isinstance(made, BusyError)
    assert "branch main: gave up after 3" in str(made)
    await repository.expect(*theirs)


async def test_caller_that_leaves_does_not_hurt_its_train(repository: TrainRepository) -> None:
    """A commit whose caller leaves before the departure is left out; later ones may be made."""
    store, parent_id = Late(repository.memory), await repository.tip()
    replica = await repository.replica(store)
    early, left, stays, behind = (Update(0, (chunk,)) for chunk in range(4))
    tasks = [asyncio.create_task(commit(replica, parent_id, update)) for update in (early, stays)]
    is_reached = asyncio.Event()

    async def leave() -> None:
        tasks[0].cancel()
        late = asyncio.create_task(commit(replica, parent_id, left))
        tasks.append(asyncio.create_task(commit(replica, parent_id, behind)))
        await settle()
        late.cancel()
        with suppress(asyncio.CancelledError):
            await late
        is_reached.set()

    store.before("put", "overwritten/", leave)
    await is_reached.wait()
    await asyncio.gather(*tasks[1:])

    await repository.expect(early, stays, behind)


async def test_large_manifests_of_a_train_are_built_upon(repository: TrainRepository) -> None:
    """Commits of a train that change one array have the chunks of those before, also where the
    manifests that these have made are too large to be held.
    """
    data = [np.random.default_rng(number).bytes(9_000_000) for number in range(3)]
    updates = [Update(0, (number,), data=each) for number, each in enumerate(data)]
    made = await commit_all(await repository.replica(), await repository.tip(), *updates)

    assert len(set(snapshot_ids(made))) == len(updates)
    assert repository.counting.calls["put", "repo"] == 1
    session = (await repository.library()).readonly_session("main")
    found = [await asyncio.to_thread(read, session, f"a/c/{number}") for number in range(4)]
    assert found == [*data, b"\0"]
