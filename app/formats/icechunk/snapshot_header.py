"""What a snapshot file tells besides its nodes; in version 1 nothing else tells it."""

from dataclasses import dataclass
from typing import Final

from app.formats.icechunk.envelope import FileType, open_envelope
from app.formats.icechunk.fields import check_object_id
from app.formats.icechunk.flatbuffer import U64, Buffer, required
from app.formats.icechunk.ids import OBJECT_ID_NBYTES, decode_id
from app.formats.icechunk.metadata_items import read_metadata
from app.formats.icechunk.repo_info import SnapshotInfo, checked_us

_OVERHEAD_NBYTES: Final = 1024


@dataclass(frozen=True, slots=True)
class SnapshotHeader:
    """The snapshot, its parent, who said what of it."""

    info: SnapshotInfo

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the value holds."""
        items = self.info.metadata.items
        told = 4 * len(self.info.message) + sum(4 * len(name) + len(data) for name, data in items)
        return _OVERHEAD_NBYTES * (1 + len(items)) + told


@dataclass(frozen=True, slots=True)
class SnapshotHeaderDecoder:
    """Reads the snapshot *object_id*, whose payload has at most *limit_nbytes*."""

    object_id: str
    limit_nbytes: int

    def __call__(self, data: bytes) -> SnapshotHeader:
        """Decode a whole file.

        Raises: `DecodeError`, also for another snapshot.
        """
        version, payload = open_envelope(data, FileType.SNAPSHOT, self.limit_nbytes)
        root = Buffer(payload, self.limit_nbytes).root
        check_object_id(root, "snapshot", self.object_id)
        info = SnapshotInfo(
            required(decode_id(self.object_id), "id"),
            root.struct(1, OBJECT_ID_NBYTES),
            checked_us(root.number(3, U64)),
            required(root.text(4), "message"),
            read_metadata(root, 5, version),
        )
        return SnapshotHeader(info)
