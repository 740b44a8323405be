"""Request ids in the metadata of snapshots: a request that is repeated commits once."""

from collections.abc import Mapping
from typing import Final, NamedTuple

from app.errors import BadBodyError, ConflictError
from app.formats.documents import Json
from app.formats.icechunk.flexbuffers import decode_flexbuffer
from app.formats.icechunk.repo_info import RepoInfo, SnapshotInfo

_OURS: Final = "__shardgate"
_OF_LIBRARY: Final = "__icechunk"
_WRITE_ID: Final = "write_id"
_FINGERPRINT: Final = "request"


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
        mark = _mark(snapshot, needle)
        if mark.get(_WRITE_ID) == write_id.text:
            if mark.get(_FINGERPRINT, "") != write_id.fingerprint:
                raise ConflictError("another commit was made with the same Idempotency-Key")
            return snapshot
    return None


def _mark(snapshot: SnapshotInfo, needle: bytes) -> Mapping[str, Json]:
    for name, value in snapshot.metadata.items:
        if name == _OURS and needle in value:
            mark = decode_flexbuffer(value)
            return mark if isinstance(mark, dict) else {}
    return {}
