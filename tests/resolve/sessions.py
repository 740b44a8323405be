"""Replicas in this process before one store, which has a repository of the library in it."""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import icechunk
import zarr

from app.errors import StorageUnavailableError
from app.formats.icechunk.conflicts import Policy
from app.formats.icechunk.layout import Icechunk
from app.formats.icechunk.session import SessionDocument
from app.formats.icechunk.write_ids import WriteId
from app.model import ObjectRef
from app.resolve.budget import ByteBudget
from app.resolve.containers import Containers
from app.resolve.icechunk.commit_request import CommitRequest
from app.resolve.icechunk.committing import Committer
from app.resolve.icechunk.repo_swap import RepoSwaps
from app.resolve.icechunk.repositories import OpenedRepository, open_repository
from app.resolve.icechunk.session_commit import Made, SessionCommit
from app.resolve.icechunk.session_store import SessionStore
from app.resolve.icechunk.sessions import Sessions, root_of
from app.resolve.listing import Root
from app.resolve.metadata_cache import MetadataCache, ReadCache
from app.storage.memory import MemoryStore
from tests.sessions import GROUP, array_document

ROOT: Final = ObjectRef("memory://repo", "")
_LIMIT: Final = 2**26


def files_of_repository(folder: Path) -> Mapping[str, bytes]:
    """Let the library write a repository with ``a`` of three chunks, and ``g/b`` of one."""
    repo = icechunk.Repository.create(icechunk.local_filesystem_storage(str(folder)))
    session = repo.writable_session("main")
    group = zarr.create_group(session.store)
    options: Any = {"chunks": (2,), "dtype": "u1", "compressors": None}
    group.create_array("a", shape=(6,), **options)[:] = [1, 2, 3, 4, 5, 6]
    group.create_array("g/b", shape=(4,), **options)[2:] = [7, 8]
    session.commit("first")
    return {
        file.relative_to(folder).as_posix(): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }


def stored(files: Mapping[str, bytes], clock: Callable[[], float] = time.time) -> MemoryStore:
    """Put *files* into a store."""
    store = MemoryStore(clock)
    for name, data in files.items():
        store.place(ROOT.join(name), data)
    return store


async def opened_by_library(store: MemoryStore, folder: Path) -> icechunk.Repository:
    """Write what is stored to *folder*, for the library."""
    async for each in store.list(ROOT):
        found: Any = await store.get(each.ref)
        file = folder / each.ref.key
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(found.data)
    return icechunk.Repository.open(icechunk.local_filesystem_storage(str(folder)))


class Dying:
    """A store that is out of reach from some call on, which is done or is not."""

    def __init__(self, store: MemoryStore, *, is_done: bool) -> None:
        self._store = store
        self._left = sys.maxsize
        self._is_done = is_done

    def die_at(self, nth: int) -> None:
        """Give up at the call *nth* from now on."""
        self._left = nth

    @property
    def is_dead(self) -> bool:
        """Tell whether it came to that."""
        return self._left < 0

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)
        if name not in ("get", "put", "delete", "stat"):
            return call

        async def spoiled(ref: ObjectRef, *args: Any, **options: Any) -> Any:
            self._left -= 1
            if self._left == -1 and self._is_done:
                await call(ref, *args, **options)
            if self._left < 0:
                raise StorageUnavailableError(ref, "out of reach", lasting=True)
            return await call(ref, *args, **options)

        return spoiled


@dataclass
class Replica:
    """One of those that know the repository."""

    opened: OpenedRepository
    sessions: Sessions
    committer: Committer

    @classmethod
    async def of(cls, store: Any, clock: Callable[[], float] = time.time) -> "Replica":
        """Start it."""
        fetch = ReadCache(store, MetadataCache(_LIMIT), ttl_s=60)
        root = Root(ROOT, store, Containers([Icechunk(_LIMIT, _LIMIT)]), fetch)
        committer = Committer(RepoSwaps(store, fetch, clock=clock), ByteBudget(_LIMIT, wait_s=1))
        return cls(await open_repository(root, ""), Sessions(store, fetch, clock=clock), committer)

    async def begin(self) -> str:
        """Begin a session."""
        return (await self.sessions.create(self.opened, "main")).session_id

    async def enter(self, session_id: str) -> SessionStore:
        """Ask for a session as each request does."""
        repository = self.opened.repository
        await self.sessions.find(repository, session_id, self.opened.fetch)
        store = self.sessions.stores.find(root_of(repository, session_id))
        assert store is not None
        return store

    async def commit(
        self, session_id: str, *, policy: Policy = Policy.FAIL, **options: Any
    ) -> Made:
        """Commit a session."""
        store = await self.enter(session_id)

        async def make(document: SessionDocument, changes: Any, write_id: str) -> Made:
            request = CommitRequest(
                branch=document.branch,
                parent_id=document.parent_id,
                message="made in a session",
                write_id=WriteId(write_id),
                policy=policy,
                allow_empty=True,
            )
            return Made(*await self.committer.commit(self.opened, changes, request))

        return await SessionCommit(store.session, make, None, **options).run()


def document(*shape: int) -> bytes:
    """Describe an array, or a group where there is no shape."""
    if not shape:
        return GROUP
    return json.dumps(array_document(shape, (2,) * len(shape))).encode()


def ref(key: str) -> ObjectRef:
    """Name a key of a session, in a bucket that is never looked at."""
    return ObjectRef("session", key)


async def contents(store: SessionStore) -> dict[str, bytes]:
    """Read all that is listed."""
    found = {}
    async for each in store.list(ref("")):
        read: Any = await store.get(each.ref)
        assert len(read.data) == each.size
        found[each.ref.key] = read.data
    return found


def keys_below(folder: str, shape: tuple[int, ...]) -> Iterator[str]:
    """Name the chunks that an array of *shape*, in one dimension, has room for."""
    return (f"{folder}/c/{at}" for at in range(-(-shape[0] // 2)))
