"""A request and its response: made once by `GatewayProtocol` or `AsgiApp`, and passed on.

The path is ``/{dataset}/{virtual key}``, or ``/~TOKEN/{dataset}/{virtual key}``.

Each layer of an `Application` has two entries: ``cached(request)`` returns a response that is in
memory, or else ``respond(request, exchange)`` sends one.
"""

import itertools
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from http import HTTPStatus
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import quote, unquote

from shardgate.errors import BadKeyError
from shardgate.model import FORBIDDEN_IN_KEYS, MAX_KEY_NBYTES, NAMED_REFS, VirtualKey, escape_ref
from shardgate.read.bodies import Body
from shardgate.server.body import IncomingBody
from shardgate.settings import RESERVED, first_segment, path_prefix
from shardgate.storage.contract import TEMPORARY

type Headers = list[tuple[bytes, bytes]]
type RequestHeaders = Mapping[bytes, bytes]
"""Headers of a request by lower-case name; see `combine_headers`."""
type Networks = Sequence[IPv4Network | IPv6Network]

# Names of unfinished objects, but not refs of branches and tags called ``shardgate-…``.
_RESERVED: Final = re.compile(rf"(?<!@branch)(?<!@tag){re.escape(TEMPORARY)}")
FORWARDED_PREFIX: Final = b"x-forwarded-prefix"
TOKEN_PREFIXES: Final = (b"/~", b"/%7E", b"/%7e")
"""Beginnings of paths with a token."""
# Weight of a media type that is not accepted (RFC 9110 §12.4.2).
_UNWANTED: Final = re.compile(rb"q\s*=\s*0(\.0*)?")
_REQUEST_ID: Final = re.compile(rb"[\x21-\x7e]{1,128}")
_process: Final = secrets.token_hex(4).encode()
_numbers: Final = itertools.count(1)


class Asgi(NamedTuple):
    """The arguments of an ASGI application."""

    scope: Mapping[str, Any]
    receive: Any
    send: Any


class Named(Protocol):
    """Caller of a request, with its name in logs."""

    @property
    def name(self) -> str:
        """Name of the caller."""


class Request:
    """A request, and its caller once that is known."""

    query = b""
    segment: bytes | None = None
    """The first segment of the path, ``/~TOKEN``, if it is a token."""
    name: str
    """Dataset, which may not exist, or a reserved name."""
    dataset: str
    """*name*, or in the API the dataset that the request is for, which may not exist."""
    key: VirtualKey | None = None
    """What follows *name* and a slash, which may be empty; `None` without the slash."""
    fault: BadKeyError | None = None
    """Why the path has no valid *key*."""
    root_path = ""
    """Decoded path of the service for clients: the prefix of a `PathPrefix`, and a mount in it."""
    sent_path: bytes
    """Path as it arrived, with all that *raw_path* lacks."""
    body: IncomingBody | None = None
    """`None` for a plain GET, whose body is dropped."""
    asgi: Asgi | None = None
    """`None` for a plain GET, which does not come through ASGI."""
    caller: Named | None = None
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
            # Frames of the traceback would live as long as the request.
            self.fault = error.with_traceback(None)
        self.needs_asgi = self.name in RESERVED or raw_path in {b"/", b""}
        """Whether the path is of the API or a page of the service, whose routes speak ASGI."""
        self.dataset = self.name
        if self.name == "api":
            self.dataset = self.path.removeprefix("/api/datasets")[1:].partition("/")[0]
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
    def token(self) -> str | None:
        """Token in the path, percent-encoded as it was sent."""
        return None if self.segment is None else token_in(self.segment)

    @property
    def accepts_html(self) -> bool:
        """Return whether ``Accept`` names HTML, as that of browsers does for windows and frames."""
        for each in self.headers.get(b"accept", b"").lower().split(b","):
            media_type, *parameters = (part.strip() for part in each.split(b";"))
            if media_type == b"text/html":
                return not any(map(_UNWANTED.fullmatch, parameters))
        return False

    @property
    def opens_page(self) -> bool:
        """Return whether a browser opens a page: of the service, or of a folder."""
        if self.method not in {"GET", "HEAD"}:
            return False
        # All GETs of signing in are for pages, also of clients that say nothing of HTML.
        is_sign_in = self.name == "login" and self.headers.get(b"accept", b"*/*") == b"*/*"
        if not (is_sign_in or self.accepts_html):
            return False
        if self.needs_asgi:
            return self.name in {"", "login", "docs", "viewer"}
        is_of_plane = self.query.startswith(b"at.")  # else it is a request of S3
        return (self.key or "/").endswith("/") and (is_of_plane or not self.query)

    @property
    def fills_window(self) -> bool:
        """Return whether a browser shows the response: a page, or the object of a key."""
        is_read = self.method in {"GET", "HEAD"}
        return self.opens_page or (is_read and self.accepts_html and not self.needs_asgi)

    @property
    def client_paths(self) -> Sequence[bytes]:
        """Paths that the client can have sent, without a token: a proxy may have stripped them."""
        root = quote(self.root_path).encode()
        paths = [self.sent_path, root + self.raw_path]
        if self.raw_path == b"/":
            paths.append(root)  # proxies make a slash of the bare prefix
        return paths

    @property
    def base_path(self) -> str:
        """Path that datasets are below, for links: *root_path*, and a token."""
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


