"""The file ``repo``: refs, snapshots and the latest operations ("Repo Info File"); metadata.

Its tables are described here for reading and for writing; see `repo_writer`.
"""

import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import IntEnum
from typing import Any, Final, NamedTuple

from shardgate.formats.icechunk.config import Config, read_config
from shardgate.formats.icechunk.coords import Places
from shardgate.formats.icechunk.flatbuffers import (
    DATA,
    FILE_ID,
    INT32,
    OBJECT_ID,
    OBJECT_IDS,
    TABLE,
    TEXT,
    TEXTS,
    U32,
    UINT8,
    UINT16,
    UINT16S,
    UINT32,
    UINT64,
    Envelope,
    Field,
    FileType,
    FlatBufferReader,
    FlatBufferWriter,
    TableType,
    open_envelope,
    tables_of,
)
from shardgate.formats.icechunk.ids import decode_id, encode_id
from shardgate.formats.icechunk.metadata_items import METADATA, Metadata
from shardgate.formats.reading import DecodeError

NO_PARENT: Final = -1
_SPEC_VERSIONS: Final = (1, 2)
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LAST_US: Final = (datetime.max.replace(tzinfo=UTC) - EPOCH) // timedelta(microseconds=1)
_BACKUP_NAME: Final = re.compile(r"(?!.*\.\.)[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}")
_STATUS: Final = TableType(UINT8, UINT64, TEXT)
_REF: Final = TableType(TEXT.required("name of a ref"), UINT32)
_SNAPSHOT_ID: Final = TableType(FILE_ID)
_FLAG: Final = "feature_flag_changed"
_REQUIRED: Final = {"name", "branch", "new_snap_id", "previous_snap_id"}
"""Fields of updates that none lacks; numbers have a default."""
_UNKNOWN: Final[tuple[str, Mapping[str, Field]]] = ("unknown", {})


type Value = str | bytes | int | bool | Status | None


class Availability(IntEnum):
    """Operations that a repository admits."""

    ONLINE = 0
    READ_ONLY = 1
    OFFLINE = 2


@dataclass(frozen=True, slots=True)
class Status:
    """Operations that a repository admits, since when, and the reason for not more."""

    availability: Availability
    set_at: datetime
    reason: str | None


class SnapshotInfo(NamedTuple):
    """Snapshot as ``repo`` lists it."""

    object_id: bytes
    parent: bytes | None
    flushed_at_us: int
    message: str
    metadata: Metadata
    pruned_ancestor_tx_logs: tuple[bytes, ...] = ()
    """Ids of expired ancestors, oldest first, all after the parent."""

    @property
    def nbytes(self) -> int:
        items = self.metadata.items
        texts = 4 * len(self.message) + sum(4 * len(name) + len(value) for name, value in items)
        return 1024 * (1 + len(items)) + texts  # a KiB for the Python objects of each item

    @property
    def snapshot_id(self) -> str:
        return encode_id(self.object_id)

    @property
    def parent_id(self) -> str | None:
        return None if self.parent is None else encode_id(self.parent)

    @property
    def flushed_at(self) -> datetime:
        return moment(self.flushed_at_us)


class Update(NamedTuple):
    """Operation on a repository."""

    kind: str
    """Name in the specification, without ``Update``: ``new_commit``."""
    updated_at_us: int
    backup_path: str | None
    """File in ``overwritten/`` whose newest update is this one; `None` in that file itself."""
    fields: Mapping[str, Value]

    @property
    def updated_at(self) -> datetime:
        return moment(self.updated_at_us)


def is_backup(name: str) -> bool:
    """Return whether a file in ``overwritten/`` can have this name, which leads nowhere else."""
    return _BACKUP_NAME.fullmatch(name) is not None


def moment(count_us: int) -> datetime:
    """Return the time that is *count_us* microseconds after the beginning of 1970, UTC."""
    return EPOCH + timedelta(microseconds=count_us)


def checked_us(count: int) -> int:
    """Return *count*, microseconds since 1970, UTC, unless that is after the year 9999."""
    if count > _LAST_US:
        raise DecodeError(f"{count} microseconds after 1970 there is no time")
    return count


def _read_backup(reader: FlatBufferReader, at: int) -> str:
    name = reader.text(at)
    if not is_backup(name):
        raise DecodeError(f"{name!r} is no name of a backup")
    return name


def _read_status(reader: FlatBufferReader, at: int) -> Status:
    number, set_at_us, reason = reader.table(_STATUS, at)
    if number not in Availability:
        raise DecodeError(f"the repository is of unknown availability {number}")
    return Status(Availability(number), moment(checked_us(set_at_us)), reason)


