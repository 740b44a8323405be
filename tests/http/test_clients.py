"""`app.http.clients`: whose a request is."""

from ipaddress import ip_network

import pytest

from app.http.clients import name_client, peer_of

PROXIES = (ip_network("10.0.0.0/8"), ip_network("fd00::/8"))


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        ("192.0.2.1", None, "192.0.2.1"),
        ("192.0.2.1", "9.9.9.9", "192.0.2.1"),
        ("10.0.0.1", None, "10.0.0.1"),
        ("10.0.0.1", "", "10.0.0.1"),
        ("10.0.0.1", "192.0.2.1", "192.0.2.1"),
        ("10.0.0.1", "9.9.9.9, 192.0.2.1", "192.0.2.1"),
        ("10.0.0.1", "9.9.9.9,192.0.2.1 , 10.0.0.2,", "192.0.2.1"),
        ("10.0.0.1", "10.0.0.3, 10.0.0.2", "10.0.0.3"),
        ("::ffff:10.0.0.1", "192.0.2.1", "192.0.2.1"),
        ("10.0.0.1", "9.9.9.9, nobody", "10.0.0.1"),
        ("fd00::1", "2001:db8::1", "2001:db8::/64"),
        ("2001:db8::ffff:1", None, "2001:db8::/64"),
        ("::ffff:192.0.2.1", None, "192.0.2.1"),
    ],
)
def test_the_last_that_is_no_proxy_is_the_client(
    peer: str, forwarded: str | None, client: str
) -> None:
    """Each proxy adds who connects to it; what stands before anybody can write."""
    given = {} if forwarded is None else {b"x-forwarded-for": forwarded.encode()}

    assert name_client(peer, given, PROXIES) == client


@pytest.mark.parametrize("told", ["", "unknown", 'a","caller":"ana', 'fe80::1%"', "1.2.3"])
def test_what_is_no_address_names_nobody(told: str) -> None:
    """Logs name the client, and a client could tell anything."""
    proxies = [ip_network("10.0.0.0/8")]

    assert name_client("10.0.0.1", {b"x-forwarded-for": told.encode()}, proxies) == "10.0.0.1"


def test_a_connection_has_an_address_or_none() -> None:
    """Sockets in the file system have none."""
    assert peer_of(("2001:db8::1", 7)) == b"2001:db8::1"
    assert peer_of(None) == b""
