"""Opened Icechunk repositories: repo info, refs, snapshots, history and operations."""

from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from typing import Any, Final, NamedTuple

from shardgate.concurrency import run_in_thread
from shardgate.errors import (
    BadParameterError,
    DamagedError,
    LockedError,
    OfflineError,
    ReadOnlyError,
    UnknownRefError,
    UnknownRepositoryError,
)
from shardgate.formats.documents import Json
from shardgate.formats.icechunk.flatbuffers import memory_nbytes
from shardgate.formats.icechunk.ids import decode_id, encode_id
from shardgate.formats.icechunk.keys import MAIN, Branch, Tag, parse_ref
from shardgate.formats.icechunk.layout import RepositoryLayout
from shardgate.formats.icechunk.repo_info import (
    Availability,
    RepoInfo,
    RepoInfoDecoder,
    SnapshotInfo,
    Status,
    Value,
    is_backup,
)
from shardgate.formats.icechunk.repository_files import REPO, RepoRefs, Repository
from shardgate.formats.icechunk.snapshot import (
    SnapshotHeaderDecoder,
    StoredSnapshot,
    StoredSnapshotDecoder,
)
from shardgate.formats.icechunk.transaction_log import TransactionLog, TransactionLogDecoder
from shardgate.formats.reading import DecodeError, Fetch, Read
from shardgate.formats.surveying import Listing, RefDescription
from shardgate.model import ByteRange, ETag, Fixed, ObjectRef
from shardgate.read.listing import Root, list_names

_METADATA_NBYTES: Final = 1 << 20
_SEPARATOR: Final = "~"


@dataclass(frozen=True, slots=True)
class OpenedRepository:
    """Repository with the means to read its files."""

    repository: Repository
    fetch: Fetch
    listing: Listing

    @property
    def directory(self) -> ObjectRef:
        return self.repository.directory

    @property
    def repo(self) -> ObjectRef:
        return self.directory.join(REPO)

    async def info(self) -> RepoInfo | None:
        """Read the file ``repo``; return `None` for format version 1, which has no such file."""
        if not isinstance(self.repository.refs, RepoRefs):
            return None
        if (info := await self.repository.refs.info(self.fetch)) is None:
            raise UnknownRepositoryError(f"{self.directory}: the repository no longer exists")
        return info

    async def writable_info(self) -> RepoInfo:
        """Read ``repo``; raise `LockedError` or `ReadOnlyError` if it accepts no writes."""
        try:
            info = await self.info()
        except OfflineError as error:
            raise LockedError(str(error)) from error
        if info is None:
            raise ReadOnlyError(f"{self.directory} follows version 1 of Icechunk's format")
        require_unlocked(info, self.repo)
        return info

    async def decode_in_thread[T](
        self, ref: ObjectRef, call: Callable[[], T], *, is_long: bool = True
    ) -> T:
        """Run *call*, in a thread if *is_long*; raise `DamagedError` of *ref* for `DecodeError`."""
        try:
            return await run_in_thread(call, is_long=is_long)
        except DecodeError as error:
            raise DamagedError(ref, str(error)) from error

    async def find(self, spelled: str) -> str:
        """Return the id of the snapshot that *spelled* refers to; the snapshot may not exist.

        Refs are spelled as in keys: ``@branch.NAME``, ``@tag.NAME``, ``@SNAPSHOTID``. Without
        ``@`` it is the name of a branch or, if no such branch exists, the id of a snapshot. The
        empty string is ``main``.
        """
        await self.info()
        for ref, _ in parse_ref(spelled or MAIN.name):
            if (found := await self.repository.refs.resolve(ref, self.fetch)) is not None:
                return found.snapshot_id
        hint = await self.repository.suggest_ref(spelled, self.fetch)
        raise UnknownRefError(f"there is no {spelled or MAIN.name} in {self.directory}: {hint}")

    async def find_log(self, object_id: bytes) -> TransactionLog | None:
        """Read the transaction log of a snapshot; `None` if it does not exist."""
        decode = TransactionLogDecoder(object_id, self.repository.limit_nbytes)
        return await self.repository.read("transactions", object_id, decode, self.fetch)

    async def read_log(self, object_id: bytes) -> TransactionLog:
        """Read the transaction log of a snapshot. Raises: `DamagedError` if it does not exist."""
        if (log := await self.find_log(object_id)) is None:
            name = self.repository.file("transactions", object_id)
            raise DamagedError(name, "does not exist: the changes of a commit are unknown")
        return log

    async def ancestry(self, snapshot_id: str) -> AsyncGenerator[SnapshotInfo]:
        """Yield a snapshot and its ancestors; raise `UnknownRefError` if it does not exist."""
        info = await self.info()
        listed = self._read_ancestry(snapshot_id)
        if info is not None:
            listed = self._listed_ancestry(info, snapshot_id)
        is_any = False
        async for each in listed:
            is_any = True
            yield each
        if not is_any:
            raise UnknownRefError(f"there is no snapshot {snapshot_id} in {self.directory}")

    async def _listed_ancestry(
        self, info: RepoInfo, snapshot_id: str
    ) -> AsyncGenerator[SnapshotInfo]:
        ancestors = await self.decode_in_thread(self.repo, partial(info.ancestry, snapshot_id))
        if ancestors is None:
            return
        while batch := await self.decode_in_thread(self.repo, lambda: list(islice(ancestors, 64))):
            for each in batch:
                yield each

    async def _read_ancestry(self, snapshot_id: str) -> AsyncGenerator[SnapshotInfo]:
        """Follow the snapshot files of version 1, which are mutable: expiration rewrites them."""
        wanted: str | None = snapshot_id
        visited: set[str] = set()
        while wanted is not None and (object_id := decode_id(wanted)) is not None:
            limit = self.repository.limit_nbytes
            name = self.repository.file("snapshots", object_id)
            decode = SnapshotHeaderDecoder(object_id, limit)
            request = ByteRange(0, limit + 1)
            read = Read("snapshot-header", name, request, decode, memory_nbytes=memory_nbytes)
            found = await self.fetch(read)
            if found is None and visited:
                raise DamagedError(name, "does not exist, and is the parent of a snapshot")
            if found is None:
                return
            yield found.value
            visited.add(wanted)
            if (wanted := found.value.parent_id) in visited:
                raise DamagedError(name, "a snapshot is its own ancestor")


