"""`app.http.selection`: preconditions before ranges."""

from email.utils import formatdate
from http import HTTPStatus

import pytest

from app.http.selection import Conditions, Selection, accepts_gzip
from app.model import EVERYTHING, ByteRange, ETag, SuffixRange

ETAG = ETag('"v1"')
WHOLE = ByteRange(0, 10)
PART = ByteRange(2, 4)
MODIFIED_S = 784111777


def choose(method: str = "GET", **headers: str) -> Selection:
    """Choose of ten bytes of the version v1."""
    given = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    return Conditions.parse(method, given).choose(ETAG, 10, MODIFIED_S)


def at(after_s: int) -> str:
    """Write the date *after_s* the entity was modified."""
    return formatdate(MODIFIED_S + after_s, usegmt=True)


DATE = at(0)


@pytest.mark.parametrize(
    "header", ['"v1"', 'W/"v1"', "*", '"v0", "v1"', '"v0",W/"v1"', ' "v1" ', "v1"]
)
def test_not_modified(header: str) -> None:
    """If-None-Match compares weakly, in lists, and a star matches everything."""
    assert choose(if_none_match=header) == Selection(HTTPStatus.NOT_MODIFIED)


@pytest.mark.parametrize("header", ['"v2"', "v2", '"v1', "", '"V1"'])
def test_modified(header: str) -> None:
    """Another tag, or what is none, does not match."""
    assert choose(if_none_match=header) == Selection(HTTPStatus.OK, WHOLE, WHOLE)


@pytest.mark.parametrize("header", ['"v2"', 'W/"v1"', "v2"])
def test_precondition_fails(header: str) -> None:
    """If-Match compares strongly."""
    assert choose(if_match=header) == Selection(HTTPStatus.PRECONDITION_FAILED)


@pytest.mark.parametrize("header", ['"v1"', "*", '"v0", "v1"', "v1"])
def test_precondition_holds(header: str) -> None:
    """If-Match lets the current version through, also without quotes, as icechunk writes it."""
    assert choose(if_match=header).status is HTTPStatus.OK


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"if_modified_since": DATE}, 304),
        ({"if_modified_since": at(1)}, 304),
        ({"if_modified_since": at(-1)}, 200),
        ({"if_modified_since": "Sunday, 06-Nov-94 08:49:37 GMT"}, 304),
        ({"if_modified_since": "Sun Nov  6 08:49:37 1994"}, 304),
        ({"if_modified_since": "Sun, 06 Nov 1994 25:49:37 GMT"}, 200),
        ({"if_modified_since": f"{at(1)}, {at(1)}"}, 200),
        ({"if_modified_since": "tomorrow"}, 200),
        ({"if_modified_since": DATE, "if_none_match": '"v2"'}, 200),
        ({"if_modified_since": at(-1), "if_none_match": '"v1"'}, 304),
        ({"if_unmodified_since": DATE}, 200),
        ({"if_unmodified_since": at(-1)}, 412),
        ({"if_unmodified_since": "yesterday"}, 200),
        ({"if_unmodified_since": at(-1), "if_match": '"v1"'}, 200),
        ({"if_unmodified_since": DATE, "if_match": '"v2"'}, 412),
        ({"if_unmodified_since": at(-1), "if_modified_since": DATE}, 412),
        ({"if_unmodified_since": DATE, "if_modified_since": DATE}, 304),
        ({"if_match": '"v1"', "if_modified_since": DATE}, 304),
    ],
)
def test_dates(method: str, headers: dict[str, str], status: int) -> None:
    """Dates count to the second, where no tag says more; what is no date is ignored (§13)."""
    assert choose(method, **headers).status == status


@pytest.mark.parametrize("name", [b"if-modified-since", b"if-unmodified-since"])
def test_dates_are_ignored_for_what_has_no_time(name: bytes) -> None:
    """Nothing is known then of whether it was modified."""
    conditions = Conditions.parse("GET", {name: DATE.encode()})

    assert conditions.choose(ETAG, 10, None).status is HTTPStatus.OK
    assert conditions.reading is None


def test_if_match_goes_before_if_none_match() -> None:
    """A failed precondition is told even where the client has the version."""
    chosen = choose(if_match='"v2"', if_none_match='"v1"')

    assert chosen.status is HTTPStatus.PRECONDITION_FAILED


