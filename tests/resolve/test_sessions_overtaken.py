"""Others do something with a session just before one call to the store, which then comes late."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from zarr.core.buffer import default_buffer_prototype

from app.errors import (
    BusyError,
    ConflictError,
    StorageUnavailableError,
    UnknownSessionError,
)
from app.formats.icechunk.conflicts import Policy
from app.model import ObjectRef
from app.resolve.icechunk.session_commit import SessionCommit
from app.storage.contract import Found
from app.storage.memory import MemoryStore
from tests.resolve.sessions import (
    ROOT,
    Replica,
    contents,
    files_of_repository,
    opened_by_library,
    ref,
    stored,
)
from tests.resolve.stores import Clock

OVER_S: Final = 30
"""A lease is over by then."""
DAY_S: Final = 24 * 3600

type Between = Callable[[], Awaitable[object]]


class Late:
    """A store that lets something happen before, or after, one call."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._order: tuple[str, str, Between] | None = None
        self._is_after = False

    def before(self, call: str, name: str, between: Between) -> None:
        """Do *between* before the next *call* of an object whose key has *name* in it."""
        self._order, self._is_after = (call, name, between), False

    def after(self, call: str, name: str, between: Between) -> None:
        """Do it once it is done, and before that is known."""
        self._order, self._is_after = (call, name, between), True

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)
        if name not in ("get", "put", "delete"):
            return call

        async def late(ref: ObjectRef, *args: Any, **options: Any) -> Any:
            if self._order is None or self._order[0] != name or self._order[1] not in ref.key:
                return await call(ref, *args, **options)
            between, self._order = self._order[2], None
            if not self._is_after:
                await between()
            answer = await call(ref, *args, **options)
            if self._is_after:
                await between()
            return answer

        return late


class Scene:
    """Two replicas before one store, one of which is late, and a session that was written to."""

    def __init__(self, memory: MemoryStore, clock: Clock) -> None:
        self.memory = memory
        self.clock = clock
        self.store = Late(memory)

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
        store = await replica.enter(session_id)
        await store.put(ref(f"a/c/{at}"), [bytes([at + 9] * 2)], expected=None)

    async def demand(self, folder: Path, *chunks: int, commits: int) -> None:
        """Be sure that just these chunks were committed, by so many commits."""
        repo = await opened_by_library(self.memory, folder)
        store = repo.readonly_session("main").store
        prototype = default_buffer_prototype()
        found = [await store.get(f"a/c/{at}", prototype=prototype) for at in range(3)]
        values = [chunk.to_bytes()[0] for chunk in found if chunk is not None]
        assert values == [at + 9 if at in chunks else 2 * at + 1 for at in range(3)]
        assert len(list(repo.ancestry(branch="main"))) == 2 + commits


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, bytes]:
    """Write the repository that all begins with."""
    return files_of_repository(tmp_path_factory.mktemp("overtaken") / "repo")


@pytest.fixture
def scene(files: Mapping[str, bytes]) -> Scene:
    """Store it."""
    clock = Clock(time.time())
    return Scene(stored(files, clock), clock)


async def test_a_session_is_not_swept_away_that_was_just_renewed(
    scene: Scene, tmp_path: Path
) -> None:
    """Who begins another session found it expired, and it was written to at the last moment."""
    session_id = await scene.begin()
    scene.clock.now += DAY_S - 1

    async def write() -> None:
        scene.clock.now -= 2
        await scene.put(scene.other, session_id, 2)
        scene.clock.now += 2

    scene.clock.now += 2
    scene.store.after("get", ".session", write)
    await scene.late.begin()

    await scene.other.commit(session_id)
    await scene.demand(tmp_path, 0, 1, 2, commits=1)


async def test_a_write_into_a_session_that_is_being_swept_away_is_refused(scene: Scene) -> None:
    """It was written when nobody could know, and is told that it does not count."""
    session_id = await scene.begin()
    scene.clock.now += DAY_S - 1

    async def sweep() -> None:
        scene.clock.now += 2
        await scene.other.begin()
        scene.clock.now -= 2

    scene.store.after("put", f"{session_id}/", sweep)

    with pytest.raises(UnknownSessionError):
        await scene.put(scene.late, session_id, 2)


