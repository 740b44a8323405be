"""What the metadata of a snapshot tell of the request that made it, so that none counts twice."""

from collections.abc import Mapping
from typing import Final, NamedTuple

from app.errors import BadBodyError, ConflictError
from app.formats.documents import Json
from app.formats.icechunk.flexbuffer import decode_flexbuffer
from app.formats.icechunk.repo_info import RepoInfo
from app.formats.icechunk.snapshot_list import SnapshotInfo

_OURS: Final = "__shardgate"
_OF_LIBRARY: Final = "__icechunk"
_WRITE_ID: Final = "write_id"
_FINGERPRINT: Final = "request"


class WriteId(NamedTuple):
    """Tells a request for a commit from all others, however often it comes."""

    text: str
    fingerprint: str = ""
    """Of what the request says, where clients choose the *text*."""


def check_metadata(metadata: Mapping[str, Json]) -> None:
    """Return if the names are for everybody.

    Raises: `BadBodyError`.
    """
    for name in (_OURS, _OF_LIBRARY):
        if name in metadata:
            raise BadBodyError(f"metadata: the name {name} is reserved")


def marked(metadata: Mapping[str, Json], write_id: WriteId, rebases: int) -> dict[str, Json]:
    """Add to *metadata* what made the commit; *rebases* as the library tells of them."""
    told: dict[str, Json] = dict(metadata)
    if rebases:
        told[_OF_LIBRARY] = {"rebase_attempts": rebases}
    mark: dict[str, Json] = {_WRITE_ID: write_id.text}
    if write_id.fingerprint:
        mark[_FINGERPRINT] = write_id.fingerprint
    told[_OURS] = mark
    return told


def find_write(info: RepoInfo, write_id: WriteId) -> SnapshotInfo | None:
    """Find the snapshot that was made for *write_id*; it may take long where there is one.

    Raises: `ConflictError` if it was made for another request.
    """
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
