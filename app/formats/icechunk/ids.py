"""Object ids as file names spell them: Crockford's Base32 without padding ("Common Types")."""

from functools import lru_cache
from typing import Final

OBJECT_ID_NBYTES: Final = 12
"""Of snapshots, manifests and chunks."""
NODE_ID_NBYTES: Final = 8
_ALPHABET: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_VALUES: Final = {letter: value for value, letter in enumerate(_ALPHABET)}


@lru_cache(maxsize=8192)
def encode_id(data: bytes) -> str:
    """Spell the id *data*; its last bits are padded with zeros to a multiple of 5."""
    count = -(-len(data) * 8 // 5)
    bits = int.from_bytes(data) << (count * 5 - len(data) * 8)
    return "".join(_ALPHABET[bits >> shift & 31] for shift in range(count * 5 - 5, -1, -5))


def decode_id(text: str, nbytes: int = OBJECT_ID_NBYTES) -> bytes | None:
    """Read an id of *nbytes*; `None` for any but its one canonical spelling, in capitals."""
    if len(text) != -(-nbytes * 8 // 5) or any(letter not in _VALUES for letter in text):
        return None
    bits = 0
    for letter in text:
        bits = bits << 5 | _VALUES[letter]
    padding = len(text) * 5 - nbytes * 8
    return None if bits & (1 << padding) - 1 else (bits >> padding).to_bytes(nbytes)
