"""The file ``repo`` written anew ("Updates to the repo info file"), or for the first time."""

from collections.abc import Mapping
from typing import Final

from app.formats.icechunk.config import Config
from app.formats.icechunk.envelope import FileType, seal_envelope
from app.formats.icechunk.flatbuffer import U8, U16, U32
from app.formats.icechunk.flatbuffer_writing import (
    Items,
    NewTable,
    Number,
    Text,
    Vector,
    data_vector,
    write_flatbuffer,
)
from app.formats.icechunk.metadata_writing import items_vector
from app.formats.icechunk.ops_log_writing import OpsLog, rewrite_ops_log
from app.formats.icechunk.repo_changes import RepoChange
from app.formats.icechunk.repo_draft import RepoDraft
from app.formats.icechunk.repo_info import RepoInfo
from app.formats.icechunk.snapshot_records import snapshot_block
from app.formats.reading import DecodeError

_VERSION: Final = 2
_SLOTS: Final = 13
_SPEC_VERSION: Final = 0
_EXTRA: Final = 12


def rewrite_repo(info: RepoInfo, change: RepoChange, at_us: int, backup: str) -> bytes:
    """Write the file that comes after *info*, which is kept under the name *backup*.

    *at_us*, in microseconds since 1970 began, is later than the newest operation. Ten thousand
    snapshots take some milliseconds.

    Raises: `DecodeError`, also where something would be lost that only a newer specification
    knows; `KeyError` for a ref or snapshot that is not there, `ValueError` for one that is.
    """
    if info.version != _VERSION:
        raise DecodeError(f"the file follows version {info.version}, not {_VERSION}")
    root = info.root()
    root.demand_known(_SLOTS)
    draft = RepoDraft.of(info)
    update = draft.apply(change, at_us)
    config = info.config if isinstance(info.config, Config) else Config()
    log = rewrite_ops_log(root, update, at_us, backup, config.num_updates_per_repo_info_file)
    spec_version = root.number(_SPEC_VERSION, U8)
    payload = write_repo(draft, log, spec_version, root.data(_EXTRA))
    return seal_envelope(FileType.REPO_INFO, payload, config.compression_level)


def write_repo(draft: RepoDraft, log: OpsLog, spec_version: int, extra: bytes | None) -> bytes:
    """Write the FlatBuffer.

    Raises: `KeyError` where a ref is at a snapshot that is not listed.
    """
    snapshots = draft.snapshots.sorted()
    rows = snapshots.rows()
    return write_flatbuffer(
        NewTable(
            (
                Number(U8, spec_version),
                _refs(draft.tags, rows),
                _refs(draft.branches, rows),
                Items([Text(name) for name in _sorted(draft.deleted_tags)]),
                snapshot_block(snapshots),
                draft.status,
                None if draft.items is None else items_vector(draft.items),
                log.updates,
                log.repo_before_updates,
                data_vector(draft.config),
                _flags(draft.enabled_flags),
                _flags(draft.disabled_flags),
                data_vector(extra),
            )
        )
    )


def _refs(refs: Mapping[str, bytes], rows: Mapping[bytes, int]) -> Items:
    names = _sorted(refs)
    return Items([NewTable((Text(name), Number(U32, rows[refs[name]]))) for name in names])


def _sorted(names: Mapping[str, bytes] | set[str]) -> list[str]:
    return sorted(names, key=str.encode)


def _flags(flags: set[int] | None) -> Vector | None:
    if flags is None:
        return None
    return Vector(b"".join(map(U16.pack, sorted(flags))), len(flags), U16.size)