class Application(Protocol):
    """A layer that answers requests."""

    def cached(self, request: Request) -> Response | None:
        """Return the response if it is in memory, as of a GET."""

    async def respond(self, request: Request, exchange: Exchange) -> None:
        """Send the response to any request; it may raise after it has begun to be written."""

    def refuse(self, status: HTTPStatus, detail: str, headers: RequestHeaders) -> Response:
        """Return the response to malformed HTTP; *headers* are those that have arrived."""


def encode_headers(headers: Headers) -> bytes:
    """Return *headers*, each on a line of its own (RFC 9112 §5)."""
    return b"".join([b": ".join(header) + b"\r\n" for header in headers])


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


@lru_cache(maxsize=4096)
def split_target(raw_path: bytes) -> tuple[str, VirtualKey | None]:
    """Split ``/{dataset}/{virtual key}``; the key is `None` if no slash follows the dataset.

    A key may end in a slash, as a prefix.

    Raises: `BadKeyError` for a key that is not UTF-8 once decoded, has control characters, ``.``,
    ``..`` or empty segments, is too long, or is reserved for temporary objects.
    """
    try:
        path = raw_path.decode("ascii")
        if "%" in path:
            path = "/".join(map(_decode, path.split("/")))
    except UnicodeDecodeError:
        raise BadKeyError("the path is not percent-encoded UTF-8") from None
    dataset, slash, key = path[1:].partition("/")
    return dataset, check_key(key) if slash else None


def check_key(key: str) -> VirtualKey:
    """Return the decoded *key*; raise `BadKeyError` as `split_target` does."""
    try:
        nbytes = len(key.encode())
    except UnicodeEncodeError:
        raise BadKeyError(f"{key[:40]!r} is no key: it is not valid UTF-8") from None
    if nbytes > MAX_KEY_NBYTES:
        raise BadKeyError(f"the key {key[:40]!r}… is longer than {MAX_KEY_NBYTES} bytes")
    if _RESERVED.search(key):
        raise BadKeyError(f"{key!r} is no key: {TEMPORARY} is reserved for unfinished objects")
    if FORBIDDEN_IN_KEYS.search(key):
        raise BadKeyError(f"{key!r} has a control character or an empty, '.' or '..' segment")
    return VirtualKey(key)


def quote_segment(name: str) -> str:
    """Percent-encode one segment of a key, which may end in a slash, for a URL."""
    return quote(name, safe="/%@" if name.startswith(NAMED_REFS) else "/@")


def quote_key(key: str) -> str:
    """Percent-encode a key, or the beginning of one, for a URL."""
    return "/".join(map(quote_segment, key.split("/")))


