"""Fields that several tables have: moments, ids, names of backups, the status."""

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import IntEnum
from typing import Final

from app.formats.icechunk.flatbuffer import U8, U64, Table, required
from app.formats.icechunk.ids import OBJECT_ID_NBYTES, encode_id
from app.formats.reading import DecodeError

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_BACKUP: Final = re.compile(r"(?!.*\.\.)[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}")


class Availability(IntEnum):
    """What may be done with a repository."""

    ONLINE = 0
    READ_ONLY = 1
    OFFLINE = 2


@dataclass(frozen=True, slots=True)
class Status:
    """What may be done with a repository since when, and why not more."""

    availability: Availability
    set_at: datetime
    reason: str | None


def read_status(table: Table) -> Status:
    """Read a table `RepoStatus`.

    Raises: `DecodeError`.
    """
    number = table.number(0, U8)
    try:
        availability = Availability(number)
    except ValueError:
        raise DecodeError(f"the repository is of unknown availability {number}") from None
    return Status(availability, read_moment(table, 1), table.text(2))


def read_moment(table: Table, slot: int) -> datetime:
    """Read a count of microseconds since 1970, UTC.

    Raises: `DecodeError` for what is after the year 9999.
    """
    count = table.number(slot, U64)
    try:
        return EPOCH + timedelta(microseconds=count)
    except OverflowError:
        raise DecodeError(f"{count} microseconds after 1970 there is no time") from None


def read_object_id(table: Table, slot: int) -> str:
    """Read the id of a snapshot, a manifest, a chunk or a transaction log.

    Raises: `DecodeError` where it is absent.
    """
    return encode_id(required(table.struct(slot, OBJECT_ID_NBYTES), "id"))


def check_object_id(root: Table, kind: str, object_id: str) -> None:
    """Return if the file says that it is the *kind* of thing called *object_id*.

    Raises: `DecodeError`.
    """
    if (found := read_object_id(root, 0)) != object_id:
        raise DecodeError(f"it is the {kind} {found}, not {object_id}")


def read_backup(table: Table, slot: int) -> str | None:
    """Read the name of a file in `overwritten/`; it can lead nowhere else.

    Raises: `DecodeError`.
    """
    name = table.text(slot)
    if name is None or is_backup(name):
        return name
    raise DecodeError(f"{name!r} is no name of a backup")


def is_backup(name: str) -> bool:
    """Tell whether a file in `overwritten/` can have this name, which leads nowhere else."""
    return _BACKUP.fullmatch(name) is not None
