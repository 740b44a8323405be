"""Creation of repositories, and changes of their refs by compare-and-swap of ``repo``.

``repo`` is the only mutable file. A plan maps its current content to a change. The old file is kept
in ``overwritten/`` first. After a lost race the plan is made again. A repository is created in an
empty place, as the specification says under "Initialize New Repository".
"""

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import Final, Literal, NamedTuple
from weakref import WeakValueDictionary

from shardgate.auditing import note
from shardgate.concurrency import Backoff, retry_conflicts
from shardgate.errors import (
    BadBodyError,
    ClockSkewError,
    ConflictError,
    DamagedError,
    PreconditionFailedError,
    ReadOnlyError,
    UnknownRefError,
    UnknownRepositoryError,
)
from shardgate.formats.documents import Marked
from shardgate.formats.icechunk.flatbuffers import decoded_nbytes, fits, memory_nbytes
from shardgate.formats.icechunk.ids import decode_id, encode_id
from shardgate.formats.icechunk.keys import MAIN
from shardgate.formats.icechunk.layout import Icechunk
from shardgate.formats.icechunk.metadata_items import encode_metadata
from shardgate.formats.icechunk.repo_info import RepoInfo, RepoInfoDecoder
from shardgate.formats.icechunk.repo_writer import (
    ROOT_ID,
    ROOT_MESSAGE,
    ROOT_METADATA,
    FieldUpdate,
    RefUpdate,
    RepoUpdate,
    create_repo,
    rewrite_repo,
    seal_repo,
)
from shardgate.formats.icechunk.repository_files import REPO, RepoRefs
from shardgate.formats.icechunk.snapshot import (
    SnapshotHeaderDecoder,
    StoredSnapshot,
    write_snapshot,
)
from shardgate.formats.icechunk.transaction_log import TransactionLog, write_transaction_log
from shardgate.formats.reading import DecodeError, Versioned
from shardgate.icechunk.chunk_files import new_object_id
from shardgate.icechunk.repository import NamedRef, OpenedRepository, require_unlocked
from shardgate.model import ByteRange, ETag, ObjectRef
from shardgate.read.bodies import Demand
from shardgate.read.containers import Dataset
from shardgate.read.metadata_cache import ReadCache
from shardgate.storage.contract import ABSENT, CONFLICT, Conflict, Found, ObjectStore

_BACKOFF: Final = Backoff(first_s=0.05, longest_s=2.0, at_once=5)
SKEW_S: Final = 600
"""Largest difference of clocks; the library has the same limit."""
_SNAPSHOT: Final = f"snapshots/{encode_id(ROOT_ID)}"
_TRANSACTION_LOG: Final = f"transactions/{encode_id(ROOT_ID)}"
_NO_CHANGES: Final = TransactionLog(*6 * (frozenset(),), updated_chunks={})
_MAX_NAME_NBYTES: Final = 255
_UNREACHABLE: Final = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]|^\.{0,2}$")


class Planned[T](NamedTuple):
    """Decision of a plan."""

    answer: T
    """Result of `RepoSwaps.update`, once the changes are made."""
    changes: Sequence[RepoUpdate] = ()


@dataclass(slots=True, eq=False, weakref_slot=True)
class RepoFile:
    """One version of the file ``repo``, the same for all callers that have read it."""

    found: Found
    info: RepoInfo
    backup: str
    """Name of its copy in ``overwritten/``."""
    has_backup: bool = False
    """True once that copy is written."""


class Swapped[T](NamedTuple):
    """Outcome of a plan."""

    answer: T
    data: bytes = b""
    info: RepoInfo | None = None
    """What *data*, the new file, decodes to; `None` without a change."""
    file: RepoFile | None = None
    """The new file, once it is written."""


class _ClockCheck(NamedTuple):
    """Comparison of the clock here with that of a store."""

    until_s: float
    """When it is repeated, by the steady clock."""
    offset_s: float
    """Difference of the clock here and the steady clock."""


