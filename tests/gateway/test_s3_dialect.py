"""`shardgate.gateway.s3_dialect`: recognition of S3 requests, and their XML."""

# ruff: noqa: S314  what is parsed here we wrote

from http import HTTPStatus
from typing import cast
from xml.etree import ElementTree as ET

import pytest

from shardgate.errors import BadBodyError, BadKeyError, ShardgateError, UnsupportedError
from shardgate.gateway.s3_dialect import error_code, error_document, parse_deletion, speaks_s3
from shardgate.server.problems import STATUS
from shardgate.server.request import Headers, Request


def _request(headers: dict[bytes, bytes], query: bytes = b"") -> Request:
    request = Request("GET", b"/em/c/0/0", list(headers.items()), headers, b"192.0.2.1")
    request.query = query
    return request


@pytest.mark.parametrize(
    ("headers", "query", "is_s3"),
    [
        ({}, b"", False),
        ({b"authorization": b"AWS4-HMAC-SHA256 Credential=a"}, b"", True),
        ({b"authorization": b"AWS key:signature"}, b"", True),
        ({b"authorization": b"Bearer AWS4-HMAC-SHA256"}, b"", False),
        ({b"amz-sdk-invocation-id": b"1"}, b"", True),
        ({}, b"X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Signature=0", True),
        ({}, b"x-amz-signature=0", True),
        ({}, b"a=1&x-id=GetObject", True),
        ({}, b"list-type=2", True),
        ({}, b"a=list-type=2", False),
    ],
)
def test_s3_request_is_recognised(headers: dict[bytes, bytes], query: bytes, is_s3: bool) -> None:  # noqa: FBT001
    """A request is S3's if it is signed or has a header or parameter that only S3 clients send."""
    assert speaks_s3(_request(headers, query)) is is_s3


@pytest.mark.parametrize(
    ("status", "error", "code"),
    [
        (403, None, "AccessDenied"),
        (408, None, "RequestTimeout"),
        (411, None, "MissingContentLength"),
        (424, None, "FailedDependency"),
        (500, None, "InternalError"),
        (503, None, "SlowDown"),
        (400, BadKeyError(), "InvalidRequest"),
    ],
)
def test_codes_are_those_of_s3(status: int, error: ShardgateError | None, code: str) -> None:
    """Each status has S3's error code; only 504 is an InternalError beside 500.

    `tests/clients/test_s3_writing.py` has the other codes.
    """
    internal = {status for status in STATUS.values() if error_code(status) == "InternalError"}

    assert error_code(HTTPStatus(status), error) == code
    assert sorted(internal) == [504]


def test_error_document_is_valid_xml() -> None:
    """An error is valid XML, with characters that XML cannot hold replaced."""
    request = _request({b"x-request-id": b"7"})
    status = HTTPStatus.SERVICE_UNAVAILABLE
    document = error_document(request, status, "SlowDown", "<\x01&\ud800")
    headers = cast("Headers", document.headers)
    body = cast("bytes", document.body)
    told = {each.tag: each.text for each in ET.fromstring(body)}

    assert told == {"Code": "SlowDown", "Message": "<?&?", "RequestId": "7"}
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
    """A 412 names the condition of the request, if there is exactly one."""
    request = _request(dict.fromkeys(names, b"*"))
    document = error_document(request, HTTPStatus(status), "Code", "why")

    assert ET.fromstring(cast("bytes", document.body)).findtext("Condition") == condition


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
def test_deletion_parsed(inside: bytes, keys: list[tuple[str, str | None]], is_quiet: bool) -> None:  # noqa: FBT001
    """A Delete document has its keys in order, with or without namespace and declaration."""
    namespace = b"http://s3.amazonaws.com/doc/2006-03-01/"
    for text in (
        b"<Delete>" + inside + b"</Delete>",
        b'<Delete xmlns="' + namespace + b'">' + inside + b"</Delete>",
        b'<?xml version="1.0" encoding="UTF-8"?><Delete>' + inside + b"</Delete>",
    ):
        found = parse_deletion(text)

        assert (found.keys, found.is_quiet) == (keys, is_quiet)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        *(
            (body, BadBodyError)
            for body in (
                *(b"", b"{}", b"<Delete>", b"<Delete></Delete>", b"<Remove>" + A + b"</Remove>"),
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
                b"<Delete>" + b"<Object/>" * 100_000 + b"</Delete>",
                b'<Delete xmlns="' + b"u" * 2**16 + b'">' + A + b"</Delete>",
            )
        ),
        *(
            (
                b"<Delete>" + A[:-9] + b"<%b>1</%b></Object></Delete>" % (name, name),
                UnsupportedError,
            )
            for name in (b"VersionId", b"Size", b"LastModifiedTime")
        ),
    ],
)
def test_invalid_deletion_is_refused(body: bytes, error: type[Exception]) -> None:
    """A Delete document with other elements, entities, deep trees or over 1,000 keys is refused."""
    with pytest.raises(error):
        parse_deletion(body)
    assert len(parse_deletion(b"<Delete>" + A * 1000 + b"</Delete>").keys) == 1000
