"""Where references lead: URLs as fsspec understands them, below allowed prefixes."""

from pathlib import Path

import pytest

from shardgate.errors import DamagedError, NotAllowedError
from shardgate.formats.kerchunk.layout import resolve_source
from shardgate.formats.kerchunk.reference_table import TableBuilder
from shardgate.formats.reading import DecodeError
from shardgate.formats.references import allow
from shardgate.model import Inline, Missing, ObjectRef, Part, Stored
from tests.support.formats.kerchunk.sets import opening, write_json

ROOTS = {
    "s3://bucket/": ObjectRef("s3", ""),
    "file:///data": ObjectRef("file", ""),
    "https://host/a": ObjectRef("https", ""),
    "az://container": ObjectRef("az", ""),
    "file:////other//deep/": ObjectRef("deep", ""),
}
ALLOWED = [allow(url, root) for url, root in ROOTS.items()]
MOST = 2**63 - 1


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://bucket/a/b.nc", ("s3", "a/b.nc")),
        ("s3://bucket/a%20b?c#d", ("s3", "a%20b?c#d")),
        ("s3://bucket/é b", ("s3", "é b")),
        ("/data/a b%20.nc", ("file", "a b%20.nc")),
        ("file:///data/a%20b", ("file", "a%20b")),
        ("/other/deep/x", ("deep", "x")),
        ("file:////data//x", ("file", "x")),
        ("/elsewhere/../data/x", ("file", "x")),
        ("/data/a//../x", ("file", "x")),
        ("/../data/x", ("file", "x")),
        ("file:///data//./x", ("file", "x")),
        ("/data/%2e%2e/x", ("file", "%2e%2e/x")),
        ("https://host/a/b/../c", ("https", "c")),
        ("https://host/a/b//../c", ("https", "b/c")),
        ("s3://bucket//a//b", ("s3", "/a//b")),
        ("s3a://bucket/a", ("s3", "a")),
        ("abfs://container/a%20b", ("az", "a%20b")),
        ("https://host/a/b%20c", ("https", "b c")),
        ("https://HOST:443/a/b#c", ("https", "b")),
        ("https://host/a/b%2fc+%2B%7Ed", ("https", "b%2Fc+%2B~d")),
        ("https://host/a/100%/%25", ("https", "100%25/%25")),
    ],
)
def test_url_leads_to_the_object_that_fsspec_reads(url: str, expected: tuple[str, str]) -> None:
    """URLs of web servers are percent-encoded, others not; a path is that of a local file.

    The sets beside fsspec have the spellings of paths.
    """
    assert resolve_source(url, ALLOWED) == ObjectRef(*expected)


@pytest.mark.parametrize(
    "url",
    [
        "s3://other/a",
        "s3://bucket/../other/a",
        "s3://bucket/a/./b",
        "/etc/passwd",
        "/data/../etc/passwd",
        "//etc/passwd",
        "/data//../etc/passwd",
        "/data/a/../../etc/passwd",
        "file:/data/../etc/passwd",
        "/data/a//../../etc/passwd",
        "file:///data2/x",
        "https://host/a/../b",
        "https://host/a/..%2fb",
        "http://host/a/b",
        "https://host/ab",
        "https://host/a/%2e%2e/b",
        "https://host/a/b%2F%2e%2e%2F..%2Fc",
        "https://host/a%2Fb",
    ],
)
def test_url_outside_of_allowed_prefixes_is_not_followed(url: str) -> None:
    """Other buckets, hosts and folders, and ways out of the allowed ones, are not allowed."""
    with pytest.raises(NotAllowedError):
        resolve_source(url, ALLOWED)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("", "a reference to nothing: expected a URL"),
        ("data/a.nc", "'data/a.nc': expected a URL, or the absolute path"),
        ("memory://bucket/a", "known scheme"),
        ("simplecache::s3://bucket/a", "known scheme"),
        ("https://host/a/b?token=1", "with a query"),
        ("s3://key:secret@bucket/a", "holds credentials"),
        ("s3://bucket/a/", "to a folder"),
        ("https://host/a/\ud800", "surrogates not allowed"),
        ("s3://bucket/\ud800", "surrogates not allowed"),
    ],
)
def test_unusable_url_is_damage(url: str, reason: str) -> None:
    """Relative paths, unknown schemes, queries and credentials are refused with a reason."""
    with pytest.raises(DecodeError, match=reason) as caught:
        resolve_source(url, ALLOWED)
    assert "secret" not in str(caught.value)
    assert "token=1" not in str(caught.value)


async def test_reference_has_the_location_of_its_kind(tmp_path: Path) -> None:
    """Parts, whole objects and bytes are located, and listed with the lengths that are known."""
    (tmp_path / "a.nc").write_bytes(b"0123456789")
    source = f"{tmp_path}/a.nc"
    refs = {"part": [source, 2, 3], "text": "abc", "whole": [source]}
    write_json(path := tmp_path / "refs.json", refs)

    async with opening(path) as opened:
        kinds = [type(await opened.find(name)) for name in (*refs, "other", "")]
        names = await opened.names()

    assert kinds == [Part, Inline, Stored, Missing, Missing]
    assert names == {"part": 3, "text": 3, "whole": None}


async def test_unusable_reference_is_damage_of_its_key_alone(tmp_path: Path) -> None:
    """A reference without a URL is damage that names the key; others of the set are read."""
    write_json(path := tmp_path / "refs.json", {"bad": [None, 0, 1], "good": "abc"})

    async with opening(path) as opened:
        assert await opened.read("good") == b"abc"
        with pytest.raises(DamagedError, match=r"refs.json: bad: a reference to nothing"):
            await opened.read("bad")


async def test_inline_bytes_have_the_version_of_their_set(tmp_path: Path) -> None:
    """The ETag of bytes in a set changes with the set."""
    path, etags = tmp_path / "refs.json", set()
    for text in ("a", "b", "bc"):
        write_json(path, {"k": text})
        async with opening(path) as opened:
            place = await opened.find("k")
        assert isinstance(place, Inline)
        etags.add(place.etag)

    assert len(etags) == 3


@pytest.mark.parametrize("part", [(True, 1), (1, True), (-1, 2), (5, -5), (0, 2**70), (MOST, 1)])
def test_part_of_other_numbers_is_refused(part: tuple[int, int]) -> None:
    """Offset, length and end of a part are integers from 0 to 2^63-1, and no booleans."""
    builder = TableBuilder(2)
    builder.add_source("a", "s3://b/x", (MOST - 1, 1))
    with pytest.raises(DecodeError, match="expected an integer of 0"):
        builder.add_source("a", "s3://b/x", part)


def test_more_references_than_the_limit_are_refused() -> None:
    """A set may replace references, but not have more than its limit."""
    builder = TableBuilder(2)
    for name in ("a", "b", "a"):
        builder.add_bytes(name, b"")

    with pytest.raises(DecodeError, match="more than 2 references"):
        builder.add_bytes("c", b"")
