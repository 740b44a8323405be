"""The operations in ``repo`` as columns, to be written again with others before them."""

from dataclasses import dataclass, fields, replace
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from app.formats.icechunk.fields import is_backup
from app.formats.icechunk.flatbuffer import U32, Buffer, Table, required
from app.formats.icechunk.ids import OBJECT_ID_NBYTES
from app.formats.icechunk.ragged import Bytes, Places, Spans, Tables
from app.formats.reading import DecodeError

_UPDATES: Final = 7
_SLOTS: Final = 4
STATUS: Final = 16
_STATUS_SLOTS: Final = 3

RAW_NBYTES: Final = 24
"""Room for all that is no link."""
_LINK, _FIRST, _SECOND = 4, 8, 20
_NAME: Final = (_LINK, 0)
_ID: Final = (_FIRST, OBJECT_ID_NBYTES)
_SECOND_ID: Final = (_SECOND, OBJECT_ID_NBYTES)
BODIES: Final = (
    (),
    (),  # RepoInitialized
    ((_FIRST, 1), (_FIRST + 1, 1)),  # RepoMigrated: versions
    (),  # ConfigChanged
    (),  # MetadataChanged
    (_NAME,),  # TagCreated
    (_NAME, _ID),  # TagDeleted
    (_NAME,),  # BranchCreated
    (_NAME, _ID),  # BranchDeleted
    (_NAME, _ID),  # BranchReset
    (_NAME, _ID),  # NewCommit
    (_NAME, _ID, _SECOND_ID),  # CommitAmended
    (_ID,),  # NewDetachedSnapshot
    (),  # GCRan
    (),  # ExpirationRan
    ((_FIRST, 2), (_FIRST + 2, 1), (_FIRST + 3, 1)),  # FeatureFlagChanged: number, value, is set
    (_NAME,),  # RepoStatusChanged: leads to a table
    (),  # that without one
)
"""Of each member of the union, where we put its fields, and how many bytes they have."""


@dataclass(frozen=True, slots=True)
class UpdateColumns:
    """Operations, newest first; all spans are of *source*."""

    source: Bytes
    kinds: NDArray[np.uint8]
    times: NDArray[np.uint64]
    raw: Bytes
    """What lies in their own tables, a row for each."""
    names: Spans
    has_backup: NDArray[np.bool_]
    backups: Spans
    has_status: NDArray[np.bool_]
    availability: NDArray[np.uint8]
    set_at: NDArray[np.uint64]
    has_reason: NDArray[np.bool_]
    reasons: Spans

    @classmethod
    def read(cls, root: Table) -> Self:
        """Read those of the file whose table is *root*.

        Raises: `DecodeError`, also where something would be lost.
        """
        source = np.frombuffer(root.buffer.data, np.uint8)
        start, count = required(root.vector(_UPDATES, U32.size), "latest_updates")
        tables = Tables(root.buffer, start + 4 * np.arange(count))
        tables.demand_known(_SLOTS)
        kinds = tables.numbers(0, "u1")
        if count and not 0 < kinds.min() <= kinds.max() <= STATUS:
            raise DecodeError("it tells of an operation that only a newer specification knows")
        bodies = tables.required(1)
        raw, names = _read_bodies(root.buffer, kinds, bodies)
        rows = np.flatnonzero(kinds == STATUS)
        links = Tables(root.buffer, bodies[rows]).fields(0)
        has_status = _placed(count, rows, links > 0, np.bool_)
        statuses = Tables(root.buffer, links[links > 0])
        statuses.demand_known(_STATUS_SLOTS)
        rows = np.flatnonzero(has_status)
        reasons = statuses.vectors(2, 1)
        return cls(
            source,
            kinds,
            tables.numbers(2, "<u8"),
            raw,
            names,
            tables.fields(3) > 0,
            tables.vectors(3, 1),
            has_status,
            _placed(count, rows, statuses.numbers(0, "u1"), np.uint8),
            _placed(count, rows, statuses.numbers(1, "<u8"), np.uint64),
            _placed(count, rows, statuses.fields(2) > 0, np.bool_),
            Spans(*(_placed(count, rows, column, np.int64) for column in reasons)),
        )

    def backup(self, row: int) -> str:
        """Tell the name of the backup of an operation.

        Raises: `DecodeError`.
        """
        start, nbytes = int(self.backups.starts[row]), int(self.backups.nbytes[row])
        name = self.source[start : start + nbytes].tobytes().decode(errors="replace")
        if not is_backup(name):
            raise DecodeError(f"{name!r} is no name of a backup")
        return name

    def with_backup(self, name: str) -> Self:
        """Name the backup of the newest operation."""
        data = np.frombuffer(name.encode(), np.uint8)
        has_backup, starts, nbytes = self.has_backup.copy(), *(each.copy() for each in self.backups)
        has_backup[0], starts[0], nbytes[0] = True, len(self.source), len(data)
        return replace(
            self,
            source=np.concatenate((self.source, data)),
            has_backup=has_backup,
            backups=Spans(starts, nbytes),
        )

    def before(self, older: Self) -> Self:
        """Put *older* operations behind these."""
        columns: list[Any] = []
        for column in fields(self)[1:]:
            ours, theirs = getattr(self, column.name), getattr(older, column.name)
            if isinstance(ours, Spans):
                starts = np.concatenate((ours.starts, theirs.starts + len(self.source)))
                columns.append(Spans(starts, np.concatenate((ours.nbytes, theirs.nbytes))))
            else:
                columns.append(np.concatenate((ours, theirs)))
        return type(self)(np.concatenate((self.source, older.source)), *columns)

    def newest(self, count: int) -> Self:
        """Leave out all but *count*."""
        columns: list[Any] = []
        for column in fields(self)[1:]:
            ours = getattr(self, column.name)
            is_spans = isinstance(ours, Spans)
            columns.append(Spans(*(each[:count] for each in ours)) if is_spans else ours[:count])
        return type(self)(self.source, *columns)


def _read_bodies(buffer: Buffer, kinds: NDArray[np.uint8], slots: Places) -> tuple[Bytes, Spans]:
    """Read what is told of operations of each kind."""
    raw = np.zeros((len(kinds), RAW_NBYTES), np.uint8)
    starts, nbytes = np.zeros(len(kinds), np.int64), np.zeros(len(kinds), np.int64)
    for kind in np.unique(kinds):
        rows = np.flatnonzero(kinds == kind)
        bodies = Tables(buffer, slots[rows])
        bodies.demand_known(len(BODIES[kind]))
        for slot, (at, size) in enumerate(BODIES[kind]):
            stretch = slice(at - _FIRST, at - _FIRST + size)
            if size == OBJECT_ID_NBYTES:
                raw[rows, stretch] = bodies.structs(slot, size)
            elif size:
                raw[rows, stretch] = bodies.numbers(slot, f"<u{size}").view("u1").reshape(-1, size)
            elif kind != STATUS:
                starts[rows], nbytes[rows] = bodies.vectors(slot, 1, is_required=True)
    return raw, Spans(starts, nbytes)


def _placed(count: int, rows: Places, values: NDArray[Any], kind: Any) -> NDArray[Any]:
    """Make a column of zeros with *values* in some *rows*."""
    column = np.zeros(count, kind)
    column[rows] = values
    return column
