"""Targets of requests: URLs that are parsed, redirected or refused."""

import re
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardgate.storage.http1_client import BadUrlError, Origin, RequestTarget

HEAD = re.compile(
    rb"/[!-~]* HTTP/1\.1\r\nHost: [!-~]+\r\nAccept-Encoding: identity\r\nUser-Agent: [!-~]+\r\n"
)
SECRET = "s3cr3t-s1gnature"
PARTS = st.text(st.sampled_from("aé0:/?#[]@%. \\\r\n\0")) | st.text()
URLS = st.builds("{}{}".format, st.sampled_from(["", "http://", "https://h", "//"]), PARTS)


@pytest.mark.parametrize(
    ("url", "origin", "host", "path"),
    [
        ("http://example.com", ("http", "example.com", 80), "example.com", "/"),
        ("https://example.com/a", ("https", "example.com", 443), "example.com", "/a"),
        ("http://example.com:9000?x", ("http", "example.com", 9000), "example.com:9000", "/?x"),
        ("https://h:80/a?x=1&y=a/b?c", ("https", "h", 80), "h:80", "/a?x=1&y=a/b?c"),
        ("HTTPS://Example.COM/a?b#c", ("https", "example.com", 443), "Example.COM", "/a?b"),
        ("http://127.0.0.1:80/a//b/../c", ("http", "127.0.0.1", 80), "127.0.0.1:80", "/a//b/../c"),
        ("http://[::1]/a%20b%2Fc?X=a%2Bb", ("http", "::1", 80), "[::1]", "/a%20b%2Fc?X=a%2Bb"),
        ("https://[2001:db8::1]:8443/", ("https", "2001:db8::1", 8443), "[2001:db8::1]:8443", "/"),
    ],
)
def test_url_is_parsed_into_a_request(
    url: str, origin: tuple[str, str, int], host: str, path: str
) -> None:
    """Path, query and ``Host`` of a request are those of the URL; the fragment is not sent."""
    target = RequestTarget(url)

    assert target.origin == Origin(*origin)
    assert target.head.decode() == (
        f"{path} HTTP/1.1\r\nHost: {host}\r\nAccept-Encoding: identity\r\nUser-Agent: shardgate\r\n"
    )


UNFIT = (
    *(f"ftp://h/{SECRET}", f"http://user:{SECRET}@h/", f"http://h:65536/{SECRET}"),
    f"http://[::1/{SECRET}",
)


@pytest.mark.parametrize(
    "url",
    [
        *UNFIT,
        *(f"http://user@h/{SECRET}", f"file:///{SECRET}", f"s3://bucket/{SECRET}", f"//h/{SECRET}"),
        *(f"h/{SECRET}", f"http:/{SECRET}", f"http:///{SECRET}", f"http://:80/{SECRET}"),
        *(f"http://h/ {SECRET}", f" http://h/{SECRET}", f"http://h/{SECRET}\n"),
        *(f"http://h/\r\nX-Injected: {SECRET}", f"http://h/\t{SECRET}", f"http://h/\0{SECRET}"),
        *(f"http://h/\x7f{SECRET}", f"http://h/é{SECRET}", f"http://h:0/{SECRET}"),
        *(f"http://h:-1/{SECRET}", f"http://h:{SECRET}/", f"http://[{SECRET}]/"),
        *(f"http://a..{SECRET}/", f"http://.{SECRET}/", f"http://{SECRET * 4}/", ""),
    ],
)
def test_invalid_url_is_refused(url: str) -> None:
    """An invalid URL raises BadUrlError, which does not contain the URL."""
    with pytest.raises(BadUrlError) as raised:
        RequestTarget(url)

    assert SECRET not in repr(raised.value)


def test_target_hides_its_url() -> None:
    """The repr and str of a target do not contain its signature."""
    target = RequestTarget(f"http://h/a?X-Amz-Signature={SECRET}")

    assert SECRET not in f"{target!r} {target!s}"


@pytest.mark.parametrize(
    ("location", "url"),
    [
        ("c", "http://h:81/a/c"),
        ("/c?d=e", "http://h:81/c?d=e"),
        ("../c", "http://h:81/c"),
        ("?d=e", "http://h:81/a/b?d=e"),
        ("//other/c", "http://other/c"),
        ("http://other:82/c", "http://other:82/c"),
        ("https://other/c", "https://other/c"),
        ("c d", "http://h:81/a/c%20d"),
        ("/c%20d%2Fe", "http://h:81/c%20d%2Fe"),
        ('/c"<>\\^`{|}', "http://h:81/c%22%3C%3E%5C%5E%60%7B%7C%7D"),
        ("/c#d", "http://h:81/c"),
        ("/!$&'()*+,;=:@[]~", "http://h:81/!$&'()*+,;=:@[]~"),
        ("/c\r\nX-Injected: 1", "http://h:81/c%0D%0AX-Injected:%201"),
    ],
)
def test_redirect_is_resolved(location: str, url: str) -> None:
    """A redirect is resolved against the requested URL, and characters not allowed are quoted."""
    found, expected = RequestTarget("http://h:81/a/b?x=y").redirected(location), RequestTarget(url)

    assert (found.origin, found.head) == (expected.origin, expected.head)


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="%?#/."), min_size=1))
def test_redirect_to_raw_utf_8_is_quoted(name: str) -> None:
    """Raw UTF-8 in a redirect is percent-encoded."""
    found = RequestTarget("http://h/a").redirected(f"/b/{name.encode().decode('latin-1')}.bin")

    path = f"/b/{quote(name, safe="!$&'()*+,:;=@[]~")}.bin"
    assert found.head.startswith(f"{path} ".encode())


def test_second_redirect_is_resolved_against_the_first() -> None:
    """A second redirect is resolved against the first."""
    found = RequestTarget("http://h/a/b").redirected("https://other/c/d").redirected("e")

    assert (found.origin, found.path) == (Origin("https", "other", 443), "/c/e")


@pytest.mark.parametrize("location", ["http://h/b", "http://h:443/b", "HTTP://other/b"])
def test_redirect_away_from_tls_is_refused(location: str) -> None:
    """A redirect from https to http raises BadUrlError."""
    with pytest.raises(BadUrlError, match="away from TLS"):
        RequestTarget("https://h/a").redirected(location)


@pytest.mark.parametrize("location", [f"mailto:{SECRET}", f"http://h/{SECRET}\N{SNOWMAN}", *UNFIT])
def test_invalid_redirect_is_refused(location: str) -> None:
    """An invalid redirect raises BadUrlError, which does not contain its location."""
    with pytest.raises(BadUrlError) as raised:
        RequestTarget("http://h/a").redirected(location)

    assert SECRET not in repr(raised.value)


@given(URLS, st.booleans())
def test_any_text_is_a_target_or_refused(url: str, is_redirect: bool) -> None:  # noqa: FBT001
    """Any text is a target with one well-formed head, or raises BadUrlError."""
    try:
        target = (
            RequestTarget("http://h/a/b").redirected(url) if is_redirect else RequestTarget(url)
        )
    except BadUrlError:
        return

    assert HEAD.fullmatch(target.head)
