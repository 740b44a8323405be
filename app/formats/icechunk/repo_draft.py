"""What ``repo`` is to become: one operation after the other changes it in memory."""

from dataclasses import dataclass
from typing import Final, Self, assert_never

from app.formats.icechunk.flatbuffer import U16, Table, required
from app.formats.icechunk.flatbuffer_writing import Inlay, NewTable, Text
from app.formats.icechunk.ids import decode_id
from app.formats.icechunk.metadata_items import read_metadata
from app.formats.icechunk.ops_log_writing import NewUpdate, copy_status, status_table
from app.formats.icechunk.repo_changes import (
    Amended,
    BranchCreated,
    BranchDeleted,
    BranchReset,
    Items,
    NewCommit,
    RepoChange,
    StatusChanged,
    TagCreated,
    TagDeleted,
)
from app.formats.icechunk.repo_info import NamedSnapshots, RepoInfo
from app.formats.icechunk.snapshot_columns import SnapshotColumns
from app.formats.reading import DecodeError

_STATUS: Final = 5
_METADATA: Final = 6
_CONFIG: Final = 9
_ENABLED_FLAGS: Final = 10
_DISABLED_FLAGS: Final = 11


@dataclass(slots=True)
class RepoDraft:
    """All that is in ``repo`` but the operations."""

    branches: dict[str, bytes]
    tags: dict[str, bytes]
    deleted_tags: set[str]
    snapshots: SnapshotColumns
    status: NewTable
    items: Items | None
    config: bytes | None
    enabled_flags: set[int] | None
    disabled_flags: set[int] | None

    @classmethod
    def of(cls, info: RepoInfo) -> Self:
        """Begin with what there is.

        Raises: `DecodeError`, also where something would be lost.
        """
        root = info.root()
        has_items = root.at(_METADATA) is not None
        return cls(
            _ids(info.branches),
            _ids(info.tags),
            set(info.deleted_tags()),
            SnapshotColumns.read(root),
            copy_status(required(root.table(_STATUS), "status")),
            read_metadata(root, _METADATA, info.version).items if has_items else None,
            root.data(_CONFIG),
            _flags(root, _ENABLED_FLAGS),
            _flags(root, _DISABLED_FLAGS),
        )

    def apply(self, change: RepoChange, at_us: int) -> NewUpdate:
        """Do *change*, and give what the log tells of it.

        Raises: `KeyError` for a ref or snapshot that is not there, `ValueError` for one that is.
        """
        match change:
            case TagCreated() | TagDeleted():
                return self._change_tags(change)
            case BranchCreated() | BranchReset() | BranchDeleted():
                return self._change_branches(change)
            case NewCommit() | Amended():
                return self._add(change)
            case StatusChanged(availability, reason):
                self.status = status_table(availability, at_us, reason)
                return NewUpdate(16, (self.status,))
            case _:
                assert_never(change)

    def _change_tags(self, change: TagCreated | TagDeleted) -> NewUpdate:
        name = change.name
        if isinstance(change, TagDeleted):
            before = self.tags.pop(name)
            self.deleted_tags.add(name)
            return NewUpdate(6, (Text(name), Inlay(before)))
        if name in self.tags or name in self.deleted_tags:
            raise ValueError(f"there is or was a tag {name!r}")
        self.tags[name] = change.snapshot_id
        return NewUpdate(5, (Text(name),))

    def _change_branches(self, change: BranchCreated | BranchReset | BranchDeleted) -> NewUpdate:
        name = change.name
        if isinstance(change, BranchCreated):
            if name in self.branches:
                raise ValueError(f"there is a branch {name!r}")
            self.branches[name] = change.snapshot_id
            return NewUpdate(7, (Text(name),))
        before = self.branches.pop(name)
        if isinstance(change, BranchDeleted):
            return NewUpdate(8, (Text(name), Inlay(before)))
        self.branches[name] = change.snapshot_id
        return NewUpdate(9, (Text(name), Inlay(before)))

    def _add(self, change: NewCommit | Amended) -> NewUpdate:
        self.snapshots = self.snapshots.with_new(change.snapshot)
        new = change.snapshot.object_id
        before, self.branches[change.branch] = self.branches[change.branch], new
        if isinstance(change, Amended):
            return NewUpdate(11, (Text(change.branch), Inlay(before), Inlay(new)))
        return NewUpdate(10, (Text(change.branch), Inlay(new)))


def _ids(refs: NamedSnapshots) -> dict[str, bytes]:
    if refs.faults:
        raise DecodeError(f"the ref {next(iter(refs.faults))!r} is damaged")
    return {name: required(decode_id(text), "id") for name, text in refs.items()}


def _flags(root: Table, slot: int) -> set[int] | None:
    return None if root.at(slot) is None else set(root.numbers(slot, U16))
