"""Zip archives with wrong numbers, lengths, extra fields and end records."""

import random
import struct
from typing import Any, Final

from tests.support.formats.zip.archives import Entry, Fields, archive

_NUMBERS: Final = [
    *(0, 1, 2, 7, 30, 46, 255, 2**15, 2**16 - 1, 2**16, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1),
    *(2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 46, 2**64 - 1),
]
_LOCAL: Final = {
    "version": 16,
    "flags": 16,
    "method": 16,
    "time": 16,
    "date": 16,
    "crc": 32,
    "nbytes": 32,
    "size": 32,
    "name": 16,
    "extra": 16,
}
"""Bits of the fields of local headers."""
_CENTRAL: Final = _LOCAL | {"comment": 16, "disk": 16, "internal": 16, "external": 32, "start": 32}
_END: Final = {
    "disk": 16,
    "first": 16,
    "here": 16,
    "count": 16,
    "nbytes": 32,
    "start": 32,
    "comment": 16,
}
_END64: Final = {
    "record": 64,
    "made": 16,
    "needed": 16,
    "disk": 32,
    "first": 32,
    "here": 64,
    "count": 64,
    "nbytes": 64,
    "start": 64,
}
_LOCATOR: Final = {"disk": 32, "at": 64, "disks": 32}
_NAMES: Final = [b"a", b"a/b", b"a/", b"", b"..", b"a\\b", b"\xff\xfe", b"x" * 300, b"/a", b"c/0\0"]


def _fields(chance: random.Random, bits: dict[str, int], often: float) -> Fields:
    """Return wrong numbers for one or two fields, *often* enough."""
    found: Fields = {}
    while chance.random() < often:
        name = chance.choice(list(bits))
        near = chance.choice([chance.randint(0, 400), chance.choice(_NUMBERS)])
        found[name] = near % 2 ** bits[name]
    return found


def _extra(chance: random.Random) -> bytes:
    """Return extra fields: zip64 numbers, a Unicode path, and fields of a wrong length."""
    numbers = [chance.choice(_NUMBERS) for _ in range(chance.randint(0, 3))]
    zip64 = struct.pack(f"<{len(numbers)}Q", *numbers) + bytes(chance.choice([0, 0, 4, 7]))
    fields = [(1, zip64), (0x7075, b"\1" + bytes(4) + b"name"), (chance.randrange(2**16), b"x")]
    kind, body = chance.choice(fields)
    length = len(body) if chance.random() < 0.8 else chance.choice([0, 1, 8, 2**16 - 1])
    return struct.pack("<2H", kind, length) + body


def changed(chance: random.Random) -> bytes:
    """Return an archive with a few wrong fields and bytes."""
    entries = []
    for number in range(chance.randint(0, 4)):
        wide: Fields = {}
        if chance.random() < 0.3:
            wide = {chance.choice(["nbytes", "size", "start"]): 2**32 - 1}
        entry = Entry(
            name=b"c/%d" % number if chance.random() < 0.7 else chance.choice(_NAMES),
            data=bytes(chance.randrange(20)),
            method=chance.choice([0, 0, 8, 8, 9, 99]),
            flags=chance.choice([0, 0, 0, 1, 8, 0x800]),
            extra=_extra(chance) if wide or chance.random() < 0.1 else b"",
            local_extra=_extra(chance) if chance.random() < 0.1 else b"",
            local=_fields(chance, _LOCAL, 0.1),
            central=_fields(chance, _CENTRAL, 0.15) | wide,
            host=chance.choice([0, 3, 255]),
        )
        entries.append(entry)
    options: dict[str, Any] = {"end": _fields(chance, _END, 0.2)}
    if chance.random() < 0.4:
        options["end64"] = _fields(chance, _END64, 0.3)
        options["locator"] = _fields(chance, _LOCATOR, 0.2)
    data = archive(*entries, comment=chance.choice([b"", b"PK\5\6"]), **options)
    if chance.random() < 0.2:
        at = chance.randrange(len(data))
        data = data[:at] + bytes([chance.choice([0, 1, 127, 128, 255])]) + data[at + 1 :]
    return data[: chance.randrange(len(data))] if chance.random() < 0.05 else data
