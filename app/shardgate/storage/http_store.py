"""Objects of a plain HTTP server, and guards for reads that virtual references ask for."""

import asyncio
import re
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from http import HTTPStatus
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from pathlib import Path
from types import MappingProxyType
from typing import Final, Self
from urllib.parse import quote, unquote

from shardgate.errors import (
    ConfigurationError,
    StorageDeniedError,
    StorageRedirectError,
    StorageUnavailableError,
    StorageUnusableError,
)
from shardgate.model import Bucket, GuardedBucket, ObjectRef, encode_path
from shardgate.settings import StoreSettings
from shardgate.storage.contract import Listed
from shardgate.storage.http1_client import (
    BadUrlError,
    ForbiddenAddressError,
    HttpClient,
    Origin,
    RequestTarget,
    Resolve,
)
from shardgate.storage.http_reader import HttpReader
from shardgate.storage.refusals import FAILURES, HttpMethod, Refusal, storage_error
from shardgate.storage.wrappers import ReadOnlyStore, is_plain

_TOKEN: Final = re.compile("[!-~]+")
_TOKEN_S: Final = 10.0

type LookUp = Callable[[str, int], Awaitable[Sequence[str]]]

_NAT64: Final = IPv6Network("64:ff9b::/96")
_NOT_PUBLIC: Final = tuple(
    ip_network(network)
    for network in (
        "192.0.0.0/24",  # protocol assignments
        "192.88.99.0/24",  # relays of 6to4
        "::/96",  # IPv4-compatible
        "64:ff9b:1::/48",  # local-use NAT64
        "2001::/32",  # Teredo
        "2002::/16",  # 6to4
        "fec0::/10",  # site-local
    )
)


class HttpStore(ReadOnlyStore, HttpReader):
    """Reads objects below the URL that is the bucket; the rest of the path is the key.

    Redirects are followed below the URLs that *redirects* has for the bucket, by default below
    the bucket itself. With a *guard*, such as `resolve_public`, only the addresses that it returns
    are connected to.
    """

    follows_redirects = True

    def __init__(
        self,
        settings: StoreSettings | None = None,
        *,
        connections: int = 64,
        timeout_s: float = 10.0,
        guard: Resolve | None = None,
        redirects: Mapping[str, Sequence[RequestTarget]] = MappingProxyType({}),
    ) -> None:
        settings = settings or StoreSettings()
        client = HttpClient(connections=connections, silence_s=timeout_s, resolve=guard)
        super().__init__(client, settings)
        self._redirects = redirects
        self._setting = "redirects" if guard is None else "virtual_chunk_prefixes"
        self._token = BearerToken.of(settings)
        if self._token is not None:
            self._authorization = self._token.header

    def list(self, prefix: ObjectRef, **_: str) -> AsyncGenerator[Listed]:
        raise StorageUnusableError(prefix, "an HTTP server cannot be listed")

    async def check_reachable(self, root: ObjectRef) -> None:
        """Send a HEAD; any status below 500 is accepted, and 501 of a server that knows none."""
        try:
            status = (await self._request("HEAD", root)).status
        except FAILURES as error:
            raise storage_error(root, error) from error
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR and status != HTTPStatus.NOT_IMPLEMENTED:
            raise StorageUnavailableError(root, f"the server answered {status}")

    async def _target(self, method: HttpMethod, ref: ObjectRef) -> RequestTarget:  # noqa: ARG002
        return _target_of(ref)

    def _proves_absence(self, refusal: Refusal) -> bool:
        return refusal.status in {404, 410}

    def _renew(self, method: HttpMethod, ref: ObjectRef, refusal: Refusal) -> bool:  # noqa: ARG002
        """Read the token again after 401."""
        is_denied = refusal.status == HTTPStatus.UNAUTHORIZED
        return is_denied and self._token is not None and self._token.expire()

    def _follow(self, ref: ObjectRef, target: RequestTarget, location: str) -> RequestTarget:
        try:
            found = target.redirected(location)
        except BadUrlError as error:
            shown = location.partition("?")[0].rpartition("@")[2]  # without secrets
            raise StorageRedirectError(ref, f"redirected to {shown!r}: {error}") from error
        allowed = self._redirects.get(ref.bucket) or [RequestTarget(url_of(ref.bucket))]
        if not any(_is_below(found, prefix) for prefix in allowed):
            shown = found.without_query
            raise StorageRedirectError(
                ref, f"redirected to {shown}, which the setting {self._setting} does not allow"
            )
        return found


