"""What every store holds a write against; nothing here waits."""

from collections.abc import Sequence

from app.errors import BadKeyError, RangeNotSatisfiedError
from app.model import ByteRange, ETag, ObjectRef, Piece
from app.storage.contract import ABSENT, TEMPORARY, UPLOADS, Expected


def demand_writable(ref: ObjectRef, pieces: Sequence[Piece], expected: Expected) -> None:
    """Raise unless *ref* can name an object, and *pieces* can be taken from what is *expected*.

    Raises: `BadKeyError`, `ValueError`.
    """
    name = f"/{ref.key}".replace(f"/{UPLOADS}", "/", 1)
    if name.endswith("/") or TEMPORARY in name:
        raise BadKeyError(f"{ref.key!r} can be no object")
    if not isinstance(expected, str) and any(isinstance(piece, ByteRange) for piece in pieces):
        raise ValueError(f"{ref}: of which version are the ranges?")


def is_as_expected(etag: ETag | None, expected: Expected) -> bool:
    """Tell whether an object in the version *etag*, `None` without one, may be replaced."""
    if expected is None:
        return True
    return etag == (None if expected == ABSENT else expected)


def demand_inside(ref: ObjectRef, piece: ByteRange, size: int) -> None:
    """Raise unless the object of *size* bytes has all of *piece*."""
    if piece.stop > size:
        raise RangeNotSatisfiedError(ref, size)


def is_ours(prefix: ObjectRef, ref: ObjectRef) -> bool:
    """Tell whether *ref*, found below *prefix*, is an unfinished object of a writer."""
    return TEMPORARY in ref.key[prefix.key.rfind("/") + 1 :]


def given_nbytes(pieces: Sequence[Piece]) -> int:
    """Count the bytes of *pieces* that are new."""
    return sum(len(piece) for piece in pieces if isinstance(piece, bytes))
