"""Icechunk's files as its specification has them, one field after the other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import flatbuffers
import zstandard
from flatbuffers import number_types

REPO, TRANSACTION_LOG = 6, 4
NOON = 1_700_000_000_000_000


def in_envelope(payload: bytes, file_type: int, version: int = 2) -> bytes:
    """Put *payload* behind the header."""
    header = "ICE🧊CHUNK".encode() + b"tests".ljust(24) + bytes([version, file_type, 1])
    return header + zstandard.compress(payload)


@dataclass(frozen=True)
class Number:
    """A number that lies in the table itself."""

    kind: Any
    value: int


U8 = partial(Number, number_types.Uint8Flags)
U16 = partial(Number, number_types.Uint16Flags)
U32 = partial(Number, number_types.Uint32Flags)
I32 = partial(Number, number_types.Int32Flags)
U64 = partial(Number, number_types.Uint64Flags)


@dataclass(frozen=True)
class Numbers:
    """A vector of numbers."""

    kind: Any
    items: Sequence[int]


U16s = partial(Numbers, number_types.Uint16Flags)
U32s = partial(Numbers, number_types.Uint32Flags)


@dataclass(frozen=True)
class Struct:
    """Bytes that lie in the table itself."""

    data: bytes


@dataclass(frozen=True)
class Structs:
    """A vector of structs of *nbytes* each."""

    items: Sequence[bytes]
    nbytes: int = 12


@dataclass
class Shared:
    """What many fields of one buffer lead to."""

    value: Any
    place: int | None = None


type Fields = Mapping[int, Any]
"""By slots: numbers, structs, text, bytes, tables as mappings, lists of texts or tables."""


def flatbuffer(root: Fields) -> bytes:
    """Spell the table *root*."""
    builder = flatbuffers.Builder(1024)
    builder.ForceDefaults(True)  # noqa: FBT003
    builder.Finish(_table(builder, root), b"Ichk")
    return bytes(builder.Output())


def _table(builder: flatbuffers.Builder, fields: Fields) -> int:
    inline = (Number, Struct)
    places = {
        slot: value if isinstance(value, inline) else _distant(builder, value)
        for slot, value in fields.items()
    }
    builder.StartObject(max(fields, default=-1) + 1)
    for slot, value in places.items():
        match value:
            case Struct(data):
                builder.Prep(1, len(data))
                for byte in reversed(data):
                    builder.PrependByte(byte)
                builder.PrependStructSlot(slot, builder.Offset(), 0)
            case Number(kind, number):
                builder.PrependSlot(kind, slot, number, 0)
            case _:
                builder.PrependUOffsetTRelativeSlot(slot, value, 0)
    return int(builder.EndObject())


def _distant(builder: flatbuffers.Builder, value: Any) -> int:
    """Write what a field of a table leads to, and tell where."""
    match value:
        case str():
            return int(builder.CreateString(value))
        case bytes():
            return int(builder.CreateByteVector(value))
        case Mapping():
            return _table(builder, value)
        case Shared():
            if value.place is None:
                value.place = _distant(builder, value.value)
            return value.place
    return _vector(builder, value)


def _vector(builder: flatbuffers.Builder, value: Any) -> int:
    match value:
        case Structs(structs, nbytes):
            builder.StartVector(nbytes, len(structs), 1)
            for data in reversed(structs):
                builder.head -= nbytes
                builder.Bytes[builder.head : builder.head + nbytes] = data
        case Numbers(kind, numbers):
            builder.StartVector(kind.bytewidth, len(numbers), kind.bytewidth)
            for number in reversed(numbers):
                builder.Prepend(kind, number)
        case _:
            places = [_distant(builder, item) for item in value]
            builder.StartVector(4, len(places), 4)
            for place in reversed(places):
                builder.PrependUOffsetTRelative(place)
    return int(builder.EndVector())


def ref(name: str, index: int) -> Fields:
    """Describe a branch or a tag."""
    return {0: name, 1: U32(index)}


def item(name: str, value: bytes) -> Fields:
    """Describe a metadata item."""
    return {0: name, 1: value}


def snapshot(
    snapshot_id: bytes, parent: int | None = -1, message: str = "", more: Fields | None = None
) -> Fields:
    """Describe a snapshot in `repo`; *parent* `None` leaves the field out."""
    fields = {0: Struct(snapshot_id), 2: U64(NOON), 3: message}
    return fields | ({} if parent is None else {1: I32(parent)}) | dict(more or {})


def update(kind: int, body: Fields, backup: str | None = None, at: int = NOON) -> Fields:
    """Describe one operation."""
    fields = {0: U8(kind), 1: body, 2: U64(at)}
    return fields if backup is None else {**fields, 3: backup}


FIRST = b"first snapsh"


@dataclass(frozen=True)
class Repo:
    """The file `repo`; *more* adds fields, and `None` in it takes them away."""

    branches: Sequence[Fields] = (ref("main", 0),)
    tags: Sequence[Fields] = ()
    deleted_tags: Sequence[str] = ()
    snapshots: Sequence[Fields] = (snapshot(FIRST),)
    status: Fields = field(default_factory=lambda: {0: U8(0), 1: U64(NOON)})
    updates: Sequence[Fields] = (update(1, {}),)
    more: Fields = field(default_factory=dict)
    version: int = 2

    def payload(self) -> bytes:
        """Spell the FlatBuffer."""
        fields = {
            0: U8(2),
            1: self.tags,
            2: self.branches,
            3: self.deleted_tags,
            4: self.snapshots,
            5: self.status,
            7: self.updates,
            **self.more,
        }
        return flatbuffer({slot: value for slot, value in fields.items() if value is not None})

    def file(self) -> bytes:
        """Spell the file."""
        return in_envelope(self.payload(), REPO, self.version)


def transaction_log(object_id: bytes = FIRST, more: Fields | None = None) -> bytes:
    """Spell the payload of a transaction log that tells of nothing but *more*."""
    fields: dict[int, Any] = {0: Struct(object_id), 7: []}
    fields |= {slot: Structs([], 8) for slot in range(1, 7)}
    fields |= more or {}
    return flatbuffer({slot: value for slot, value in fields.items() if value is not None})


def changed_chunks(node_id: bytes, chunks: Sequence[Sequence[int]]) -> Fields:
    """Describe the changed chunks of an array."""
    return {0: Struct(node_id), 1: [{0: U32s(coords)} for coords in chunks]}
