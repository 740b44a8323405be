"""Replicas in this process that share one store with a repository of the icechunk library."""

import json
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final
from weakref import WeakValueDictionary

import icechunk
import zarr

from shardgate.errors import StorageUnavailableError
from shardgate.formats.icechunk.conflicts import Policy
from shardgate.formats.icechunk.layout import Icechunk
from shardgate.formats.icechunk.repo_writer import WriteId
from shardgate.icechunk.commit import CommitRequest, CommitResult
from shardgate.icechunk.repo_swap import RepoSwaps
from shardgate.icechunk.repository import OpenedRepository, open_repository
from shardgate.icechunk.sessions.document import SessionDocument
from shardgate.icechunk.sessions.registry import Sessions
from shardgate.icechunk.sessions.session_commit import SessionCommit
from shardgate.icechunk.sessions.store import SessionStore
from shardgate.icechunk.trains import Committer
from shardgate.model import ETag, ObjectRef
from shardgate.read.budget import ByteBudget
from shardgate.read.containers import Containers
from shardgate.read.listing import Root
from shardgate.read.metadata_cache import MetadataCache, ReadCache
from shardgate.storage.contract import Conflict, Listed
from shardgate.storage.memory import MemoryStore
from tests.support.files import read_files
from tests.support.read.stores import CallOn, Tapped
from tests.support.sessions import GROUP, array_document

ROOT: Final = ObjectRef("memory://repo", "")
_LIMIT: Final = 2**26


def files_of_repository(folder: Path) -> Mapping[str, bytes]:
    """Write a repository with ``a`` of three chunks and ``g/b`` of one, by the library."""
    repo = icechunk.Repository.create(icechunk.local_filesystem_storage(str(folder)))
    session = repo.writable_session("main")
    group = zarr.create_group(session.store)
    options: Any = {"chunks": (2,), "dtype": "u1", "compressors": None}
    group.create_array("a", shape=(6,), **options)[:] = [1, 2, 3, 4, 5, 6]
    group.create_array("g/b", shape=(4,), **options)[2:] = [7, 8]
    session.commit("first")
    return read_files(folder)


def stored(files: Mapping[str, bytes], clock: Callable[[], float] = time.time) -> MemoryStore:
    """Return a store with *files*."""
    store = MemoryStore(clock)
    for name, data in files.items():
        store.place(ROOT.join(name), data)
    return store


async def opened_by_library(store: MemoryStore, folder: Path) -> icechunk.Repository:
    """Copy the store to *folder*, and open it with the library."""
    async for each in store.list(ROOT):
        found: Any = await store.get(each.ref)
        file = folder / each.ref.key
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(found.data)
    return icechunk.Repository.open(icechunk.local_filesystem_storage(str(folder)))


