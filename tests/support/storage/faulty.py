"""A small real object server with faults at chosen requests.

It is a path-style S3 endpoint, which does not check signatures, and at the same URL a plain HTTP
server: the object ``key`` of ``bucket`` is ``/bucket/key``. It runs in threads of its own, so that
tests with or without an event loop can use it.
"""

import gzip
import hashlib
import re
import ssl
import threading
from collections.abc import Container, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from enum import Enum
from functools import lru_cache
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from shardgate.settings import StoreSettings
from tests.support.storage.listening import Handler, Listener, listing

LONGEST_S: Final = 60.0
"""Much longer than a response takes on a busy machine."""
_STALLED_S: Final = 0.5


class Fault(Enum):
    """Faults of one request; status, code and message of a refusal."""

    DENY = 403, "AccessDenied", "Access Denied"
    EXPIRED = 403, "AccessDenied", "Request has expired"
    NO_LISTING = 403, "AccessDenied", "User: me is not authorized to perform: s3:ListBucket on it"
    NO_DECRYPTION = 403, "AccessDenied", "User: me is not authorized to perform: kms:Decrypt on it"
    WRONG_KEY = 403, "InvalidAccessKeyId", ""
    WRONG_SECRET = 403, "SignatureDoesNotMatch", ""
    SKEWED = 403, "RequestTimeTooSkewed", ""
    ARCHIVED = 403, "InvalidObjectState", ""
    FORBIDDEN = 403, "", ""
    UNAUTHORIZED = 401, "", ""
    EXPIRED_TOKEN = 400, "ExpiredToken", "The provided token has expired."
    NO_BUCKET = 404, "NoSuchBucket", ""
    SLOW_DOWN = 503, "SlowDown", "Please reduce your request rate."
    TOO_MANY = 429, "", ""
    ERROR = 500, "InternalError", ""
    BAD_GATEWAY = 502, "", ""
    TEAPOT = 418, "", ""
    STALL = "never answers"
    STALL_BODY = "stops in the middle of the body, connection open"
    RESET = "resets the connection before the headers"
    RESET_BODY = "resets the connection in the middle of the body"
    CUT = "closes the connection in the middle of the body"
    GARBAGE = "answers what is not HTTP"
    SHORT_LENGTH = "announces and sends a byte less than Content-Range says"
    WRONG_RANGE = "sends the range one byte further on"
    BAD_RANGE = "sends a Content-Range that is none"
    NO_TOTAL = "sends a Content-Range without the size of the object"
    IGNORE_SUFFIX = "answers a suffix with everything"
    SUFFIX_AS_PREFIX = "takes -n for 0-n"
    BAD_SUFFIX = "sends a suffix with a Content-Range that is none"
    CLOSE_AT_SUFFIX = "closes the connection when asked for a suffix"
    NO_HEAD = "knows no HEAD"
    DENY_HEAD = "denies HEAD, as a server does whose URLs are signed for GET"
    MIRRORS = "has two ETags for each object, by turns, and never the one of If-Match"
    IGNORE_RANGE = "answers 200 with everything"
    RANGE_AS_200 = "answers a range with 200 and Content-Range"
    IGNORE_CONDITIONS = "ignores If-Match, If-None-Match and If-Unmodified-Since"
    REFUSE_LONG_SUFFIX = "416 for a suffix longer than the object"
    NO_SIZE_IN_416 = "416 without Content-Range"
    NO_ETAG = "sends Last-Modified only"
    NO_DATE = "sends no Last-Modified"
    BAD_DATE = "sends a Last-Modified that is none"
    WEAK_ETAG = "sends a weak ETag"
    CHUNKED = "announces no length"
    REPLACE = "replaces the object just before it answers"
    SQUEEZE = "compresses what it sends by gzip, though it was not asked for"
    CODED = "has the object stored with gzip, as its bytes are"
    VARY = "says that its coding depends on what is asked for"
    GZIP_ETAG = "has the ETag of Apache for what it compresses"


def timeout_of(request: pytest.FixtureRequest) -> float:
    """Return the time-out of a store: short only where the server is to stop answering."""
    fault = getattr(request.node, "callspec", None) and request.node.callspec.params.get("fault")
    return _STALLED_S if fault in (Fault.STALL, Fault.STALL_BODY) else LONGEST_S


_DATES: Final = ("Mon, 06 Jul 2026 10:00:00 GMT", "Tue, 07 Jul 2026 10:00:00 GMT")


@dataclass(frozen=True)
class Seen:
    """One request as it arrived; *path* is unquoted and without the query."""

    method: str
    path: str
    query: str
    headers: dict[str, str]


@dataclass
class _Order:
    fault: Fault
    nth: Container[int]
    path: str
    query: str | None
    matched: int = 0


