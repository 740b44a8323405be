"""URLs become what a request needs, or are refused without being repeated."""

import re
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.storage.http1.errors import BadUrlError
from app.storage.http1.target import Origin, Target

HEAD = re.compile(
    rb"/[!-~]* HTTP/1\.1\r\nHost: [!-~]+\r\nAccept-Encoding: identity\r\nUser-Agent: [!-~]+\r\n"
)
SECRET = "s3cr3t-s1gnature"
PARTS = st.text(st.sampled_from("aé0:/?#[]@%. \\\r\n\0")) | st.text()
URLS = st.builds("{}{}".format, st.sampled_from(["", "http://", "https://h", "//"]), PARTS)


def asked(target: Target) -> str:
    """Give the path and query that are asked for."""
    return target.head.split(b" ", 1)[0].decode()


def host(target: Target) -> str:
    """Give the value of ``Host``."""
    return target.head.split(b"\r\nHost: ", 1)[1].split(b"\r\n", 1)[0].decode()


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("http://example.com/a", Origin("http", "example.com", 80)),
        ("https://example.com/a", Origin("https", "example.com", 443)),
        ("http://example.com:9000/a", Origin("http", "example.com", 9000)),
        ("https://example.com:80/a", Origin("https", "example.com", 80)),
        ("HTTPS://Example.COM/a", Origin("https", "example.com", 443)),
        ("http://127.0.0.1/a", Origin("http", "127.0.0.1", 80)),
        ("http://[::1]/a", Origin("http", "::1", 80)),
        ("https://[2001:db8::1]:8443/a", Origin("https", "2001:db8::1", 8443)),
    ],
)
def test_a_url_tells_whom_to_connect_to(url: str, origin: Origin) -> None:
    """Scheme, host and port are found, each scheme with its own default port."""
    assert Target(url).origin == origin


@pytest.mark.parametrize(
    "netloc", ["example.com", "example.com:9000", "[::1]", "[::1]:9000", "127.0.0.1:80"]
)
def test_the_host_is_named_as_in_the_url(netloc: str) -> None:
    """``Host`` has the brackets and the port that the URL has, for signatures cover it."""
    assert host(Target(f"http://{netloc}/a")) == netloc


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("http://h/a/b.bin", "/a/b.bin"),
        ("http://h", "/"),
        ("http://h/", "/"),
        ("http://h?x=1", "/?x=1"),
        ("http://h/a?x=1&y=a/b?c", "/a?x=1&y=a/b?c"),
        ("http://h/a%20b%2Fc?X-Amz-Signature=a%2Bb", "/a%20b%2Fc?X-Amz-Signature=a%2Bb"),
        ("http://h/a//b/../c", "/a//b/../c"),
        ("http://h/a?b#c", "/a?b"),
    ],
)
def test_path_and_query_are_asked_for_as_they_are(url: str, path: str) -> None:
    """Nothing is quoted, unquoted or normalized; only the fragment stays here."""
    assert asked(Target(url)) == path


def test_a_head_has_nothing_but_its_lines() -> None:
    """The path, the host, no compression, and who asks."""
    assert Target("http://h:81/a?b").head == (
        b"/a?b HTTP/1.1\r\nHost: h:81\r\nAccept-Encoding: identity\r\nUser-Agent: shardgate\r\n"
    )


