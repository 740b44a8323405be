"""The file ``repo`` written with more operations ("Updates to the repo info file").

Request ids in the metadata of snapshots make a request that is repeated commit once.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from struct import Struct
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardgate.errors import BadBodyError, ClockSkewError, ConflictError
from shardgate.formats.documents import Json
from shardgate.formats.icechunk.chunk_tables import Rows, read_rows, read_targets
from shardgate.formats.icechunk.config import Config
from shardgate.formats.icechunk.coords import Places
from shardgate.formats.icechunk.flatbuffers import (
    I32,
    U32,
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
from shardgate.formats.icechunk.metadata_items import ITEM, encode_metadata
from shardgate.formats.icechunk.repo_info import (
    BODIES,
    NO_PARENT,
    REPO,
    REPO_LISTS,
    REPO_WITHOUT_LISTS,
    SNAPSHOT,
    UPDATE,
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
    snapshot_row,
    update_row,
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
_FORMS: Final = (
    (SNAPSHOT, (True, True, True, True, True, False)),
    (SNAPSHOT, (True, True, True, True, True, True)),
    (ITEM, (True, True)),
    (UPDATE, (True, True, True, False)),
    (UPDATE, (True, True, True, True)),
    *((body, (True,) * len(body.fields)) for body in BODIES.values()),
)
"""Types of tables, and which of their fields are present, that nearly all tables have.

