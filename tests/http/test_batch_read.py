"""`app.http.batch_read`: what a batch of reads asks for."""

import pytest

from app.errors import BadBodyError, BadKeyError
from app.http.batch_read import parse_batch


def test_keys_with_and_without_ranges() -> None:
    """In the order in which they are asked for, twice if that is wanted."""
    wanted = parse_batch(b'{"keys": [{"key": "a", "range": "bytes=0-1"}, {"key": "a"}]}')

    assert [(each.key, each.range) for each in wanted] == [("a", "bytes=0-1"), ("a", None)]
    assert list(parse_batch(b'{"keys": []}')) == []


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"", BadBodyError),
        (b"[]", BadBodyError),
        (b'{"keys": {}}', BadBodyError),
        (b'{"keys": ["a"]}', BadBodyError),
        (b'{"keys": [{"key": 1}]}', BadBodyError),
        (b'{"keys": [{"key": "a", "start": 1}]}', BadBodyError),
        (b'{"keys": [{"key": "\\ud800"}]}', BadBodyError),
        (b'{"keys": [{"key": "a//b"}]}', BadKeyError),
        (b'{"keys": [' + b",".join([b'{"key": "a"}'] * 10_001) + b"]}", BadBodyError),
        (b"[" * 100_000, BadBodyError),
    ],
)
def test_anything_else_is_refused(body: bytes, error: type[Exception]) -> None:
    """As a whole, before anything is read."""
    with pytest.raises(error):
        parse_batch(body)
