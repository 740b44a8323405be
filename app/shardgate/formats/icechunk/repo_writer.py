"""The file ``repo`` written with more operations ("Updates to the repo info file").

Request ids in the metadata of snapshots make a request that is repeated commit once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from shardgate.errors import BadBodyError, ConflictError
from shardgate.formats.documents import Json
from shardgate.formats.icechunk.config import Config
from shardgate.formats.icechunk.flatbuffers import (
    FileType,
    FlatBufferWriter,
    required,
    seal_envelope,
)
from shardgate.formats.icechunk.flexbuffers import decode_flexbuffer
from shardgate.formats.icechunk.ids import decode_id, encode_id
from shardgate.formats.icechunk.keys import MAIN
from shardgate.formats.icechunk.repo_info import (
    REPO,
    Availability,
    RepoField,
    RepoInfo,
    SnapshotInfo,
    Status,
    Update,
    Value,
    encode_metadata,
    moment,
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


class FutureError(ValueError):
    """A stored time is ahead of the clock."""


def moment_after(newest_us: int, now_us: int, newest: str) -> int:
    """Return the time, or the first after *newest_us* if the clock is a little behind that; both
    are microseconds since 1970, UTC.

    Raises: `FutureError`, which names *newest*.
    """
    if newest_us > now_us + _MOST_AHEAD_US:
        ahead_s = (newest_us - now_us) // 1_000_000
        raise FutureError(
            f"{newest} was written {ahead_s} s ahead of {moment(now_us)}, the time here: the clock "
            "here is behind, or that of its writer was ahead; later ones must wait for that time"
        )
    return max(now_us, newest_us + 1)


@dataclass(slots=True)
class _Draft:
    """Refs and snapshots that an operation changes."""

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


def rewrite_repo(info: RepoInfo, changes: Sequence[RepoUpdate], now_us: int, backup: str) -> bytes:
    """Write the file that comes after *info*, which is kept in ``overwritten/`` as *backup*.

    Of several *changes*, made in order, only the last is ever the newest in a file: those before it
    have no backup, and readers find them in the file of the next that has one.

    Raises: `DecodeError` if something of a newer specification would be lost, `FutureError`.
    """
    if info.version != _VERSION:
        raise DecodeError(f"the file follows version {info.version}, not {_VERSION}")
    row = info.reader(is_strict=True).root(REPO)
    draft = _Draft(
        _raw(info.branches),
        _raw(info.tags),
        set(row[RepoField.DELETED_TAGS]),
        row[RepoField.SNAPSHOTS],
    )
    config = info.config if isinstance(info.config, Config) else Config()
    before, *older = row[RepoField.LATEST_UPDATES] or [None]
    if before is None:
        raise DecodeError("it lists no operation")
    updates = [before._replace(backup_path=backup), *older]
    for change in changes:
        at_us = moment_after(updates[0].updated_at_us, now_us, _named(updates[0]))
        updates.insert(0, draft.apply(change, at_us))
    stop = _overflow(updates, config.num_updates_per_repo_info_file)
    if stop < len(updates):
        row[RepoField.REPO_BEFORE_UPDATES] = updates[stop].backup_path
    row[RepoField.LATEST_UPDATES] = updates[:stop]
    return seal_envelope(FileType.REPO_INFO, _write(draft, row), config.compression_level)


def _named(update: Update) -> str:
    """Return the snapshot that *update* made, or else its kind."""
    match update:
        case Update(fields={"new_snap_id": bytes(object_id)}):
            return f"snapshot {encode_id(object_id)}"
    return f"the last change ({update.kind})"


def _overflow(updates: list[Update], most: int) -> int:
    """Return the number of updates to keep: the backup has the others, if there is one."""
    stops = range(max(1, most), len(updates))
    return next((at for at in stops if updates[at].backup_path is not None), len(updates))


def create_repo(flushed_at_us: int, at_us: int) -> bytes:
    """Write the file of a new repository; times are microseconds since 1970, UTC."""
    metadata = encode_metadata(ROOT_METADATA)
    first = SnapshotInfo(ROOT_ID, None, flushed_at_us, ROOT_MESSAGE, metadata)
    row: list[object] = [None] * len(RepoField)
    row[RepoField.SPEC_VERSION] = _VERSION
    row[RepoField.STATUS] = Status(Availability.ONLINE, moment(at_us), None)
    row[RepoField.LATEST_UPDATES] = [Update("repo_initialized", at_us, None, {})]
    draft = _Draft({MAIN.name: ROOT_ID}, {}, set(), [first])
    return seal_envelope(FileType.REPO_INFO, _write(draft, row))


def _write(draft: _Draft, row: list[object]) -> bytearray:
    snapshots = sorted(draft.snapshots, key=lambda each: each.object_id)
    indexes = {each.object_id: index for index, each in enumerate(snapshots)}
    for slot, refs in (RepoField.TAGS, draft.tags), (RepoField.BRANCHES, draft.branches):
        row[slot] = [(name, indexes[refs[name]]) for name in sorted(refs, key=str.encode)]
    row[RepoField.DELETED_TAGS] = sorted(draft.deleted_tags, key=str.encode)
    row[RepoField.SNAPSHOTS] = snapshots
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
