"""Tables of references as trees of Thrift fields, which can be changed before they are encoded."""

import copy
import random
import struct
from typing import Any, Final

_NUMBERS: Final = [
    *(0, 1, -1, 2, 15, 16, 2**15, 2**31, -(2**31), 2**32, 2**62, 2**63 - 1),
    *(-(2**63), 2**63, 2**64 - 1, -(2**64), 2**69),
]

type Field = list[Any]
"""Number of the field, its Thrift type, and its value."""


def varint(number: int) -> bytes:
    """Encode an unsigned number."""
    encoded = b""
    while number > 127:
        encoded += bytes([number & 127 | 128])
        number >>= 7
    return encoded + bytes([number])


def zigzag(number: int) -> bytes:
    """Encode a signed number."""
    return varint(2 * number if number >= 0 else -2 * number - 1)


def encode(kind: int, value: Any) -> bytes:
    """Encode a value of a Thrift type; booleans of fields have none."""
    match kind:
        case 5 | 6:
            return zigzag(value)
        case 8:
            return varint(len(value)) + bytes(value)
        case 9:
            item_kind, items = value
            body = b"".join(encode(item_kind, item) for item in items)
            return bytes([0xF0 | item_kind]) + varint(len(items)) + body
        case 12:
            encoded, last = b"", 0
            for number, field_kind, field in value:
                encoded += (
                    bytes([field_kind]) + zigzag(number)
                    if not 0 < number - last < 16
                    else (bytes([number - last << 4 | field_kind]))
                )
                encoded += encode(field_kind, field)
                last = number
            return encoded + b"\0"
    return b""


def page(value_count: int, body: bytes) -> list[Field]:
    """Return the header of a data page of plain values."""
    values = [[1, 5, value_count], [2, 5, 0], [3, 5, 3], [4, 5, 3]]
    return [[1, 5, 0], [2, 5, len(body)], [3, 5, len(body)], [5, 12, values]]


COLUMNS: Final = {
    b"path": (6, b"\4\0\0\0s3:/" * 2),
    b"offset": (2, struct.pack("<2q", 0, 5)),
    b"size": (2, struct.pack("<2q", 0, 7)),
    b"raw": (6, b"\1\0\0\0x" * 2),
}
"""Type and plain values of the columns of a table of two rows."""


def table() -> tuple[bytes, list[Field]]:
    """Return the pages of a table of two rows, and its footer."""
    pages = b"PAR1"
    chunks: list[list[Field]] = []
    for kind, body in COLUMNS.values():
        header = encode(12, page(2, body))
        nbytes = len(header) + len(body)
        meta = [[1, 5, kind], [4, 5, 0], [5, 6, 2], [6, 6, nbytes], [7, 6, nbytes]]
        chunks.append([[3, 12, [*meta, [9, 6, len(pages)]]]])
        pages += header + body
    schema: list[list[Field]] = [[[4, 8, b"root"], [5, 5, len(COLUMNS)]]]
    schema += [[[1, 5, kind], [3, 5, 0], [4, 8, name]] for name, (kind, _) in COLUMNS.items()]
    group = [[1, 9, (12, chunks)], [2, 6, 0], [3, 6, 2]]
    return pages, [[1, 5, 1], [2, 9, (12, schema)], [3, 6, 2], [4, 9, (12, [group])]]


def assemble(pages: bytes, footer: list[Field]) -> bytes:
    """Return the file."""
    encoded = encode(12, footer)
    return pages + encoded + struct.pack("<I", len(encoded)) + b"PAR1"


def fields_of(struct_: list[Field]) -> list[Field]:
    """Return all fields of a struct, at all depths."""
    found = []
    for field in struct_:
        found.append(field)
        if field[1] == 12:
            found += fields_of(field[2])
        elif field[1] == 9 and field[2][0] == 12:
            for item in field[2][1]:
                found += fields_of(item)
    return found


def changed(chance: random.Random) -> bytes:
    """Return a table with a few wrong numbers, types, fields and bytes."""
    pages, footer = table()
    for _ in range(chance.randint(1, 3)):
        fields = fields_of(footer)
        field = chance.choice(fields)
        match chance.randrange(5):
            case 0 | 1 if field[1] in (5, 6):
                field[2] = chance.choice(_NUMBERS)
            case 2:
                field[1], field[2] = chance.choice([(1, True), (2, False), (8, b"x"), (12, [])])
            case 3:
                field[0] = chance.randint(-1, 20)
            case 4:
                other = chance.choice(fields)
                field[1], field[2] = other[1], copy.deepcopy(other[2])
    if chance.random() < 0.5:
        at = chance.randrange(4, len(pages))
        pages = pages[:at] + bytes([chance.choice([0, 1, 127, 128, 255])]) + pages[at + 1 :]
    return assemble(pages, footer)
