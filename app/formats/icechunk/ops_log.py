"""What was done to a repository, operation by operation ("Update")."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from app.formats.icechunk.fields import (
    Status,
    read_backup,
    read_moment,
    read_object_id,
    read_status,
)
from app.formats.icechunk.flatbuffer import U8, U16, Table, required

type Value = str | int | bool | Status | None

UNKNOWN: Final = "unknown"
"""The kind of an update that only a newer specification knows."""


@dataclass(frozen=True, slots=True)
class Update:
    """One operation."""

    kind: str
    """The specification's name of it, without ``Update``: ``new_commit``."""
    updated_at: datetime
    backup_path: str | None
    """The file in `overwritten/` whose newest update is this one; `None` in that file itself."""
    fields: Mapping[str, Value]
    """By the specification's names; ids as file names spell them."""


def _text(table: Table, slot: int) -> str:
    return required(table.text(slot), "name in an update")


def _u8(table: Table, slot: int) -> int:
    return table.number(slot, U8)


def _u16(table: Table, slot: int) -> int:
    return table.number(slot, U16)


def _flag(table: Table, slot: int) -> bool | None:
    """Read what a feature flag was set to, `None` if it was reset; the next slot tells."""
    return table.number(slot, U8) != 0 if table.number(slot + 1, U8) else None


def _status(table: Table, slot: int) -> Status | None:
    return None if (status := table.table(slot)) is None else read_status(status)


_KINDS: Final[Mapping[int, tuple[str, Mapping[str, Callable[[Table, int], Any]]]]] = {
    1: ("repo_initialized", {}),
    2: ("repo_migrated", {"from_version": _u8, "to_version": _u8}),
    3: ("config_changed", {}),
    4: ("metadata_changed", {}),
    5: ("tag_created", {"name": _text}),
    6: ("tag_deleted", {"name": _text, "previous_snap_id": read_object_id}),
    7: ("branch_created", {"name": _text}),
    8: ("branch_deleted", {"name": _text, "previous_snap_id": read_object_id}),
    9: ("branch_reset", {"name": _text, "previous_snap_id": read_object_id}),
    10: ("new_commit", {"branch": _text, "new_snap_id": read_object_id}),
    11: (
        "commit_amended",
        {"branch": _text, "previous_snap_id": read_object_id, "new_snap_id": read_object_id},
    ),
    12: ("new_detached_snapshot", {"new_snap_id": read_object_id}),
    13: ("gc_ran", {}),
    14: ("expiration_ran", {}),
    15: ("feature_flag_changed", {"id": _u16, "new_value": _flag}),
    16: ("repo_status_changed", {"status": _status}),
}
"""Of each member of the union, its name and its fields, slot after slot."""


def read_update(table: Table) -> Update:
    """Read a table `Update`.

    Raises: `DecodeError`.
    """
    number = table.number(0, U8)
    body = required(table.table(1), "update_type")
    kind, readers = _KINDS.get(number, (UNKNOWN, {}))
    fields = {name: read(body, slot) for slot, (name, read) in enumerate(readers.items())}
    if kind == UNKNOWN:
        fields = {"number": number}
    return Update(kind, read_moment(table, 2), read_backup(table, 3), fields)
