"""The snapshots that ``repo`` lists and what came before each, for those that leave some out."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from app.formats.icechunk.ids import OBJECT_ID_NBYTES, decode_id
from app.formats.icechunk.repo_changes import Reparented
from app.formats.icechunk.repo_info import NamedSnapshots, RepoInfo
from app.formats.icechunk.snapshot_columns import SnapshotColumns
from app.formats.reading import DecodeError


@dataclass(frozen=True, slots=True)
class Ancestor:
    """What `repo` tells of a snapshot, as far as others go back to it."""

    parent_id: bytes | None
    flushed_at_us: int
    pruned_logs: tuple[bytes, ...]
    """Of ancestors that expired, oldest first, all after the parent."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """All snapshots by their ids."""

    snapshots: dict[bytes, Ancestor]

    @classmethod
    def of(cls, info: RepoInfo) -> Self:
        """Read the snapshots of a file.

        Raises: `DecodeError`.
        """
        columns = SnapshotColumns.read(info.root())
        ids = _split(columns.ids.tobytes())
        source, found = columns.source.tobytes(), dict[bytes, Ancestor]()
        spans = zip(columns.pruned.starts.tolist(), columns.pruned.nbytes.tolist(), strict=True)
        for object_id, parent, flushed, (start, nbytes) in zip(
            ids, columns.parents.tolist(), columns.flushed.tolist(), spans, strict=True
        ):
            parent_id = None if parent < 0 else ids[parent]
            logs = tuple(_split(source[start : start + nbytes]))
            if object_id in found:
                raise DecodeError("a snapshot is listed twice")
            found[object_id] = Ancestor(parent_id, flushed, logs)
        return cls(found)

    def ancestry(self, object_id: bytes) -> Iterator[bytes]:
        """Give a snapshot, its parent and so on.

        Raises: `DecodeError` where one is its own ancestor.
        """
        at: bytes | None = object_id
        for _ in self.snapshots:
            if at is None:
                return
            yield at
            at = self.snapshots[at].parent_id
        if at is not None:
            raise DecodeError("a snapshot is its own ancestor")

    def logs_since(self, object_id: bytes, since: bytes | None) -> tuple[bytes, ...]:
        """Name the snapshots after *since* that *object_id* comes from, oldest first.

        Those that expired before are among them, and *object_id* itself is not.
        """
        newest_first: list[bytes] = []
        for each in self.ancestry(object_id):
            if each == since:
                break
            if each != object_id:
                newest_first.append(each)
            newest_first += reversed(self.snapshots[each].pruned_logs)
        return tuple(reversed(newest_first))

    def reparented(self, object_id: bytes, since: bytes | None) -> Reparented:
        """Put a snapshot right after its ancestor *since*."""
        return Reparented(since, self.logs_since(object_id, since))


def tips(refs: NamedSnapshots) -> dict[str, bytes]:
    """Give the snapshots that refs are at.

    Raises: `DecodeError` if one of the refs is damaged: none knows what it needs.
    """
    if refs.faults:
        raise DecodeError(f"the ref {next(iter(refs.faults))!r} is damaged")
    return {name: _decoded(text) for name, text in refs.items()}


def _decoded(text: str) -> bytes:
    if (object_id := decode_id(text)) is None:
        raise DecodeError(f"{text} is no id")
    return object_id


def _split(data: bytes) -> list[bytes]:
    return [data[at : at + OBJECT_ID_NBYTES] for at in range(0, len(data), OBJECT_ID_NBYTES)]
