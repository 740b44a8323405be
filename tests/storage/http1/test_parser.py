"""Bytes become one answer, however they are split, or are refused."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Self

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.storage.http1.errors import BadAnswerError
from app.storage.http1.parser import AnswerParser

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
HELLO = b"2\r\nhe\r\n3;name=value\r\nllo\r\n0\r\n"
"""Two chunks, one with an extension, and the last; trailers may follow."""


def parse(*pieces: bytes, is_bodiless: bool = False) -> AnswerParser:
    """Feed *pieces*."""
    parser = AnswerParser(is_bodiless=is_bodiless)
    for piece in pieces:
        parser.feed(piece)
    return parser


def seen(parser: AnswerParser) -> dict[str, object]:
    """Take all that there is to see."""
    names = (
        *("status", "headers", "length", "buffered", "has_begun", "has_head"),
        *("is_complete", "is_until_close", "is_reusable"),
    )
    return {name: getattr(parser, name) for name in names} | {"body": parser.take()}


@dataclass(frozen=True)
class Answer:
    """The bytes of an answer, and what they mean."""

    data: bytes
    body: bytes
    headers: dict[bytes, bytes] = field(default_factory=dict)
    is_until_close: bool = False

    def after(self, interim: bytes) -> Self:
        """Announce it by other answers."""
        return type(self)(interim + self.data, self.body, self.headers, self.is_until_close)


def chunked(chunks: list[bytes], trailers: bytes) -> Answer:
    """Send *chunks* as they are."""
    coded = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
    data = b"%s%s\r\n%s0\r\n%s\r\n" % (OK, CHUNKED, coded, trailers)
    return Answer(data, b"".join(chunks), {b"transfer-encoding": b"chunked"})


def measured(body: bytes) -> Answer:
    """Say how long *body* is."""
    length = b"%d" % len(body)
    data = b"%sContent-Length: %s\r\n\r\n%s" % (OK, length, body)
    return Answer(data, body, {b"content-length": length})


def unmeasured(body: bytes) -> Answer:
    """End *body* by closing the connection."""
    return Answer(b"%sETag: x\r\n\r\n%s" % (OK, body), body, {b"etag": b"x"}, is_until_close=True)


BODIES = st.binary(max_size=40)
INTERIMS = st.lists(
    st.sampled_from(
        [
            b"HTTP/1.1 100 Continue\r\n\r\n",
            b"HTTP/1.1 102 Processing\r\nContent-Length: 3\r\n\r\n",
            b"HTTP/1.1 103 Early Hints\r\nETag: y\r\nLink: </a>\r\n\r\n",
            b"HTTP/1.1 199 Whatever\r\nETag: z\r\n\r\n",
        ]
    ),
    max_size=3,
).map(b"".join)
SELF_DELIMITED = st.builds(measured, BODIES) | st.builds(
    chunked,
    st.lists(st.binary(min_size=1, max_size=40), max_size=4),
    st.sampled_from([b"", b"X-Sum: 1\r\n", b"ETag: z\r\nX-Sum: 1\r\n"]),
)
ANSWERS = st.builds(Answer.after, SELF_DELIMITED | st.builds(unmeasured, BODIES), INTERIMS)
CUTS = st.lists(st.integers(0, 400))


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    """Cut *data* at some places, as a network does."""
    places = sorted({0, len(data), *(cut % len(data) for cut in cuts)})
    return [data[start:stop] for start, stop in pairwise(places)]


@given(ANSWERS, CUTS)
def test_an_answer_means_the_same_however_it_is_split(answer: Answer, cuts: list[int]) -> None:
    """Head, announcements, body and trailers may be cut anywhere."""
    assert seen(parse(*split(answer.data, cuts))) == {
        "status": 200,
        "headers": answer.headers,
        "length": len(answer.body) if b"content-length" in answer.headers else None,
        "body": answer.body,
        "buffered": len(answer.body),
        "has_begun": True,
        "has_head": True,
        "is_complete": not answer.is_until_close,
        "is_until_close": answer.is_until_close,
        "is_reusable": not answer.is_until_close,
    }


@given(ANSWERS)
def test_an_answer_means_the_same_byte_by_byte(answer: Answer) -> None:
    """The smallest pieces are no exception."""
    whole = parse(answer.data)
    slowly = parse(*(answer.data[i : i + 1] for i in range(len(answer.data))))

    assert seen(slowly) == seen(whole)


@given(SELF_DELIMITED, CUTS, st.data())
def test_an_answer_cut_short_is_not_complete(
    answer: Answer, cuts: list[int], data: st.DataObject
) -> None:
    """Whatever is missing, be it the last byte, is missed."""
    kept = data.draw(st.integers(1, len(answer.data) - 1))

    assert not parse(*split(answer.data[:kept], cuts)).is_complete


@given(SELF_DELIMITED, CUTS, st.sampled_from([OK, b"x", b"\0", b"0\r\n\r\n"]))
def test_bytes_after_the_body_are_left_and_end_the_connection(
    answer: Answer, cuts: list[int], surplus: bytes
) -> None:
    """An answer with something behind it is whole, but nothing may follow on the connection."""
    *pieces, last = split(answer.data, cuts)
    parser = parse(*pieces, last + surplus)

    assert (parser.is_complete, parser.is_reusable, parser.take()) == (True, False, answer.body)


@given(ANSWERS, CUTS)
def test_the_answer_to_a_head_ends_with_its_head(answer: Answer, cuts: list[int]) -> None:
    """However long the body of a GET would be, none is waited for."""
    interim, _, rest = answer.data.partition(OK)
    head = interim + OK + rest.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
    parser = parse(*split(head, cuts), is_bodiless=True)

    assert (parser.is_complete, parser.headers, parser.take()) == (True, answer.headers, b"")


@given(ANSWERS, st.binary(max_size=20), st.integers(0, 400), CUTS)
def test_any_bytes_are_parsed_or_refused(
    answer: Answer, damage: bytes, place: int, cuts: list[int]
) -> None:
    """Nothing but `BadAnswerError` is raised, whatever a server sends."""
    start = place % len(answer.data)
    data = answer.data[:start] + damage + answer.data[start + len(damage) :]
    try:
        parser = parse(*split(data, cuts))
    except BadAnswerError:
        return

    assert parser.buffered == len(parser.take())


def test_what_was_taken_of_a_body_is_not_given_again() -> None:
    """A body may be taken in parts."""
    parser = parse(OK + b"Content-Length: 6\r\n\r\nabc")
    taken = [parser.take(), parser.take()]
    parser.feed(b"def")

    assert [*taken, parser.take()] == [b"abc", b"", b"def"]


@pytest.mark.parametrize("is_bodiless", [False, True])
def test_the_length_is_known_with_the_head(is_bodiless: bool) -> None:  # noqa: FBT001
    """How long a body is, or would be, is told before it arrives."""
    assert parse(OK + b"Content-Length: 7\r\n\r\n", is_bodiless=is_bodiless).length == 7


def test_nothing_has_begun_before_the_first_byte() -> None:
    """Only an answer of which nothing has arrived can be asked for once more."""
    assert not AnswerParser(is_bodiless=False).has_begun


def test_half_a_head_has_begun() -> None:
    """A single byte is a beginning."""
    assert parse(b"H").has_begun


def test_the_names_of_headers_are_in_lower_case() -> None:
    """Names are the same in any case."""
    parser = parse(OK + b"ETag: A\r\ncontent-LENGTH: 0\r\n\r\n")

    assert parser.headers == {b"etag": b"A", b"content-length": b"0"}


def test_space_around_the_value_of_a_header_is_no_part_of_it() -> None:
    """RFC 9110 §5.5 excludes leading and trailing white space."""
    parser = parse(OK + b'ETag:\t "a b" \t\r\nContent-Length:  0 \r\n\r\n')

    assert parser.headers == {b"etag": b'"a b"', b"content-length": b"0"}


def test_the_value_of_a_header_may_be_empty() -> None:
    """An empty value neither vanishes nor takes the next line in."""
    parser = parse(OK + b"ETag:\r\nX-A: 1\r\nContent-Length: 0\r\n\r\n")

    assert parser.headers == {b"etag": b"", b"x-a": b"1", b"content-length": b"0"}


def test_of_a_repeated_header_the_last_counts() -> None:
    """Nothing that is read here may be repeated."""
    assert parse(OK + b"ETag: a\r\nETag: b\r\n\r\n").headers == {b"etag": b"b"}


@pytest.mark.parametrize("trailer", [b"ETag: forged", b"Content-Range: bytes 0-0/1", b"X-New: 1"])
def test_trailers_are_no_headers(trailer: bytes) -> None:
    """What follows the last chunk neither adds to the head nor replaces parts of it."""
    head = OK + CHUNKED + b"ETag: true\r\n\r\n"
    parser = parse(head + HELLO + trailer + b"\r\n\r\n")

    assert parser.headers == {b"transfer-encoding": b"chunked", b"etag": b"true"}


def test_the_name_of_the_chunked_coding_may_be_in_any_case() -> None:
    """Transfer codings are the same in any case, too."""
    parser = parse(OK + b"Transfer-Encoding: Chunked \r\n\r\n" + HELLO + b"\r\n")

    assert (parser.is_complete, parser.take()) == (True, b"hello")


@pytest.mark.parametrize("status", [204, 304])
@pytest.mark.parametrize("header", [b"", b"Content-Length: 5\r\n", CHUNKED])
def test_some_statuses_have_no_body(status: int, header: bytes) -> None:
    """An answer of 204 or 304 ends with its head, whatever the headers say."""
    parser = parse(b"HTTP/1.1 %d X\r\n%s\r\n" % (status, header))

    assert (parser.is_complete, parser.is_reusable, parser.take()) == (True, True, b"")


@pytest.mark.parametrize("is_bodiless", [False, True])
def test_a_body_where_none_may_be_is_left(is_bodiless: bool) -> None:  # noqa: FBT001
    """What a wrong server sends after a 304 or a HEAD is not given to anybody."""
    status = b"200" if is_bodiless else b"304"
    head = b"HTTP/1.1 %s X\r\nContent-Length: 5\r\n\r\n" % status
    parser = parse(head + b"hello", is_bodiless=is_bodiless)

    assert (parser.is_complete, parser.is_reusable, parser.take()) == (True, False, b"")


def test_a_body_without_length_goes_on_until_the_connection_closes() -> None:
    """Its end cannot be seen from here."""
    parser = parse(OK + b"\r\n", b"a", b"b")

    assert (parser.is_until_close, parser.is_complete, parser.take()) == (True, False, b"ab")


@pytest.mark.parametrize(
    ("head", "is_reusable"),
    [
        (b"HTTP/1.1 200 OK\r\n", True),
        (b"HTTP/1.1 404 Not Found\r\n", True),
        (b"HTTP/1.1 200\r\n", True),
        (b"HTTP/1.1 200 OK\r\nConnection: keep-alive\r\n", True),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n", False),
        (b"HTTP/1.1 200 OK\r\nConnection: Close, X\r\n", False),
        (b"HTTP/1.1 200 OK\r\nUpgrade: h2c\r\nConnection: upgrade\r\n", True),
        (b"HTTP/1.0 200 OK\r\n", False),
        (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n", True),
    ],
)
def test_another_answer_may_follow_where_the_server_allows_it(
    head: bytes,
    is_reusable: bool,  # noqa: FBT001
) -> None:
    """HTTP/1.1 keeps connections unless it says otherwise, HTTP/1.0 only if it says so."""
    assert parse(head + b"Content-Length: 2\r\n\r\nhi").is_reusable is is_reusable


@pytest.mark.parametrize(
    "data",
    [
        b"garbage",
        b"\0\1\2\3",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"GET / HTTP/1.1\r\nHost: h\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/1.1 20 OK\r\n\r\n",
        b"HTTP/9.9 200 OK\r\n\r\n",
        OK + b"ETag : a\r\n\r\n",
        OK + b"no colon\r\n\r\n",
        OK + b"ETag: a\0b\r\n\r\n",
        OK + b"ETag: a\r\n folded\r\n\r\n",
    ],
)
def test_what_is_not_http_is_refused(data: bytes) -> None:
    """Neither other protocols nor damaged heads are guessed at."""
    with pytest.raises(BadAnswerError):
        parse(data)


@pytest.mark.parametrize(
    "headers",
    [
        b"Content-Length: 2\r\nContent-Length: 3\r\n",
        b"Content-Length: 2, 3\r\n",
        b"Content-Length: -1\r\n",
        b"Content-Length: +2\r\n",
        b"Content-Length: 0x2\r\n",
        b"Content-Length: 99999999999999999999\r\n",
        b"Content-Length:\r\n",
        CHUNKED + b"Content-Length: 2\r\n",
        b"Content-Length: 2\r\n" + CHUNKED,
    ],
)
def test_a_body_of_two_or_no_lengths_is_refused(headers: bytes) -> None:
    """Where servers and proxies could differ about the end, there is no answer."""
    with pytest.raises(BadAnswerError):
        parse(OK + headers + b"\r\nhi")


@pytest.mark.parametrize("coding", [b"gzip", b"gzip, chunked", b"identity", b"chunked, chunked"])
def test_an_unknown_transfer_coding_is_refused(coding: bytes) -> None:
    """What would have to be unpacked is not passed on as it is."""
    with pytest.raises(BadAnswerError, match="transfer coding"):
        parse(OK + b"Transfer-Encoding: " + coding + b"\r\n\r\n")


@pytest.mark.parametrize("chunk", [b"x\r\n", b"-1\r\n", b"2\r\nabc\r\n", b"f" * 17 + b"\r\n"])
def test_a_damaged_chunk_is_refused_after_the_head(chunk: bytes) -> None:
    """Status and headers stay what they were, but the body has no end."""
    parser = parse(OK + CHUNKED + b"\r\n2\r\nhi\r\n")
    with pytest.raises(BadAnswerError):
        parser.feed(chunk)

    assert (parser.status, parser.is_complete, parser.is_reusable) == (200, False, False)


def test_another_protocol_is_refused() -> None:
    """Nobody asked for a 101."""
    with pytest.raises(BadAnswerError, match="another protocol"):
        parse(b"HTTP/1.1 101 Switching\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n")


@pytest.mark.parametrize("status", [b"000", b"099", b"104", b"199"])
@pytest.mark.parametrize(
    "rest",
    [b"Content-Length: 2\r\n\r\nno", CHUNKED + b"\r\n2\r\nno\r\n0\r\n\r\n"],
    ids=["measured", "chunked"],
)
def test_an_announcement_with_a_body_is_refused(status: bytes, rest: bytes) -> None:
    """Else it would be taken for the beginning of the body that is announced."""
    with pytest.raises(BadAnswerError):
        parse(b"HTTP/1.1 " + status + b" X\r\n" + rest, OK + b"Content-Length: 2\r\n\r\nhi")


@pytest.mark.parametrize(
    "data",
    [
        OK + b"X: " + b"a" * 70_000,
        OK + b"X: a\r\n" * 12_000,
        b"HTTP/1.1 200 " + b"a" * 70_000,
        b"HTTP/1.1 100 Continue\r\n\r\n" * 3_000,
    ],
)
def test_a_head_that_does_not_end_is_refused(data: bytes) -> None:
    """After 64 KiB no more is taken in, be they headers or announcements."""
    with pytest.raises(BadAnswerError, match="too large"):
        parse(*(data[i : i + 1000] for i in range(0, len(data), 1000)))


def test_a_large_head_that_ends_is_taken() -> None:
    """Less than 64 KiB is no attack."""
    data = OK + b"X: %s\r\nContent-Length: 0\r\n\r\n" % (b"a" * 65_000)

    assert parse(*(data[i : i + 1000] for i in range(0, len(data), 1000))).is_complete


def test_a_body_larger_than_any_head_is_taken() -> None:
    """The limit ends with the head."""
    chunk = b"4000\r\n" + b"a" * 0x4000 + b"\r\n"

    assert parse(OK + CHUNKED + b"\r\n", *([chunk] * 8)).buffered == 8 * 0x4000
