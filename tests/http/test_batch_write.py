"""`app.http.batch_write`: a batch of writes, taken apart as it arrives."""

import pytest

from app.errors import BadBodyError, BadHeaderError, BadKeyError, TooLargeError
from app.http.batch_write import Frames
from app.model import ETag

BATCH = (
    b'{"key": "a", "length": 3}\nab\n'
    b'{"key": "b/c", "length": 0, "content_encoding": "gzip"}\n'
    b'{"key": "d", "delete": true, "if_match": "\\"x\\""}\n'
    b'{"key": "e", "length": 1}\ne'
)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, len(BATCH)])
def test_keys_and_bodies(size: int) -> None:
    """However the body is cut on its way, each key gets its bytes."""
    frames = Frames(most_nbytes=3)
    for at in range(0, len(BATCH), size):
        frames.feed(BATCH[at : at + size])
    given = frames.finish()

    assert [(each.key, each.body, each.headers.is_gzip) for each in given] == [
        ("a", b"ab\n", False),
        ("b/c", b"", True),
        ("d", None, False),
        ("e", b"e", False),
    ]
    demand = given[2].demand
    assert demand is not None
    assert (demand([ETag('"x"')]), demand([])) == (True, False)
    assert given[0].demand is None


def test_an_empty_batch_writes_nothing() -> None:
    """No key is no mistake."""
    assert list(Frames(most_nbytes=1).finish()) == []


@pytest.mark.parametrize("length", [1, 24, 26, 27, len(BATCH) - 1])
def test_a_truncated_batch_is_refused(length: int) -> None:
    """Though the keys before are complete."""
    frames = Frames(most_nbytes=3)
    frames.feed(BATCH[:length])

    with pytest.raises(BadBodyError):
        frames.finish()


@pytest.mark.parametrize(
    ("batch", "error"),
    [
        (b"\n", BadBodyError),
        (b"[]\n", BadBodyError),
        (b'{"key": "a"}\n', BadBodyError),
        (b'{"key": "a", "length": -1}\n', BadBodyError),
        (b'{"key": "a", "length": true}\n', BadBodyError),
        (b'{"key": "a", "length": "1"}\n', BadBodyError),
        (b'{"key": "a", "length": 1, "delete": true}\n', BadBodyError),
        (b'{"key": "a", "delete": false}\n', BadBodyError),
        (b'{"key": "a", "length": 0, "more": 1}\n', BadBodyError),
        (b'{"key": "a", "length": 0, "content_encoding": "br"}\n', BadBodyError),
        (b'{"key": "a", "length": 4}\n', TooLargeError),
        (b'{"key": "../a", "length": 0}\n', BadKeyError),
        (b'{"key": "\\ud800", "length": 0}\n', BadBodyError),
        (b'{"key": "a/", "length": 0}\n', BadBodyError),
        (b'{"key": "", "delete": true}\n', BadBodyError),
        (b'{"key": "a", "length": 0, "if_match": "\\"x"}\n', BadHeaderError),
        (b"{" * 9000, BadBodyError),
        (b'{"key": "a", "delete": true}\n' * 10_001, BadBodyError),
    ],
)
def test_a_wrong_line_is_refused(batch: bytes, error: type[Exception]) -> None:
    """With what is wrong, before more has arrived."""
    with pytest.raises(error):
        Frames(most_nbytes=3).feed(batch)
