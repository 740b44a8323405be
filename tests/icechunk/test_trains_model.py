"""Random trains of several replicas, beside the library and crashes, compared with a model."""

import asyncio
import itertools
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import icechunk
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from shardgate.icechunk.commit import CommitResult
from shardgate.icechunk.repo_swap import RefUpdates
from tests.support.icechunk.sessions.replicas import Dying, Replica
from tests.support.icechunk.train_repository import (
    ARRAYS,
    CHUNKS,
    Outcome,
    TrainRepository,
    Update,
    commit,
    commit_all,
    is_conflict,
)

REPLICAS: Final = 2
CHUNK_SETS: Final = st.sets(st.integers(0, CHUNKS - 1), min_size=1, max_size=3)


class Asked(NamedTuple):
    """A request of a round."""

    replica: int
    array: int
    chunks: frozenset[int]
    back: int
    """Commits between the parent and the tip."""
    is_amend: bool
    is_repeated: bool


class Round(NamedTuple):
    """Requests at one time; from the call *dies_at* on the first replica fails."""

    asked: list[Asked]
    dies_at: int | None
    is_done: bool
    has_tag: bool
    by_library: int | None
    """Chunk of the first array that the library writes after the others."""


ASKED: Final = st.builds(
    Asked,
    st.integers(0, REPLICAS - 1),
    st.integers(0, len(ARRAYS) - 1),
    CHUNK_SETS.map(frozenset),
    st.sampled_from([0, 0, 0, 1, 3]),
    st.sampled_from([False] * 5 + [True]),
    st.sampled_from([False] * 3 + [True]),
)
ROUND: Final = st.builds(
    Round,
    st.lists(ASKED, min_size=1, max_size=5),
    st.none() | st.integers(0, 40),
    st.booleans(),
    st.booleans(),
    st.none() | st.integers(0, CHUNKS - 1),
)


class Made(NamedTuple):
    """A commit of the model."""

    parent_id: str
    """Snapshot that the changes were made against."""
    touched: frozenset[tuple[int, int]]
    """Arrays and chunks."""
    value: int
    amended: str | None = None
    """The commit that it replaces."""