@lru_cache(maxsize=8192)
def _target_of(ref: ObjectRef) -> RequestTarget:
    """Return the URL of *ref*; servers resolve dot segments, however they are quoted."""
    # A virtual reference is requested in its own spelling; see `decode_path`.
    is_spelled = isinstance(ref.bucket, GuardedBucket)
    if not {".", ".."}.isdisjoint((unquote(ref.key) if is_spelled else ref.key).split("/")):
        raise StorageDeniedError(ref, "the key contains '.' or '..' segments")
    path = encode_path(ref.key) if is_spelled else quote(ref.key, safe="/~")
    return RequestTarget(f"{url_of(ref.bucket)}/{path}")


def url_of(bucket: str) -> str:
    """Return the URL that *bucket* stands for: its name may hold that of a store."""
    url = bucket.url if isinstance(bucket, Bucket) else bucket
    scheme, _, rest = url.partition("://")
    return f"{scheme.partition('+')[0]}://{rest}"


async def resolve_host(host: str, port: int) -> list[str]:
    """Return the addresses of *host* according to the system's resolver."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


async def resolve_public(
    prefixes: Sequence[RequestTarget], origin: Origin, *, look_up: LookUp = resolve_host
) -> Sequence[str]:
    """Return the public addresses of *origin*. Raises: `ForbiddenAddressError` if it has none.

    Servers that the operator named in *prefixes* by address or as ``localhost`` may have any. Of
    other servers only the addresses that were checked are connected to, without a second look-up.
    """
    if is_literal(origin.host) and origin in {prefix.origin for prefix in prefixes}:
        return [origin.host]
    found = await look_up(origin.host, origin.port)
    if not (public := [address for address in found if is_public(address)]):
        raise ForbiddenAddressError(f"{origin.host} has no public address")
    return public


class BearerToken:
    """Token for a server; that in a file is read again after some seconds, and after a refusal."""

    def __init__(self, token: str | Path) -> None:
        """Raise `ConfigurationError` if a file has no token."""
        self._path = token if isinstance(token, Path) else None
        self._header = _header_of(token)
        self._until = time.monotonic() + _TOKEN_S
        self._lock = asyncio.Lock()

    @classmethod
    def of(cls, settings: StoreSettings) -> Self | None:
        """Return the token in *settings*, if they have one."""
        if settings.bearer_token is not None:
            return cls(settings.bearer_token.get_secret_value())
        return None if settings.bearer_token_file is None else cls(settings.bearer_token_file)

    async def header(self) -> bytes:
        """Return the line of the header; a file that cannot be read leaves the token as it is."""
        if self._path is not None and time.monotonic() > self._until:
            async with self._lock:
                if time.monotonic() > self._until:  # nobody else has read it by now
                    with suppress(ConfigurationError):
                        self._header = await asyncio.to_thread(_header_of, self._path)
                    self._until = time.monotonic() + _TOKEN_S
        return self._header

    def expire(self) -> bool:
        """Read the file again for the next header; return `False` if there is none."""
        self._until = 0.0
        return self._path is not None


def _header_of(token: str | Path) -> bytes:
    where = token if isinstance(token, Path) else "bearer_token"
    try:
        text = token.read_text("ascii").strip() if isinstance(token, Path) else token
    except OSError as error:
        raise ConfigurationError(f"{where}: {error.strerror}") from error
    except UnicodeDecodeError:
        text = ""
    if not _TOKEN.fullmatch(text):
        raise ConfigurationError(f"{where}: holds no bearer token") from None
    return f"Authorization: Bearer {text}\r\n".encode()


def _is_below(target: RequestTarget, prefix: RequestTarget) -> bool:
    segments = _segments(target.path)
    expected = _segments(prefix.path.rstrip("/"))
    return (
        target.origin == prefix.origin
        and segments[: len(expected)] == expected
        and all(is_plain(each) and "/" not in each for each in segments[len(expected) :])
    )


def _segments(path: str) -> list[str]:
    return [unquote(segment) for segment in path.split("/")]


def is_literal(host: str) -> bool:
    """Return whether *host* is an address or ``localhost``, which no name service explains."""
    if host == "localhost":
        return True
    with suppress(ValueError):
        return bool(ip_address(host))
    return False


def is_public(text: str) -> bool:
    """Return whether *text* is an address on the public Internet, also an embedded IPv4 one."""
    try:
        address = _unwrap(ip_address(text))
    except ValueError:
        return False
    return (
        address.is_global
        and not address.is_multicast
        and not address.is_reserved
        and not any(address in network for network in _NOT_PUBLIC)
    )


def _unwrap(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address in _NAT64:
            return IPv4Address(int(address) & 0xFFFFFFFF)
    return address
