"""Where the nodes of a snapshot are, whatever they are: transaction logs know only their ids."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from app.formats.icechunk.envelope import FileType, open_envelope
from app.formats.icechunk.fields import check_object_id
from app.formats.icechunk.flatbuffer import Buffer, required
from app.formats.icechunk.ids import NODE_ID_NBYTES

_NODE_NBYTES: Final = 256


@dataclass(frozen=True, slots=True)
class NodePaths:
    """The paths of a snapshot's nodes by their ids."""

    paths: Mapping[bytes, str]
    """As they are stored, with a slash in front."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the value holds."""
        return sum(_NODE_NBYTES + 4 * len(path) for path in self.paths.values())


@dataclass(frozen=True, slots=True)
class NodePathsDecoder:
    """Reads the snapshot *object_id*, whose payload has at most *limit_nbytes*."""

    object_id: str
    limit_nbytes: int

    def __call__(self, data: bytes) -> NodePaths:
        """Decode a whole file.

        Raises: `DecodeError`, also for another snapshot.
        """
        payload = open_envelope(data, FileType.SNAPSHOT, self.limit_nbytes).payload
        root = Buffer(payload, self.limit_nbytes).root
        check_object_id(root, "snapshot", self.object_id)
        paths = {
            required(node.struct(0, NODE_ID_NBYTES), "node id"): required(node.text(1), "path")
            for node in root.tables(2)
        }
        return NodePaths(paths)
