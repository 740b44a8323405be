"""A request and its response: made once by `GatewayProtocol` or `AsgiApp`, and passed on.

A layer has one entry, ``answer(request)``. It returns the response if that is in memory, or else a
function that sends one to an `Exchange`.
"""

import itertools
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import quote, unquote

from shardgate.errors import BadKeyError
from shardgate.http.auth.access import Caller
from shardgate.http.body import IncomingBody
from shardgate.http.paths import TOKEN_PREFIXES, split_target, split_token, token_in
from shardgate.model import VirtualKey
from shardgate.read.bodies import Body

type Headers = list[tuple[bytes, bytes]]
type RequestHeaders = Mapping[bytes, bytes]
"""Headers of a request by lower-case name; see `combine_headers`."""

_REQUEST_ID: Final = re.compile(rb"[\x21-\x7e]{1,128}")
_process: Final = secrets.token_hex(4).encode()
_numbers: Final = itertools.count(1)


class Asgi(NamedTuple):
    """The arguments of an ASGI application."""

    scope: Mapping[str, Any]
    receive: Any
    send: Any


class Request:
    """A request, and its caller once that is known."""

    query = b""
    segment: bytes | None = None
    """The first segment of the path, ``/~TOKEN``, if it is a token."""
    name: str
    """Dataset, which may not exist, or a reserved name."""
    key: VirtualKey | None = None
    """What follows *name* and a slash, which may be empty; `None` without the slash."""
    fault: BadKeyError | None = None
    """Why the path has no valid *key*."""
    root_path = ""
    """Decoded path that another application has mounted this one below."""
    sent_path: bytes
    """Path as it was sent, with all that *raw_path* lacks."""
    body: IncomingBody | None = None
    """`None` for a plain GET, whose body is dropped."""
    asgi: Asgi | None = None
    """`None` for a plain GET, which does not come through ASGI."""
    caller: Caller | None = None
    """Set by `Authenticator`."""

    def __init__(
        self, method: str, raw_path: bytes, fields: Headers, headers: RequestHeaders, peer: bytes
    ) -> None:
        """*raw_path* has no *root_path*; *fields* are the headers in their order."""
        self.method = method
        self.sent_path = raw_path
        if raw_path.startswith(TOKEN_PREFIXES):
            self.segment, raw_path = split_token(raw_path)
        self.raw_path = raw_path
        """Percent-encoded path, without a token."""
        try:
            self.name, self.key = split_target(raw_path)
        except BadKeyError as error:
            self.name = self.path[1:].partition("/")[0]
            self.fault = error.with_traceback(None)
        self.fields = fields
        self.headers = headers
        self.peer = peer
        """Address of the connection."""
        self.id = request_id(headers.get(b"x-request-id"))

    @property
    def path(self) -> str:
        """Decoded path."""
        return unquote(self.raw_path.decode("utf-8", "replace"))

    @property
    def dataset(self) -> str:
        """The dataset that the request is for, or a reserved name; neither may exist."""
        if self.name != "api":
            return self.name
        return self.path.removeprefix("/api/datasets")[1:].partition("/")[0]

    @property
    def token(self) -> str | None:
        """Token in the path, percent-encoded as it was sent."""
        return None if self.segment is None else token_in(self.segment)

    @property
    def base_path(self) -> str:
        """Path that datasets are below, for links: that of a mount, and a token."""
        return quote(self.root_path) + ("" if self.segment is None else f"/~{self.token}")


@dataclass(slots=True)
class Response:
    """A response, with all its headers."""

    status: HTTPStatus
    headers: Headers | bytes
    """As a list, or in lines as HTTP/1.1 has them."""
    body: Body = b""


class Exchange(Protocol):
    """A response on its way to the client."""

    status: int
    """0 until the response begins."""
    sent_nbytes: int
    """Bytes of the body that the connection has taken."""
    response_complete: bool

    async def write(self, response: Response) -> None:
        """Write the response; to be called once."""


type DeferredResponse = Callable[[Exchange], Awaitable[None]]
"""Sends a response that needs I/O; it may raise after it has begun to be written."""
type Answer = Response | DeferredResponse


def encode_headers(headers: Headers) -> bytes:
    """Return *headers*, each on a line of its own (RFC 9112 §5)."""
    return b"".join([part for name, value in headers for part in (name, b": ", value, b"\r\n")])


def combine_headers(headers: Headers) -> dict[bytes, bytes]:
    """Return request headers by name; values of a repeated one become a list (RFC 9110 §5.3)."""
    combined = dict(headers)
    if len(combined) == len(headers):
        return combined
    values: dict[bytes, list[bytes]] = {}
    for name, value in headers:
        values.setdefault(name, []).append(value)
    return {name: b", ".join(each) for name, each in values.items()}


def request_id(sent: bytes | None) -> bytes:
    """Return the client's request id if it is fit for a header and a log, else a new one."""
    if sent is not None and _REQUEST_ID.fullmatch(sent):
        return sent
    return b"%b-%x" % (_process, next(_numbers))