async def test_half_a_journal_is_not_committed(scene: Scene, tmp_path: Path) -> None:
    """The session was discarded when the lease was over, and the one who had it reads on."""
    session_id = await scene.begin()

    async def discard() -> None:
        scene.clock.now += OVER_S
        store = await scene.other.enter(session_id)
        await scene.other.sessions.discard(store.session)

    scene.store.before("get", f"{session_id}/", discard)

    with pytest.raises((BusyError, UnknownSessionError)):
        await scene.late.commit(session_id)
    await scene.demand(tmp_path, commits=0)


async def test_what_is_listed_and_not_there_is_not_left_out(scene: Scene, tmp_path: Path) -> None:
    """An entry that lies where nobody looks was acknowledged; nothing is committed without it."""
    session_id = await scene.begin()
    [entry] = [each.ref async for each in scene.memory.list(ROOT) if each.ref.key.endswith("/1")]
    shelf, _, name = entry.key.rpartition("/")
    elsewhere = entry._replace(key=f"{shelf}f/{name}")
    await move(scene.memory, entry, elsewhere)

    with pytest.raises(StorageUnavailableError, match="it was listed, and is not there"):
        await scene.late.commit(session_id)
    await scene.demand(tmp_path / "before", commits=0)

    await move(scene.memory, elsewhere, entry)
    await scene.late.commit(session_id)
    await scene.demand(tmp_path / "after", 0, 1, commits=1)


async def move(store: MemoryStore, source: ObjectRef, target: ObjectRef) -> None:
    """Put an object elsewhere."""
    found = await store.get(source)
    assert isinstance(found, Found)
    store.place(target, found.data)
    await store.delete(source, expected=None)


async def test_a_session_does_not_expire_while_it_is_committed(
    scene: Scene, tmp_path: Path
) -> None:
    """Though nobody has written to it for nearly a day."""
    session_id = await scene.begin()
    scene.clock.now += DAY_S - 1

    async def sweep() -> None:
        scene.clock.now += 2
        await scene.other.begin()

    scene.store.before("get", f"{session_id}/", sweep)

    made = await scene.late.commit(session_id)
    await scene.demand(tmp_path, 0, 1, commits=1)
    assert await scene.other.commit(session_id) == made


async def test_what_is_written_after_another_one_failed_is_committed(
    scene: Scene, tmp_path: Path
) -> None:
    """A swap comes late, when the session was opened again and has taken more."""
    session_id = await scene.begin()

    async def fail() -> None:
        scene.clock.now += OVER_S
        store = await scene.other.enter(session_id)
        with pytest.raises(ConflictError):
            await SessionCommit(store.session, _refuse, None).run()
        await scene.put(scene.other, session_id, 2)

    scene.store.before("put", "repo", fail)
    await scene.late.commit(session_id)
    before = await contents(await scene.other.enter(session_id))
    assert before["a/c/2"] == bytes([11] * 2)

    await scene.other.commit(session_id, policy=Policy.OURS)
    await scene.demand(tmp_path, 0, 1, 2, commits=2)


async def test_a_damaged_session_keeps_nobody_from_beginning_another(scene: Scene) -> None:
    """It is left where it is."""
    session_id = await scene.begin()
    document = ROOT.join(f"sessions/{session_id}.session")
    scene.memory.place(document, b"damaged")

    assert await scene.late.begin() != session_id
    assert await scene.memory.stat(document) is not None


async def test_nobody_waits_long_for_what_is_removed(scene: Scene) -> None:
    """What takes long is broken off, and another one who begins a session goes on with it."""
    session_id = await scene.begin()
    await scene.other.commit(session_id)
    entries = scene.late.opened.directory.join(f"sessions/{session_id}/")

    scene.store.before("delete", session_id, asyncio.Event().wait)
    async with asyncio.timeout(10):
        await scene.late.begin()
    assert [each async for each in scene.memory.list(entries)]

    await scene.late.begin()
    assert not [each async for each in scene.memory.list(entries)]


async def _refuse(*_: Any) -> Any:
    raise ConflictError("for certain")
