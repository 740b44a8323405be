"""The files of a repository that has just been made ("Initialize New Repository")."""

from typing import Final

from app.formats.documents import Json
from app.formats.icechunk.envelope import FileType, seal_envelope
from app.formats.icechunk.fields import Availability
from app.formats.icechunk.flatbuffer import U64
from app.formats.icechunk.flatbuffer_writing import (
    Inlay,
    Items,
    NewTable,
    Number,
    Text,
    Vector,
    write_flatbuffer,
)
from app.formats.icechunk.keys import MAIN
from app.formats.icechunk.metadata_writing import encode_metadata, items_vector
from app.formats.icechunk.ops_log_writing import NewUpdate, begin_ops_log, status_table
from app.formats.icechunk.repo_changes import NewSnapshot
from app.formats.icechunk.repo_draft import RepoDraft
from app.formats.icechunk.repo_writing import write_repo
from app.formats.icechunk.snapshot_columns import NO_SNAPSHOTS

ROOT_ID: Final = bytes.fromhex("0b1cc8d6787580f0e33a6534")
"""Of the first snapshot of every repository, which has no nodes."""
_SPEC_VERSION: Final = 2
_MESSAGE: Final = "Repository initialized"
_METADATA: Final[Json] = {"__icechunk": {"is_root": True}}
_EMPTY: Final = Vector(b"", 0)
_INITIALIZED: Final = 1


def first_snapshot(flushed_at_us: int) -> bytes:
    """Write the file of the first snapshot."""
    fields = (
        Inlay(ROOT_ID),
        None,
        Items(()),
        Number(U64, flushed_at_us),
        Text(_MESSAGE),
        items_vector(encode_metadata(_METADATA)),
        Vector(b"", 0, 8),
        Items(()),
    )
    return seal_envelope(FileType.SNAPSHOT, write_flatbuffer(NewTable(fields)))


def first_transaction_log() -> bytes:
    """Write the file of its transaction log, which tells of nothing."""
    fields = (Inlay(ROOT_ID), *6 * (_EMPTY,), Items(()), Items(()))
    return seal_envelope(FileType.TRANSACTION_LOG, write_flatbuffer(NewTable(fields)))


def create_repo(flushed_at_us: int, at_us: int) -> bytes:
    """Write the file ``repo``, with nothing but ``main`` at the first snapshot."""
    first = NewSnapshot(ROOT_ID, None, flushed_at_us, _MESSAGE, encode_metadata(_METADATA))
    draft = RepoDraft(
        branches={MAIN.name: ROOT_ID},
        tags={},
        deleted_tags=set(),
        snapshots=NO_SNAPSHOTS.with_new(first),
        status=status_table(Availability.ONLINE, at_us, None),
        items=(),
        config=None,
        enabled_flags=None,
        disabled_flags=None,
    )
    log = begin_ops_log(NewUpdate(_INITIALIZED), at_us)
    return seal_envelope(FileType.REPO_INFO, write_repo(draft, log, _SPEC_VERSION, None))