def _write_status(writer: FlatBufferWriter, status: Status) -> int:
    set_at_us = (status.set_at - EPOCH) // timedelta(microseconds=1)
    return writer.table(_STATUS, (status.availability, set_at_us, status.reason))


def _write_positions(writer: FlatBufferWriter, positions: Places) -> int:
    return writer.vector(len(positions), positions.astype("<u4").tobytes())


def _read_snapshots(reader: FlatBufferReader, at: int) -> list[SnapshotInfo]:
    rows = reader.tables(SNAPSHOT, at)
    ids: list[bytes | None] = [row[0] for row in rows]
    parents = [row[1] for row in rows]
    if rows:
        check_parents(min(parents), max(parents), len(rows))
    ids.append(None)  # at NO_PARENT
    return [_snapshot(row, ids[row[1]], reader.version) for row in rows]


def check_parents(least: int, most: int, count: int) -> None:
    """Check the indexes of parents in a list of *count* snapshots. Raises: `DecodeError`."""
    if not NO_PARENT <= least <= most < count:
        raise DecodeError("the parent of a snapshot is not listed")


def _snapshot(row: list[Any], parent: bytes | None, version: int) -> SnapshotInfo:
    object_id, _, flushed_at_us, message, metadata, pruned = row
    return SnapshotInfo(
        object_id,
        parent,
        checked_us(flushed_at_us),
        message,
        metadata or Metadata(version, ()),
        tuple(pruned or ()),
    )


def snapshot_row(each: SnapshotInfo, parent: int) -> tuple[Any, ...]:
    """Return the fields of a snapshot with the index of its parent."""
    object_id, _, at_us, message, metadata, pruned = each
    return object_id, parent, at_us, message, metadata if metadata.items else None, pruned or None


def make_update(
    reader: FlatBufferReader, number: int, body: int, updated_at_us: int, backup: str | None
) -> Update:
    """Make an update of the fields of its table."""
    kind, types = _UPDATE_KINDS.get(number, _UNKNOWN)
    if reader.is_strict and number not in _UPDATE_KINDS:
        raise DecodeError(f"update {number} is one that only a newer specification knows")
    values = reader.table(BODIES[kind], body)
    fields = dict(zip(types, values, strict=True))
    if kind == _FLAG:
        fields["new_value"] = bool(fields["new_value"]) if fields.pop("is_set") else None
    elif number not in _UPDATE_KINDS:
        fields = {"number": number}
    return Update(kind, checked_us(updated_at_us), backup, fields)


def update_row(update: Update) -> tuple[Any, ...]:
    """Return the fields of the table of *update*."""
    kind, updated_at_us, backup, fields = update
    if kind == _FLAG:
        value = fields["new_value"]
        fields = {**fields, "new_value": bool(value), "is_set": value is not None}
    _, types = _UPDATE_KINDS[_NUMBERS[kind]]
    body = (BODIES[kind], [fields[name] for name in types])
    return _NUMBERS[kind], body, updated_at_us, backup


_BACKUP: Final = Field("I", _read_backup, TEXT.write)
_STATUS_FIELD: Final = Field("I", _read_status, _write_status)
SNAPSHOT: Final = TableType(FILE_ID, INT32, UINT64, TEXT.required("message"), METADATA, OBJECT_IDS)
UPDATE: Final = TableType(UINT8, TABLE.required("update_type"), UINT64, _BACKUP)
_UPDATE_KINDS: Final[Mapping[int, tuple[str, Mapping[str, Field]]]] = {
    1: ("repo_initialized", {}),
    2: ("repo_migrated", {"from_version": UINT8, "to_version": UINT8}),
    3: ("config_changed", {}),
    4: ("metadata_changed", {}),
    5: ("tag_created", {"name": TEXT}),
    6: ("tag_deleted", {"name": TEXT, "previous_snap_id": OBJECT_ID}),
    7: ("branch_created", {"name": TEXT}),
    8: ("branch_deleted", {"name": TEXT, "previous_snap_id": OBJECT_ID}),
    9: ("branch_reset", {"name": TEXT, "previous_snap_id": OBJECT_ID}),
    10: ("new_commit", {"branch": TEXT, "new_snap_id": OBJECT_ID}),
    11: (
        "commit_amended",
        {"branch": TEXT, "previous_snap_id": OBJECT_ID, "new_snap_id": OBJECT_ID},
    ),
    12: ("new_detached_snapshot", {"new_snap_id": OBJECT_ID}),
    13: ("gc_ran", {}),
    14: ("expiration_ran", {}),
    15: (_FLAG, {"id": UINT16, "new_value": UINT8, "is_set": UINT8}),
    16: ("repo_status_changed", {"status": _STATUS_FIELD}),
}
"""Updates by their numbers in the union: names, and types of their fields by slots."""
BODIES: Final = {
    kind: TableType(
        *(field.required(name) if name in _REQUIRED else field for name, field in types.items())
    )
    for kind, types in (*_UPDATE_KINDS.values(), _UNKNOWN)
}
_NUMBERS: Final = {kind: number for number, (kind, _) in _UPDATE_KINDS.items()}

