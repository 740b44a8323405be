"""Files of Icechunk, built with the package `flatbuffers` from the schemas.

A table is a `dict` of its fields by slot; fields that are `None` are absent. A table or vector
object that occurs twice is written once, so that files can share parts that no writer shares.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import flatbuffers
import zstandard

type Table = dict[int, "Field | None"]
type Field = "Number | Numbers | Struct | Structs | str | bytes | Table | Sequence[Table | str]"

SNAPSHOT, MANIFEST, TRANSACTION_LOG, REPO_INFO = 1, 2, 4, 6


_NAMES = {"B": "Uint8", "H": "Uint16", "I": "Uint32", "i": "Int32", "Q": "Uint64"}


@dataclass(frozen=True, eq=False)
class Number:
    """A number; *kind* is that of `struct`: B, H, I, i, Q."""

    kind: str
    value: int


@dataclass(frozen=True, eq=False)
class Numbers:
    """A vector of numbers."""

    kind: str
    values: Sequence[int]


@dataclass(frozen=True, eq=False)
class Struct:
    """A struct; ids are aligned to 1."""

    data: bytes
    align: int = 1


@dataclass(frozen=True, eq=False)
class Structs:
    """A vector of structs of *size* bytes each."""

    items: Sequence[bytes]
    size: int = 12
    align: int = 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Ref:
    """A chunk reference; fields that are `None` are absent."""

    index: Sequence[int] | Numbers | None
    inline: bytes | None = None
    offset: int | None = None
    length: int | None = None
    chunk_id: bytes | None = None
    location: str | bytes | None = None
    checksum_etag: str | bytes | None = None
    checksum_last_modified: int | None = None
    compressed_location: bytes | None = None

    @property
    def table(self) -> Table:
        """The reference as a table."""
        index = self.index
        return {
            0: index if index is None or isinstance(index, Numbers) else Numbers("I", index),
            1: self.inline,
            2: _number("Q", self.offset),
            3: _number("Q", self.length),
            4: _struct(self.chunk_id),
            5: self.location,
            6: self.checksum_etag,
            7: _number("I", self.checksum_last_modified),
            8: self.compressed_location,
        }


def envelope(payload: bytes, file_type: int, *, version: int = 2, compression: int = 1) -> bytes:
    """Wrap *payload* in one frame of zstd, or in none."""
    body = zstandard.ZstdCompressor(level=3).compress(payload) if compression == 1 else payload
    return header(file_type, version=version, compression=compression, client="tests") + body


def header(file_type: int, *, version: int = 2, compression: int = 1, client: str = "") -> bytes:
    """Return the 39 bytes of a file's header."""
    name = client.encode().ljust(24)
    return b"ICE\xf0\x9f\xa7\x8aCHUNK" + name + bytes([version, file_type, compression])