async def open_repository(root: Root, path: str) -> OpenedRepository:
    """Open the repository *path* below *root*. Raises: `UnknownRepositoryError`, `DamagedError`."""
    layout = await root.containers.open(root.ref.join(path), root.fetch)
    if not isinstance(layout, RepositoryLayout):
        place = f"at {path}" if path else "at its root; its path is needed"
        raise UnknownRepositoryError(f"the dataset has no Icechunk repository {place}")
    repository = layout.repository
    listing = partial(list_names, root.store, repository.directory)
    return OpenedRepository(repository, root.fetch, listing)


async def read_snapshot(
    repository: Repository, snapshot_id: str, fetch: Fetch
) -> StoredSnapshot | None:
    """Read a complete snapshot of *repository*; return `None` if it does not exist."""
    if (object_id := decode_id(snapshot_id)) is None:
        return None
    decode = StoredSnapshotDecoder(object_id, repository.limit_nbytes)
    return await repository.read("snapshots", object_id, decode, fetch)


def require_unlocked(info: RepoInfo, ref: ObjectRef) -> None:
    """Check that the status in *info*, read from *ref*, permits writes. Raises: `LockedError`."""
    status = info.status
    if status.availability is not Availability.ONLINE:
        name = status.availability.name.lower().replace("_", "-")
        raise LockedError(f"{ref}: the repository is {name}: {status.reason or 'no reason given'}")


@dataclass(frozen=True, slots=True)
class Ancestor:
    """Snapshot in a history."""

    snapshot_id: str
    parent_id: str | None
    """The previous commit that still exists; none for the first one."""
    message: str
    flushed_at: datetime
    metadata: dict[str, Json]


class ListPage[T](NamedTuple):
    """Part of a list."""

    items: list[T]
    next: str | None
    """Argument *after* of the next part, if there is one."""
    ends_early: str | None = None
    """Reason for which further items cannot be read, if there are some."""


async def read_history(
    opened: OpenedRepository, ref: str, after: str | None, limit: int
) -> ListPage[Ancestor]:
    """Read up to *limit* snapshots that led to *ref*, or ancestors of the snapshot *after*."""
    start = await opened.find(ref)
    infos: list[SnapshotInfo] = []
    nbytes = 0
    async for info in opened.ancestry(after or start):
        if info.snapshot_id == after:
            continue
        if len(infos) == limit or nbytes > _METADATA_NBYTES:
            return ListPage(await _ancestors(opened, infos), infos[-1].snapshot_id)
        infos.append(info)
        nbytes += sum(len(value) for _, value in info.metadata.items)
    return ListPage(await _ancestors(opened, infos), None)


async def _ancestors(opened: OpenedRepository, infos: list[SnapshotInfo]) -> list[Ancestor]:
    def decode(info: SnapshotInfo) -> Ancestor:
        metadata = info.metadata.decode()
        return Ancestor(info.snapshot_id, info.parent_id, info.message, info.flushed_at, metadata)

    return await opened.decode_in_thread(opened.directory, lambda: list(map(decode, infos)))


@dataclass(frozen=True, slots=True)
class NamedRef:
    """Branch or tag, and its snapshot."""

    name: str
    snapshot_id: str


async def read_refs(
    opened: OpenedRepository, kind: type[Branch | Tag], after: str | None, limit: int
) -> ListPage[NamedRef]:
    """Read up to *limit* of the branches, or tags, behind the name *after*; and the next name."""
    await opened.info()
    refs = await opened.repository.refs.named(kind, opened.fetch, opened.listing)
    # The listing has no order; there are few refs.
    names = sorted(name for name in refs if after is None or name > after)
    page = [NamedRef(name, refs[name]) for name in names[:limit]]
    return ListPage(page, names[limit - 1] if len(names) > limit else None)


