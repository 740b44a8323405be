"""Reference sets in JSON: both versions, their documents, and hostile ones."""

import base64
import gzip
import json
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import assume, given
from hypothesis import strategies as st

from shardgate.concurrency import run_in_thread
from shardgate.errors import DamagedError
from shardgate.formats.kerchunk.json_set import decode_json_set
from shardgate.formats.kerchunk.reference_table import (
    InvalidReference,
    ReferenceSet,
    SourcePart,
)
from shardgate.formats.reading import DecodeError
from shardgate.formats.surveying import ChunkCollection
from shardgate.model import ByteRange
from tests.support.formats.kerchunk.sets import (
    LIMIT_NBYTES,
    opening,
    write_json,
)

GROUP = '{"zarr_format":2}'


def _decode(document: Any, limit_nbytes: int = LIMIT_NBYTES) -> ReferenceSet:
    data = document if isinstance(document, bytes) else json.dumps(document).encode()
    return decode_json_set(data, limit_nbytes)


def _found(document: Any) -> dict[str, SourcePart | InvalidReference | bytes | None]:
    found = _decode(document)
    return {
        name: found.table.lookup(row)
        for name, row in found.names.below("", "", "")
        if row is not None
    }


TEXTS = st.text(string.ascii_letters + '/.0é\u4e2d{}:, "\\', min_size=1, max_size=12)
VALUES = st.one_of(
    TEXTS,
    st.binary(max_size=9).map(lambda data: f"base64:{base64.b64encode(data).decode()}"),
    st.dictionaries(TEXTS, st.integers() | TEXTS | st.none() | st.lists(st.booleans())),
    st.tuples(TEXTS.map("s3://b/".__add__)),
    st.tuples(TEXTS.map("s3://b/".__add__), st.integers(0, 2**62 - 1), st.integers(0, 2**62)),
)


@given(
    refs=st.dictionaries(TEXTS, VALUES, max_size=8),
    version=st.sampled_from([0, 1]),
    indent=st.sampled_from([None, 0, "\t"]),
)
def test_set_is_decoded_as_by_the_standard_library(
    refs: dict[str, Any], version: int, indent: int | str | None
) -> None:
    """All keys and values of any set, however it is spaced, are those that `json` loads."""
    assume(version or refs.keys().isdisjoint({"version", "refs"}))  # these mark other versions
    document = {"refs": refs, "version": 1} if version else refs
    text = json.dumps(document, indent=indent, ensure_ascii=bool(version))
    found = _found(text.encode())

    expected: dict[str, Any] = {}
    for name, value in refs.items():
        if "\\" in name or not {"", ".", ".."}.isdisjoint(name.split("/")):
            continue  # it is no key
        match value:
            case str():
                is_coded = value.startswith("base64:")
                expected[name] = base64.b64decode(value[7:]) if is_coded else value.encode()
            case dict():
                expected[name] = json.dumps(value).encode()
            case (url,):
                expected[name] = SourcePart(url, None)
            case (url, start, length):
                expected[name] = SourcePart(url, ByteRange(start, start + length))
    assert found == expected
    assert list(found) == sorted(expected)


def test_last_of_equal_names_counts() -> None:
    """A name that comes twice has its last reference, as for other readers of JSON."""
    assert _found(b'{"a": "1", "b": "2", "a": ["s3://b/x", 3, 4]}') == {
        "a": SourcePart("s3://b/x", ByteRange(3, 7)),
        "b": b"2",
    }


def test_braces_without_templates_are_literal() -> None:
    """A URL with braces is not evaluated in a set without templates."""
    assert _found({"version": 1, "refs": {"a": ["s3://b/{{x}}"]}}) == {
        "a": SourcePart("s3://b/{{x}}", None)
    }


DOCUMENTS = {".zgroup": GROUP, ".zattrs": {"a": 1}, "t/.zarray": '{"shape":[1]}'}


@pytest.mark.parametrize("is_versioned", [False, True])
def test_consolidated_metadata_are_made_of_the_documents(*, is_versioned: bool) -> None:
    """A Zarr v2 group in a set has consolidated metadata with all its documents."""
    refs = {**DOCUMENTS, "t/0": ["s3://b/x", 0, 4]}
    found = _found({"version": 1, "refs": refs} if is_versioned else refs)

    made = found[".zmetadata"]
    assert isinstance(made, bytes)
    assert json.loads(made) == {
        "zarr_consolidated_format": 1,
        "metadata": {
            ".zgroup": {"zarr_format": 2},
            ".zattrs": {"a": 1},
            "t/.zarray": {"shape": [1]},
        },
    }