@dataclass(frozen=True, slots=True)
class RepoSwaps:
    """Changes ``repo``, one change of a repository at a time; readers here see it at once."""

    store: ObjectStore
    reads: ReadCache
    clock: Callable[[], float] = time.time
    backoff: Backoff = _BACKOFF
    _turns: WeakValueDictionary[ObjectRef, asyncio.Lock] = field(
        default_factory=WeakValueDictionary, init=False
    )
    _files: WeakValueDictionary[ObjectRef, RepoFile] = field(
        default_factory=WeakValueDictionary, init=False
    )
    """Last versions read, while a caller has them."""
    _clock_checks: dict[str, _ClockCheck] = field(default_factory=dict, init=False)
    """By bucket."""

    def now_us(self) -> int:
        return int(self.clock() * 1_000_000)

    async def look_up[T](
        self, opened: OpenedRepository, look: Callable[[RepoFile], T], file: RepoFile | None = None
    ) -> T:
        """Return what *look* finds in *file*, or in the current file, also while a change is made.

        Raises: its errors, and those of `read`.
        """
        file = file or await self.read(opened)
        look_up = partial(look, file)
        return await opened.decode_in_thread(opened.repo, look_up, is_long=file.info.is_long)

    async def read(self, opened: OpenedRepository) -> RepoFile:
        """Read the current file.

        Raises: `ReadOnlyError` for version 1 of the format, `UnknownRepositoryError`,
        `DamagedError`, `BusyError`, `StorageError`.
        """
        if not isinstance(opened.repository.refs, RepoRefs):
            raise ReadOnlyError(f"{opened.directory} follows version 1 of Icechunk's format")
        ref = opened.repo
        limit = opened.repository.limit_nbytes
        read = RepoRefs(opened.directory, limit).read
        requested_at = self.reads.clock()
        found = await self.store.get(ref, read.request)
        if not isinstance(found, Found):
            self.reads.forget(ref)
            raise UnknownRepositoryError(f"there is no repository any more at {opened.directory}")
        # The store is always asked; what is cached only spares decoding.
        known = self.reads.decoded(read, found.etag)
        if known is None or (info := known.spec) is None:
            self.reads.forget(ref)
            weigh = partial(memory_nbytes, found.data, limit)
            nbytes = await opened.decode_in_thread(ref, weigh)
            async with self.reads.cache.decoding.room(nbytes):
                decode = partial(RepoInfoDecoder(limit), found.data)
                info = await opened.decode_in_thread(ref, decode)
            version = Versioned(Marked(info), found.etag, found.size, found.modified_s)
            self.reads.put(read, version, requested_at)
        file = self._files.get(ref)
        if file is None or file.found.etag != found.etag:
            file = self._files[ref] = RepoFile(found, info, self._name_backup())
        return file

    def _name_backup(self) -> str:
        # Counts down to the year 3000, so that newer names sort before older ones.
        number = max(0, 32_503_680_000_000 - self.now_us() // 1000)
        return f"repo.{number:014d}.{encode_id(new_object_id())}"

    async def update[T](
        self,
        opened: OpenedRepository,
        plan: Callable[[RepoFile], Planned[T]],
        file: RepoFile | None = None,
    ) -> Swapped[T]:
        """Make the changes that *plan* decides on for the current file, and return the outcome.

        *plan* runs in a worker thread, again for each file that another writer has put there in
        between; first for *file*, if that was read a moment ago. Its exceptions are passed on.

        Raises: the errors of `read`, `LockedError`, `ClockSkewError`, `ConflictError` if the file
        would get too large, `UnwritableError`; after a `StorageError` the change may have been
        made.
        """

        async def attempt() -> Swapped[T] | Conflict:
            nonlocal file
            current = file
            file = None
            if current is None or not self._is_newest(opened, current):
                current = await self.read(opened)
            return await self._swap(opened, plan, current)

        # Callers in this process take turns, in place of losing the race against each other.
        async with self._turns.setdefault(opened.repo, asyncio.Lock()):
            return await retry_conflicts(attempt, Conflict, opened.repo, backoff=self.backoff)

    def _is_newest(self, opened: OpenedRepository, file: RepoFile) -> bool:
        """Return whether no other version is known in this process."""
        read = RepoRefs(opened.directory, opened.repository.limit_nbytes).read
        return self.reads.decoded(read, file.found.etag) is not None

    async def _swap[T](
        self, opened: OpenedRepository, plan: Callable[[RepoFile], Planned[T]], file: RepoFile
    ) -> Swapped[T] | Conflict:
        ref = opened.repo
        limit = opened.repository.limit_nbytes
        payload_nbytes = len(file.info.payload)
        # The file before and the one after are in memory at the same time.
        weight = 2 * (payload_nbytes + decoded_nbytes(payload_nbytes, limit))
        async with self.reads.cache.decoding.room(weight):
            prepare = partial(self._prepare, ref, limit, file, plan)
            prepared = await opened.decode_in_thread(ref, prepare, is_long=file.info.is_long)
        if prepared.info is None:
            return prepared
        await self.write_backup(opened, file)
        try:
            swapped = await self.store.put(ref, [prepared.data], expected=file.found.etag)
        finally:
            self.reads.forget(ref)
        if isinstance(swapped, Conflict):
            return CONFLICT
        # Readers ask the store for the time of the new file; the next change decodes nothing.
        read = RepoRefs(opened.directory, limit).read
        nbytes = len(prepared.data)
        self.reads.put_written(read, Versioned(Marked(prepared.info), swapped, nbytes))
        found = Found(prepared.data, ByteRange(0, nbytes), nbytes, swapped)
        written = self._files[ref] = RepoFile(found, prepared.info, self._name_backup())
        return prepared._replace(file=written)

    def _prepare[T](
        self, ref: ObjectRef, limit: int, file: RepoFile, plan: Callable[[RepoFile], Planned[T]]
    ) -> Swapped[T]:
        answer, changes = plan(file)
        if not changes:
            return Swapped(answer)
        # The status of a repository that is read-only can be set again.
        if not all(isinstance(each, FieldUpdate) and each.is_status for each in changes):
            require_unlocked(file.info, ref)
        info = rewrite_repo(file.info, changes, self.now_us(), file.backup)
        data = seal_repo(info)
        demand_readable(ref, data, limit)
        return Swapped(answer, data, info)

    async def write_backup(self, opened: OpenedRepository, file: RepoFile) -> None:
        """Write the copy of *file* in ``overwritten/``, unless that is done, and compare clocks.

        Raises: `ClockSkewError`, `UnwritableError`, `StorageError`.
        """
        if file.has_backup:
            return
        backup = opened.directory.join(f"overwritten/{file.backup}")
        began_s = self.clock()
        # A conflict is the same copy, written by another caller with this file.
        await self.store.put(backup, [file.found.data], expected=ABSENT)
        await self.compare_clocks(backup, began_s)
        file.has_backup = True

    async def compare_clocks(self, written: ObjectRef, began_s: float) -> None:
        """Call `demand_clock`, unless the clocks agreed some minutes ago and none was set here.

        Raises: `ClockSkewError`, `StorageError`.
        """
        steady_s = self.reads.clock()
        offset_s = self.clock() - steady_s
        last = self._clock_checks.get(written.bucket)
        # A clock that moves by more than a second against the steady one was set by somebody.
        if last is None or steady_s >= last.until_s or abs(offset_s - last.offset_s) > 1.0:
            await demand_clock(self.store, written, began_s)
            self._clock_checks[written.bucket] = _ClockCheck(steady_s + SKEW_S, offset_s)


def demand_readable(name: ObjectRef, data: bytes, limit_nbytes: int) -> None:
    """Check that the new file *data* can be read within *limit_nbytes*. Raises: `ConflictError`."""
    if not fits(data, limit_nbytes):
        raise ConflictError(
            f"{name} would exceed {limit_nbytes} bytes, and could not be read again: "
            "limits.repository_file_bytes"
        )


async def demand_clock(store: ObjectStore, written: ObjectRef, now_s: float) -> None:
    """Check that *written*, an object whose PUT began at *now_s*, has about that time."""
    stat = await store.stat(written)
    if stat is None or stat.modified_s is None:
        return
    skew_s = stat.modified_s - int(now_s)
    if abs(skew_s) > SKEW_S:
        side = "ahead of" if skew_s < 0 else "behind"
        raise ClockSkewError(
            f"{written}: the clock of this machine is {abs(skew_s)} s {side} that of the store; "
            f"times that are written may differ from it by {SKEW_S} s"
        )


async def create_repository(swaps: RepoSwaps, dataset: Dataset) -> str:
    """Create a repository at the root of *dataset*, and return the id of its first snapshot.

    Of several callers one succeeds. An attempt that stopped halfway can be completed by another.

    Raises: `ConflictError` where the root is not empty, or another caller was faster;
    `ClockSkewError`, `UnwritableError`, `StorageError`.
    """
    if not any(isinstance(each, Icechunk) for each in dataset.containers.formats):
        raise ConflictError(f"{dataset.name} is configured as {dataset.format}: not of Icechunk")
    root = dataset.root
    store = swaps.store
    began_s = swaps.clock()
    await store.verify_conditional_writes(root)
    await _check_empty(swaps, root)
    now_us = swaps.now_us()
    log = write_transaction_log(ROOT_ID, _NO_CHANGES)
    # The log and the snapshot first: ``repo``, which makes it a repository, must not lead nowhere.
    if await store.put(root.join(_TRANSACTION_LOG), [log], expected=ABSENT) is not CONFLICT:
        await demand_clock(store, root.join(_TRANSACTION_LOG), began_s)
    metadata = encode_metadata(ROOT_METADATA)
    first = StoredSnapshot(ROOT_ID, {}, {}, now_us, ROOT_MESSAGE, metadata)
    snapshot = write_snapshot(first)
    if await store.put(root.join(_SNAPSHOT), [snapshot], expected=ABSENT) is CONFLICT:
        # An attempt that stopped halfway has written it: the time in ``repo`` must be the same.
        now_us = await _read_flushed_at_us(swaps, root.join(_SNAPSHOT))
    try:
        data = create_repo(now_us, max(now_us, swaps.now_us()))
        done = await store.put(root.join(REPO), [data], expected=ABSENT)
    finally:
        swaps.reads.forget(root.join(REPO))
    if done is CONFLICT:
        raise ConflictError(f"another request has created a repository at {root}")
    return encode_id(ROOT_ID)


async def _check_empty(swaps: RepoSwaps, root: ObjectRef) -> None:
    """Return if *root* is empty, but for an unfinished attempt and empty folder objects."""
    async for listed in swaps.store.list(root.prefix):
        name = listed.ref.key.removeprefix(root.prefix.key)
        if name == REPO:
            raise ConflictError(f"there is a repository at {root} already")
        is_marker = name.endswith("/") or not name
        if not (is_marker and not listed.size) and name not in (_SNAPSHOT, _TRANSACTION_LOG):
            raise ConflictError(f"{root} is not empty: there is {name}")


async def _read_flushed_at_us(swaps: RepoSwaps, ref: ObjectRef) -> int:
    found = await swaps.store.get(ref)
    if not isinstance(found, Found):
        raise ConflictError(f"{ref} was deleted during the creation of a repository")
    try:
        header = SnapshotHeaderDecoder(ROOT_ID, limit_nbytes=64 * 1024)(found.data)
    except DecodeError as error:
        raise DamagedError(ref, str(error)) from error
    return header.flushed_at_us


class Feature(IntEnum):
    """Operations that the owner of a repository can forbid, by number in the specification."""

    MOVE_NODE = 3
    CREATE_TAG = 4
    DELETE_TAG = 5


@dataclass(frozen=True, slots=True)
class RefUpdates:
    """Updates branches and tags of one repository."""

    swaps: RepoSwaps
    opened: OpenedRepository

    async def create(self, kind: Literal["branch", "tag"], name: str, snapshot_id: str) -> NamedRef:
        """Create a branch or tag; raise `ConflictError` if there is, or was, one of that name."""

        def check(info: RepoInfo) -> None:
            if kind == "tag":
                check_feature(info, Feature.CREATE_TAG)
            refs = info.tags if kind == "tag" else info.branches
            if name in refs:
                raise ConflictError(f"there is a {kind} {name!r} already")
            if kind == "tag" and name in info.deleted_tags():
                raise ConflictError(f"there was a tag {name!r}: its name cannot be used again")

        _check_name(name)
        return await self._set(
            "tag_created" if kind == "tag" else "branch_created", name, snapshot_id, check
        )

    async def reset_branch(self, name: str, snapshot_id: str, demand: Demand) -> NamedRef:
        """Move a branch that meets *demand* to another snapshot."""
        check = partial(_check_tip, name, demand)
        return await self._set("branch_reset", name, snapshot_id, check)

    async def delete_branch(self, name: str, demand: Demand | None) -> None:
        """Delete a branch other than ``main``; its snapshots stay."""

        def plan(file: RepoFile) -> Planned[None]:
            _check_tip(name, demand, file.info)
            return Planned(None, [RefUpdate("branch_deleted", name)])

        if name == MAIN.name:
            raise ConflictError(f"the branch {name} can be reset, but not be deleted")
        await self.swaps.update(self.opened, plan)

    async def delete_tag(self, name: str) -> None:
        """Delete a tag, whose name cannot be used again; raise `ConflictError` if forbidden."""

        def plan(file: RepoFile) -> Planned[None]:
            check_feature(file.info, Feature.DELETE_TAG)
            if (snapshot_id := file.info.tags.get(name)) is None:
                raise UnknownRefError(f"there is no tag {name!r}")
            note(before=snapshot_id)
            return Planned(None, [RefUpdate("tag_deleted", name)])

        await self.swaps.update(self.opened, plan)

    async def _set(
        self,
        kind: Literal["branch_created", "branch_reset", "tag_created"],
        name: str,
        snapshot_id: str,
        check: Callable[[RepoInfo], None],
    ) -> NamedRef:
        if (object_id := decode_id(snapshot_id)) is None:
            raise BadBodyError(f"{snapshot_id[:40]!r} is no id of a snapshot")

        def plan(file: RepoFile) -> Planned[NamedRef]:
            check(file.info)
            if file.info.snapshot(snapshot_id) is None:
                raise UnknownRefError(f"there is no snapshot {snapshot_id}")
            return Planned(NamedRef(name, snapshot_id), [RefUpdate(kind, name, object_id)])

        return (await self.swaps.update(self.opened, plan)).answer


def _check_name(name: str) -> None:
    """Raise `BadBodyError` for names that no URL can contain, though the library admits them."""
    if _UNREACHABLE.search(name):
        raise BadBodyError(f"no ref is called {name!r}: no URL would lead to it")
    if len(name.encode()) > _MAX_NAME_NBYTES:
        raise BadBodyError(f"the name of a ref has more than {_MAX_NAME_NBYTES} bytes")


def check_feature(info: RepoInfo, feature: Feature) -> None:
    """Check that the repository in *info* permits *feature*. Raises: `ConflictError`."""
    if feature in info.disabled_feature_flags():
        name = feature.name.lower()
        raise ConflictError(f"the repository forbids it: the feature flag {name} is off")


def _check_tip(name: str, demand: Demand | None, info: RepoInfo) -> None:
    if (current := info.branches.get(name)) is None:
        raise UnknownRefError(f"there is no branch {name!r}")
    note(before=current)
    if demand is not None and demand((ETag(f'"{current}"'),)) is not None:
        raise PreconditionFailedError(f"the branch {name!r} is at {current}")