Others are appended only: a file that begins with another list counts as that of another writer.
"""
_BLOCK_END: Final = Struct("<II")
"""Last bytes of the block and of the file: where the block begins, and how many bytes of it may be
operations that have left the list."""


class NewSnapshot(NamedTuple):
    """A snapshot on top of a branch or, if it *amends* the tip, in place of that."""

    branch: str | None
    """`None` for a detached snapshot, which no branch leads to."""
    snapshot: SnapshotInfo
    amends: bool = False


class RefUpdate(NamedTuple):
    """A branch or a tag that is created, reset or deleted; it is not checked again."""

    kind: Literal["branch_created", "branch_reset", "branch_deleted", "tag_created", "tag_deleted"]
    """Kind of the operation in the log of updates."""
    name: str
    snapshot_id: bytes | None = None
    """`None` for a deletion."""


class FieldUpdate(NamedTuple):
    """Fields of ``repo`` that are replaced: its status, metadata, flags or configuration."""

    kind: Literal[
        "repo_status_changed", "metadata_changed", "feature_flag_changed", "config_changed"
    ]
    """Kind of the operation in the log of updates."""
    replaced: Mapping[RepoField, object]
    fields: Mapping[str, Value]
    """Fields of the operation."""

    @property
    def is_status(self) -> bool:
        return self.kind == "repo_status_changed"


type RepoUpdate = NewSnapshot | RefUpdate | FieldUpdate


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
    """Refs and fields that operations change, and new snapshots."""

    branches: dict[str, bytes]
    tags: dict[str, bytes]
    deleted_tags: set[str]
    snapshots: list[SnapshotInfo]
    replaced: dict[RepoField, object] = field(default_factory=dict)

    def apply(self, change: RepoUpdate, at_us: int) -> Update:
        fields: dict[str, Value]
        match change:
            case NewSnapshot(branch, snapshot, amends):
                new = snapshot.object_id
                self.snapshots.append(snapshot)
                if branch is None:
                    return Update("new_detached_snapshot", at_us, None, {"new_snap_id": new})
                before = self.branches[branch]
                self.branches[branch] = new
                kind = "commit_amended" if amends else "new_commit"
                fields = {"branch": branch, "new_snap_id": new, "previous_snap_id": before}
                return Update(kind, at_us, None, fields)
            case FieldUpdate(kind, replaced, recorded):
                self.replaced |= replaced
                return Update(kind, at_us, None, recorded)
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
        # Newest first, as the file lists them.
        newer.insert(0, draft.apply(change, at_us))
    for slot, value in draft.replaced.items():
        row[slot] = value
    stop = _overflow(newer, older, config.num_updates_per_repo_info_file)
    # The last of *newer* is the first of *older*, so that the two overlap by one.
    if stop < len(newer):
        row[RepoField.REPO_BEFORE_UPDATES] = newer[stop].backup_path
    elif stop < len(newer) + len(older) - 1:
        row[RepoField.REPO_BEFORE_UPDATES] = older[stop - len(newer) + 1].backup_path
    snapshots_at = row[RepoField.SNAPSHOTS]

    def write(block: _TableBlock) -> bytes:
        lists = info.reader(is_strict=True)
        positions, ids = _list_snapshots(lists, snapshots_at, block, draft.snapshots)
        row[RepoField.SNAPSHOTS] = positions
        kept = older.write(block, 1, max(1, stop - len(newer) + 1))
        row[RepoField.LATEST_UPDATES] = np.concatenate((block.add_updates(newer[:stop]), kept))
        return _write(draft, row, ids, block)

    block = _TableBlock(info.payload)
    try:
        payload = write(block)
    except DecodeError:
        if not block.is_new:
            raise
        # Tables that are too many to decode at once, or of a newer specification, can be repeated.
        payload = write(_TableBlock(info.payload, repeats=True))
    return RepoInfoDecoder(info.limit_nbytes).decode(Envelope(_VERSION, payload), len(payload))


def seal_repo(info: RepoInfo) -> bytes:
    """Write the file of *info*."""
    config = info.config if isinstance(info.config, Config) else Config()
    return seal_envelope(FileType.REPO_INFO, info.payload, config.repo_compression_level)


class _TableBlock:
    """Tables of snapshots and operations, which the next version of the file repeats and extends.

    It begins with vtables, the same in all files. A file of another writer is repeated as a whole.
    """

    def __init__(self, payload: bytes, *, repeats: bool = False) -> None:
        self.writer = FlatBufferWriter()
        for kind, present in _FORMS:
            self.writer.lay_out(kind, present)
        vtables = bytes(self.writer.data)
        start, stale_nbytes = _BLOCK_END.unpack(payload[-_BLOCK_END.size :])
        if payload[start : start + len(vtables)] == vtables:
            self.writer.data = bytearray(payload[start:])
            self.stale_nbytes = stale_nbytes + _BLOCK_END.size
            self._shift = -start
        else:
            self._shift = self.writer.pad()
            self.writer.data += payload
            self.stale_nbytes = 0
        # Each operation stays after it has left the list; all is written anew before such waste
        # takes much of the file, but not so often that this would take much of the time.
        most_stale_nbytes = len(self.writer.data) // 4 + 64 * 1024
        self.is_new = self.stale_nbytes > most_stale_nbytes and not repeats
        """True if nothing is repeated."""
        if self.is_new:
            self.writer.data = bytearray(vtables)
            self.stale_nbytes = 0

    def repeat(self, places: Places) -> Places:
        """Return the positions in the block for *places* in the file before."""
        positions: Places = places + self._shift
        if (positions < 0).any():
            raise DecodeError("damaged FlatBuffer: a table lies outside of its block")
        return positions

    def patch(self, places: Places, values: NDArray[np.int32]) -> None:
        """Replace numbers at *places* in the file before, which need not be aligned."""
        data = self.writer.data
        numbers = np.ndarray((len(data) - I32.size + 1,), "<i4", data, strides=(1,))
        numbers[self.repeat(places)] = values

    def add_updates(self, updates: Iterable[Update]) -> Places:
        """Write *updates*, and return their positions in the block."""
        before = len(self.writer.data)
        positions = [self.writer.table(UPDATE, update_row(each)) for each in updates]
        if not self.is_new:
            self.stale_nbytes += len(self.writer.data) - before
        return np.array(positions, np.int64)


def _list_snapshots(
    reader: FlatBufferReader, at: int, block: _TableBlock, new: Sequence[SnapshotInfo]
) -> tuple[Places, NDArray[np.bytes_]]:
    """List the snapshots in the vector at *at*, and *new* ones, sorted by id; return their
    positions in *block*, and the ids. Of old ones the tables are checked, not what they lead to.
    """
    rows = read_rows(reader, SNAPSHOT, read_targets(reader, at))
    old_parents = rows.column(1)
    if len(rows):
        check_parents(old_parents.min(), old_parents.max(), len(rows))
        checked_us(int(rows.column(2).max()))
    new_ids = np.array([each.object_id for each in new], _IDS)
    ids = np.concatenate((rows.column(0).view(_IDS), new_ids))
    order = np.argsort(ids, kind="stable")
    ids = ids[order]
    indexes = np.full(len(order) + 1, NO_PARENT)  # the last one at NO_PARENT
    indexes[order] = np.arange(len(order))
    old = _move_snapshots(reader, block, rows, indexes[old_parents].astype("<i4"))
    added = []
    for each in new:
        parent = NO_PARENT if each.parent is None else int(_find_ids(ids, [each.parent])[0])
        added.append(block.writer.table(SNAPSHOT, snapshot_row(each, parent)))
    return np.concatenate((old, np.array(added, np.int64)))[order], ids


def _move_snapshots(
    reader: FlatBufferReader, block: _TableBlock, rows: Rows, parents: NDArray[np.int32]
) -> Places:
    """Return the positions in *block* of old snapshots, whose *parents* have other indexes now."""
    if block.is_new:
        positions = np.zeros(len(rows), np.int64)
        rewritten = np.arange(len(rows))
    else:
        positions = block.repeat(rows.tables)
        has_field = rows.fields[:, 1] > 0
        block.patch(rows.fields[has_field, 1], parents[has_field])
        # The library leaves out the field for 0, which can be another number now.
        rewritten = np.flatnonzero(~has_field & (parents != 0))
    for place in rewritten.tolist():
        row = reader.table(SNAPSHOT, int(rows.tables[place]))
        row[1] = int(parents[place])
        positions[place] = block.writer.table(SNAPSHOT, row)
    return positions


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

    def write(self, block: _TableBlock, start: int, stop: int) -> Places:
        """Return the positions in *block* of those from *start* up to *stop*."""
        if not block.is_new:
            return block.repeat(self._rows.tables[start:stop])
        return block.add_updates(self[index] for index in range(start, min(stop, len(self))))


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
    block = _TableBlock(bytes(_BLOCK_END.size))  # of a file without tables
    row[RepoField.LATEST_UPDATES] = block.add_updates([Update("repo_initialized", at_us, None, {})])
    root = block.writer.table(SNAPSHOT, snapshot_row(first, NO_PARENT))
    row[RepoField.SNAPSHOTS] = np.array([root])
    draft = _Draft({MAIN.name: ROOT_ID}, {}, set(), [])
    return seal_envelope(FileType.REPO_INFO, _write(draft, row, np.array([ROOT_ID]), block))


def _write(draft: _Draft, row: list[object], ids: NDArray[np.bytes_], block: _TableBlock) -> bytes:
    """Write the file with the refs of *draft*; *ids* are those of all snapshots."""
    for slot, refs in (RepoField.TAGS, draft.tags), (RepoField.BRANCHES, draft.branches):
        names = sorted(refs, key=str.encode)
        indexes = _find_ids(ids, [refs[name] for name in names]).tolist()
        row[slot] = list(zip(names, indexes, strict=True))
    row[RepoField.DELETED_TAGS] = sorted(draft.deleted_tags, key=str.encode)
    writer = FlatBufferWriter()
    front = writer.finish(REPO, row)
    start = writer.pad()
    words = np.frombuffer(front, "<u4")
    root = FlatBufferReader(bytes(front)).root(REPO.lazy)
    # An offset leads forward only, so the block comes last, and its position is known now.
    for slot in REPO_LISTS:
        first = root[slot] // U32.size + 1
        slots = np.arange(first, first + int(words[first - 1]))
        words[slots] += np.uint32(start) - slots.astype("<u4") * np.uint32(U32.size)
    return b"".join((front, block.writer.data, _BLOCK_END.pack(start, block.stale_nbytes)))


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
    # Spares decoding all snapshots: nearly every commit is a new one.
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
