"""The file ``repo`` written with more operations ("Updates to the repo info file").

Request ids in the metadata of snapshots make a request that is repeated commit once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardgate.errors import BadBodyError, ClockSkewError, ConflictError
from shardgate.formats.documents import Json
from shardgate.formats.icechunk.config import Config
from shardgate.formats.icechunk.coords import Places
from shardgate.formats.icechunk.flatbuffers import (
    Envelope,
    FileType,
    FlatBufferReader,
    FlatBufferWriter,
    required,
    seal_envelope,
)
from shardgate.formats.icechunk.flexbuffers import decode_flexbuffer
from shardgate.formats.icechunk.ids import OBJECT_ID_NBYTES, decode_id, encode_id
from shardgate.formats.icechunk.keys import MAIN
from shardgate.formats.icechunk.metadata_items import encode_metadata
from shardgate.formats.icechunk.repo_info import (
    NO_PARENT,
    REPO,
    REPO_WITHOUT_LISTS,
    SNAPSHOT,
    UPDATE,
    UPDATES,
    Availability,
    RepoField,
    RepoInfo,
    RepoInfoDecoder,
    SnapshotInfo,
    Status,
    Update,
    Value,
    check_parents,
    checked_us,
    make_update,
    moment,
    newer_update,
    snapshot_row,
    update_row,
)
from shardgate.formats.icechunk.table_copies import (
    MixedTables,
    Rows,
    TableCopier,
    read_rows,
    read_targets,
)
from shardgate.formats.reading import DecodeError

ROOT_ID: Final = bytes.fromhex("0b1cc8d6787580f0e33a6534")
"""Id of the first snapshot of every repository, which has no nodes."""
ROOT_MESSAGE: Final = "Repository initialized"
ROOT_METADATA: Final[Json] = {"__icechunk": {"is_root": True}}
_VERSION: Final = 2
_MOST_AHEAD_US: Final = 10_000_000
"""Difference of clocks that is tolerated: a time that is further ahead would stop other writers."""
_OURS: Final = "__shardgate"
_OF_LIBRARY: Final = "__icechunk"
_WRITE_ID: Final = "write_id"
_FINGERPRINT: Final = "request"
_IDS: Final = f"S{OBJECT_ID_NBYTES}"


class NewSnapshot(NamedTuple):
    """A snapshot on top of a branch or, if it *amends* the tip, in place of that."""

    branch: str
    snapshot: SnapshotInfo
    amends: bool = False


class RefUpdate(NamedTuple):
    """A branch or a tag that is created, reset or deleted; it is not checked again."""

    kind: Literal["branch_created", "branch_reset", "branch_deleted", "tag_created", "tag_deleted"]
    """Kind of the operation in the log of updates."""
    name: str
    snapshot_id: bytes | None = None
    """`None` for a deletion."""


type RepoUpdate = NewSnapshot | RefUpdate


def moment_after(newest_us: int, now_us: int, newest: str) -> int:
    """Return the time, or the first after *newest_us* if the clock is a little behind that; both
    are microseconds since 1970, UTC.

    Raises: `ClockSkewError`, which names *newest*.
    """
    if newest_us > now_us + _MOST_AHEAD_US:
        ahead_s = (newest_us - now_us) // 1_000_000
        raise ClockSkewError(
            f"{newest} was written {ahead_s} s ahead of {moment(now_us)}, the time here: the clock "
            "here is behind, or that of its writer was ahead; later ones must wait for that time"
        )
    return max(now_us, newest_us + 1)


@dataclass(slots=True)
class _Draft:
    """Refs that an operation changes, and new snapshots."""

    branches: dict[str, bytes]
    tags: dict[str, bytes]
    deleted_tags: set[str]
    snapshots: list[SnapshotInfo]

    def apply(self, change: RepoUpdate, at_us: int) -> Update:
        fields: dict[str, Value]
        match change:
            case NewSnapshot(branch, snapshot, amends):
                new, before = snapshot.object_id, self.branches[branch]
                self.branches[branch] = new
                self.snapshots.append(snapshot)
                kind = "commit_amended" if amends else "new_commit"
                fields = {"branch": branch, "new_snap_id": new, "previous_snap_id": before}
                return Update(kind, at_us, None, fields)
            case RefUpdate(kind, name, snapshot_id):
                refs = self.tags if kind.startswith("tag") else self.branches
                fields = {"name": name, "previous_snap_id": refs.pop(name, None)}
                if snapshot_id is not None:
                    refs[name] = snapshot_id
                elif refs is self.tags:
                    self.deleted_tags.add(name)
                return Update(kind, at_us, None, fields)


def rewrite_repo(
    info: RepoInfo, changes: Sequence[RepoUpdate], now_us: int, backup: str
) -> RepoInfo:
    """Make the version that comes after *info*, which is kept in ``overwritten/`` as *backup*.

    Of several *changes*, made in order, only the last is ever the newest in a file: those before it
    have no backup, and readers find them in the file of the next that has one.

    Raises: `DecodeError` if something of a newer specification would be lost, `ClockSkewError`.
    """
    if info.version != _VERSION:
        raise DecodeError(f"the file follows version {info.version}, not {_VERSION}")
    reader = info.reader(is_strict=True)
    row = reader.root(REPO_WITHOUT_LISTS)
    draft = _Draft(_raw(info.branches), _raw(info.tags), set(row[RepoField.DELETED_TAGS]), [])
    config = info.config if isinstance(info.config, Config) else Config()
    older = _UpdateList(reader, row[RepoField.LATEST_UPDATES])
    if not len(older):
        raise DecodeError("it lists no operation")
    newer = [older[0]._replace(backup_path=backup)]
    for change in changes:
        at_us = moment_after(newer[0].updated_at_us, now_us, _named(newer[0]))
        newer.insert(0, draft.apply(change, at_us))
    stop = _overflow(newer, older, config.num_updates_per_repo_info_file)
    if stop < len(newer):
        row[RepoField.REPO_BEFORE_UPDATES] = newer[stop].backup_path
    elif stop < len(newer) + len(older) - 1:
        row[RepoField.REPO_BEFORE_UPDATES] = older[stop - len(newer) + 1].backup_path
    row[RepoField.LATEST_UPDATES] = older.mix(newer[:stop], 1, max(1, stop - len(newer) + 1))
    rows, places = _read_snapshots(reader, row[RepoField.SNAPSHOTS])
    mixed, ids = _mix_snapshots(TableCopier(reader), rows, places, draft.snapshots)
    row[RepoField.SNAPSHOTS] = mixed
    payload = bytes(_write(draft, row, ids))
    return RepoInfoDecoder(info.limit_nbytes).decode(Envelope(_VERSION, payload), len(payload))


def seal_repo(info: RepoInfo) -> bytes:
    """Write the file of *info*."""
    config = info.config if isinstance(info.config, Config) else Config()
    return seal_envelope(FileType.REPO_INFO, info.payload, config.repo_compression_level)


def _read_snapshots(reader: FlatBufferReader, at: int) -> tuple[Rows, Places]:
    """Check the snapshots in the vector at *at*, but for what `TableCopier` checks; return them
    sorted by position, which spares sorting what they lead to, and their places in the vector.
    """
    targets = read_targets(reader, at)
    places = np.argsort(targets, kind="stable")
    rows = read_rows(reader, SNAPSHOT, targets[places])
    if len(rows):
        parents = rows.column(1)
        check_parents(parents.min(), parents.max(), len(rows))
        checked_us(int(rows.column(2).max()))
    return rows, places


def _mix_snapshots(
    copier: TableCopier, rows: Rows, places: Places, new: Sequence[SnapshotInfo]
) -> tuple[MixedTables, NDArray[np.bytes_]]:
    """List old snapshots, which had *places*, and *new* ones, sorted by id; return the ids too."""
    ids = np.empty(len(rows) + len(new), _IDS)
    ids[places] = rows.column(0).view(_IDS)
    ids[len(rows) :] = [each.object_id for each in new]
    order = np.argsort(ids, kind="stable")
    ids = ids[order]
    indexes = np.full(len(order) + 1, NO_PARENT)  # the last one at NO_PARENT
    indexes[order] = np.arange(len(order))
    copies = np.empty(len(rows), np.int64)
    copies[places] = copier.rows(rows, {1: indexes[rows.column(1)]})
    listed = [
        snapshot_row(each, NO_PARENT if each.parent is None else _find_ids(ids, [each.parent])[0])
        for each in new
    ]
    return MixedTables(copier.pieces, copies, listed, order), ids


def _find_ids(ids: NDArray[np.bytes_], wanted: Sequence[bytes]) -> Places:
    """Return the places of *wanted* in sorted *ids*. Raises: `DecodeError` for an absent one."""
    sought = np.array(wanted, _IDS)
    found: Places = np.searchsorted(ids, sought)
    if len(sought) and (not len(ids) or (ids.take(found, mode="clip") != sought).any()):
        raise DecodeError("a snapshot is not listed")
    return found


class _UpdateList:
    """Operations in the payload, newest first, each decoded when it is asked for."""

    def __init__(self, reader: FlatBufferReader, at: int) -> None:
        self._reader = reader
        self._rows = read_rows(reader, UPDATE.lazy, read_targets(reader, at))
        self._has_backup = self._rows.fields[:, 3] > 0

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Update:
        position = int(self._rows.tables[index])
        return make_update(self._reader, *self._reader.table(UPDATE, position))

    def next_backup(self, start: int) -> int:
        """Return the index of the first operation from *start* on that has a backup, or their
        number.
        """
        found = np.flatnonzero(self._has_backup[start:])
        return start + int(found[0]) if len(found) else len(self)

    def mix(self, new: Sequence[Update], start: int, stop: int) -> MixedTables:
        """List *new* operations, then those from *start* up to *stop*."""
        copier, rows = TableCopier(self._reader), self._rows.take(slice(start, stop))
        numbers = rows.column(0)
        if len(rows):
            checked_us(int(rows.column(2).max()))
        copies = np.zeros(len(rows), np.int64)
        for number in np.unique(numbers).tolist():
            if (kind := UPDATES.get(number)) is None:
                raise DecodeError(newer_update(number))
            chosen = np.flatnonzero(numbers == number)
            copies[chosen] = copier.tables(kind, rows.tables[chosen])
        order = np.roll(np.arange(len(copies) + len(new)), len(new))
        return MixedTables(copier.pieces, copies, list(map(update_row, new)), order)


def _overflow(newer: Sequence[Update], older: _UpdateList, most: int) -> int:
    """Return how many updates to keep, of *newer* and all *older* but the first: the backup has the
    others, if there is one.
    """
    for at in range(max(1, most), len(newer)):
        if newer[at].backup_path is not None:
            return at
    return len(newer) + older.next_backup(max(1, 1 + most - len(newer))) - 1


def _named(update: Update) -> str:
    """Return the snapshot that *update* made, or else its kind."""
    match update:
        case Update(fields={"new_snap_id": bytes(object_id)}):
            return f"snapshot {encode_id(object_id)}"
    return f"the last change ({update.kind})"


def create_repo(flushed_at_us: int, at_us: int) -> bytes:
    """Write the file of a new repository; times are microseconds since 1970, UTC."""
    metadata = encode_metadata(ROOT_METADATA)
    first = SnapshotInfo(ROOT_ID, None, flushed_at_us, ROOT_MESSAGE, metadata)
    row: list[object] = [None] * len(RepoField)
    row[RepoField.SPEC_VERSION] = _VERSION
    row[RepoField.STATUS] = Status(Availability.ONLINE, moment(at_us), None)
    update = update_row(Update("repo_initialized", at_us, None, {}))
    row[RepoField.LATEST_UPDATES] = MixedTables.of([update])
    row[RepoField.SNAPSHOTS] = MixedTables.of([snapshot_row(first, NO_PARENT)])
    draft = _Draft({MAIN.name: ROOT_ID}, {}, set(), [])
    return seal_envelope(FileType.REPO_INFO, _write(draft, row, np.array([ROOT_ID])))


def _write(draft: _Draft, row: list[object], ids: NDArray[np.bytes_]) -> bytearray:
    """Write the file with the refs of *draft*; *ids* are those of all snapshots."""
    for slot, refs in (RepoField.TAGS, draft.tags), (RepoField.BRANCHES, draft.branches):
        names = sorted(refs, key=str.encode)
        indexes = _find_ids(ids, [refs[name] for name in names]).tolist()
        row[slot] = list(zip(names, indexes, strict=True))
    row[RepoField.DELETED_TAGS] = sorted(draft.deleted_tags, key=str.encode)
    return FlatBufferWriter().finish(REPO, row)


def _raw(refs: Mapping[str, str]) -> dict[str, bytes]:
    return {name: required(decode_id(text), "id") for name, text in refs.items()}


class WriteId(NamedTuple):
    """Identifier of a request for a commit."""

    text: str
    fingerprint: str = ""
    """Digest of the request, where clients choose the *text*."""


def check_metadata(metadata: Mapping[str, Json]) -> None:
    """Check that clients may use the names. Raises: `BadBodyError`."""
    for name in (_OURS, _OF_LIBRARY):
        if name in metadata:
            raise BadBodyError(f"metadata: the name {name} is reserved")


def marked(metadata: Mapping[str, Json], write_id: WriteId, rebases: int) -> dict[str, Json]:
    """Return *metadata* with the identifier, and the number of rebases as the library writes it."""
    marked_up: dict[str, Json] = dict(metadata)
    if rebases:
        marked_up[_OF_LIBRARY] = {"rebase_attempts": rebases}
    mark: dict[str, Json] = {_WRITE_ID: write_id.text}
    if write_id.fingerprint:
        mark[_FINGERPRINT] = write_id.fingerprint
    marked_up[_OURS] = mark
    return marked_up


def find_write(info: RepoInfo, write_id: WriteId) -> SnapshotInfo | None:
    """Find the snapshot made for *write_id*. Raises: `ConflictError` for another request."""
    needle = write_id.text.encode()
    if needle not in info.payload:
        return None
    for snapshot in info.snapshots():
        marks = [value for name, value in snapshot.metadata.items if name == _OURS]
        mark = decode_flexbuffer(marks[0]) if marks and needle in marks[0] else None
        if isinstance(mark, dict) and mark.get(_WRITE_ID) == write_id.text:
            if mark.get(_FINGERPRINT, "") != write_id.fingerprint:
                raise ConflictError("another commit was made with the same Idempotency-Key")
            return snapshot
    return None