@pytest.mark.parametrize(
    "change",
    [
        {"t/.zattrs": ["s3://b/attributes"]},
        {"t/.zattrs": "{not JSON"},
        {"t/.zattrs": "[" * 100_000},
        {".zgroup": ["s3://b/group"]},
    ],
)
def test_incomplete_metadata_are_not_consolidated(change: dict[str, Any]) -> None:
    """Where a document is not in the set, or no JSON, none are consolidated: some would hide it."""
    assert ".zmetadata" not in _found(DOCUMENTS | change)


def test_consolidated_metadata_of_the_set_are_kept() -> None:
    """Consolidated metadata that the set has are served as they are."""
    assert _found(DOCUMENTS | {".zmetadata": "mine"})[".zmetadata"] == b"mine"


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        (b"", "malformed JSON at letter 0"),
        (b"[]", "malformed JSON at letter 0"),
        (b'{"a": "b"', "malformed JSON at letter 9"),
        (b'{"a" "b"}', "malformed JSON at letter 4"),
        (b'{"a": "b",}', "malformed JSON at letter 10"),
        (b'{"a": "b"} {}', "malformed JSON at letter 11"),
        (b'{a: "b"}', "malformed JSON at letter 1"),
        (b'{"a": b}', "Expecting value"),
        (b'{"a": "\xff"}', "utf-8"),
        (b'{"a": ' + b"[" * 100_000, "nested deeper than 1024 levels"),
        (b'{"a": ["s3://b/x", ' + b"9" * 5000 + b", 1]}", "integer string conversion"),
        ({"a": 1, "b": None}, "none of its members is a reference"),
        ({"version": 1, "refs": ["a"]}, "refs: expected an object"),
        ({"version": 1, "refs": None}, "refs: expected an object"),
        ({"version": 2, "refs": {}}, "version 0 or 1: 2"),
        ({"version": "1", "refs": {}}, "version 0 or 1: '1'"),
        ({"refs": {"a": "b"}}, "version 0 or 1: None"),
        ({"version": 1, "templates": [1]}, "templates: expected"),
    ],
)
def test_document_of_another_kind_is_refused(document: Any, reason: str) -> None:
    """Malformed JSON, unknown versions and invalid references are refused with a reason."""
    with pytest.raises(DecodeError, match=reason):
        _decode(document)


INVALID: list[tuple[Any, str]] = [
    (1, "expected a text"),
    (["s3://b/x", True, 2], "expected integers"),
    (["s3://b/x", float("nan"), 2], "expected integers"),
    (["s3://b/x", -1, 2], "offset: expected an integer of 0 to"),
    (["s3://b/x", 1, -2], "length at 1: expected an integer of 0 to"),
    (["s3://b/x", 2**63, 1], "offset: expected an integer of 0 to"),
    ("base64:A", "base64"),
    ("\ud800", "surrogates"),
    (["{{nope}}"], "'nope' is undefined"),
    (["{{u}}{%"], "a part that is not evaluated"),
]


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize(("value", "reason"), INVALID)
def test_invalid_reference_fails_its_own_key(value: Any, reason: str, version: int) -> None:
    """A reference that cannot be followed has a reason, and others of its set are found."""
    refs = {"a": value, "b": "text", "c": ["s3://b/x", 1, 2]}
    if not version and "{{" in str(value):
        return
    found = _found({"version": 1, "templates": {"u": "s3://b"}, "refs": refs} if version else refs)

    assert isinstance(invalid := found.pop("a"), InvalidReference)
    assert reason in invalid.reason
    assert found == {"b": b"text", "c": SourcePart("s3://b/x", ByteRange(1, 3))}


def test_names_that_are_no_keys_are_counted() -> None:
    """A set says how many of its names are no keys, with the first as an example."""
    found = _decode({"a/": "x", "b": "y", "../c": "z", "\ud800": "z"})

    assert found.left_out == (3, "a/")


def test_other_keys_of_an_invalid_pattern_are_not_absent() -> None:
    """Where the keys of a pattern are not known, a key without a reference is not absent."""
    pattern = {"key": "k{{i}}", "url": "s3://b/x", "dimensions": {"i": {"stop": 2}}}
    found = _decode({"version": 1, "refs": {"a": "b"}, "gen": [pattern, {"key": 3}]})

    assert [name for name, _ in found.names.below("", "", "")] == ["a", "k0", "k1"]
    assert isinstance(found.find_chunk("other"), InvalidReference)
    assert _decode({"version": 1, "refs": {"a": "b"}}).find_chunk("other") is None