def _decode(segment: str) -> str:
    """Decode a segment; in names of refs stays escaped what a segment cannot hold."""
    text = unquote(segment, errors="strict")
    return escape_ref(text) if text.startswith(NAMED_REFS) else text


class PathPrefix:
    """Path of the service for clients, which proxies may strip off the paths of requests.

    It is `server.root_path`, or else the last X-Forwarded-Prefix: that of the nearest proxy.
    """

    def __init__(
        self, root_path: str = "", proxies: Networks = (), datasets: Iterable[str] = ()
    ) -> None:
        """*datasets* are the names of all."""
        self.root_path = root_path
        self._proxies = proxies
        self._names = RESERVED.union(datasets)

    def split(self, path: bytes, headers: RequestHeaders, peer: bytes) -> tuple[str, bytes]:
        """Return the prefix of a request of *peer*, and *path* without it."""
        prefix = self.root_path or self._forwarded(headers, peer)
        below = strip_prefix(path, prefix)
        if not self.root_path and (
            first_segment(prefix) in self._names  # keys of that dataset begin like the prefix
            # Proxies keep these private: with a forged prefix before them they would pass.
            or first_segment(unquote(below.decode("latin-1"))) in {"metrics", "readyz", "_shard"}
        ):
            return prefix, path
        return prefix, below

    def _forwarded(self, headers: RequestHeaders, peer: bytes) -> str:
        sent = headers.get(FORWARDED_PREFIX)
        if sent is None or not is_within(peer.decode(), self._proxies):
            return ""
        try:
            return path_prefix(sent.rpartition(b",")[2].strip().decode("latin-1"))
        except ValueError:
            return ""


def strip_prefix(raw_path: bytes, prefix: str) -> bytes:
    """Return *raw_path* without the decoded *prefix*, if it begins with that."""
    sent = b"/".join(raw_path.split(b"/")[: prefix.count("/") + 1])
    is_below = unquote(sent.decode("latin-1")) == prefix
    return raw_path[len(sent) :] if is_below else raw_path


def split_token(raw_path: bytes) -> tuple[bytes | None, bytes]:
    """Split ``/~TOKEN/{dataset}/{virtual key}`` into ``/~TOKEN`` and the rest."""
    if not raw_path.startswith(TOKEN_PREFIXES):
        return None, raw_path
    end = raw_path.find(b"/", 1)
    if end < 0:
        return raw_path, b""
    return raw_path[:end], raw_path[end:]


def token_in(segment: bytes) -> str:
    """Return the token of ``/~TOKEN``, percent-encoded as it was sent."""
    prefix = b"/~" if segment.startswith(b"/~") else b"/%7E"
    return segment[len(prefix) :].decode("latin-1")


def peer_of(client: tuple[str, int] | None) -> bytes:
    """Return the address of an ASGI *client* for logs; empty if the connection has none."""
    return b"" if client is None else client[0].encode(errors="backslashreplace")


def client_of(peer: str, headers: RequestHeaders, proxies: Networks) -> str:
    """Return the client of a request that comes through a connection of *peer*.

    It is the last address in X-Forwarded-For that is not one of *proxies*, each of which appends
    the peer of its own connection. An IPv6 client is named by its network.
    """
    forwarded = headers.get(b"x-forwarded-for", b"").decode("latin-1").split(",")
    client = peer
    while forwarded and is_within(client, proxies):
        address = forwarded.pop().strip()
        if address and ("%" in address or _parse_address(address) is None):
            break  # a zone could hold any characters
        client = address or client
    return _network_of(client)


def is_within(client: str, networks: Networks) -> bool:
    """Return whether the address *client* lies in one of *networks*."""
    address = _parse_address(client)
    if isinstance(address, IPv6Address):
        address = address.ipv4_mapped or address
    return address is not None and any(address in network for network in networks)


def _network_of(client: str) -> str:
    address = _parse_address(client)
    if not isinstance(address, IPv6Address):
        return client
    # One client usually holds a network of 64 bits.
    return str(address.ipv4_mapped or IPv6Network((address, 64), strict=False))


def _parse_address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(text)
    except ValueError:
        return None
