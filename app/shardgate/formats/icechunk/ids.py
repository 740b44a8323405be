"""Ids in file names: Crockford's Base32 without padding ("Common Types")."""

from base64 import b32encode
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import numpy as np

OBJECT_ID_NBYTES: Final = 12
NODE_ID_NBYTES: Final = 8
_ALPHABET: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
# To the digits of `int` with base 32.
_TO_DIGITS: Final = str.maketrans(_ALPHABET, "0123456789ABCDEFGHIJKLMNOPQRSTUV")
_FROM_RFC_4648: Final = bytes.maketrans(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", _ALPHABET.encode())
_LETTERS: Final = -(-OBJECT_ID_NBYTES * 8 // 5)
_TABLE: Final = np.array([_ALPHABET.find(chr(code)) for code in range(128)], np.int8).view(np.uint8)


@lru_cache(maxsize=8192)
def encode_id(data: bytes) -> str:
    """Encode an id; its last bits are padded with zeros to a multiple of 5."""
    return b32encode(data).rstrip(b"=").translate(_FROM_RFC_4648).decode()


def decode_id(text: str, nbytes: int = OBJECT_ID_NBYTES) -> bytes | None:
    """Decode an id of *nbytes*; `None` for any but the canonical spelling, in capitals."""
    if len(text) != -(-nbytes * 8 // 5) or not set(text).issubset(_ALPHABET):
        return None
    bits = int(text.translate(_TO_DIGITS), 32)
    padding = len(text) * 5 - nbytes * 8
    if bits & (1 << padding) - 1:
        return None
    return (bits >> padding).to_bytes(nbytes)


def decode_ids(texts: Sequence[str]) -> list[bytes] | None:
    """Decode many object ids at once; `None` if one of them is not canonical."""
    if not texts:
        return []
    joined = "".join(texts)
    if not joined.isascii() or not {_LETTERS}.issuperset(map(len, texts)):
        return None
    letters = np.frombuffer(joined.encode(), np.uint8).reshape(len(texts), _LETTERS)
    values = _TABLE[letters]
    bits = np.unpackbits(values[:, :, None], axis=2)
    # A letter that is none is -1, whose upper bits are set.
    if bits[:, :, :3].any():
        return None
    data = np.packbits(bits[:, :, 3:].reshape(len(texts), _LETTERS * 5), axis=1)
    if data[:, OBJECT_ID_NBYTES:].any():
        return None
    every = data[:, :OBJECT_ID_NBYTES].tobytes()
    return [every[at : at + OBJECT_ID_NBYTES] for at in range(0, len(every), OBJECT_ID_NBYTES)]
