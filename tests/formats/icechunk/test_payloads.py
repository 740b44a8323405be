"""Payloads of changed chunks in columns, and their columns in JSON."""

import numpy as np

from app.formats.icechunk.manifest import Native, Virtual
from app.formats.icechunk.payloads import Distinct, Inlaid, Payload, PayloadKind, Payloads, Ranges
from app.model import ByteRange, ETag, UnmodifiedSince

EACH: list[Payload | None] = [
    Native(b"a" * 12, ByteRange(1, 5)),
    None,
    Virtual("s3://b/k", ByteRange(0, 2**62), ETag('"e"')),
    Inlaid(b"xy"),
    Virtual("s3://b/é", ByteRange(2, 3), None),
    Virtual("s3://b/k", ByteRange(7, 9), UnmodifiedSince(5)),
]


def test_columns_give_back_what_was_put_in() -> None:
    """Of every kind, with every kind of checksum."""
    assert list(Payloads.of(EACH)) == EACH


def test_any_can_be_taken_in_any_order() -> None:
    """What they refer to comes along."""
    taken = Payloads.of(EACH).take(np.array([5, 0, 0, 1]))

    assert list(taken) == [EACH[5], EACH[0], EACH[0], None]
    assert list(taken.values_of(PayloadKind.VIRTUAL)) == [b"s3://b/k"]
    assert taken.of_kind(PayloadKind.NATIVE).tolist() == [1, 2]


def test_parts_are_joined() -> None:
    """Each keeps what it refers to, however each of them was made."""
    parts = [
        Payloads.of(EACH),
        Payloads.gone(2),
        Payloads.virtual(
            Distinct.of(["s3://c/1", "s3://c/2", "s3://c/1"]),
            Ranges(np.array([0, 1, 2]), np.array([1, 2, 3])),
            Distinct.of([None, ETag('"e"'), None]),
        ),
        Payloads.inlaid([b"1"]),
        Payloads.native(Distinct.of([b"b" * 12]), Ranges(np.array([3]), np.array([4]))),
    ]

    joined = Payloads.joined(parts)

    assert list(joined) == [each for part in parts for each in part]
    assert list(parts[0]) == EACH, "the parts stay as they were"
    assert list(joined)[8:] == [
        Virtual("s3://c/1", ByteRange(0, 1), None),
        Virtual("s3://c/2", ByteRange(1, 2), ETag('"e"')),
        Virtual("s3://c/1", ByteRange(2, 3), None),
        Inlaid(b"1"),
        Native(b"b" * 12, ByteRange(3, 4)),
    ]


def test_nothing_is_joined_to_nothing() -> None:
    """A request may tell of no chunks."""
    assert not list(Payloads.joined([]))
    assert not list(Payloads.of([]))