class Model:
    """A repository, and what every snapshot must have."""

    def __init__(self, repository: TrainRepository, tip: str) -> None:
        self.repository = repository
        self.line = [tip]
        """Snapshots of ``main``, oldest first."""
        self.lines = {tip: [tip]}
        """For each snapshot its ancestors, oldest first, and itself."""
        self.made: dict[str, Made] = {}
        self.tags: dict[str, str] = {}
        self.asked: list[tuple[str, Update]] = []
        """Parents and contents of all requests."""

    async def run(self, number: int, doing: Round) -> None:
        """Send the requests of a round, repeat them all, and compare."""
        dying = Dying(self.repository.memory, is_done=doing.is_done)
        replicas = [await self.repository.replica(dying)]
        replicas += [await self.repository.replica() for _ in range(REPLICAS - 1)]
        if doing.dies_at is not None:
            dying.left = doing.dies_at
        sent = [self._send(each) for each in doing.asked]
        tasks = [
            asyncio.create_task(commit(replicas[each.replica], *request))
            for each, request in zip(doing.asked, sent, strict=True)
        ]
        if doing.has_tag:
            await self._tag(replicas[-1], f"t{number}")
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        healthy = await self.repository.replica()
        await self._compare(sent, outcomes)
        again = [outcome for request in sent for outcome in await commit_all(healthy, *request)]
        for before, after in zip(outcomes, again, strict=True):
            assert before == after or not isinstance(before, CommitResult)
        await self._compare(sent, again)
        if doing.by_library is not None:
            await self._write_by_library(doing.by_library, f"library {number}")

    def _send(self, asked: Asked) -> tuple[str, Update]:
        if asked.is_repeated and self.asked:
            return self.asked[-1]
        parent_id = self.line[max(0, len(self.line) - 1 - asked.back)]
        update = Update(asked.array, tuple(sorted(asked.chunks)), amend=asked.is_amend)
        self.asked.append((parent_id, update))
        return self.asked[-1]

    async def _tag(self, replica: Replica, name: str) -> None:
        info = await replica.opened.info()
        assert info is not None
        snapshot_id = info.branches["main"]
        made = await RefUpdates(replica.committer.swaps, replica.opened).create(
            "tag", name, snapshot_id
        )
        self.tags[name] = made.snapshot_id

    async def _compare(self, sent: list[tuple[str, Update]], outcomes: list[Outcome]) -> None:
        """Take in the new commits as the library lists them, and compare everything."""
        repo = await self.repository.library()
        history = {each.id: each for each in repo.ancestry(branch="main")}
        line = list(history)[::-1][1:]
        updates = {update.key: (parent_id, update) for parent_id, update in self.asked}
        if line[: len(self.line)] != self.line:  # the tip was amended
            assert line[: len(self.line) - 1] == self.line[:-1]
            assert updates[history[line[len(self.line) - 1]].message][1].amend
        for at, snapshot_id in enumerate(line):
            if snapshot_id not in self.lines:
                parent_id, update = updates[history[snapshot_id].message]
                self._take(snapshot_id, line[:at], parent_id, update)
        self.line = line
        for (_, update), outcome in zip(sent, outcomes, strict=True):
            if isinstance(outcome, CommitResult):
                assert outcome.snapshot_id in self.lines
            elif is_conflict(outcome):
                assert getattr(outcome, "actual_parent", None) in self.lines, update
        keys = [history[snapshot_id].message for snapshot_id in line]
        assert len(set(keys)) == len(keys)
        self._compare_content(repo)

    def _take(self, snapshot_id: str, below: list[str], parent_id: str, update: Update) -> None:
        """Add a commit, which must not conflict with those between its parent and itself."""
        touched = frozenset((update.array, chunk) for chunk in update.chunks)
        amended = None
        if update.amend:
            assert self.lines[parent_id][:-1] == below
            amended = parent_id
        else:
            assert parent_id in below
            for other in below[below.index(parent_id) + 1 :]:
                assert not touched & self._touched(other)
        self.made[snapshot_id] = Made(parent_id, touched, update.value, amended)
        self.lines[snapshot_id] = [*below, snapshot_id]

    def _touched(self, snapshot_id: str) -> frozenset[tuple[int, int]]:
        if (made := self.made.get(snapshot_id)) is None:
            return frozenset()
        return made.touched | (self._touched(made.amended) if made.amended else frozenset())

    def _values(self, snapshot_id: str) -> list[list[int]]:
        if (made := self.made.get(snapshot_id)) is None:
            return [[0] * CHUNKS for _ in ARRAYS]
        values = self._values(made.amended or self.lines[snapshot_id][-2])
        for array, chunk in made.touched:
            values[array][chunk] = made.value
        return values

    def _compare_content(self, repo: icechunk.Repository) -> None:
        tips: list[dict[str, Any]] = [{"branch": "main"}, *({"tag": name} for name in self.tags)]
        for ref in tips:
            line = [each.id for each in repo.ancestry(**ref)][::-1][1:]
            assert line == self.lines[self.tags.get(ref.get("tag", ""), self.line[-1])]
            store = repo.readonly_session(**ref).store
            for name, values in zip(ARRAYS, self._values(line[-1]), strict=True):
                found: Any = zarr.open_array(store, path=name, mode="r")[...]
                assert found.tolist() == values
        for before, after in itertools.pairwise(self.line):
            diff = repo.diff(from_snapshot_id=before, to_snapshot_id=after)
            expected: dict[str, list[list[int]]] = {}
            for array, chunk in sorted(self._touched(after)):
                expected.setdefault(f"/{ARRAYS[array]}", []).append([chunk])
            assert diff.updated_chunks == expected
        log = list(repo.ops_log())
        moments = [each.updated_at for each in log]
        assert sorted(set(moments), reverse=True) == moments
        text = "\n".join(str(each.kind) for each in log)
        for snapshot_id in self.made:
            assert text.count(f'new_snap_id="{snapshot_id}"') == 1

    async def _write_by_library(self, chunk: int, message: str) -> None:
        """Write a chunk by the library, and take its files back into the store."""
        repo = await self.repository.library()
        session, update = repo.writable_session("main"), Update(0, (chunk,), key=message)
        zarr.open_array(session.store, path=ARRAYS[0])[chunk] = np.uint8(update.value)
        made = session.commit(message)
        self.repository.take_back()
        self._take(made, self.line, self.line[-1], update)
        self.line = self.lines[made]


@pytest.mark.parametrize("examples", [4, pytest.param(300, marks=pytest.mark.soak)])
def test_random_trains_agree_with_a_model(tmp_path: Path, examples: int) -> None:
    """After random trains, crashes, repeats, amends and tags the library reads what a model has."""

    @settings(max_examples=examples, deadline=None)
    @given(st.lists(ROUND, min_size=1, max_size=5))
    def check(rounds: list[Round]) -> None:
        async def run() -> None:
            repository = TrainRepository(Path(folder))
            model = Model(repository, await repository.tip())
            for number, doing in enumerate(rounds):
                await model.run(number, doing)

        with TemporaryDirectory(dir=tmp_path) as folder:
            asyncio.run(run())

    check()
