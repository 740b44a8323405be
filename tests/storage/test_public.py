"""Addresses of the Internet and others."""

import pytest

from app.storage.public import is_public


@pytest.mark.parametrize(
    "address",
    [
        "8.8.8.8",
        "172.32.0.1",
        "2606:4700::1111",
        "::ffff:8.8.8.8",
        "64:ff9b::8.8.8.8",
    ],
)
def test_servers_of_the_internet_are_public(address: str) -> None:
    """Also those that are named by an IPv4 address within IPv6."""
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.255.255.254",
        "10.0.0.1",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "0.1.2.3",
        "192.0.0.8",
        "192.0.2.1",
        "192.88.99.1",
        "198.18.0.1",
        "224.0.0.1",
        "239.1.2.3",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "fe80::1",
        "fe80::1%eth0",
        "fec0::1",
        "fc00::1",
        "fd12::1",
        "ff02::1",
        "2001:db8::1",
        "100::1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "::ffff:169.254.169.254",
        "::127.0.0.1",
        "::8.8.8.8",
        "2002:7f00:1::",
        "2002:a9fe:a9fe::1",
        "2001:0:0:0::1",
        "64:ff9b::127.0.0.1",
        "64:ff9b::169.254.169.254",
        "64:ff9b:1::8.8.8.8",
    ],
)
def test_all_others_are_not(address: str) -> None:
    """Private, loopback, link-local, unspecified, multicast, reserved, or such within IPv6."""
    assert not is_public(address)


@pytest.mark.parametrize("text", ["", "localhost", "2130706433", "0177.0.0.1", "127.1", "1.2.3.4 "])
def test_what_is_no_address_is_not_public(text: str) -> None:
    """Only one spelling is an address."""
    assert not is_public(text)
