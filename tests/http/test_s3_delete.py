"""`app.http.s3_delete`: many keys to delete, from whoever sends them."""

import pytest

from app.errors import BadBodyError, UnsupportedError
from app.http.s3_delete import parse_deletion

A = b"<Object><Key>a</Key></Object>"


@pytest.mark.parametrize(
    ("inside", "keys", "is_quiet"),
    [
        (A, [("a", None)], False),
        (A + b"<Quiet>true</Quiet>", [("a", None)], True),
        (b"<Quiet>true</Quiet>" + A, [("a", None)], True),
        (A + b"<Quiet>false</Quiet>", [("a", None)], False),
        (b"\n <Object>\n <Key>a &amp; b</Key>\n </Object>\n", [("a & b", None)], False),
        (A + b'<Object><ETag>"e"</ETag><Key>b</Key></Object>', [("a", None), ("b", '"e"')], False),
        ("<Object><Key>é&#x20AC;</Key></Object>".encode(), [("é€", None)], False),
    ],
)
def test_deletions(inside: bytes, keys: list[tuple[str, str | None]], is_quiet: bool) -> None:  # noqa: FBT001
    """Keys in their order, with or without the namespace and the declaration."""
    namespace = b"http://s3.amazonaws.com/doc/2006-03-01/"
    for text in (
        b"<Delete>" + inside + b"</Delete>",
        b'<Delete xmlns="' + namespace + b'">' + inside + b"</Delete>",
        b'<?xml version="1.0" encoding="UTF-8"?><Delete>' + inside + b"</Delete>",
    ):
        found = parse_deletion(text)

        assert (found.keys, found.is_quiet) == (keys, is_quiet)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"<Delete>",
        b"<Delete></Delete>",
        b"<Remove>" + A + b"</Remove>",
        b"<Delete><Object/></Delete>",
        b"<Delete><Object><Key></Key></Object></Delete>",
        b"<Delete><Object><Key>a</Key><Other/></Object></Delete>",
        b"<Delete><Key>a</Key></Delete>",
        b"<Delete>" + A * 1001 + b"</Delete>",
        b"<!DOCTYPE Delete><Delete>" + A + b"</Delete>",
        b'<!DOCTYPE D [<!ENTITY x "y">]><Delete><Object><Key>&x;</Key></Object></Delete>',
        b"<Delete><Object><Key>&x;</Key></Object></Delete>",
        b"<Delete><Object><Key>\xff</Key></Object></Delete>",
        b"<a>" * 100_000,
    ],
)
def test_anything_else_is_refused(body: bytes) -> None:
    """Other elements, too many keys, entities, deep trees."""
    with pytest.raises(BadBodyError):
        parse_deletion(body)


@pytest.mark.parametrize("name", [b"VersionId", b"Size", b"LastModifiedTime"])
def test_conditions_that_cannot_be_held_are_told(name: bytes) -> None:
    """A version is not deleted as if it were the key."""
    element = b"<%b>1</%b>" % (name, name)
    with pytest.raises(UnsupportedError):
        parse_deletion(b"<Delete><Object><Key>a</Key>" + element + b"</Object></Delete>")


def test_a_thousand_keys_are_taken() -> None:
    """As many as S3 takes."""
    assert len(parse_deletion(b"<Delete>" + A * 1000 + b"</Delete>").keys) == 1000
