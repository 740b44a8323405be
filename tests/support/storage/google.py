"""A small server of Google's XML API that keeps generations, and compares them as Google's does.

Emulators on the package indexes accept preconditions and ignore them. The answers of this server to
17 requests (PUT with and without ``x-goog-if-generation-match``, GET, HEAD, ranges) were compared
by hand with those of Google's storage-testbench 0.45: statuses, bytes, metadata, ranges, and which
generations grow were the same. The uploads were sent to its JSON API, since its XML API keeps no
user metadata, and returns neither an ETag nor, for a PUT, the generation, as Google's does.
"""

import hashlib
import json
import re
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import formatdate
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from tests.support.storage.listening import Handler, Listener, listing

BUCKET = "bucket"


def service_account(url: str) -> str:
    """Return the key of a service account with which obstore sends no credentials to *url*."""
    names = ("client_email", "private_key", "private_key_id")
    return json.dumps({"disable_oauth": True, "gcs_base_url": url} | dict.fromkeys(names, ""))


ENVIRON = {"GOOGLE_SERVICE_ACCOUNT_KEY": service_account("")}
"""Variables with which obstore writes without credentials."""
_KEPT = ("content-type", "content-encoding", "content-disposition", "cache-control")


class _Stored(NamedTuple):
    data: bytes
    generation: int
    headers: dict[str, str]

    @property
    def etag(self) -> str:
        return f'"{hashlib.md5(self.data, usedforsecurity=False).hexdigest()}"'


class GoogleServer:
    """One bucket, and synchronous methods to store its objects."""

    def __init__(self) -> None:
        self.objects: dict[str, _Stored] = {}
        self.lock = threading.Lock()
        self.silent = frozenset[str]()
        """Methods whose responses tell no generations, as those behind some proxies."""
        self._generation = 0
        self._server = Listener(_Handler, self)
        self.url = self._server.url

    def put(self, key: str, data: bytes, headers: dict[str, str] | None = None) -> _Stored:
        """Store *data*."""
        self._generation = max(self._generation + 1, time.time_ns() // 1000)
        self.objects[key] = _Stored(data, self._generation, headers or {})
        return self.objects[key]

    def delete(self, key: str) -> None:
        """Remove an object."""
        del self.objects[key]

    @contextmanager
    def running(self) -> Generator["GoogleServer"]:
        """Answer requests until the context ends."""
        with self._server.running():
            yield self


class _Handler(Handler[GoogleServer]):
    methods = ("GET", "HEAD", "PUT", "DELETE")

    def answer(self) -> None:
        owner = self.server.owner
        parts = urlsplit(self.path)
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        announced = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(announced)
        if len(body) < announced:
            self.close_connection = True
            return
        if bucket != BUCKET:
            self._refuse(404, "NoSuchBucket")
            return
        if not key:
            self._list(parse_qs(parts.query, keep_blank_values=True))
            return
        with owner.lock:
            now = owner.objects.get(key)
            generation = self.headers.get("x-goog-if-generation-match")
            if generation not in (None, str(now.generation if now else 0)):
                self._refuse(412, "PreconditionFailed")
            elif self.command == "PUT":
                self._made(owner.put(key, body, self._kept()))
            elif now is None:
                self._refuse(404, "NoSuchKey")
            elif self.command == "DELETE":
                owner.delete(key)
                self._send(204, {})
            else:
                self._object(now)

    def _kept(self) -> dict[str, str]:
        sent = {name.lower(): value for name, value in self.headers.items()}
        return {k: v for k, v in sent.items() if k in _KEPT or k.startswith("x-goog-meta-")}

    def _made(self, made: _Stored) -> None:
        self._send(200, {"ETag": made.etag} | self._generation(made))

    def _generation(self, stored: _Stored) -> dict[str, str]:
        if self.command in self.server.owner.silent:
            return {}
        return {"x-goog-generation": str(stored.generation)}

    def _object(self, found: _Stored) -> None:
        tag = found.etag
        size = len(found.data)
        headers = {
            "ETag": tag,
            "Last-Modified": formatdate(found.generation / 1e6, usegmt=True),
            **self._generation(found),
            **found.headers,
        }
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if self.headers.get("If-Match", tag) != tag:
            self._refuse(412, "PreconditionFailed")
        elif self.headers.get("If-None-Match") == tag:
            self._send(304, headers)
        elif asked is None or self.command == "HEAD":
            self._send(200, headers, found.data)
        else:
            start = int(asked[1]) if asked[1] else max(0, size - int(asked[2]))
            stop = min(int(asked[2]) + 1, size) if asked[1] and asked[2] else size
            if start >= size:
                self._refuse(416, "InvalidRange")
                return
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
            self._send(206, headers, found.data[start:stop])

    def _list(self, query: dict[str, list[str]]) -> None:
        with self.server.owner.lock:
            objects = dict(self.server.owner.objects)
        told = dict[str, str]()
        for key, each in objects.items():
            modified = datetime.fromtimestamp(each.generation / 1e6, UTC)
            told[key] = f"<ETag>{each.etag}</ETag><Size>{len(each.data)}</Size>"
            told[key] += f"<LastModified>{modified:%Y-%m-%dT%H:%M:%S.%fZ}</LastModified>"
        self._send(200, {"Content-Type": "application/xml"}, listing(told, query))

    def _refuse(self, status: int, code: str) -> None:
        document = f"<Error><Code>{code}</Code><Message>no</Message></Error>"
        self._send(status, {"Content-Type": "application/xml"}, document.encode())

    def _send(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if status not in (204, 304):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD" and status not in (204, 304):
            self.wfile.write(body)
