"""Checks of the head of a request that neither httptools nor uvicorn makes."""

from http import HTTPStatus
from typing import Any, Final, NamedTuple

import httptools

from app.http.problems import Headers
from app.http.responses import RequestHeaders, combine_headers

HEAD_NBYTES: Final = 64 * 1024
"""Longest head; also the most that may follow a body, such as trailers. Keys have up to 3 KiB."""
MAX_HEADERS: Final = 128

_FRAMING: Final = frozenset({b"content-length", b"transfer-encoding"})
_CONTINUE: Final = b"100-continue"


class RefusedRequestError(Exception):
    """The bytes of a client are no request that can be answered; the connection ends."""

    def __init__(self, status: HTTPStatus, detail: str) -> None:
        super().__init__(detail)
        self.status = status


MALFORMED: Final = (HTTPStatus.BAD_REQUEST, "this is not HTTP/1.1")
TOO_LARGE: Final = (
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    f"the head of a request has up to {HEAD_NBYTES} bytes and {MAX_HEADERS} headers",
)


class RequestHead(NamedTuple):
    """A head that every HTTP implementation understands alike."""

    target: Any
    """As `httptools.parse_url` returns it."""
    headers: Headers
    """In their order, with lower-case names; ``host`` is that of an absolute target."""
    by_name: RequestHeaders
    expects_continue: bool


def check_head(parser: Any, url: bytes, headers: Headers, received_nbytes: int) -> RequestHead:
    """Check a head within the last *received_nbytes*. Raises: `RefusedRequestError`."""
    if len(headers) > MAX_HEADERS:
        raise RefusedRequestError(*TOO_LARGE)
    if received_nbytes > HEAD_NBYTES and _nbytes(url, headers) > HEAD_NBYTES:
        raise RefusedRequestError(*TOO_LARGE)
    by_name = combine_headers(headers)
    is_1_1 = parser.get_http_version() == "1.1"
    if len(by_name) == len(headers):
        hosts = int(b"host" in by_name)
    else:
        hosts = sum(name == b"host" for name, _ in headers)
    if hosts > 1 or (is_1_1 and not hosts):
        raise RefusedRequestError(HTTPStatus.BAD_REQUEST, "a request names one Host")
    if parser.should_upgrade() and not _FRAMING.isdisjoint(by_name):
        # The parser takes what follows for the other protocol, or for a request.
        detail = "a request with a body cannot ask for an upgrade"
        raise RefusedRequestError(HTTPStatus.BAD_REQUEST, detail)
    target = httptools.parse_url(url)
    if target.path is None:
        raise RefusedRequestError(*MALFORMED)
    if target.host is not None:  # it takes the place of Host (RFC 9112 §3.2.2)
        authority = url.split(b"/", 3)[2].rpartition(b"@")[2]
        headers = [each for each in headers if each[0] != b"host"]
        headers.append((b"host", authority))
        by_name = combine_headers(headers)
    expected = by_name.get(b"expect")
    is_expecting = expected is not None and _CONTINUE in expected.lower().split(b", ")
    return RequestHead(target, headers, by_name, is_expecting and is_1_1)


def _nbytes(url: bytes, headers: Headers) -> int:
    return len(url) + sum(len(name) + len(value) + 4 for name, value in headers)
