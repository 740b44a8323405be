"""`shardgate.formats.documents`: markers in JSON, decoded once for all dialects."""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from shardgate.errors import DamagedError, MetadataMissingError
from shardgate.formats.contract import Layout
from shardgate.formats.documents import (
    DocumentDecoder,
    DocumentFormat,
    Marked,
    MarkerDecoder,
    etag_of_rewritten,
    may_contain,
    parse_json,
    write_json,
)
from shardgate.formats.reading import DecodeError, Opaque, Versioned
from shardgate.model import ByteRange, ETag, ObjectRef, VirtualKey, Whole
from shardgate.read.containers import PassThrough
from shardgate.read.metadata_cache import MetadataCache, ReadCache
from tests.support.read.stores import WatchedStore
from tests.support.resolving import ROOT

_LIMIT = 100


@dataclass(frozen=True)
class _Dialect:
    """Dialect of documents with its own member."""

    member: str

    def parse(self, document: Any, data: bytes) -> Opaque | None:
        if not isinstance(document, dict) or self.member not in document:
            return None
        return Opaque(data)

    def may_rewrite(self, data: bytes) -> bool:
        return may_contain(data, re.compile(rb'"rewrite"\s*:'))

    def translator(self, directory: ObjectRef) -> None:
        """Translate nothing."""

    def layout(self, directory: ObjectRef, spec: Versioned[Opaque]) -> Layout:
        return PassThrough(directory.join(f"{self.member}-{spec.size}"))


_DIALECTS = (_Dialect("a"), _Dialect("b"))
_decode = MarkerDecoder(_DIALECTS, _LIMIT)


@pytest.mark.parametrize(("document", "at"), [({"a": 1}, 0), ({"b": 1}, 1), ({"b": 1, "a": 1}, 0)])
def test_first_dialect_that_recognizes_a_document_decodes_it(document: Any, at: int) -> None:
    """A document is decoded by the first dialect that recognizes it."""
    data = json.dumps(document).encode()
    marked = _decode(data)

    assert (marked.dialect, marked.spec, marked.nbytes) == (_DIALECTS[at], Opaque(data), len(data))


@pytest.mark.parametrize(
    "data",
    [
        b"{}", b"[]", b"1", b'"a"', b"null", b' {"c": 1}\n', b'\xef\xbb\xbf{"c": 1}',
        b"read me", b"\x89PNG\r\n", b"\0{}", b"[" * 10**6,
    ],
)  # fmt: skip
def test_unrecognized_marker_is_no_marker(data: bytes) -> None:
    """A marker that no dialect recognizes, JSON or not, decodes to nothing."""
    marked = _decode(data)

    assert (marked.dialect, marked.spec, marked.nbytes) == (None, None, 0)


@pytest.mark.parametrize(
    "data",
    [
        b" \n", b"{", b"{}}", b'{"a": 1}{', b'{"a": "\xff"}', b'{"a": ' + b"1" * 90,
        b"\xef\xbb\xbf{", b'{"a":' * 10**6, b'{"a": ' + b"1" * 10**4 + b"}",
    ],
    ids=lambda data: data[:9],
)  # fmt: skip
def test_malformed_json_marker_is_refused(data: bytes) -> None:
    """A marker that begins like JSON but is truncated or too deep raises DecodeError."""
    with pytest.raises(DecodeError, match="no JSON"):
        MarkerDecoder(_DIALECTS, 10**7)(data)


@pytest.mark.parametrize("data", [b"", b"\0", b"\0" * 1000])
def test_empty_or_zeroed_marker_is_refused(data: bytes) -> None:
    """A marker that is empty or has only zero bytes, as after a crash, is damage."""
    with pytest.raises(DecodeError, match=r"it is empty|it has only zero bytes"):
        _decode(data)


def test_marker_above_the_limit_is_not_parsed() -> None:
    """A marker above the limit is not parsed, and another document above it is refused."""
    data = b'{"a": 1}'.ljust(_LIMIT)

    assert _decode(data) == Marked(Opaque(data), _DIALECTS[0])
    assert _decode(data + b" ") == Marked(is_long=True)
    with pytest.raises(DecodeError, match=r"more than 100 bytes: limits\.metadata_bytes"):
        DocumentDecoder(lambda _, data: Opaque(data), _LIMIT)(data + b" ")


