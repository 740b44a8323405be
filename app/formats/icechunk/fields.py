"""Fields that several tables have: moments and ids."""

from datetime import UTC, datetime
from typing import Final

from app.formats.icechunk.flatbuffer import Table, required
from app.formats.icechunk.ids import OBJECT_ID_NBYTES, encode_id
from app.formats.reading import DecodeError

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def read_object_id(table: Table, slot: int) -> str:
    """Read the id of a snapshot, a manifest, a chunk or a transaction log."""
    return encode_id(required(table.struct(slot, OBJECT_ID_NBYTES), "id"))


def check_object_id(root: Table, kind: str, object_id: str) -> None:
    """Check that the file says that it is the *kind* of thing called *object_id*."""
    if (found := read_object_id(root, 0)) != object_id:
        raise DecodeError(f"it is the {kind} {found}, not {object_id}")
