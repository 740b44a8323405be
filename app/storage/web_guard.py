"""What a read over HTTP may reach that begins below one prefix."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from ipaddress import ip_address
from urllib.parse import unquote

from app.storage.guarded import is_plain
from app.storage.http1.errors import ForbiddenError
from app.storage.http1.target import Origin, Target
from app.storage.public import is_public

type LookUp = Callable[[str, int], Awaitable[Sequence[str]]]


async def look_up(host: str, port: int) -> list[str]:
    """Ask the system for the addresses of *host*."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


class WebGuard:
    """Keeps reads, wherever redirects lead, below one prefix and on the public Internet.

    A server that the operator named by its address or as ``localhost`` may be anywhere. Of all
    others those addresses are connected to that were found public, and no name is looked up twice.
    """

    def __init__(self, root: Target, *, look_up: LookUp = look_up) -> None:
        self._root = root
        self._look_up = look_up

    async def resolve(self, origin: Origin) -> Sequence[str]:
        """Give the addresses of *origin* that may be connected to."""
        if origin == self._root.origin and _is_literal(origin.host):
            return [origin.host]
        found = await self._look_up(origin.host, origin.port)
        if not (public := [address for address in found if is_public(address)]):
            raise ForbiddenError(f"{origin.host} has no public address")
        return public

    def follow(self, target: Target) -> None:
        """Let a redirect stay below the prefix, segment by segment."""
        if target.origin != self._root.origin:
            scheme, host, port = target.origin
            raise ForbiddenError(f"redirected to another server, {scheme}://{host}:{port}")
        if not is_below(target, self._root):
            raise ForbiddenError("redirected out of the allowed prefix")


def is_below(target: Target, prefix: Target) -> bool:
    """Tell whether *target* has the origin of *prefix* and a path below it, segment by segment."""
    segments, expected = _segments(target.path), _segments(prefix.path.rstrip("/"))
    return (
        target.origin == prefix.origin
        and segments[: len(expected)] == expected
        and all(map(is_plain, segments))
    )


def _segments(path: str) -> list[str]:
    return [unquote(segment) for segment in path.split("/")]


def _is_literal(host: str) -> bool:
    """Tell whether the name cannot mean another server tomorrow."""
    if host == "localhost":
        return True
    with suppress(ValueError):
        return bool(ip_address(host))
    return False