REPO: Final = TableType(
    UINT8,
    tables_of(_REF).required("tags"),
    tables_of(_REF).required("branches"),
    TEXTS.required("deleted_tags"),
    Field("I", _read_snapshots, _write_positions).required("snapshots"),
    _STATUS_FIELD.required("status"),
    METADATA,
    Field(
        "I",
        lambda reader, at: [make_update(reader, *row) for row in reader.tables(UPDATE, at)],
        _write_positions,
    ).required("latest_updates"),
    _BACKUP,
    DATA,
    UINT16S,
    UINT16S,
    DATA,
)


RepoField = IntEnum(
    "RepoField",
    "SPEC_VERSION TAGS BRANCHES DELETED_TAGS SNAPSHOTS STATUS METADATA LATEST_UPDATES "
    "REPO_BEFORE_UPDATES CONFIG ENABLED_FEATURE_FLAGS DISABLED_FEATURE_FLAGS EXTRA",
    start=0,
)
"""Fields of the file, by slots."""
REPO_LISTS: Final = (RepoField.SNAPSHOTS, RepoField.LATEST_UPDATES)
REPO_WITHOUT_LISTS: Final = TableType(
    *((REPO.lazy if slot in REPO_LISTS else REPO).fields[slot] for slot in RepoField)
)
"""The same, with the positions of its long lists."""


class _SnapshotList:
    """Snapshots in the payload, each decoded when it is asked for; a parent is an index."""

    def __init__(self, reader: FlatBufferReader, at: int) -> None:
        self._reader = reader
        self._start, self._count = reader.vector(at, U32.size)

    def id_at(self, index: int) -> bytes:
        return bytes(self._row(_SNAPSHOT_ID, index)[0])

    def ancestry(self, index: int) -> Iterator[SnapshotInfo]:
        for _ in range(self._count):
            row = self._row(SNAPSHOT, index)
            index = row[1]
            parent = None if index == NO_PARENT else self.id_at(index)
            yield _snapshot(row, parent, self._reader.version)
            if parent is None:
                return
        raise DecodeError("a snapshot is its own ancestor")

    def find(self, object_id: bytes) -> int | None:
        """Find a snapshot in the list, which is sorted by id."""
        index = bisect_left(range(self._count), object_id, key=self.id_at)
        return index if index < self._count and self.id_at(index) == object_id else None

    def _row(self, kind: TableType, index: int) -> list[Any]:
        if not 0 <= index < self._count:
            raise DecodeError(f"there is no snapshot {index}, only {self._count}")
        slot = self._start + U32.size * index
        return self._reader.table(kind, slot + U32.unpack_from(self._reader.data, slot)[0])


