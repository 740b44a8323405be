"""The operations in ``repo`` written from columns, all tables of a kind at once."""

from struct import pack
from typing import Final

import numpy as np
from numpy.typing import NDArray

from app.formats.icechunk.flatbuffer_writing import Block
from app.formats.icechunk.ragged import write_vectors
from app.formats.icechunk.update_columns import BODIES, RAW_NBYTES, STATUS, UpdateColumns

_UPDATE: Final = np.dtype(
    {
        "names": ["vtable", "body", "at", "backup", "kind"],
        "formats": ["<i4", "<u4", "<u8", "<u4", "u1"],
        "offsets": [0, 4, 8, 16, 20],
        "itemsize": 24,
    }
)
_BODY: Final = np.dtype([("vtable", "<i4"), ("link", "<u4"), ("raw", "u1", RAW_NBYTES)])
_STATUS_TABLE: Final = np.dtype(
    {
        "names": ["vtable", "reason", "set_at", "availability"],
        "formats": ["<i4", "<u4", "<u8", "u1"],
        "offsets": [0, 4, 8, 16],
        "itemsize": 24,
    }
)


def _vtable(nbytes: int, *places: int) -> bytes:
    return pack(f"<{2 + len(places)}H", 4 + 2 * len(places), nbytes, *places)


def _vtables() -> tuple[bytes, NDArray[np.int64]]:
    """Write the vtables of updates, bodies and statuses; tell where each begins."""
    tables = [_vtable(24, 20, 4, 8, backup) for backup in (0, 16)]
    tables += [_vtable(32, *(at for at, _ in body)) for body in BODIES]
    tables += [_vtable(24, 16, 8, reason) for reason in (0, 4)]
    ends = np.cumsum([len(table) for table in tables])
    data = b"".join(tables)
    return data + bytes(-len(data) % 8), np.concatenate(([0], ends[:-1]))


_HEAD, _VTABLES = _vtables()
_OFBODIES: Final = 2
_OF_STATUSES: Final = _OFBODIES + len(BODIES)


def update_block(updates: UpdateColumns) -> Block:
    """Write the vector of *updates*, and all that it leads to."""
    count, rows = len(updates.kinds), np.flatnonzero(updates.has_status)
    names, name_at = write_vectors(updates.source, updates.names, 1, tail=1)
    backups, backup_at = write_vectors(updates.source, updates.backups, 1, tail=1)
    reasons, reason_at = write_vectors(updates.source, updates.reasons.take(rows), 1, tail=1)
    updates_at = len(_HEAD) + 4 + 4 * count + -(4 + 4 * count) % 8
    sizes = (24 * count, 32 * count, 24 * len(rows), len(names), len(backups))
    bodies_at, statuses_at, names_at, backups_at, reasons_at = updates_at + np.cumsum(sizes)

    places, bodies = updates_at + 24 * np.arange(count), bodies_at + 32 * np.arange(count)
    statuses = statuses_at + 24 * np.arange(len(rows))
    update = np.zeros(count, _UPDATE)
    update["vtable"] = places - _VTABLES[updates.has_backup.astype(np.int64)]
    update["body"], update["at"], update["kind"] = (
        bodies - (places + 4),
        updates.times,
        updates.kinds,
    )
    update["backup"] = backups_at + backup_at - (places + 16)

    body = np.zeros(count, _BODY)
    kinds = updates.kinds.astype(np.int64)
    is_bare = (kinds == STATUS) & ~updates.has_status
    body["vtable"] = bodies - _VTABLES[_OFBODIES + kinds + is_bare]
    body["raw"] = updates.raw
    links = names_at + name_at
    links[rows] = statuses
    body["link"] = links - (bodies + 4)

    status = np.zeros(len(rows), _STATUS_TABLE)
    has_reason = updates.has_reason[rows].astype(np.int64)
    status["vtable"] = statuses - _VTABLES[_OF_STATUSES + has_reason]
    status["reason"] = reasons_at + reason_at - (statuses + 4)
    status["set_at"], status["availability"] = updates.set_at[rows], updates.availability[rows]

    index = np.zeros((updates_at - len(_HEAD)) // 4, "<u4")
    index[0] = count
    index[1 : count + 1] = places - (len(_HEAD) + 4 + 4 * np.arange(count))
    tables = (index, update, body, status, names, backups, reasons)
    return Block((_HEAD, *tables), at=len(_HEAD))
