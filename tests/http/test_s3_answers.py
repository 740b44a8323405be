"""`app.http.s3_answers`: XML that clients of S3 act on."""

from http import HTTPStatus
from xml.etree import ElementTree as ET

import pytest

from app.errors import BadKeyError, DigestError, UnknownDatasetError
from app.http.problems import STATUS
from app.http.s3_answers import buckets, code_of, deleted, error_document, failed_condition

# ruff: noqa: S314  what is parsed here we wrote

NS = "{http://s3.amazonaws.com/doc/2006-03-01/}"


def test_every_status_of_an_error_has_a_code() -> None:
    """Only what is our own fault, or the store's, is an internal error."""
    internal = {status for status in STATUS.values() if code_of(status) == "InternalError"}

    assert internal == {
        HTTPStatus.INTERNAL_SERVER_ERROR,
        HTTPStatus.BAD_GATEWAY,
        HTTPStatus.GATEWAY_TIMEOUT,
    }


@pytest.mark.parametrize(
    ("status", "code"),
    [(404, "NoSuchKey"), (412, "PreconditionFailed"), (411, "MissingContentLength"),
     (413, "EntityTooLarge"), (403, "AccessDenied"), (503, "SlowDown"), (405, "MethodNotAllowed"),
     (408, "RequestTimeout"), (416, "InvalidRange"), (501, "NotImplemented")],
)  # fmt: skip
def test_codes_are_those_of_s3(status: int, code: str) -> None:
    """Clients act on the code."""
    assert code_of(HTTPStatus(status)) == code


def test_some_errors_have_codes_of_their_own() -> None:
    """A missing bucket is no missing key."""
    assert code_of(HTTPStatus.NOT_FOUND, UnknownDatasetError()) == "NoSuchBucket"
    assert code_of(HTTPStatus.BAD_REQUEST, DigestError()) == "BadDigest"
    assert code_of(HTTPStatus.BAD_REQUEST, BadKeyError()) == "InvalidRequest"


def test_an_error_is_xml_whatever_it_is_about() -> None:
    """Control characters, which XML cannot hold, are left out."""
    headers, body = error_document(HTTPStatus.SERVICE_UNAVAILABLE, "SlowDown", "<\x01&\ud800", "7")
    root = ET.fromstring(body)

    assert {each.tag: each.text for each in root} == {
        "Code": "SlowDown",
        "Message": "<?&?",
        "RequestId": "7",
    }
    assert dict(headers)[b"content-length"] == b"%d" % len(body)
    assert dict(headers)[b"content-type"] == b"application/xml"
    assert b"retry-after" in dict(headers)


@pytest.mark.parametrize(
    ("status", "names", "condition"),
    [
        (412, (b"if-none-match",), "If-None-Match"),
        (412, (b"if-match", b"range"), "If-Match"),
        (412, (b"x-amz-copy-source-if-match",), "x-amz-copy-source-If-Match"),
        (412, (b"if-match", b"if-none-match"), None),
        (404, (b"if-match",), None),
    ],
)
def test_the_condition_that_failed_is_named(
    status: int, names: tuple[bytes, ...], condition: str | None
) -> None:
    """Unless it may have been one of several."""
    headers = dict.fromkeys(names, b"*")
    assert failed_condition(HTTPStatus(status), headers) == condition


def test_buckets_are_listed() -> None:
    """By name, in their order."""
    assert [each.text for each in ET.fromstring(buckets(["b", "a"])).iter(f"{NS}Name")] == [
        "b",
        "a",
    ]


@pytest.mark.parametrize("is_quiet", [False, True])
def test_deleted_keys_are_told_of(is_quiet: bool) -> None:  # noqa: FBT001
    """Errors always, successes unless that is not wanted."""
    text = deleted(["a", "b"], [None, BadKeyError("no")], is_quiet=is_quiet)
    told = [(each.tag, each.findtext(f"{NS}Key")) for each in ET.fromstring(text)]

    assert told == [(f"{NS}Deleted", "a")] * (not is_quiet) + [(f"{NS}Error", "b")]