_LONG = [b'{"a": "' + b"x" * 200, b'{"a": 1, "rewrites": "rewrite"}'.ljust(101)]


@pytest.mark.parametrize("marker", _LONG)
async def test_long_marker_without_sharding_is_passed_on(marker: bytes) -> None:
    """Keys below a long marker that needs no rewriting name objects; it is read once."""
    case = _Case(marker)
    for _ in range(2):
        layout = await case.open()
        assert layout is not None
        for key in map(VirtualKey, ("marker", "c/0")):
            assert await layout.locate(key, case.fetch) == Whole(ROOT.join(key))
            assert not layout.encloses(key)

    assert len(case.store.calls) == 2


@pytest.mark.parametrize(
    "marker",
    [
        b'{"a": "' + b"x" * 200 + b'", "rewrite": 1}',
        b'{"a": 1, "\\u0072ewrite": 1}'.ljust(101),
        b'{"a": "' + b"x" * 16 * _LIMIT,
        b'{\0"\0a\0'.ljust(101),
        b'{"a": "'.ljust(2**20 - 3) + b'"rewrite": 1}',
    ],
)
async def test_long_marker_with_sharding_is_refused(marker: bytes) -> None:
    """A long marker that may need rewriting is damage, and the reason names the setting."""
    case = _Case(marker)
    case.limit = max(_LIMIT, len(marker) // 10) if len(marker) > 2**17 else _LIMIT
    for _ in range(2):
        with pytest.raises(DamagedError, match=r"marker: .*rewritten: limits\.metadata_bytes"):
            await case.open()

    assert len(case.store.calls) == 2


def test_etag_of_a_rewritten_document_is_distinct() -> None:
    """The ETag of a rewritten document is strong and differs from the stored one."""
    assert etag_of_rewritten(ETag('"abc"')) == '"abc-u1"'


class _Case:
    """A format over a watched store."""

    def __init__(self, marker: bytes | None) -> None:
        self.store = WatchedStore()
        if marker is not None:
            self.store.place(ROOT.join("marker"), marker)
        self.fetch = ReadCache(self.store, MetadataCache(2**20), ttl_s=60)
        self.limit = _LIMIT

    async def open(self, *, is_named: bool = False) -> Layout | None:
        """Open the container."""
        fmt = DocumentFormat("test", VirtualKey("marker"), _DIALECTS, self.limit, is_named)
        return await fmt.open(ROOT, self.fetch)


@pytest.mark.parametrize("marker", [None, b"{}", b"[]", b"no JSON", b"x" * 101])
async def test_directory_without_a_recognized_marker_is_no_container(marker: bytes | None) -> None:
    """A directory without a marker, or with an unrecognized one, is no container."""
    assert await _Case(marker).open() is None


@pytest.mark.parametrize("marker", [b"{}", b"[]", b"no JSON", b"\x7b\x22"])
async def test_unknown_marker_of_a_named_format_is_damage(marker: bytes) -> None:
    """An unknown marker of a named format is damage, and an error page is no absence."""
    with pytest.raises(DamagedError, match="marker"):
        await _Case(marker).open(is_named=True)

    page = _Case(b"<html>Bad gateway</html>")
    assert await page.open() is None
    with pytest.raises(MetadataMissingError, match="marker: an error page"):
        await page.open(is_named=True)


async def test_marker_that_is_no_longer_metadata_is_damage() -> None:
    """A marker is damage if it was metadata before, until it is metadata again."""
    case = _Case(b'{"a": 1}')
    assert await case.open() is not None
    for content in (b"{}", b"[]", b"no JSON"):
        case.store.place(ROOT.join("marker"), content)
        case.fetch.forget(ROOT.join("marker"))
        with pytest.raises(DamagedError, match="metadata before"):
            await case.open()
    case.store.place(ROOT.join("marker"), b'{"a": 2}')

    assert await case.open() is not None


async def test_marker_is_read_once_for_all_dialects() -> None:
    """Two openings of a container take one read of its marker, up to a byte above the limit."""
    case = _Case(b'{"b": 1}')
    assert await case.open() == PassThrough(ROOT.join("b-8"))
    await case.open()

    assert [call.request for call in case.store.calls] == [ByteRange(0, _LIMIT + 1)]


@pytest.mark.parametrize(
    "document",
    [
        {"a": [0.1, -0.0, 1e300, 1e16, 2**80, float("nan"), float("-inf"), "é\ud800", None, True]},
        {"z": {"y": {"x": {"w": {}}}}, "a": {"b": []}, "c": [[[1]], {}, "s"]},
        {"a": list(range(2500)), "b": [{"c": 1}] * 2000},
        [],
        "text",
    ],
)
@pytest.mark.parametrize("padding", [0, 2**18])
def test_json_round_trip_keeps_the_text(document: Any, padding: int) -> None:
    """JSON that is parsed and written keeps members, order, numbers and strings, at any length."""
    text = json.dumps(document).encode()

    assert write_json(parse_json(text + b" " * padding)) == text


@pytest.mark.parametrize("item", [b"{}", b"7", b"0.5", b"[[]]", b"null", b'"{}7\\\\"'])
def test_long_document_is_parsed_and_written_in_many_calls(item: bytes) -> None:
    """Long JSON is parsed and written in many Python calls, so that other threads can run."""
    text = b'{"a":[[[[' + (b"," + b" " * 20).join([item] * 2**14) + b"]]]]}"
    called = 0

    def count(_: object, event: str, __: object) -> None:
        nonlocal called
        called += event == "call"

    sys.setprofile(count)
    try:
        document = parse_json(text)
        parsing, called = called, 0
        write_json(document)
    finally:
        sys.setprofile(None)

    assert parsing >= 2**14
    assert called >= 2**14 // 1000


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32-be"])
def test_long_document_of_any_encoding_is_parsed(encoding: str) -> None:
    """Long JSON is parsed in each encoding that short JSON may have."""
    document = {"é": ["\u2222}"] * 2**15, "a": [0.5, 7]}

    assert parse_json(json.dumps(document, ensure_ascii=False).encode(encoding)) == document


def _nested(levels: int, innermost: Any) -> Any:
    for number in range(levels):
        innermost = {"a": innermost} if number % 2 else [innermost]
    return innermost


@pytest.mark.parametrize(
    "innermost", [1, ["x" * 100] * 5000, ["]", "{[" * 2000, 'x\\"[[', "\\\\", "["]]
)
def test_document_nested_1024_deep_is_parsed_and_written(innermost: Any) -> None:
    """A document of 1,024 levels, short or long, is parsed, and written as it was."""
    levels = 1024 - isinstance(innermost, list)
    document = _nested(levels, innermost)
    text = json.dumps(document).encode()

    assert parse_json(text) == document
    assert write_json(document) == text


def test_lists_inside_one_another_are_each_looked_at_a_few_times() -> None:
    """Writing JSON iterates over each list at most four times, however deep the lists are."""
    looks = 0

    class Counted(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            nonlocal looks
            looks += 1
            return super().__iter__()

    document: Any = Counted(range(20_000))
    for _ in range(900):
        document = Counted([document])

    assert json.loads(write_json(document)) == document
    assert looks <= 4 * 901


@pytest.mark.parametrize("levels", [1025, 1400])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32-be"])
def test_document_nested_deeper_is_refused(levels: int, encoding: str) -> None:
    """A document of more than 1,024 levels is neither parsed nor written, whatever its encoding."""
    document = _nested(levels, '\\"')

    with pytest.raises(ValueError, match="nested deeper than 1024 levels"):
        parse_json(json.dumps(document).encode(encoding))
    with pytest.raises(ValueError, match="nested deeper than 1024 levels"):
        write_json(document)


@pytest.mark.parametrize("mark", ["[", '{"a":', '[{"a":'])
def test_brackets_that_never_end_are_refused(mark: str) -> None:
    """Begun lists and objects, 100,000 inside one another, are refused before they are parsed."""
    with pytest.raises(ValueError, match="nested deeper than 1024 levels"):
        parse_json(mark.encode() * 100_000)
