"""`shardgate.server.request`: datasets, keys and tokens in paths, and addresses of clients."""

from collections.abc import Callable
from ipaddress import ip_network
from typing import Final
from urllib.parse import quote, unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardgate.errors import BadKeyError
from shardgate.server.request import (
    Request,
    client_of,
    peer_of,
    quote_segment,
    split_target,
    split_token,
)

HTML: Final = b"text/html"
NAMES = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="/"), min_size=1)


@pytest.mark.parametrize(
    ("path", "key"),
    [
        (b"s0/c/0/1", "s0/c/0/1"),
        (b"", ""),
        (b"s0/", "s0/"),
        (b"a%20b+c", "a b+c"),
        (b"%C3%A9", "é"),
        (b"7:0:0-64", "7:0:0-64"),
        (b".zattrs", ".zattrs"),
        (b"..a/b..", "..a/b.."),
        (b"%zz", "%zz"),
        (b"@branch.a/b", "@branch.a/b"),
        (b"@branch.a%2fb/c%2fd", "@branch.a%2Fb/c/d"),
        (b"%40branch%2ea%2Fb/c", "@branch.a%2Fb/c"),
        (b"@tag.100%25/c%25", "@tag.100%25/c%"),
        (b"@tag.%252F/c", "@tag.%252F/c"),
        (b"@tag.a%00%0D%0A%7f", "@tag.a%00%0D%0A%7F"),
        (b"@branch.%2e%2e/c", "@branch.../c"),
        (b"@branch.%2F..%2F..%2Fetc/c", "@branch.%2F..%2F..%2Fetc/c"),
        (b"lab/@branch.a%2Fb/c", "lab/@branch.a%2Fb/c"),
        (b"@Branch.a%2Fb", "@Branch.a/b"),
    ],
)
def test_path_is_split_into_dataset_and_key(path: bytes, key: str) -> None:
    """The first segment names the dataset; the rest, decoded once, is the key."""
    assert split_target(b"/em/" + path) == ("em", key)
    assert split_target(b"/em") == ("em", None)


@pytest.mark.parametrize(
    "path",
    [
        *(b"../etc", b"a/..", b"./a", b"%2e%2e/a", b"%2e%2e%2fa", b"a//b", b"/a"),
        *(b"a%00b", b"a%0d%0ab", b"%ff", b"\xff", b"@branch.%ff", b"@branch.a/b%00"),
        *(b"@branch.a/../b", b"@branch.a/%2e%2e/b", b"@branch.a//b"),
        *(b".shardgate-uploads/0", b"a/c/0%2eshardgate-1"),
        *(b"@branch." + b"%2F" * 400, b"%C3%A9" * 513, b"a" * 1025, b"a" * 100_000),
    ],
)
def test_invalid_path_is_refused(path: bytes) -> None:
    """A path that leaves the root, is too long or has two spellings raises BadKeyError."""
    with pytest.raises(BadKeyError):
        split_target(b"/em/" + path)


@pytest.mark.parametrize("spell", [quote, quote_segment])
@given(st.lists(NAMES, min_size=1, max_size=5))
def test_quoted_key_is_unquoted(spell: Callable[[str], str], segments: list[str]) -> None:
    """A quoted key is unquoted again, or is refused for its segments, length or reserved name."""
    key = "/".join(segments)
    try:
        found = split_target(f"/em/{spell(key)}".encode())
    except BadKeyError:
        assert {".", ".."} & set(segments) or len(key.encode()) > 1024 or ".shardgate-" in key
    else:
        assert found == ("em", key)


@given(st.sampled_from(["@branch.", "@tag."]), st.text(st.characters(exclude_categories=["Cs"])))
def test_ref_name_stays_in_its_segment(start: str, name: str) -> None:
    """Slashes and control characters in the name of a ref do not split its segment."""
    text = start + name
    try:
        dataset, key = split_target(f"/em/{quote(text, safe='')}/a".encode())
    except BadKeyError:
        assert len(quote(text)) > 1000
        return
    segment, _, rest = (key or "").partition("/")
    assert (dataset, unquote(segment), rest) == ("em", text, "a")
    assert split_target(f"/em/{quote_segment(segment)}/a".encode()) == (dataset, key)


