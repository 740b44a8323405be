"""Garbage collection: files that nothing leads to any more are removed.

What is kept is found out first, then ``repo`` is replaced by compare-and-swap, so that nobody can
build on what goes, then files go: those that refer to others before them.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from app.errors import BusyError, DamagedError
from app.formats.icechunk.collecting import Remains, plan_collection
from app.formats.icechunk.repo_info import RepoInfo
from app.formats.icechunk.snapshot_reading import StoredSnapshotDecoder
from app.formats.icechunk.used_chunks import ChunkIdsDecoder, UsedChunks
from app.formats.reading import Weighable
from app.resolve.icechunk.clocks import try_clock
from app.resolve.icechunk.expiring import fresh_info
from app.resolve.icechunk.journal import SESSIONS, Place
from app.resolve.icechunk.older_than import spell_moment
from app.resolve.icechunk.open_sessions import Sessions, find_sessions, remove_session
from app.resolve.icechunk.repo_swap import Planned, RepoSwaps
from app.resolve.icechunk.repositories import OpenedRepository
from app.resolve.icechunk.sweeping import Held, Swept, list_files, sweep
from app.storage.abreast import abreast

_ATTEMPTS: Final = 20
_SOME: Final = 256
"""So many files are read before what was read of them is taken in."""


@dataclass(slots=True)
class GcReport:
    """What was removed, or would be."""

    executed: bool
    older_than: str
    """No file that was written later is removed."""
    oldest_session: str | None = None
    """The session that goes on and needs files from before the time that was asked for."""
    snapshots_dropped: int = 0
    """How many are listed no longer."""
    sessions_removed: int = 0
    """How many had expired."""
    folders: dict[str, Swept] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    """Folders that were not looked at, because something in those before could not be removed."""

    @property
    def failed(self) -> int:
        """How many files could not be removed."""
        return sum(swept.failed for swept in self.folders.values())


class _Needed(NamedTuple):
    """What one look at the repository says is needed."""

    info: RepoInfo
    sessions: Sessions
    limit_us: int
    remains: Remains
    young: frozenset[bytes]
    """Snapshot files that are kept though nothing may lead to them."""


class Collector:
    """Collects the garbage of one repository."""

    def __init__(
        self,
        swaps: RepoSwaps,
        opened: OpenedRepository,
        older_than_us: int,
        on_progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Get ready to remove what was written before *older_than_us*; *on_progress* hears how."""
        self._swaps = swaps
        self._store = swaps.store
        self._opened = opened
        self._older_than_us = older_than_us
        self._on_progress = on_progress
        self._snapshots = set[bytes]()
        """Those whose manifests are known; what they need stays, even if they go meanwhile."""
        self._manifests = set[bytes]()
        self._read_manifests = set[bytes]()
        self._chunks = UsedChunks()

    async def run(self, *, execute: bool) -> GcReport:
        """Remove what nothing leads to, or only tell what that is.

        Raises: `LockedError`, `ReadOnlyError`, `UnknownRepositoryError`, `UnwritableError`,
        `ClockSkewError`; `DamagedError` where it cannot be known what is needed, `BusyError`
        where that changes all the time, `StorageError`. Nothing is removed then but what was
        before.
        """
        if execute:
            await self._store.demand_safety(self._opened.directory)
            await self._try_clock()
        needed = await self._settle(execute=execute)
        oldest = needed.sessions.oldest if needed.limit_us < self._older_than_us else None
        report = GcReport(
            execute,
            spell_moment(needed.limit_us),
            None if oldest is None else oldest.session_id,
            len(needed.remains.change.dropped),
            len(needed.sessions.ended),
        )
        await self._sweep_all(needed, report, execute=execute)
        if execute:
            await abreast(self._remove_session, needed.sessions.ended)
        return report

    async def _try_clock(self) -> None:
        """Be sure that what we take for old, or for expired, is."""
        folder = self._opened.directory.join(SESSIONS)
        await try_clock(self._store, folder, self._swaps.now_us() / 1_000_000)

    async def _settle(self, *, execute: bool) -> _Needed:
        """Find out what is needed, and leave the others out of ``repo``.

        That is done only to the file which said so; if others replace it, all begins anew.
        """
        for _ in range(_ATTEMPTS):
            needed = await self._look()
            if not execute or await self._swaps.update(
                self._opened, partial(_drop, needed.info, needed.remains)
            ):
                return needed
        raise BusyError(f"{self._opened.repo} was replaced by others {_ATTEMPTS} times meanwhile")

    async def _look(self) -> _Needed:
        opened = self._opened
        info = await fresh_info(self._swaps, opened)
        sessions = await find_sessions(self._store, opened, self._swaps.now_us())
        limit_us = self._older_than_us
        if (oldest := sessions.oldest) is not None:
            limit_us = min(limit_us, oldest.since_us)
        young = frozenset(
            [
                file.object_id
                async for file in list_files(self._store, opened.directory.join("snapshots/"))
                if not file.is_older(limit_us)
            ]
        )
        remains = await opened.think(
            opened.repo, partial(plan_collection, info, young | sessions.parents)
        )
        await self._read_snapshots(remains.kept)
        await self._read_snapshots(young - remains.kept, unlisted=True)
        await self._read_chunks()
        return _Needed(info, sessions, limit_us, remains, young)

    async def _read_snapshots(self, wanted: Collection[bytes], *, unlisted: bool = False) -> None:
        """Learn which manifests snapshots have."""
        missing = sorted(set(wanted) - self._snapshots)
        for start in range(0, len(missing), _SOME):
            read = partial(self._read_snapshot, unlisted=unlisted)
            await abreast(read, missing[start : start + _SOME])
            self._on_progress(f"{len(self._snapshots)} snapshots read")

    async def _read_snapshot(self, object_id: bytes, *, unlisted: bool) -> None:
        """Learn which manifests a snapshot has; one that is not listed may go meanwhile."""
        decode = StoredSnapshotDecoder(object_id, self._opened.repository.limit_nbytes)
        snapshot = await self._read("snapshots", object_id, decode)
        if snapshot is None and unlisted:
            return
        snapshot = self._required(snapshot, "snapshots", object_id)
        self._manifests.update(snapshot.manifest_files)
        for node in snapshot.nodes.values():
            if node.array is not None:
                self._manifests.update(each.object_id for each in node.array.manifests)
        self._snapshots.add(object_id)

    async def _read_chunks(self) -> None:
        """Learn which chunk files manifests refer to."""
        missing = sorted(self._manifests - self._read_manifests)
        for start in range(0, len(missing), _SOME):
            await abreast(self._read_manifest, missing[start : start + _SOME])
            self._on_progress(f"{len(self._read_manifests)} manifests read")

    async def _read_manifest(self, object_id: bytes) -> None:
        decode = ChunkIdsDecoder(object_id, self._opened.repository.limit_nbytes)
        found = await self._read("manifests", object_id, decode)
        self._chunks.add(self._required(found, "manifests", object_id).ids)
        self._read_manifests.add(object_id)

    async def _read[T: Weighable](
        self, kind: str, object_id: bytes, decode: Callable[[bytes], T]
    ) -> T | None:
        return await self._opened.repository.read(kind, object_id, decode, self._opened.fetch)

    def _required[T](self, found: T | None, kind: str, object_id: bytes) -> T:
        if found is None:
            name = self._opened.repository.file(kind, object_id)
            raise DamagedError(name, "does not exist, and is needed: nothing was removed")
        return found

    async def _sweep_all(self, needed: _Needed, report: GcReport, *, execute: bool) -> None:
        """Look at one folder after the other; where something stays, what it refers to does."""
        remains = needed.remains
        held: dict[str, Held] = {
            "snapshots": _among(remains.kept | needed.young),
            "transactions": _among(remains.logs),
            "manifests": _among(self._manifests),
            "chunks": lambda ids: self._chunks.hold(ids).tolist(),
        }
        for name, each in held.items():
            if any(swept.failed for swept in report.folders.values()):
                report.skipped.append(name)
                continue
            self._on_progress(f"looking through {name}")
            folder = self._opened.directory.join(f"{name}/")
            report.folders[name] = await sweep(
                self._store, folder, limit_us=needed.limit_us, held=each, execute=execute
            )

    async def _remove_session(self, place: Place) -> None:
        await remove_session(self._store, place)


def _drop(seen: RepoInfo, remains: Remains, info: RepoInfo) -> Planned[bool]:
    """Leave out what is not needed of the file that was *seen*, if it is still there."""
    if info.payload != seen.payload:
        return Planned(answer=False)
    return Planned(answer=True, change=remains.change)


def _among(ids: Collection[bytes]) -> Held:
    return lambda wanted: [each in ids for each in wanted]
