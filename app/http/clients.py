"""Whose a request is, as far as its connection tells."""

from collections.abc import Mapping, Sequence
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Final

type Networks = Sequence[IPv4Network | IPv6Network]
type Client = tuple[str, int] | None
"""The address and port of a connection, if it has some."""

_SITE_BITS: Final = 64
"""Who has an address of IPv6 has all that begin with the same so many bits."""


def peer_of(client: Client) -> bytes:
    """Write the address of a connection as logs have it; nothing if it has none."""
    return b"" if client is None else client[0].encode(errors="backslashreplace")


def name_client(peer: str, given: Mapping[bytes, bytes], proxies: Networks) -> str:
    """Name who sends the request with the headers *given* through a connection of *peer*.

    That is the last address in X-Forwarded-For that is none of the *proxies*, each of which adds
    who connects to it.
    """
    forwarded = given.get(b"x-forwarded-for", b"").decode("latin-1").split(",")
    client = peer
    while forwarded and is_within(client, proxies):
        told = forwarded.pop().strip()
        if told and not _is_address(told):
            break
        client = told or client
    return _site(client)


def _is_address(told: str) -> bool:
    """Tell whether somebody told an address, and nothing that a log could be deceived by."""
    try:
        ip_address(told)
    except ValueError:
        return False
    return "%" not in told


def is_within(client: str, proxies: Networks) -> bool:
    """Tell whether the address *client* is one of the *proxies*."""
    try:
        address = ip_address(client)
    except ValueError:
        return False
    if isinstance(address, IPv6Address):
        address = address.ipv4_mapped or address
    return any(address in network for network in proxies)


def _site(client: str) -> str:
    try:
        address = ip_address(client)
    except ValueError:
        return client
    if not isinstance(address, IPv6Address):
        return client
    return str(address.ipv4_mapped or IPv6Network((address, _SITE_BITS), strict=False))