@dataclass(frozen=True, slots=True)
class RepoInfo:
    """One version of ``repo``; it is read often, so most of it is decoded only when needed."""

    payload: bytes
    stored_nbytes: int = field(compare=False)
    """Bytes of the file; of the payload, if the file is still to be written."""
    limit_nbytes: int
    version: int
    """Version of the specification that the file follows."""
    branches: Mapping[str, str]
    """Ids of snapshots by name."""
    tags: Mapping[str, str]
    status: Status
    repo_before_updates: str | None
    """File in ``overwritten/`` that has the updates before those of this file."""
    config: Config | DecodeError

    @property
    def nbytes(self) -> int:
        config_nbytes = 0 if isinstance(self.config, DecodeError) else self.config.nbytes
        refs_nbytes = 256 * (len(self.branches) + len(self.tags))  # Python objects
        return len(self.payload) + refs_nbytes + config_nbytes

    @property
    def is_long(self) -> bool:
        """True if a look-up may hold up the event loop."""
        return len(self.payload) > 32 * 1024  # some 200 snapshots, a millisecond

    def deleted_tags(self) -> list[str]:
        """Return the names of deleted tags, which cannot be used again."""
        return self._read(RepoField.DELETED_TAGS) or []

    def disabled_feature_flags(self) -> list[int]:
        """Return the numbers of the features that the repository does not admit."""
        return self._read(RepoField.DISABLED_FEATURE_FLAGS) or []

    def enabled_feature_flags(self) -> list[int]:
        """Return the numbers of the features that the repository admits whatever the default is."""
        return self._read(RepoField.ENABLED_FEATURE_FLAGS) or []

    def config_data(self) -> bytes | None:
        """Return the configuration as it is stored, a FlexBuffer; `None` if none is."""
        data: bytes | None = self._read(RepoField.CONFIG)
        return data

    def metadata(self) -> Metadata:
        """Return the metadata of the repository itself."""
        return self._read(RepoField.METADATA) or Metadata(self.version, ())

    def snapshots(self) -> list[SnapshotInfo]:
        """Decode all snapshots in the order of the file, also those that no ref leads to."""
        return self._read(RepoField.SNAPSHOTS) or []

    def snapshot(self, snapshot_id: str) -> SnapshotInfo | None:
        """Find a snapshot; `None` if none of that id is listed."""
        return next(self.ancestry(snapshot_id) or iter(()), None)

    def ancestry(self, snapshot_id: str) -> Iterator[SnapshotInfo] | None:
        """Return a snapshot, its parent and so on; `None` if none of that id is listed."""
        reader = self.reader()
        if (object_id := decode_id(snapshot_id)) is None:
            return None
        snapshots = _SnapshotList(reader, reader.root(REPO.lazy)[RepoField.SNAPSHOTS])
        index = snapshots.find(object_id)
        return None if index is None else snapshots.ancestry(index)

    def updates(self) -> list[Update]:
        """Decode the operations that the file lists, newest first."""
        return self._read(RepoField.LATEST_UPDATES) or []

    def reader(self, *, is_strict: bool = False) -> FlatBufferReader:
        """Begin to read the payload, counting the memory and the steps that it takes from 0."""
        return FlatBufferReader(
            self.payload,
            self.limit_nbytes,
            self.version,
            stored_nbytes=self.stored_nbytes,
            is_strict=is_strict,
        )

    def _read(self, slot: RepoField) -> Any:
        reader = self.reader()
        return reader.read(REPO.fields[slot], reader.root(REPO.lazy)[slot])


@dataclass(frozen=True, slots=True)
class RepoInfoDecoder:
    """Decodes a file ``repo`` whose payload has at most *limit_nbytes*."""

    limit_nbytes: int

    def __call__(self, data: bytes) -> RepoInfo:
        envelope = open_envelope(data, FileType.REPO_INFO, self.limit_nbytes)
        return self.decode(envelope, len(data))

    def decode(self, envelope: Envelope, stored_nbytes: int) -> RepoInfo:
        """Decode the payload of a file of *stored_nbytes*."""
        version, payload = envelope
        reader = FlatBufferReader(payload, self.limit_nbytes, version, stored_nbytes=stored_nbytes)
        root = reader.root(REPO.lazy)
        if (spec_version := root[RepoField.SPEC_VERSION]) not in _SPEC_VERSIONS:
            raise DecodeError(f"the repository follows version {spec_version}, not 1 or 2")
        for slot in (RepoField.DELETED_TAGS, RepoField.LATEST_UPDATES):
            reader.vector(root[slot], U32.size)
        snapshots = _SnapshotList(reader, root[RepoField.SNAPSHOTS])
        return RepoInfo(
            payload,
            stored_nbytes,
            self.limit_nbytes,
            version,
            branches=_read_refs(reader, root[RepoField.BRANCHES], snapshots),
            tags=_read_refs(reader, root[RepoField.TAGS], snapshots),
            status=_read_status(reader, root[RepoField.STATUS]),
            repo_before_updates=reader.read(_BACKUP, root[RepoField.REPO_BEFORE_UPDATES]),
            config=_read_config(reader, root[RepoField.CONFIG]),
        )


def _read_refs(reader: FlatBufferReader, at: int, snapshots: _SnapshotList) -> dict[str, str]:
    """Read the snapshots of branches, or of tags, by name; the first of a name counts."""
    ids: dict[str, str] = {}
    for name, index in reader.tables(_REF, at):
        ids.setdefault(name, encode_id(snapshots.id_at(index)))
    return ids


def _read_config(reader: FlatBufferReader, at: int | None) -> Config | DecodeError:
    """Read the configuration; few need it, so that damage is a value."""
    try:
        return Config() if at is None else read_config(reader.read(DATA, at))
    except DecodeError as error:
        return DecodeError(str(error))