def manifest(
    object_id: bytes | None,
    arrays: Sequence[tuple[bytes | None, Sequence[Ref | Table] | None]] | None,
    *,
    dictionary: bytes | None = None,
    algorithm: int | None = None,
) -> bytes:
    """Encode the payload of a manifest, with its arrays in the given order."""
    tables: list[Table] = [
        {0: _struct(node_id), 1: None if refs is None else [_table(ref) for ref in refs]}
        for node_id, refs in arrays or ()
    ]
    return payload(
        {
            0: _struct(object_id),
            1: None if arrays is None else tables,
            2: dictionary,
            3: _number("B", algorithm),
        }
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Node:
    """A node of a snapshot; with *shape* an array, else a group."""

    node_id: bytes
    path: str
    user_data: bytes
    shape: Sequence[tuple[int, int]] | None = None
    """Array length and number of chunks of each dimension."""
    dimension_names: Sequence[str | None] | None = None
    manifests: Sequence[tuple[bytes, Sequence[tuple[int, int]]]] = ()
    """Id and extents of each manifest."""
    chunk_shape: Sequence[int] | None = None
    """Chunk lengths for the shape of version 1, which has no numbers of chunks."""


def snapshot(
    object_id: bytes,
    nodes: Sequence[Node],
    *,
    manifest_files: Sequence[tuple[bytes, int, int]] | None = (),
    flushed_at: int = 0,
    message: str = "",
    metadata: Sequence[tuple[str, bytes]] = (),
    parent_id: bytes | None = None,
    version: int = 2,
) -> bytes:
    """Encode the payload of a snapshot; manifest files have id, size and number of references."""
    files = manifest_files or ()
    v1 = [
        item.ljust(16, b"\0") + size.to_bytes(8, "little") + count.to_bytes(8, "little")
        for item, size, count in files
    ]
    v2: list[Table | str] = [
        {0: Struct(item), 1: Number("Q", size), 2: Number("I", count)}
        for item, size, count in files
    ]
    return payload(
        {
            0: Struct(object_id),
            1: _struct(parent_id),
            2: [node_table(node) for node in nodes],
            3: Number("Q", flushed_at),
            4: message,
            5: [{0: name, 1: value} for name, value in metadata],
            6: Structs(v1 if version == 1 else [], 32, 8),
            7: None if version == 1 or manifest_files is None else v2,
        }
    )


def payload(root: Table, identifier: bytes | None = b"Ichk") -> bytes:
    """Encode a FlatBuffer."""
    builder = flatbuffers.Builder(1024)
    builder.ForceDefaults(forceDefaults=True)
    builder.Finish(_Writer(builder).table(root), identifier)
    return bytes(builder.Output())


def node_table(node: Node) -> Table:
    """Return a table `NodeSnapshot`."""
    return {
        0: Struct(node.node_id),
        1: node.path,
        2: node.user_data,
        3: Number("B", 2 if node.shape is None else 1),
        4: {} if node.shape is None else _array(node, node.shape),
    }


def _array(node: Node, shape: Sequence[tuple[int, int]]) -> Table:
    v1 = [
        length.to_bytes(8, "little") + chunk.to_bytes(8, "little")
        for (length, _), chunk in zip(shape, node.chunk_shape or (), strict=False)
    ]
    v2: list[Table | str] = [{0: Number("Q", length), 1: Number("I", n)} for length, n in shape]
    names: list[Table | str] | None = None
    if node.dimension_names is not None:
        names = [{} if name is None else {0: name} for name in node.dimension_names]
    manifests: list[Table | str] = [
        {
            0: Struct(item),
            1: Structs([a.to_bytes(4, "little") + b.to_bytes(4, "little") for a, b in box], 8, 4),
        }
        for item, box in node.manifests
    ]
    return {
        0: Structs(v1, 16, 8),
        1: names,
        2: manifests,
        3: None if node.chunk_shape is not None else v2,
    }


def _table(ref: Ref | Table) -> Table:
    return ref.table if isinstance(ref, Ref) else ref


def _number(kind: str, value: int | None) -> Number | None:
    return None if value is None else Number(kind, value)


def _struct(data: bytes | None) -> Struct | None:
    return None if data is None else Struct(data)


class _Writer:
    def __init__(self, builder: flatbuffers.Builder) -> None:
        self._builder = builder
        self._written: dict[int, tuple[object, int]] = {}

    def table(self, table: Table) -> int:
        """Write *table* after all that it leads to."""
        return self._once(table, lambda: self._table(table))

    def _table(self, table: Table) -> int:
        fields = {slot: value for slot, value in table.items() if value is not None}
        offsets = {
            slot: self._once(value, lambda value=value: self._write(value))
            for slot, value in fields.items()
            if not isinstance(value, Number | Struct)
        }
        builder = self._builder
        builder.StartObject(max(fields, default=-1) + 1)
        for slot, value in fields.items():
            if isinstance(value, Number):
                getattr(builder, f"Prepend{_NAMES[value.kind]}Slot")(slot, value.value, 0)
            elif isinstance(value, Struct):
                builder.Prep(value.align, len(value.data))
                self._place(value.data)
                builder.PrependStructSlot(slot, builder.Offset(), 0)
            else:
                builder.PrependUOffsetTRelativeSlot(slot, offsets[slot], 0)
        end: int = builder.EndObject()
        return end

    def _once(self, value: object, write: Any) -> int:
        if id(value) not in self._written or isinstance(value, str | bytes):
            self._written[id(value)] = value, write()
        return self._written[id(value)][1]

    def _write(self, value: Any) -> int:
        """Write the value of a field."""
        match value:
            case dict():
                return self._table(value)
            case str():
                return int(self._builder.CreateString(value))
            case bytes():
                return int(self._builder.CreateByteVector(value))
            case Numbers():
                count, size = len(value.values), struct.calcsize(value.kind)
                data = struct.pack(f"<{count}{value.kind}", *value.values)
                return self._vector(size, count, size, data)
            case Structs():
                return self._vector(
                    value.size, len(value.items), value.align, b"".join(value.items)
                )
            case _:
                return self._offsets(value)

    def _offsets(self, items: Sequence[Table | str]) -> int:
        found = [self._once(item, lambda item=item: self._write(item)) for item in items]
        self._builder.StartVector(4, len(found), 4)
        for offset in reversed(found):
            self._builder.PrependUOffsetTRelative(offset)
        return int(self._builder.EndVector())

    def _vector(self, size: int, count: int, align: int, data: bytes) -> int:
        self._builder.StartVector(size, count, align)
        self._place(data)
        return int(self._builder.EndVector())

    def _place(self, data: bytes) -> None:
        self._builder.head -= len(data)
        self._builder.Bytes[self._builder.Head() : self._builder.Head() + len(data)] = data