async def test_invalid_references_are_named_in_listing_and_description(tmp_path: Path) -> None:
    """A set lists and describes its invalid references, and damage is raised of none but these."""
    refs = {"a": "b", "bad": "base64:A", "x//y": "z"}
    write_json(path := tmp_path / "refs.json", {"version": 1, "refs": refs})
    async with opening(path) as opened:
        left_out, damaged = await opened.members.collections(
            opened.fetch, lambda _: pytest.fail("lists"), run_in_thread
        )
        assert [*await opened.names()] == ["a", "bad"]
        assert await opened.read("a") == b"b"
        with pytest.raises(DamagedError, match="bad: Invalid base64"):
            await opened.read("bad")

    assert isinstance(damaged, DamagedError)
    assert damaged.ref.key.endswith("refs.json/bad")
    assert isinstance(left_out, ChunkCollection)
    assert left_out.description.why_sharded == "1 name is no key, such as 'x//y'"


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_document_that_is_no_strict_json_is_not_consolidated(constant: str) -> None:
    """NaN in the attributes of one array does not hide all others from readers of strict JSON."""
    document = {"a": float(constant)}

    assert ".zmetadata" not in _found(DOCUMENTS | {"t/.zattrs": document})
    assert ".zmetadata" in _found(DOCUMENTS | {"t/.zattrs": {"a": constant}})


def test_expanded_templates_are_bounded_by_the_bytes_of_the_set() -> None:
    """A set whose short references all expand to long URLs is refused."""
    refs = {str(number): ["{{u}}" + str(number)] for number in range(12_000)}
    document = {"version": 1, "templates": {"u": "x" * 4000}, "refs": refs}

    with pytest.raises(DecodeError, match="more steps than an object"):
        _decode(document)


def test_other_members_of_version_1_are_passed_over() -> None:
    """Members that version 1 does not define, of any type and at any place, are no references."""
    others = {"created": 2026, "authors": ["a", 1], "note": "text", "checks": {"a": 1}}
    refs = {"a": "b", "c": ["s3://b/x", 1, 2]}

    assert _found({**others, "version": 1, "refs": refs}) == _found(refs)


def test_set_above_the_limit_is_refused() -> None:
    """A set with a byte more than the limit is refused."""
    data = json.dumps({"a": "b" * 100}).encode()

    assert len(_decode(data, len(data)).table) == 1
    with pytest.raises(DecodeError, match="of more than"):
        _decode(data, len(data) - 1)


@pytest.mark.parametrize("value", ["[[]]", '{"b":[{}]}', '[["b"]]'])
def test_set_of_values_that_take_much_memory_is_refused(value: str) -> None:
    """Many small values, which take many times their text, are refused before they are decoded."""
    inner = value[1:-1]
    data = f'{{"a": {value[0]}{",".join([inner] * 10**5)}{value[-1]}}}'.encode()

    with pytest.raises(DecodeError, match="it would take"):
        _decode(data, len(data))


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
def test_compressed_set_is_inflated_up_to_the_limit(compress: Callable[[bytes], bytes]) -> None:
    """A set that is compressed by gzip or zstd is decoded, unless it is too long once inflated."""
    data = json.dumps({"a": "b" * 10**5}).encode()

    assert len(_decode(compress(data), len(data)).table) == 1
    with pytest.raises(DecodeError, match="more than"):
        _decode(compress(data), len(data) - 1)


async def test_compressed_set_is_known_by_its_name(tmp_path: Path) -> None:
    """The name of a compressed set tells that it is one."""
    for suffix, compress in ((".json.gz", gzip.compress), (".json.zst", zstandard.compress)):
        path = tmp_path / f"refs{suffix}"
        path.write_bytes(compress(json.dumps({"a": "base64:AAE="}).encode()))
        async with opening(path) as opened:
            assert await opened.read("a") == b"\0\1"


def test_reference_takes_twenty_bytes_beside_its_name() -> None:
    """Ten thousand references to a few files take 28 bytes each, and their names."""
    names = [f"t/{i}.{j}" for i in range(10) for j in range(1000)]
    refs = {name: [f"s3://bucket/{n % 7}.nc", n, 1000] for n, name in enumerate(names)}
    found = _decode({"version": 1, "refs": refs})

    assert found.nbytes <= 28 * len(names) + sum(map(len, names)) + 2000
