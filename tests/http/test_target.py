"""`app.http.target`: from paths to keys."""

from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import BadKeyError
from app.http.target import split_target

SEGMENTS = st.text(
    st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="/"), min_size=1
)


@pytest.mark.parametrize(
    ("path", "dataset", "key"),
    [
        (b"/em/s0/c/0/1", "em", "s0/c/0/1"),
        (b"/em/", "em", ""),
        (b"/em", "em", None),
        (b"/em/s0/", "em", "s0/"),
        (b"/em/a%20b+c", "em", "a b+c"),
        (b"/em/%C3%A9", "em", "é"),
        (b"/em/7:0:0-64", "em", "7:0:0-64"),
        (b"/em/.zattrs", "em", ".zattrs"),
        (b"/em/..a/b..", "em", "..a/b.."),
        (b"/em/%zz", "em", "%zz"),
    ],
)
def test_splits(path: bytes, dataset: str, key: str | None) -> None:
    """The first segment names the dataset; the rest, decoded once, is the key."""
    assert split_target(path) == (dataset, key)


@pytest.mark.parametrize(
    "path",
    [
        b"/em/../etc",
        b"/em/a/..",
        b"/em/./a",
        b"/em/%2e%2e/a",
        b"/em/%2e%2e%2fa",
        b"/em/a//b",
        b"/em//a",
        b"/em/a%00b",
        b"/em/a%0d%0ab",
        b"/em/%ff",
        b"/em/\xff",
        b"/em/%C3%A9" * 200,
        b"/em/" + b"a" * 1025,
        b"/em/" + b"a" * 100_000,
    ],
)
def test_refuses(path: bytes) -> None:
    """What could leave the root, or have two spellings, is no key."""
    with pytest.raises(BadKeyError):
        split_target(path)


@given(st.lists(SEGMENTS, min_size=1, max_size=5))
def test_every_other_key_comes_through(segments: list[str]) -> None:
    """A quoted key comes out as it was, or is refused for its segments or length."""
    key = "/".join(segments)
    try:
        found = split_target(f"/em/{quote(key)}".encode())
    except BadKeyError:
        assert {".", ".."} & set(segments) or len(key.encode()) > 1024
    else:
        assert found == ("em", key)
