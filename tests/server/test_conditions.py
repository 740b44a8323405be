"""`shardgate.server.conditions`: ranges, preconditions, headers and errors of responses."""

import re
from email.utils import formatdate
from functools import partial
from http import HTTPStatus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardgate import errors
from shardgate.errors import BadHeaderError
from shardgate.formats.compression import raw_deflate
from shardgate.model import EVERYTHING, ByteRange, ETag, Inline, SuffixRange
from shardgate.read.bodies import Entity, Selection
from shardgate.server.conditions import (
    Conditions,
    Negotiation,
    UnsatisfiableError,
    accepts,
    content_range,
    parse_demand,
    parse_range,
    resolve_range,
)
from shardgate.server.conditions import choose as choose_part
from shardgate.server.problems import STATUS
from shardgate.server.request import Headers, combine_headers


@pytest.mark.parametrize(
    ("header", "length", "expected"),
    [
        ("bytes=0-0", 10, ByteRange(0, 1)),
        ("bytes=8-99", 10, ByteRange(8, 10)),
        ("bytes=9-", 10, ByteRange(9, 10)),
        ("bytes=-3", 10, ByteRange(7, 10)),
        ("bytes=-99", 10, ByteRange(0, 10)),
        ("Bytes= 2-3 ", 10, ByteRange(2, 4)),
        ("bytes=0-999999999999999999", 10, ByteRange(0, 10)),
        *((header, 10, None) for header in ("bytes=0-1,4-5", "bytes=0-,0-", "lines=1-2", "lines")),
        *((header, 10, UnsatisfiableError) for header in ("bytes=10-", "bytes=10-12", "bytes=-0")),
        ("bytes=-5", 0, UnsatisfiableError),
        *((f"bytes={wrong}", 10, BadHeaderError) for wrong in ("", "-", "a-b", "5-2", "+1-2")),
        *((header, 10, BadHeaderError) for header in ("bytes", "bytes=٣-٤")),
    ],
)
def test_range_is_resolved(
    header: str, length: int, expected: ByteRange | type[Exception] | None
) -> None:
    """A range is clamped to the entity, and several ranges or other units mean the whole body.

    A range outside of the entity is unsatisfiable, and a malformed one an error.
    """
    if isinstance(expected, type):
        with pytest.raises(expected):
            resolve_range(parse_range(header) or ByteRange(0, 1), length)
    else:
        request = parse_range(header)
        assert (None if request is None else resolve_range(request, length)) == expected


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 40))
def test_range_agrees_with_slicing(first: int, last: int, length: int) -> None:
    """An inclusive range selects the bytes of the corresponding slice."""
    body = bytes(range(length))
    try:
        part = resolve_range(parse_range(f"bytes={first}-{last}") or ByteRange(0, 0), length)
    except (BadHeaderError, UnsatisfiableError):
        assert not body[first : last + 1]
    else:
        assert body[part.start : part.stop] == body[first : last + 1]
        stop = min(last, length - 1)
        assert content_range(part, length) == b"bytes %d-%d/%d" % (first, stop, length)


A, B = ETag('"a"'), ETag('"b"')


@pytest.mark.parametrize(
    ("if_match", "if_none_match", "fulfilled_by"),
    [
        ("*", None, {"a", "b", "ab"}),
        ('"a"', None, {"a", "ab"}),
        ('"x", "a"', None, {"a", "ab"}),
        (' , "x" ,, "a",', None, {"a", "ab"}),
        ("a", None, {"a", "ab"}),
        ('W/"a"', None, set()),
        (None, "*", {""}),
        (None, '"a"', {"", "b"}),
        (None, 'W/"a"', {"", "b"}),
        (None, '"a","b"', {""}),
        (None, "b", {"", "a"}),
        ('"a"', '"b"', {"a"}),
        ("*", "*", set()),
    ],
)
def test_write_condition_is_evaluated(
    if_match: str | None, if_none_match: str | None, fulfilled_by: set[str]
) -> None:
    """If-Match and If-None-Match hold by any of the version's ETags; an absent object has none."""
    assert parse_demand(None, None) is None
    demand = parse_demand(if_match, if_none_match)
    current = {"": (), "a": (A,), "b": (B,), "ab": (A, B)}

    assert demand is not None
    assert {name for name, tags in current.items() if demand(tags) is None} == fulfilled_by


@pytest.mark.parametrize("value", ["", '"a', 'a"', '"a" "b"', '*, "a"', '"a\n"', "a b"])
def test_malformed_etag_list_is_refused(value: str) -> None:
    """A malformed list of entity tags is an error, and not a condition that holds."""
    with pytest.raises(BadHeaderError):
        parse_demand(value, None)
    with pytest.raises(BadHeaderError):
        parse_demand(None, value)