class FaultyServer:
    """The objects, the requests seen, and the faults ordered."""

    def __init__(self, *, tls: ssl.SSLContext | None = None) -> None:
        self.objects: dict[str, bytes] = {}
        self.redirects: dict[str, str] = {}
        """Locations of redirects by path."""
        self.seen: list[Seen] = []
        self.suffix_status = 0
        """Status of responses to suffix ranges, if they are refused."""
        self.replaced = 0
        """Number of overwritten objects, which changes Last-Modified."""
        self.stopping = threading.Event()
        self._orders: list[_Order] = []
        self._lock = threading.Lock()
        self._server = Listener(_Handler, self)
        self.url = self._server.url
        if tls is not None:
            self.url = self.url.replace("http", "https")
            self._server.socket = tls.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )

    def settings(self, **more: Any) -> StoreSettings:
        """Return settings of a store of this S3 server, with some credentials."""
        keys = {"access_key_id": "AKIDEXAMPLE", "secret_access_key": "secret"}
        named = {"endpoint_url": self.url, "region": "us-east-1", **keys, **more}
        return StoreSettings.model_validate(named)

    def put(self, bucket: str, key: str, data: bytes) -> str:
        """Store *data* as ``/bucket/key`` and return its ETag."""
        path = f"/{bucket}/{key}"
        self.replaced += path in self.objects
        self.objects[path] = data
        return etag(data)

    def fail(
        self,
        fault: Fault,
        *,
        nth: Container[int] = range(2**63 - 1),
        path: str = "",
        query: str | None = None,
    ) -> None:
        """Answer with *fault* each, or the *nth* from now (0, 1, …), request below *path*.

        With *query*, only requests with that query fail.
        """
        self._orders.append(_Order(fault, nth, path, query))

    def heal(self) -> None:
        """Remove all faults."""
        self._orders.clear()

    def faults_of(self, seen: Seen) -> set[Fault]:
        """Record a request, and return its faults."""
        with self._lock:
            self.seen.append(seen)
            faults = set()
            for order in self._orders:
                if seen.path.startswith(order.path) and order.query in (None, seen.query):
                    if order.matched in order.nth:
                        faults.add(order.fault)
                    order.matched += 1
            return faults

    @contextmanager
    def running(self) -> Generator["FaultyServer"]:
        """Answer requests until the context ends."""
        with self._server.running():
            try:
                yield self
            finally:
                self.stopping.set()


@lru_cache(8)
def etag(data: bytes) -> str:
    """Return the ETag of an object, as S3 computes it."""
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


