"""The operations in ``repo``, with a new one before them."""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from app.formats.icechunk.flatbuffer import U8, U64, Buffer, Table, required
from app.formats.icechunk.flatbuffer_writing import (
    Block,
    Inlay,
    Items,
    Linked,
    NewTable,
    Number,
    Text,
    write_flatbuffer,
)
from app.formats.icechunk.update_columns import UpdateColumns
from app.formats.icechunk.update_records import update_block
from app.formats.reading import DecodeError

_LATEST_UPDATES: Final = 7
_REPO_BEFORE_UPDATES: Final = 8
_UPDATED_AT: Final = 2
_STATUS_SLOTS: Final = 3


class NewUpdate(NamedTuple):
    """An operation that is being done."""

    kind: int
    """Its place in the union."""
    fields: Sequence[Number | Inlay | Linked | None] = ()


class OpsLog(NamedTuple):
    """What a file tells of operations."""

    updates: Block | Items
    repo_before_updates: Text | None


def begin_ops_log(first: NewUpdate, at_us: int) -> OpsLog:
    """Begin with one operation."""
    body = NewTable(tuple(first.fields))
    table = NewTable((Number(U8, first.kind), body, Number(U64, at_us)))
    return OpsLog(Items([table]), None)


def rewrite_ops_log(root: Table, new: NewUpdate, at_us: int, backup: str, most: int) -> OpsLog:
    """Put *new* before the operations of a file that is kept as *backup*.

    Of more than *most* the oldest are left to the backup that has them. Those from before a
    migration to version 2 are in none until that overflows itself.

    Raises: `DecodeError`, also where something would be lost.
    """
    old = UpdateColumns.read(root)
    if not len(old.kinds):
        raise DecodeError("it tells of no operation")
    alone = NewTable((*_LATEST_UPDATES * (None,), begin_ops_log(new, at_us).updates))
    newest = UpdateColumns.read(Buffer(write_flatbuffer(alone)).root)
    updates = newest.before(old.with_backup(backup))
    most = max(1, most)
    stops = most + np.flatnonzero(updates.has_backup[most:])
    if len(stops):
        before: str | None = updates.backup(stops[0])
        updates = updates.newest(stops[0])
    else:
        before = root.text(_REPO_BEFORE_UPDATES)
    return OpsLog(update_block(updates), None if before is None else Text(before))


def newest_us(root: Table) -> int:
    """Tell when the newest operation was done, in microseconds since 1970 began.

    Raises: `DecodeError`.
    """
    newest = next(root.tables(_LATEST_UPDATES), None)
    return required(newest, "operation").number(_UPDATED_AT, U64)


def status_table(availability: int, set_at_us: int, reason: str | None) -> NewTable:
    """Write a table `RepoStatus`."""
    text = None if reason is None else Text(reason)
    return NewTable((Number(U8, availability), Number(U64, set_at_us), text))


def copy_status(table: Table) -> NewTable:
    """Write a table `RepoStatus` as it is."""
    table.demand_known(_STATUS_SLOTS)
    return status_table(table.number(0, U8), table.number(1, U64), table.text(2))