ETAG = ETag('"v1"')
WHOLE = ByteRange(0, 10)
PART = ByteRange(2, 4)
MODIFIED_S = 784111777


def choose(method: str = "GET", **headers: str) -> Selection:
    """Evaluate *headers* for ten bytes of the version v1."""
    given = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    return Conditions.parse(method, given).choose(ETAG, 10, MODIFIED_S)


def at(after_s: int) -> str:
    """Format the date *after_s* the entity was modified."""
    return formatdate(MODIFIED_S + after_s, usegmt=True)


DATE = at(0)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        *(
            ({name: value}, status)
            for name, status, values in (
                ("if_none_match", 304, ('"v1"', 'W/"v1"', "*", ' "v1" ', "v1", '"v0",W/"v1"')),
                ("if_none_match", 200, ('"v2"', "v2", '"v1', "", '"V1"')),
                ("if_match", 412, ('"v2"', 'W/"v1"', "v2")),
                ("if_match", 200, ('"v1"', "*", '"v0", "v1"', "v1")),
                ("if_modified_since", 304, (DATE, at(1), "Sunday, 06-Nov-94 08:49:37 GMT")),
                ("if_modified_since", 304, ("Sun Nov  6 08:49:37 1994",)),
                ("if_modified_since", 200, (at(-1), f"{at(1)}, {at(1)}", "tomorrow")),
                ("if_modified_since", 200, ("Sun, 06 Nov 1994 25:49:37 GMT",)),
                ("if_unmodified_since", 200, (DATE, "yesterday")),
                ("if_unmodified_since", 412, (at(-1),)),
            )
            for value in values
        ),
        ({"if_modified_since": DATE, "if_none_match": '"v2"'}, 200),
        ({"if_modified_since": at(-1), "if_none_match": '"v1"'}, 304),
        ({"if_unmodified_since": at(-1), "if_match": '"v1"'}, 200),
        ({"if_unmodified_since": DATE, "if_match": '"v2"'}, 412),
        ({"if_unmodified_since": at(-1), "if_modified_since": DATE}, 412),
        ({"if_unmodified_since": DATE, "if_modified_since": DATE}, 304),
        ({"if_match": '"v1"', "if_modified_since": DATE}, 304),
        ({"if_match": '"v2"', "if_none_match": '"v1"'}, 412),
        ({"if_none_match": '"v1"', "range": "bytes=2-3"}, 304),
        ({"range": "bytes=2-3"}, 206),
        ({"range": "bytes=2-3", "if_range": '"v1"'}, 206),
        *(({"range": "bytes=2-3", "if_range": tag}, 200) for tag in ('"v2"', 'W/"v1"', DATE)),
    ],
)
def test_preconditions_are_evaluated_in_order(headers: dict[str, str], status: int) -> None:
    """If-Match precedes If-None-Match, which precedes Range, which is ignored for HEAD.

    If-None-Match compares weakly, If-Match strongly, and quotes may be missing. Dates count where
    no tag is sent, to the second; invalid ones are ignored (RFC 9110 §13). If-Range needs a strong
    tag (§14.2).
    """
    got = choose("GET", **headers)
    head = choose("HEAD", **headers)

    if status == 206:
        assert got == Selection(HTTPStatus.PARTIAL_CONTENT, PART, PART)
        assert head == Selection(HTTPStatus.OK, WHOLE, None)
    else:
        assert got.status == head.status == status


@pytest.mark.parametrize("name", [b"if-modified-since", b"if-unmodified-since"])
def test_dates_are_ignored_without_a_modification_time(name: bytes) -> None:
    """Conditions by date are ignored for an entity without a modification time."""
    conditions = Conditions.parse("GET", {name: DATE.encode()})

    assert conditions.choose(ETAG, 10, None).status is HTTPStatus.OK
    assert conditions.reading is None


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, EVERYTHING),
        ({b"range": b"bytes=2-3"}, PART),
        ({b"range": b"bytes=-3"}, SuffixRange(3)),
        ({b"range": b"bytes=0-1,3-4"}, EVERYTHING),
        ({b"range": b"bytes=-0"}, None),
        ({b"range": b"bytes=2-3", b"if-range": b'"v1"'}, None),
        ({b"if-none-match": b'"v1"'}, None),
        ({b"if-match": b'"v1"'}, None),
    ],
)
def test_reading_is_certain_only_without_conditions(
    headers: dict[bytes, bytes], expected: object
) -> None:
    """The range that will be read is known only without conditions."""
    assert Conditions.parse("GET", headers).reading == expected


