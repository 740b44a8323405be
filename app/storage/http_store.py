"""Objects of a plain HTTP server, and guards for reads that virtual references ask for."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from types import MappingProxyType
from typing import Final
from urllib.parse import quote, unquote

from app.errors import StorageDeniedError, StorageRedirectError, StorageUnavailableError
from app.model import GUARDED, ObjectRef
from app.storage.contract import Listed
from app.storage.http1_client import BadUrlError, ForbiddenAddressError, HttpClient, Origin, Target
from app.storage.http_reader import HttpMethod, HttpReader, Refusal
from app.storage.wrappers import ReadOnlyStore, is_plain

type LookUp = Callable[[str, int], Awaitable[Sequence[str]]]

_SERVER_ERROR: Final = 500
_ABSENT: Final = frozenset({404, 410})
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

    Redirects are followed below the bucket, and below the URLs that *redirects* has for it; with a
    *guard*, where that allows it.
    """

    follows_redirects = True

    def __init__(
        self,
        *,
        connections: int = 64,
        timeout_s: float = 10.0,
        guard: "WebGuard | None" = None,
        redirects: Mapping[str, Sequence[Target]] = MappingProxyType({}),
        forbidden_is_absent: bool = False,
    ) -> None:
        resolve = None if guard is None else guard.resolve
        client = HttpClient(connections=connections, silence_s=timeout_s, resolve=resolve)
        super().__init__(client, forbidden_is_absent=forbidden_is_absent)
        self._guard = guard
        self._redirects = redirects

    async def list(self, prefix: ObjectRef, **_: str) -> AsyncIterator[Listed]:
        for each in tuple[Listed, ...]():
            yield each
        raise StorageUnavailableError(prefix, "an HTTP server cannot be listed", lasting=True)

    async def check_reachable(self, root: ObjectRef) -> None:
        """Send a HEAD; any status below 500 is accepted."""
        if (status := await self._head_status(root)) >= _SERVER_ERROR:
            raise StorageUnavailableError(root, f"the server answered {status}")

    async def _target(self, method: HttpMethod, ref: ObjectRef) -> Target:  # noqa: ARG002
        return _target(ref)

    def _proves_absence(self, refusal: Refusal) -> bool:
        return refusal.status in _ABSENT

    def _follow(self, ref: ObjectRef, target: Target, location: str) -> Target:
        try:
            found = target.redirected(location)
        except BadUrlError as error:
            shown = location.partition("?")[0].rpartition("@")[2]
            raise StorageRedirectError(ref, f"redirected to {shown!r}: {error}") from error
        if self._guard is not None:
            self._guard.follow(found)
        elif not any(
            _is_below(found, prefix)
            for prefix in (Target(url_of(ref.bucket)), *self._redirects.get(ref.bucket, ()))
        ):
            shown = found.without_query
            raise StorageRedirectError(
                ref, f"redirected to {shown}, which is neither below the root nor in its redirects"
            )
        return found


@lru_cache(maxsize=8192)
def _target(ref: ObjectRef) -> Target:
    """Return the URL of *ref*; servers resolve dot segments, however they are quoted."""
    if not {".", ".."}.isdisjoint(ref.key.split("/")):
        raise StorageDeniedError(ref, "the key contains '.' or '..' segments")
    return Target(f"{url_of(ref.bucket)}/{quote(ref.key, safe='/~')}")


def url_of(bucket: str) -> str:
    """Return the URL that *bucket* stands for: its name may hold that of a store."""
    scheme, _, rest = bucket.removeprefix(GUARDED).partition("://")
    return f"{scheme.partition('+')[0]}://{rest}"


async def resolve_host(host: str, port: int) -> list[str]:
    """Return the addresses of *host* according to the system's resolver."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


class WebGuard:
    """Keeps reads and redirects below one prefix, and on public addresses.

    A server that the operator named by its address or as ``localhost`` may have any address. Of
    other servers only the addresses that were checked are connected to, without a second look-up.
    """

    def __init__(self, root: Target, *, look_up: LookUp = resolve_host) -> None:
        self._root = root
        self._look_up = look_up

    async def resolve(self, origin: Origin) -> Sequence[str]:
        """Return the public addresses of *origin*; raise `ForbiddenAddressError` if none."""
        if origin == self._root.origin and _is_literal(origin.host):
            return [origin.host]
        found = await self._look_up(origin.host, origin.port)
        if not (public := [address for address in found if is_public(address)]):
            raise ForbiddenAddressError(f"{origin.host} has no public address")
        return public

    def follow(self, target: Target) -> None:
        """Raise `ForbiddenAddressError` if a redirect to *target* leaves the prefix."""
        if not _is_below(target, self._root):
            scheme, host, port = target.origin
            place = f"{scheme}://{host}:{port}"
            raise ForbiddenAddressError(f"redirected out of the allowed prefix, to {place}")


def _is_below(target: Target, prefix: Target) -> bool:
    segments, expected = _segments(target.path), _segments(prefix.path.rstrip("/"))
    return (
        target.origin == prefix.origin
        and segments[: len(expected)] == expected
        and all(map(is_plain, segments))
    )


def _segments(path: str) -> list[str]:
    return [unquote(segment) for segment in path.split("/")]


def _is_literal(host: str) -> bool:
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