class _Handler(Handler[FaultyServer]):
    methods = ("GET", "HEAD")
    faults: set[Fault]

    def answer(self) -> None:
        owner = self.server.owner
        parts = urlsplit(self.path)
        seen = Seen(self.command, unquote(parts.path), parts.query, dict(self.headers.items()))
        self.faults = owner.faults_of(seen)
        query = parse_qs(parts.query, keep_blank_values=True)
        bucket, _, key = seen.path.lstrip("/").partition("/")
        if self._breaks_off():
            return
        for fault in self.faults:
            if isinstance(fault.value, tuple):
                self._refuse(*fault.value)
                return
        if Fault.REPLACE in self.faults and seen.path in owner.objects:
            owner.put(bucket, key, owner.objects[seen.path][::-1] + b"!")
        if (location := owner.redirects.get(seen.path)) is not None:
            self._send(302, b"", {"Location": location})
        elif "list-type" in query:
            self._list(bucket, query)
        elif not key:
            known = any(path.startswith(f"/{bucket}/") for path in owner.objects)
            self._send(200 if known else 404, b"")
        elif (data := owner.objects.get(seen.path)) is None:
            self._refuse(404, "NoSuchKey", "")
        else:
            self._object(data)

    def _object(self, data: bytes) -> None:
        tag = etag(data)
        if Fault.MIRRORS in self.faults:
            tag = f'"{len(self.server.owner.seen) % 2}"'
            if self.headers.get("If-Match") == tag:
                tag = f'"{(len(self.server.owner.seen) + 1) % 2}"'
        ignoring = Fault.IGNORE_CONDITIONS in self.faults
        if not ignoring and self.headers.get("If-Match", tag) != tag:
            self._refuse(412, "PreconditionFailed", "")
            return
        modified = _DATES[self.server.owner.replaced % 2]
        since = self.headers.get("If-Unmodified-Since", modified)
        if not ignoring and parsedate_to_datetime(modified) > parsedate_to_datetime(since):
            self._refuse(412, "PreconditionFailed", "")
            return
        headers = self._validators(tag, modified)
        if not ignoring and self.headers.get("If-None-Match") == headers.get("ETag", "none"):
            self._send(304, b"", headers)
            return
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        is_suffix = asked is not None and not asked[1]
        ignored = Fault.IGNORE_RANGE in self.faults
        ignored |= is_suffix and Fault.IGNORE_SUFFIX in self.faults
        if asked is None or self.command == "HEAD" or ignored:
            self._send(200, data, headers)
        elif is_suffix and self.server.owner.suffix_status:
            self._send(self.server.owner.suffix_status, b"")
        elif is_suffix and Fault.CLOSE_AT_SUFFIX in self.faults:
            self.close_connection = True
        else:
            self._range(data, asked[1], asked[2], headers)

    def _validators(self, tag: str, modified: str) -> dict[str, str]:
        """Return the validators of an object, with their faults."""
        headers = {"Accept-Ranges": "bytes", "ETag": tag, "Last-Modified": modified}
        if Fault.BAD_DATE in self.faults:
            headers["Last-Modified"] = "yesterday"
        if Fault.NO_DATE in self.faults:
            del headers["Last-Modified"]
        if Fault.WEAK_ETAG in self.faults:
            headers["ETag"] = f"W/{tag}"
        if Fault.NO_ETAG in self.faults:
            del headers["ETag"]
        if Fault.GZIP_ETAG in self.faults:
            headers["ETag"] = f'{tag[:-1]}-gzip"'
        if Fault.VARY in self.faults:
            headers["Vary"] = "Origin, Accept-Encoding"
        if Fault.CODED in self.faults:
            headers["Content-Encoding"] = "gzip"
        return headers

    def _range(self, data: bytes, first: str, last: str, headers: dict[str, str]) -> None:
        if not first and Fault.SUFFIX_AS_PREFIX in self.faults:
            first = "0"
        if first:
            start, stop = int(first), min(int(last or len(data)) + 1, len(data))
        else:
            start, stop = max(0, len(data) - int(last)), len(data)
        too_long = not first and int(last) > len(data) and Fault.REFUSE_LONG_SUFFIX in self.faults
        if start >= len(data) or too_long:
            unsatisfied = {"Content-Range": f"bytes */{len(data)}"}
            self._send(416, b"", {} if Fault.NO_SIZE_IN_416 in self.faults else unsatisfied)
            return
        if Fault.WRONG_RANGE in self.faults:
            start, stop = start + 1, stop + 1
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        if Fault.BAD_RANGE in self.faults or (not first and Fault.BAD_SUFFIX in self.faults):
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/?"
        if Fault.NO_TOTAL in self.faults:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/*"
        short = Fault.SHORT_LENGTH in self.faults
        status = 200 if Fault.RANGE_AS_200 in self.faults else 206
        self._send(status, data[start : stop - short], headers)

    def _list(self, bucket: str, query: dict[str, list[str]]) -> None:
        objects = {
            path.removeprefix(f"/{bucket}/"): f"<Size>{len(data)}</Size>"
            for path, data in self.server.owner.objects.items()
            if path.startswith(f"/{bucket}/")
        }
        if not objects:
            self._refuse(404, "NoSuchBucket", "")
            return
        self._send(200, listing(objects, query), {"Content-Type": "application/xml"})

    def _refuse(self, status: int, code: str, message: str) -> None:
        document = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
        self._send(status, document.encode() if code else b"")

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        is_success = status in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT)
        chunked = Fault.CHUNKED in self.faults and is_success
        headers = headers or {}
        if Fault.SQUEEZE in self.faults and is_success:
            if self.command == "GET":
                body = gzip.compress(body, 0)
                headers["Content-Encoding"] = "gzip"
            else:  # whose body is not compressed, and so its length is known
                chunked = False
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if chunked:
            self.send_header("Transfer-Encoding", "chunked")
        elif status != HTTPStatus.NOT_MODIFIED:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD" or status == HTTPStatus.NOT_MODIFIED:
            return
        if self._breaks_off_after(body[: len(body) // 2]):
            return
        self.wfile.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if chunked else body)

    def _breaks_off(self) -> bool:
        """Apply faults that come before any header."""
        if Fault.STALL in self.faults:
            self.server.owner.stopping.wait()
        elif self.command == "HEAD" and self.faults & {Fault.NO_HEAD, Fault.DENY_HEAD}:
            self._send(501 if Fault.NO_HEAD in self.faults else 403, b"")
        elif Fault.RESET in self.faults:
            self.reset()
        elif Fault.GARBAGE in self.faults:
            self.wfile.write(b"what?\r\n\r\n")
        else:
            return False
        self.close_connection = True
        return True

    def _breaks_off_after(self, half: bytes) -> bool:
        """Apply faults in the middle of a body."""
        if not self.faults & {Fault.STALL_BODY, Fault.RESET_BODY, Fault.CUT}:
            return False
        self.wfile.write(half)
        self.wfile.flush()
        if Fault.STALL_BODY in self.faults:
            self.server.owner.stopping.wait()
        elif Fault.RESET_BODY in self.faults:
            self.reset()
        self.close_connection = True
        return True