@pytest.mark.parametrize(
    ("coding", "header", "is_accepted"),
    [
        *(("gzip", header, True) for header in (
            "gzip", "GZIP", "x-gzip", "*", "gzip, deflate, br", "br,gzip", "gzip;q=1",
            "gzip;q=0.001", "gzip ; q=0.5", "deflate;q=0, gzip", "identity;q=0, *", "*;q=0, gzip",
            "identity, gzip;q=0.5", "br;q=0,*;q=0.1", "deflate, gzip, br, zstd", "gzip;level=1",
        )),
        *(("gzip", header, False) for header in (
            None, "", "identity", "br", "deflate, br, zstd", "gzip;q=0", "gzip;q=0.000",
            "GZIP; Q=0", "gzip ; q=0 ", "*;q=0", "gzip;q=0, *", "*, gzip;q=0", "gzipped", "bgzip",
            "gz", ";q=1", ",", "identity;q=1, *;q=0", "br;q=1, *;q=0.0",
        )),
        *(("br", header, True) for header in ("gzip, br;q=0.1", "gzip, *")),
        ("br", "br;q=0, *", False),
        ("compress", "x-compress", True),
        *(("gzip, br", header, True) for header in ("br, gzip", "*")),
        ("gzip, br", "br", False),
    ],
)  # fmt: skip
def test_accept_encoding_is_parsed(coding: str, header: str | None, *, is_accepted: bool) -> None:
    """A coding is accepted by name or `*` with a weight above zero (RFC 9110 §12.5.3).

    An object with several codings is accepted by a client that accepts each of them.
    """
    assert accepts(coding, None if header is None else header.encode()) is is_accepted


DEFLATED = Entity(A, 3, Inline(b"abc", A), coding=raw_deflate(9, 0))


@pytest.mark.parametrize("accepted", [b"*", b"deflate, raw", b"identity;q=0", None])
@pytest.mark.parametrize("is_s3", [True, False])
def test_raw_deflate_is_inflated_for_every_client(accepted: bytes | None, *, is_s3: bool) -> None:
    """Raw DEFLATE is inflated for S3 clients too; a precondition is decided without reading it."""
    negotiate = partial(Negotiation, accepted, is_s3)
    known = Conditions.parse("GET", {b"if-none-match": b'"a-identity"'})

    assert choose_part(Conditions.parse("GET", {}), negotiate, DEFLATED) is None
    assert choose_part(known, negotiate, DEFLATED) == Selection(HTTPStatus.NOT_MODIFIED)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, Selection(HTTPStatus.OK, ByteRange(0, 9))),
        ({b"if-match": b'"a-identity"'}, Selection(HTTPStatus.OK, ByteRange(0, 9))),
        ({b"if-match": b'"a"'}, Selection(HTTPStatus.PRECONDITION_FAILED)),
    ],
)
def test_head_of_raw_deflate_tells_its_size_unread(
    headers: dict[bytes, bytes], expected: Selection
) -> None:
    """HEAD of raw DEFLATE, which announces its size, selects that without the inflated form."""
    negotiate = partial(Negotiation, None, is_s3=False)

    assert choose_part(Conditions.parse("HEAD", headers), negotiate, DEFLATED) == expected


MANY = 10_000


class Name(bytes):
    """A header name that counts its comparisons."""

    compared = 0
    __hash__ = bytes.__hash__

    def __eq__(self, other: object) -> bool:
        """Compare."""
        Name.compared += 1
        return super().__eq__(other)


@given(st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.binary())))
def test_repeated_header_is_a_list(headers: Headers) -> None:
    """Values of a repeated header are joined in their order (RFC 9110 §5.3)."""
    assert combine_headers(headers) == {
        name: b", ".join(value for each, value in headers if each == name) for name, _ in headers
    }


def test_headers_are_combined_in_linear_time() -> None:
    """Combining 10,000 headers of which one is repeated compares each name a few times only."""
    headers: Headers = [(Name(b"%x" % number), b"") for number in range(MANY)]
    combine_headers([*headers, (Name(b"0"), b"")])

    assert Name.compared < 10 * MANY


def test_every_error_class_has_a_status() -> None:
    """Each error class without subclasses has a status; the docstring's tree has the others."""
    classes = {c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, Exception)}
    leaves = {c for c in classes if not c.__subclasses__()}

    assert leaves == set(STATUS)
    assert set(re.findall(r"\w+Error", errors.__doc__ or "")) == {
        c.__name__ for c in classes - leaves
    }


def test_storage_errors_are_not_404() -> None:
    """Unknown datasets, repositories, refs, sessions, uploads and tokens are 404, unlike storage
    errors.
    """
    absent = {error for error, status in STATUS.items() if status is HTTPStatus.NOT_FOUND}

    assert absent == {
        errors.UnknownDatasetError,
        errors.UnknownRepositoryError,
        errors.UnknownRefError,
        errors.UnknownSessionError,
        errors.UnknownTokenError,
        errors.UnknownUploadError,
    }
