"""Parts of objects that tests of stores read."""

from shardgate.model import ByteRange, ByteRequest, SuffixRange

REQUESTS: list[ByteRequest | None] = [
    None,
    ByteRange(1, 2),
    ByteRange(0, 0),
    ByteRange(900, 9999),
    SuffixRange(5),
]

MIDDLE = ByteRange(1000, 201_000)