def test_not_modified_goes_before_range() -> None:
    """A client that has the version gets no range of it."""
    chosen = choose(if_none_match='"v1"', range="bytes=2-3")

    assert chosen.status is HTTPStatus.NOT_MODIFIED


def test_part() -> None:
    """A range is what is read, and what is described."""
    assert choose(range="bytes=2-3") == Selection(HTTPStatus.PARTIAL_CONTENT, PART, PART)


@pytest.mark.parametrize(
    ("tag", "status"), [('"v1"', 206), ('"v2"', 200), ('W/"v1"', 200), (DATE, 200)]
)
def test_if_range(tag: str, status: int) -> None:
    """The range counts only for the version the client has; a date does not name one strongly."""
    assert choose(if_range=tag, range="bytes=2-3").status == status


def test_beyond() -> None:
    """A range past the end is refused."""
    chosen = choose(range="bytes=10-")

    assert chosen == Selection(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)


def test_head_describes_everything_and_reads_nothing() -> None:
    """Range means something for GET only (RFC 9110 §14.2)."""
    assert choose("HEAD", range="bytes=2-3") == Selection(HTTPStatus.OK, WHOLE, None)


def test_head_is_conditional() -> None:
    """HEAD can be answered with 304."""
    assert choose("HEAD", if_none_match='"v1"').status is HTTPStatus.NOT_MODIFIED


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
    """What will be read in any case is known only where no condition can change it."""
    assert Conditions.parse("GET", headers).reading == expected


def test_head_reads_nothing_for_certain() -> None:
    """HEAD needs no bytes."""
    assert Conditions.parse("HEAD", {}).reading is None


@pytest.mark.parametrize(
    "header",
    [
        "gzip", "GZIP", "x-gzip", "*", "gzip, deflate, br", "br,gzip", "gzip;q=1", "gzip;q=0.001",
        "gzip ; q=0.5", "deflate;q=0, gzip", "identity;q=0, *", "*;q=0, gzip",
        "identity, gzip;q=0.5",
        "br;q=0,*;q=0.1", "deflate, gzip, br, zstd", "gzip;level=1",
    ],
)  # fmt: skip
def test_gzip_is_accepted(header: str) -> None:
    """By its name, its old name, or as any coding, with a weight above zero (RFC 9110 §12.5.3)."""
    assert accepts_gzip(header.encode())


@pytest.mark.parametrize(
    "header",
    [
        None, "", "identity", "br", "deflate, br, zstd", "gzip;q=0", "gzip;q=0.000", "GZIP; Q=0",
        "gzip ; q=0 ", "*;q=0", "gzip;q=0, *", "*, gzip;q=0", "gzipped", "bgzip", "gz", ";q=1", ",",
        "identity;q=1, *;q=0", "br;q=1, *;q=0.0",
    ],
)  # fmt: skip
def test_gzip_is_not_accepted(header: str | None) -> None:
    """Not named, or refused by its name or as the rest; silence is no wish for it."""
    assert not accepts_gzip(None if header is None else header.encode())


@pytest.mark.parametrize(
    ("method", "headers", "takes_gzip"),
    [
        ("GET", {}, True),
        ("GET", {b"if-none-match": b'"v1"', b"if-match": b"*"}, True),
        ("GET", {b"if-range": b'"v1"'}, True),
        ("GET", {b"range": b"bytes=0-"}, False),
        ("GET", {b"range": b"bytes=0-1,3-4"}, False),
        ("GET", {b"range": b"lines=1-2"}, False),
        ("HEAD", {}, False),
        ("HEAD", {b"range": b"bytes=0-"}, False),
    ],
)
def test_a_body_comes_as_gzip_only_if_all_of_it_is_asked_for(
    method: str, headers: dict[bytes, bytes], *, takes_gzip: bool
) -> None:
    """Not for HEAD, nor with a Range, be it one that is then ignored."""
    plain = Conditions.parse(method, headers)
    accepting = Conditions.parse(method, {**headers, b"accept-encoding": b"br, gzip"})

    assert (plain.takes_gzip, accepting.takes_gzip) == (False, takes_gzip)
