"""The list of snapshots in ``repo`` written from columns, all tables of a kind at once."""

from struct import pack
from typing import Final

import numpy as np

from app.formats.icechunk.flatbuffer_writing import Block
from app.formats.icechunk.ids import OBJECT_ID_NBYTES
from app.formats.icechunk.ragged import each_of, ends_of, write_vectors
from app.formats.icechunk.snapshot_columns import SnapshotColumns

_RECORD: Final = np.dtype(
    {
        "names": ["vtable", "parent", "flushed", "id", "message", "items", "pruned"],
        "formats": ["<i4", "<i4", "<u8", ("u1", OBJECT_ID_NBYTES), "<u4", "<u4", "<u4"],
        "offsets": [0, 4, 8, 16, 28, 32, 36],
        "itemsize": 40,
    }
)
_VTABLE_NBYTES: Final = 16
_VTABLES: Final = b"".join(
    pack("<8H", _VTABLE_NBYTES, 40, 16, 4, 8, 28, 32 * has_items, 36 * has_pruned)
    for has_pruned in (0, 1)
    for has_items in (0, 1)
)
"""Of snapshots without and with metadata, and those with pruned logs besides."""
_ITEM: Final = np.dtype([("vtable", "<i4"), ("name", "<u4"), ("value", "<u4")])
_ITEM_VTABLE: Final = pack("<4H", 8, 12, 4, 8)


def snapshot_block(snapshots: SnapshotColumns) -> Block:
    """Write the vector of *snapshots*, and all that it leads to."""
    count, counts = len(snapshots.ids), np.maximum(snapshots.item_counts, 0)
    messages, message_at = write_vectors(snapshots.source, snapshots.messages, 1, tail=1)
    names, name_at = write_vectors(snapshots.source, snapshots.names, 1, tail=1)
    values, value_at = write_vectors(snapshots.source, snapshots.values, 1, tail=0)
    pruned, pruned_at = write_vectors(snapshots.source, snapshots.pruned, OBJECT_ID_NBYTES, tail=0)
    list_at, lists_nbytes = ends_of(4 + 4 * counts)
    head = len(_VTABLES) + len(_ITEM_VTABLE)
    vector = 4 + 4 * count
    records = head + vector + -(head + vector) % 8
    lists = records + _RECORD.itemsize * count
    items = lists + lists_nbytes
    sizes = (_ITEM.itemsize * len(name_at), len(messages), len(names), len(values))
    messages_at, names_at, values_at, pruned_start = items + np.cumsum(sizes)

    places = records + _RECORD.itemsize * np.arange(count)
    vtable = (snapshots.item_counts >= 0) + 2 * (snapshots.pruned.nbytes > 0)
    record = np.zeros(count, _RECORD)
    record["vtable"] = places - _VTABLE_NBYTES * vtable
    record["parent"], record["flushed"], record["id"] = (
        snapshots.parents,
        snapshots.flushed,
        snapshots.ids,
    )
    record["message"] = messages_at + message_at - (places + 28)
    record["items"] = lists + list_at - (places + 32)
    record["pruned"] = pruned_start + pruned_at - (places + 36)

    item_places = items + _ITEM.itemsize * np.arange(len(name_at))
    item = np.zeros(len(name_at), _ITEM)
    item["vtable"] = item_places - len(_VTABLES)
    item["name"] = names_at + name_at - (item_places + 4)
    item["value"] = values_at + value_at - (item_places + 8)

    words = np.zeros(lists_nbytes // 4, "<u4")
    words[list_at // 4] = counts
    slots = each_of(list_at // 4 + 1, counts)
    words[slots] = item_places - (lists + 4 * slots)

    index = np.empty(count + 1, "<u4")
    index[0], index[1:] = count, places - (head + 4 + 4 * np.arange(count))
    parts = (_VTABLES, _ITEM_VTABLE, index.tobytes(), bytes(-(head + vector) % 8))
    tables = (record, words, item, messages, names, values, pruned)
    return Block((*parts, *tables), at=head)