@pytest.mark.parametrize(
    ("raw_path", "token", "rest"),
    [
        (b"/~abc/em/c/0", "abc", b"/em/c/0"),
        (b"/~abc/", "abc", b"/"),
        (b"/~abc", "abc", b""),
        (b"/~/em", "", b"/em"),
        (b"/~a%2Fb%3D/em/c%2F0", "a%2Fb%3D", b"/em/c%2F0"),
        (b"/%7Eabc/em", "abc", b"/em"),
        (b"/~abc//em", "abc", b"//em"),
        (b"/~a/em/\xc3\xa9%20", "a", b"/em/\xc3\xa9%20"),
    ],
)
def test_token_is_the_first_segment(raw_path: bytes, token: str, rest: bytes) -> None:
    """A first segment that begins with a tilde is a token, and the rest remains as sent."""
    request = Request("GET", raw_path, [], {}, b"")

    assert (request.token, request.raw_path) == (token, rest)
    assert request.path == unquote(rest)
    assert split_token(raw_path) == (raw_path.removesuffix(rest), rest)
    assert split_token(b"/em" + raw_path) == (None, b"/em" + raw_path)
    assert split_token(rest) == (None, rest)


@pytest.mark.parametrize("raw_path", [b"/em/a/../b", b"/em//a", b"/em/%ff", b"/em/%00"])
def test_request_with_an_invalid_key_has_a_name_and_a_fault(raw_path: bytes) -> None:
    """A request whose path has no valid key names its dataset, and says what is wrong."""
    request = Request("GET", raw_path, [], {}, b"")

    assert (request.name, request.key) == ("em", None)
    assert isinstance(request.fault, BadKeyError)
    assert Request("GET", b"/em/a", [], {}, b"").fault is None


PROXIES = (ip_network("10.0.0.0/8"), ip_network("fd00::/8"))


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        ("192.0.2.1", None, "192.0.2.1"),
        ("192.0.2.1", "9.9.9.9", "192.0.2.1"),
        ("10.0.0.1", None, "10.0.0.1"),
        ("10.0.0.1", "192.0.2.1", "192.0.2.1"),
        ("10.0.0.1", "9.9.9.9, 192.0.2.1", "192.0.2.1"),
        ("10.0.0.1", "9.9.9.9,192.0.2.1 , 10.0.0.2,", "192.0.2.1"),
        ("10.0.0.1", "10.0.0.3, 10.0.0.2", "10.0.0.3"),
        ("::ffff:10.0.0.1", "192.0.2.1", "192.0.2.1"),
        ("fd00::1", "2001:db8::1", "2001:db8::/64"),
        ("2001:db8::ffff:1", None, "2001:db8::/64"),
        ("::ffff:192.0.2.1", None, "192.0.2.1"),
        *(
            ("10.0.0.1", told, "10.0.0.1")
            for told in ("", "unknown", 'a","caller":"ana', 'fe80::1%"', "1.2.3", "9.9.9.9, nobody")
        ),
    ],
)
def test_client_is_last_untrusted_address(peer: str, forwarded: str | None, client: str) -> None:
    """The client is the last address of X-Forwarded-For that is no trusted proxy.

    A value that is no address is ignored; IPv6 clients are counted by /64.
    """
    given = {} if forwarded is None else {b"x-forwarded-for": forwarded.encode()}

    assert client_of(peer, given, PROXIES) == client


def test_unix_socket_has_no_peer_address() -> None:
    """A TCP connection has its peer's address, and a Unix socket an empty one."""
    assert peer_of(("2001:db8::1", 7)) == b"2001:db8::1"
    assert peer_of(None) == b""


@pytest.mark.parametrize(
    ("method", "path", "accept", "is_page"),
    [
        *(("GET", b"/em/", accept, True) for accept in (
            HTML,
            b"TEXT/HTML",
            b"text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8",
            b"application/json , text/html ; q=0.1",
        )),
        *(("GET", b"/em/", accept, False) for accept in (
            b"text/html;q=0", b"text/html; Q=0.000, application/json", b"text/html-like",
            b"x-text/html", b'application/json;profile="text/html"', b"*/*", b"", b";;,,;,",
            b"\xff\x00text/html", b"," * 100_000, b";" * 100_000,
        )),
        ("HEAD", b"/", HTML, True),
        ("POST", b"/", HTML, False),
        ("GET", b"/login", HTML, True),
        ("GET", b"/login/callback", b"*/*", True),
        ("GET", b"/login", b"application/json", False),
        ("POST", b"/login/device", b"*/*", False),
        ("GET", b"/auth_info", HTML, False),
        ("GET", b"/api/datasets", HTML, False),
        ("GET", b"/em", HTML, True),
        ("GET", b"/em/a//b/", HTML, True),
        ("GET", b"/em/c/0", HTML, False),
        ("GET", b"/~token/em/", HTML, True),
    ],
)  # fmt: skip
def test_browser_opens_pages_of_the_service_and_of_folders(
    method: str, path: bytes, accept: bytes, *, is_page: bool
) -> None:
    """A GET of a path of the service or of a folder opens a page, if Accept names HTML with a
    weight above 0; keys, the API and writes open none.
    """
    assert Request(method, path, [], {b"accept": accept}, b"").opens_page == is_page