@dataclass(frozen=True, slots=True)
class RefTip:
    """Branch or tag, and its newest commit."""

    ref: str
    """As in keys: ``@tag.v1``."""
    snapshot_id: str
    message: str
    flushed_at: datetime | None


async def read_tips(opened: OpenedRepository, states: Iterable[RefDescription]) -> list[RefTip]:
    """Read the commit of each of *states*."""
    tips = []
    for state in states:
        tip = RefTip(state.ref, state.snapshot_id, "", None)
        with suppress(UnknownRefError):
            async with aclosing(opened.ancestry(state.snapshot_id)) as ancestors:
                newest = await anext(ancestors)
            tip = replace(tip, message=newest.message, flushed_at=newest.flushed_at)
        tips.append(tip)
    return tips


@dataclass(frozen=True, slots=True)
class Operation:
    """Operation on a repository."""

    kind: str
    """Name in the specification: `new_commit`, `tag_created`, `branch_reset`."""
    updated_at: datetime
    backup: str | None
    """File in `overwritten/` with the state after it; none for the last operation, for those before
    a migration, and for commits that became visible together with a later one."""
    fields: dict[str, Any]
    """Fields of this kind of operation, by their names in the specification."""


class _Position(NamedTuple):
    name: str | None
    before: datetime | None


async def read_operations(
    opened: OpenedRepository, after: str | None, limit: int
) -> ListPage[Operation]:
    """Read up to *limit* operations before *after*; format version 1 has no log of them."""
    place = _parse_position(after)
    newer = None
    operations: list[Operation] = []
    # Each file takes a request: a page may end before *limit* operations are found.
    for _ in range(100):
        ref = opened.repo
        info = await opened.info()
        if info is None:
            raise UnknownRepositoryError(
                f"{opened.directory} follows version 1 of the format, which has no log of "
                "operations"
            )
        if place.name is not None:
            ref = opened.directory.join(f"overwritten/{place.name}")
            info = await _read_backup(opened, place.name, ref)
        if info is None:
            return ListPage(operations, None, f"{ref} does not exist")
        room = limit - len(operations)
        found, newer = await opened.decode_in_thread(
            ref, partial(_decode, info, place, newer, room)
        )
        operations += found[:room]
        last = operations[-1].updated_at if operations else place.before
        if len(found) > room:
            return ListPage(operations, _spell_position(_Position(place.name, last)))
        if info.repo_before_updates is None:
            return ListPage(operations, None)
        place = _Position(info.repo_before_updates, last)
    return ListPage(operations, _spell_position(place))


def _decode(
    info: RepoInfo, place: _Position, newer: datetime | None, limit: int
) -> tuple[list[Operation], datetime | None]:
    """Return the operations of a file, one more than *limit* if there are more, and the time of the
    oldest; raise `DecodeError` unless older than *newer*.
    """
    operations: list[Operation] = []
    for number, update in enumerate(info.updates()):
        if newer is not None and update.updated_at >= newer:
            raise DecodeError(f"the operation of {newer} came after that of {update.updated_at}")
        newer = update.updated_at
        if place.before is not None and update.updated_at >= place.before:
            continue
        fields = {key: _field(value) for key, value in update.fields.items()}
        backup = update.backup_path if number else place.name
        operations.append(Operation(update.kind, update.updated_at, backup, fields))
        if len(operations) > limit:
            break
    return operations, newer


def _field(value: Value) -> object:
    if isinstance(value, Status):
        return {
            "availability": value.availability.name.lower(),
            "set_at": value.set_at,
            "limited_availability_reason": value.reason,
        }
    return encode_id(value) if isinstance(value, bytes) else value


async def _read_backup(opened: OpenedRepository, name: str, ref: ObjectRef) -> RepoInfo | None:
    limit = opened.repository.limit_nbytes
    version = Fixed(ETag(f'"{name}"'))
    request = ByteRange(0, limit + 1)
    read = Read("repo-backup", ref, request, RepoInfoDecoder(limit), version, memory_nbytes)
    found = await opened.fetch(read)
    return None if found is None else found.value


def _spell_position(place: _Position) -> str:
    before = "" if place.before is None else f"{place.before:%Y-%m-%dT%H:%M:%S.%fZ}"
    return before if place.name is None else f"{before}{_SEPARATOR}{place.name}"


def _parse_position(after: str | None) -> _Position:
    if after is None:
        return _Position(None, None)
    text, separator, name = after.partition(_SEPARATOR)
    if separator and not is_backup(name):
        raise BadParameterError("after: no page of operations ended with it")
    try:
        before = datetime.fromisoformat(text) if text else None
        if before is not None:
            before = before.replace(tzinfo=before.tzinfo or UTC).astimezone(UTC)
    except (ValueError, OverflowError):
        raise BadParameterError("after: it begins with no time") from None
    return _Position(name if separator else None, before)