@pytest.mark.parametrize(
    "url",
    [
        f"http://user@h/{SECRET}",
        f"http://user:{SECRET}@h/",
        f"ftp://h/{SECRET}",
        f"file:///{SECRET}",
        f"s3://bucket/{SECRET}",
        f"//h/{SECRET}",
        f"h/{SECRET}",
        f"http:/{SECRET}",
        f"http:///{SECRET}",
        f"http://:80/{SECRET}",
        f"http://h/ {SECRET}",
        f" http://h/{SECRET}",
        f"http://h/{SECRET}\n",
        f"http://h/\r\nX-Injected: {SECRET}",
        f"http://h/\t{SECRET}",
        f"http://h/\0{SECRET}",
        f"http://h/\x7f{SECRET}",
        f"http://h/é{SECRET}",
        f"http://h:65536/{SECRET}",
        f"http://h:0/{SECRET}",
        f"http://h:-1/{SECRET}",
        f"http://h:{SECRET}/",
        f"http://[::1/{SECRET}",
        f"http://[{SECRET}]/",
        f"http://a..{SECRET}/",
        f"http://.{SECRET}/",
        f"http://{SECRET * 4}/",
        "",
    ],
)
def test_what_cannot_be_asked_is_refused_without_being_repeated(url: str) -> None:
    """A text that is no URL of a server raises, and the error does not tell what it was."""
    with pytest.raises(BadUrlError) as raised:
        Target(url)

    assert SECRET not in repr(raised.value)


def test_a_target_does_not_show_its_url() -> None:
    """What a log or a traceback shows of a target holds no signature."""
    target = Target(f"http://h/a?X-Amz-Signature={SECRET}")

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
def test_a_redirect_leads_where_it_says(location: str, url: str) -> None:
    """Any reference is taken, from the URL that was asked; what is not allowed there is quoted."""
    found, expected = Target("http://h:81/a/b?x=y").redirected(location), Target(url)

    assert (found.origin, found.head) == (expected.origin, expected.head)


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="%?#/."), min_size=1))
def test_a_redirect_to_raw_utf_8_is_one_to_its_quoted_form(name: str) -> None:
    """The bytes of a header, which arrive as Latin-1, are quoted as the bytes they are."""
    found = Target("http://h/a").redirected(f"/b/{name.encode().decode('latin-1')}.bin")

    assert asked(found) == f"/b/{quote(name, safe="!$&'()*+,:;=@[]~")}.bin"


def test_a_redirect_of_a_redirect_starts_from_there() -> None:
    """Each step is relative to the one before."""
    found = Target("http://h/a/b").redirected("http://other/c/d").redirected("e")

    assert (found.origin.host, asked(found)) == ("other", "/c/e")


def test_a_redirect_to_tls_is_followed_on() -> None:
    """Once under TLS, a relative reference stays there."""
    found = Target("http://h/a").redirected("https://h/b").redirected("/c")

    assert found.origin == Origin("https", "h", 443)


@pytest.mark.parametrize("location", ["http://h/b", "http://h:443/b", "HTTP://other/b"])
def test_a_redirect_never_leads_away_from_tls(location: str) -> None:
    """Nobody on the way may learn what was asked under TLS."""
    with pytest.raises(BadUrlError, match="away from TLS"):
        Target("https://h/a").redirected(location)


@pytest.mark.parametrize(
    "location",
    [
        f"ftp://h/{SECRET}",
        f"mailto:{SECRET}",
        f"http://user:{SECRET}@h/",
        f"http://[::1/{SECRET}",
        f"http://h:65536/{SECRET}",
        f"http://h/{SECRET}\N{SNOWMAN}",  # no header can hold it
    ],
)
def test_a_redirect_to_no_proper_url_is_refused_without_being_repeated(location: str) -> None:
    """Where a server leads may hold a signature as well."""
    with pytest.raises(BadUrlError) as raised:
        Target("http://h/a").redirected(location)

    assert SECRET not in repr(raised.value)


@given(URLS)
def test_any_text_is_a_target_or_refused(url: str) -> None:
    """Whatever is accepted makes one well-formed head, and nothing else is raised."""
    try:
        target = Target(url)
    except BadUrlError:
        return

    assert HEAD.fullmatch(target.head)


@given(URLS)
def test_any_location_is_a_target_or_refused(location: str) -> None:
    """Whatever a server sends makes one well-formed head, and nothing else is raised."""
    try:
        target = Target("http://h/a/b").redirected(location)
    except BadUrlError:
        return

    assert HEAD.fullmatch(target.head)