class Counting(Tapped):
    """A store that counts its calls by method and folder."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.calls = Counter[tuple[str, str]]()

    async def around(self, name: str, ref: ObjectRef, call: CallOn) -> Any:
        """Count the call."""
        self.calls[name, ref.key.partition("/")[0]] += 1
        return await call()

    async def list(self, prefix: ObjectRef, **options: Any) -> AsyncGenerator[Listed]:
        """Count the listing."""
        self.calls["list", prefix.key.partition("/")[0]] += 1
        async for each in self._store.list(prefix, **options):
            yield each


class Dying(Tapped):
    """A store that fails from one call on, which is done or not."""

    def __init__(self, store: MemoryStore, *, is_done: bool) -> None:
        super().__init__(store)
        self.left = sys.maxsize
        """Number of calls before the failing one."""
        self._is_done = is_done

    async def around(self, name: str, ref: ObjectRef, call: CallOn) -> Any:
        """Count the call, and fail if it is the one or a later one."""
        self.left -= 1
        if self.left >= 0:
            return await call()
        if self.left == -1 and self._is_done:
            await call()
        raise StorageUnavailableError(ref, "out of reach")


type Between = Callable[[], Awaitable[object]]


class Late(Tapped):
    """A store that runs something before, or right after, one call."""

    def __init__(self, store: Any) -> None:
        super().__init__(store)
        self._order: tuple[Callable[[str, ObjectRef], bool], Between, bool] | None = None

    def before(self, call: str, name: str, between: Between) -> None:
        """Run *between* before the next *call* of an object whose key contains *name*."""
        self._order = (lambda at, ref: at == call and name in ref.key), between, False

    def after(self, call: str, name: str, between: Between) -> None:
        """Run *between* after the next such call, before it returns."""
        self._order = (lambda at, ref: at == call and name in ref.key), between, True

    def before_call(self, nth: int, between: Between) -> None:
        """Run *between* before the call *nth* from now, counted from 0."""
        numbers = count()
        self._order = (lambda *_: next(numbers) == nth), between, False

    async def around(self, name: str, ref: ObjectRef, call: CallOn) -> Any:
        """Do the call, and run the other thing if this is its call."""
        if self._order is None or not self._order[0](name, ref):
            return await call()
        (_, between, is_after), self._order = self._order, None
        if not is_after:
            await between()
        answer = await call()
        if is_after:
            await between()
        return answer


@dataclass
class Replica:
    """A replica of the service."""

    opened: OpenedRepository
    sessions: Sessions
    committer: Committer

    @classmethod
    async def of(
        cls,
        store: Any,
        clock: Callable[[], float] = time.time,
        directory: ObjectRef = ROOT,
        *,
        cached_nbytes: int = _LIMIT,
    ) -> "Replica":
        """Start a replica."""
        fetch = ReadCache(store, MetadataCache(cached_nbytes), ttl_s=60)
        root = Root(directory, store, Containers([Icechunk(_LIMIT, _LIMIT)]), fetch)
        swaps = RepoSwaps(store, fetch, clock=clock)
        committer = Committer(swaps, ByteBudget(_LIMIT, wait_s=1))
        budget = ByteBudget(_LIMIT, wait_s=1)
        sessions = Sessions(swaps, WeakValueDictionary(), [], budget)
        return cls(await open_repository(root, ""), sessions, committer)

    async def begin(self) -> str:
        """Begin a session."""
        return (await self.sessions.create(self.opened, "main"))[0]

    async def enter(self, session_id: str, *, is_edited: bool = False) -> SessionStore:
        """Open a session as each request does, and a commit with *is_edited*."""
        repository = self.opened.repository
        fetch = self.opened.fetch
        return await self.sessions.open(repository, session_id, fetch, is_edited=is_edited)

    async def write(self, session_id: str, key: str, data: bytes | None) -> ETag | Conflict | bool:
        """Write a key of a session, or delete it if there is no *data*."""
        store = await self.enter(session_id)
        ref = ObjectRef("", key)
        if data is None:
            return await store.delete(ref, expected=None)
        return await store.put(ref, [data], expected=None)

    async def contents(self, session_id: str) -> dict[str, bytes]:
        """Read all listed keys of a session."""
        store, found = await self.enter(session_id), dict[str, bytes]()
        async for each in store.list(ObjectRef("", "")):
            read: Any = await store.get(each.ref)
            assert len(read.data) == each.size
            found[each.ref.key] = read.data
        return found

    async def commit(
        self,
        session_id: str,
        key: str | None = None,
        *,
        policy: Policy = Policy.FAIL,
        metadata: Mapping[str, Any] | None = None,
    ) -> CommitResult:
        """Commit a session, by an idempotency key."""
        store = await self.enter(session_id, is_edited=True)

        async def commit(
            document: SessionDocument, changes: Any, write_id: WriteId
        ) -> CommitResult:
            request = CommitRequest(
                branch=document.branch,
                parent_id=document.parent_id,
                message="made in a session",
                write_id=write_id,
                metadata=metadata or {},
                policy=policy,
                allow_empty=True,
            )
            return await self.committer.commit(self.opened, changes, request)

        return await SessionCommit(store.session, commit, key).run()


def document(*shape: int) -> bytes:
    """Return the document of an array, or of a group without a shape."""
    if not shape:
        return GROUP
    return json.dumps(array_document(shape, (2,) * len(shape))).encode()
