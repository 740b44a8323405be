"""What the plan of a shard comes to, put together in memory."""

from collections.abc import Sequence

import google_crc32c

from app.formats.contract import Checksummed
from app.model import ByteRange, Piece


def render(pieces: Sequence[Piece | Checksummed], old: bytes = b"") -> bytes:
    """Put *pieces* one behind the other; ranges are of *old*."""
    return b"".join(_bytes(piece, old) for piece in pieces)


def _bytes(piece: Piece | Checksummed, old: bytes) -> bytes:
    match piece:
        case ByteRange(start, stop):
            assert stop <= len(old)
            return old[start:stop]
        case Checksummed(pieces):
            data = render(pieces, old)
            checksum: int = google_crc32c.value(data)
            return data + checksum.to_bytes(4, "little")
        case _:
            return piece
