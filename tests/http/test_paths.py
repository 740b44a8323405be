"""`app.http.paths`: datasets, keys and tokens in paths."""

from collections.abc import Callable
from urllib.parse import quote, unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import BadKeyError
from app.http.paths import quote_segment, split_target, split_token, without_token

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
        (b"/em/@branch.dev/a", "em", "@branch.dev/a"),
        (b"/em/@branch.a/b", "em", "@branch.a/b"),
        (b"/em/@branch.a%2fb/c%2fd", "em", "@branch.a%2Fb/c/d"),
        (b"/em/%40branch%2ea%2Fb/c", "em", "@branch.a%2Fb/c"),
        (b"/em/@tag.100%25/c%25", "em", "@tag.100%25/c%"),
        (b"/em/@tag.%252F/c", "em", "@tag.%252F/c"),
        (b"/em/@tag.a%00%0D%0A%7f", "em", "@tag.a%00%0D%0A%7F"),
        (b"/em/@tag.%C3%A9%20b", "em", "@tag.é b"),
        (b"/em/@branch.%2e%2e/c", "em", "@branch.../c"),
        (b"/em/@branch.%2F..%2F..%2Fetc/c", "em", "@branch.%2F..%2F..%2Fetc/c"),
        (b"/em/lab/@branch.a%2Fb/c", "em", "lab/@branch.a%2Fb/c"),
        (b"/em/@Branch.a%2Fb", "em", "@Branch.a/b"),
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
        b"/em/@branch.%ff",
        b"/em/@branch.a/../b",
        b"/em/@branch.a/%2e%2e/b",
        b"/em/@branch.a//b",
        b"/em/@branch.a/b%00",
        b"/em/@branch." + b"%2F" * 400,
        b"/em/\xff",
        b"/em/%C3%A9" * 200,
        b"/em/.shardgate-uploads/0",
        b"/em/a/c/0%2eshardgate-1",
        b"/em/" + b"a" * 1025,
        b"/em/" + b"a" * 100_000,
    ],
)
def test_refuses(path: bytes) -> None:
    """What could leave the root, or have two spellings, is no key."""
    with pytest.raises(BadKeyError):
        split_target(path)


@pytest.mark.parametrize("spell", [quote, quote_segment])
@given(st.lists(SEGMENTS, min_size=1, max_size=5))
def test_every_other_key_comes_through(spell: Callable[[str], str], segments: list[str]) -> None:
    """A quoted key comes out as it was, or is refused for its segments, length or reserved name."""
    key = "/".join(segments)
    try:
        found = split_target(f"/em/{spell(key)}".encode())
    except BadKeyError:
        assert {".", ".."} & set(segments) or len(key.encode()) > 1024 or ".shardgate-" in key
    else:
        assert found == ("em", key)


@given(st.sampled_from(["@branch.", "@tag."]), st.text(st.characters(exclude_categories=["Cs"])))
def test_the_name_of_a_ref_stays_in_its_segment(start: str, name: str) -> None:
    """However it is spelled, slashes and control characters in it are no part of the path."""
    text = start + name
    try:
        dataset, key = split_target(f"/em/{quote(text, safe='')}/a".encode())
    except BadKeyError:
        assert len(quote(text)) > 1000
        return
    segment, _, rest = (key or "").partition("/")
    assert (dataset, unquote(segment), rest) == ("em", text, "a")
    assert split_target(f"/em/{quote_segment(segment)}/a".encode()) == (dataset, key)


@pytest.mark.parametrize(
    ("raw_path", "token", "rest"),
    [
        (b"/~abc/em/c/0", "abc", b"/em/c/0"),
        (b"/~abc/", "abc", b"/"),
        (b"/~abc", "abc", b""),
        (b"/~/em", "", b"/em"),
        (b"/~a%2Fb%3D/em/c%2F0", "a%2Fb%3D", b"/em/c%2F0"),
        (b"/%7Eabc/em", "abc", b"/em"),
        (b"/~abc//em", "abc", b"//em"),
        (b"/~a/em/\xc3\xa9%20", "a", b"/em/\xc3\xa9%20"),
    ],
)
def test_a_token_is_the_first_segment(raw_path: bytes, token: str, rest: bytes) -> None:
    """It begins with a tilde, as no dataset does; the rest stays as it was sent, ASCII or not."""
    scope = without_token({"raw_path": raw_path, "path": unquote(raw_path)})

    assert (scope["token"], scope["raw_path"]) == (token, rest)
    assert scope["path"] == unquote(rest)
    assert split_token(raw_path) == (raw_path.removesuffix(rest), rest)
    assert split_token(b"/em" + raw_path) == (None, b"/em" + raw_path)
    assert split_token(rest) == (None, rest)
