"""Which addresses belong to the public Internet; nothing here waits."""

from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final

_NAT64: Final = IPv6Network("64:ff9b::/96")
_NOT_PUBLIC: Final = tuple(
    ip_network(network)
    for network in (
        "192.0.0.0/24",  # of protocols
        "192.88.99.0/24",  # relays of 6to4
        "::/96",  # IPv4-compatible
        "64:ff9b:1::/48",  # NAT64 of one site
        "2001::/32",  # Teredo
        "2002::/16",  # 6to4
        "fec0::/10",  # site-local
    )
)


def is_public(text: str) -> bool:
    """Tell whether an address, also one of IPv4 written in IPv6, leads out into the Internet."""
    try:
        address = _meant(ip_address(text))
    except ValueError:
        return False
    return (
        address.is_global
        and not address.is_multicast
        and not address.is_reserved
        and not any(address in network for network in _NOT_PUBLIC)
    )


def _meant(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """Take the IPv4 address out of a mapped one, and out of one that NAT64 translates."""
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address in _NAT64:
            return IPv4Address(int(address) & 0xFFFFFFFF)
    return address
