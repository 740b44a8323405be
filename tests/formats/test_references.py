"""Virtual references: the objects that they lead to, and the allowed prefixes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardgate.errors import NotAllowedError
from shardgate.formats.reading import DecodeError
from shardgate.formats.references import Allowed, inline_bytes, inline_text, parse_prefix, resolve
from shardgate.model import ObjectRef

PREFIXES = (
    "s3://archive/era5/", "s3://archive/era5/daily/", "s3://open/", "https://host.example/data/",
    "http://plain.example:8080/", "http://[2001:db8::1]/v6/", "http://bücher.example/",
    "file:///srv/data/",
)  # fmt: skip
ALLOWED = tuple(
    Allowed(parse_prefix(url), ObjectRef(f"guarded+root{at}://", f"below/{at}"))
    for at, url in enumerate(PREFIXES)
)
CONTAINERS = {
    "era": "s3://archive/era5/",
    "no slash": "s3://archive/era5",
    "é%": "https://host.example/data/",
    "climbs": "s3://archive/era5/../",
    "elsewhere": "s3://secret/",
    "circle": "vcc://circle/",
    "question": "s3://archive/era5/?x=",
    "nothing": "",
    "..": "s3://open/",
}


def _ref(at: int, rest: str) -> ObjectRef:
    return ObjectRef(f"guarded+root{at}://", f"below/{at}/{rest}")


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        ("s3://archive/era5/a/b.nc", _ref(0, "a/b.nc")),
        ("s3://archive/era5/daily/b.nc", _ref(1, "b.nc")),
        ("s3://archive/era5/dailyish/b.nc", _ref(0, "dailyish/b.nc")),
        ("S3://archive/era5/a", _ref(0, "a")),
        ("s3://archive/era%35/a", _ref(0, "a")),
        ("s3://archive/era5/..a/b..", _ref(0, "..a/b..")),
        ("s3://archive/era5//a//b", _ref(0, "/a//b")),
        ("s3://open/a", _ref(2, "a")),
        ("s3a://open/a", _ref(2, "a")),
        ("s3://open//a", _ref(2, "/a")),
        ("s3://open/a\u00a0b\u3000c", _ref(2, "a\u00a0b\u3000c")),
        ("s3://open/a\\b", _ref(2, "a\\b")),
        ("s3://open/a?versionId=1", _ref(2, "a")),
        ("s3://open/a#part", _ref(2, "a")),
        ("s3://open/a%3fb%23c", _ref(2, "a?b#c")),
        ("HTTPS://HOST.example:443/data/a", _ref(3, "a")),
        ("http://plain.example:8080/a", _ref(4, "a")),
        ("http://[2001:DB8::1]:80/v6/a", _ref(5, "a")),
        ("http://bücher.example/a", _ref(6, "a")),
        ("file:///srv/data/a", _ref(7, "a")),
        ("FILE://LOCALHOST/srv/data/a", _ref(7, "a")),
        ("s3://open/%2525", _ref(2, "%25")),
        ("s3://open/%252e%252e%252fa", _ref(2, "%2e%2e%2fa")),
        *((f"s3://open/{name}", _ref(2, name)) for name in ("%", "%zz", "+")),
        ("vcc://era/a/b", _ref(0, "a/b")),
        ("vcc://era/daily/b", _ref(1, "b")),
        ("vcc://era//a", _ref(0, "/a")),
        ("vcc://no slash/a", _ref(0, "a")),
        ("vcc://é%/a%20b", _ref(3, "a b")),
        ("vcc://era/a%252fb", _ref(0, "a%2fb")),
        ("vcc://../a", _ref(2, "a")),
    ],
)
def test_location_below_an_allowed_prefix_is_resolved(location: str, expected: ObjectRef) -> None:
    """A location below an allowed prefix resolves to an object below the root of the longest one.

    Scheme and host are case-insensitive, and the path is decoded once. A container, named by any
    text without a slash, stands for its prefix.
    """
    assert resolve(location, ALLOWED, CONTAINERS) == expected


_CLIMBING = [
    "s3://archive/era5/../secret", "s3://archive/era5/%2e%2e/secret",
    "s3://archive/era5/%2E./secret", "s3://archive/era5/..%2fsecret",
    "s3://archive/era5/%2e%2e%2fsecret", "s3://archive/era5/a/..", "s3://archive/era5/./a",
    "s3://open/..", "file:///srv/data/../secret", "file:///srv/data//etc/passwd",
    "file:////srv/data/a", "file:///srv/data/%2Fetc/passwd", "vcc://era/../secret",
    "vcc://era/%2e%2e/secret", "vcc://climbs/a",
]  # fmt: skip
_ELSEWHERE = [
    "s3://archive/era5-secret/a", "s3://archive/era50/a", "s3://archive/era5",
    "s3://archive/secret", "s3://bucket/secret", "http://127.0.0.1/x",
    "s3://archive/Era5/a", "s3://Archive/era5/a", "s3://archive2/era5/a", "s3://archive:80/era5/a",
    "s3://open.evil/a", "gs://archive/era5/a", "http://host.example/data/a",
    "https://host.example:80/data/a", "https://host.example:8443/data/a",
    "https://host.example./data/a", "https://host.example.evil/data/a",
    "https://host.example\\.evil/data/a", "https://host.example%2fdata%2f/a",
    "https://evil.example/data/a", "https://evil.example\\host.example/data/a",
    "http://plain.example/a", "http://[2001:db8::2]/v6/a", "http://[2001:db8:0::1]/v6/a",
    "http://xn--bcher-kva.example/a", "http://127.0.0.1/data/a",
    "http://169.254.169.254/latest/meta-data", "file:///srv/database/a", "file:///srv/data",
    "file:///etc/passwd",
]  # fmt: skip
_ODD = tuple(
    Allowed(parse_prefix(f"https://h/{path}/"), ObjectRef(f"guarded+odd{at}://", ""))
    for at, path in enumerate(["year=2020", "a%2Fb", "a%252Fb"])
)


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        ("https://h/year=2020/a+b", (0, "a+b")),
        ("https://h/year%3d2020/a%2Bb", (0, "a%2Bb")),
        ("https://h/a%2fb/c", (1, "c")),
        ("https://h/a%252Fb/c%2Fd", (2, "c%2Fd")),
    ],
)
def test_url_of_the_web_below_a_prefix_keeps_its_spelling(
    location: str, expected: tuple[int, str]
) -> None:
    """A web address lies below a prefix that is spelled in another way, and keeps its spelling."""
    at, key = expected
    assert resolve(location, _ODD) == ObjectRef(f"guarded+odd{at}://", key)


@pytest.mark.parametrize("location", ["https://h/a/b/c", "https://h/a%2Fb%2Fc", "https://h/a%2Fc"])
def test_escaped_slash_of_a_prefix_is_no_separator(location: str) -> None:
    """A slash within a segment of a prefix is not one between segments of an address."""
    with pytest.raises(NotAllowedError):
        resolve(location, _ODD)


_NESTED = {"a": "s3://secret/x/y", "b": "s3://secret/x/", "c": "no URL at all, but long"}


@pytest.mark.parametrize(
    ("location", "containers", "reason"),
    [
        *((location, CONTAINERS, "segments") for location in _CLIMBING),
        *((location, None, "virtual_chunk_prefixes") for location in _ELSEWHERE),
        ("vcc://era/a", None, ""),
        ("vcc://elsewhere/a", CONTAINERS, "below s3://secret/ are not allowed"),
        ("s3://secret/x/y/z", _NESTED, "below s3://secret/x/y are not allowed"),
        ("s3://archive/era6/daily/a", None, "below s3://archive/ are not allowed"),
        ("https://other.example:8443/x/a", None, "below https://other.example:8443/ are not"),
        ("file:///home/me/a.nc", None, "below file:///home/me/ are not allowed"),
        ("file:///a.nc", None, "below file:/// are not allowed"),
    ],
)
def test_location_outside_of_the_allowed_prefixes_is_refused(
    location: str, containers: dict[str, str] | None, reason: str
) -> None:
    """A location outside of all allowed prefixes raises NotAllowedError with a prefix to allow.

    Prefixes are whole segments of one bucket, host and port. Containers allow nothing by
    themselves, since every writer of a repository can add one.
    """
    for allowed in (ALLOWED, ()):
        with pytest.raises(NotAllowedError, match=reason or None):
            resolve(location, allowed, containers)


@pytest.mark.parametrize(
    "location",
    ["", "a", "/srv/data/a", "s3:/open/a", "s3:///a", "s3://", "://open/a", "3s://open/a",
     "ftp://open/a", "memory://open/a", "guarded+s3://open/a", "javascript://open/a",
     "s3://user:password@open/a", "https://host.example@evil.example/data/a",
     "https://evil.example\\@host.example/data/a", "https://@host.example/data/a",
     "https:///data/a", "file://host/srv/data/a", "file://127.0.0.1/srv/data/a",
     "file://%6cocalhost/srv/data/a", "s3://open/a\0b", "s3://open/a%00b", "s3://open/a%0d%0ab",
     "s3://open/a\nb", "s3://op\nen/a", "s3://open/a\x7f", "s3://open/%c2%85", "s3://open/%ff",
     "s3://open/", "s3://open", "s3://open?/a", "s3://archive/era5/", "s3://archive/era5/a/",
     "file:///srv/data/", "vcc://unknown/a", "vcc://ERA/a", "vcc:///a", "vcc://era%2f/a",
     "vcc://circle/a", "vcc://question/a", "vcc://nothing/a", "vcc://era", "vcc://era/",
     "VCC://era/a", "s3://open/\ud800", "https://host.example/data/\ud800"],
)  # fmt: skip
def test_invalid_location_is_refused(location: str) -> None:
    """A location that is no URL of an object raises DecodeError.

    So does one with a user name or control characters, or of an unknown or nested container.
    """
    with pytest.raises(DecodeError):
        resolve(location, ALLOWED, CONTAINERS)


PARTS = st.sampled_from(
    [
        *("s3", "S3", "http", "https", "file", "vcc", "gs", "://", ":///", "//", "/", "\\", "@"),
        *("..", ".", "%2e", "%2E%2e", "%2f", "%5c", "%25", "%00", "\0", "\n", "?", "#", ":", ":80"),
        *("archive", "era5", "daily", "open", "host.example", "srv", "data", "localhost", "é"),
        *("era", "climbs", "circle", "..", "[2001:db8::1]", "v6", "a", "secret"),
    ]
)
STARTS = st.sampled_from(["", "s3://archive/era5", "file:///srv/data", "vcc://era", *PREFIXES])
LOCATIONS = st.builds(
    lambda start, parts: start + "".join(parts), STARTS, st.lists(PARTS | st.text(max_size=3))
)


@given(LOCATIONS)
def test_random_location_resolves_below_an_allowed_root_or_is_refused(location: str) -> None:
    """Any text resolves to an object below an allowed root, or is refused."""
    try:
        found = resolve(location, ALLOWED, CONTAINERS)
    except (NotAllowedError, DecodeError):
        return
    (root,) = [each.root for each in ALLOWED if each.root.bucket == found.bucket]
    assert found.key.startswith(f"{root.key}/")
    rest = found.key.removeprefix(f"{root.key}/")
    assert rest
    assert not rest.endswith("/")
    assert {".", ".."}.isdisjoint(rest.split("/"))
    assert not any(letter < " " for letter in rest)


@pytest.mark.parametrize(
    "location",
    [
        "ftp://me:secret@host/a",
        "https://host/a/?signature=secret",
        "https://host/../a?signature=secret",
        "https://host/%ff#secret",
        "vcc://signed/a",
    ],
)
def test_refusal_contains_no_secrets(location: str) -> None:
    """The error of a refused location contains neither its user nor its query."""
    containers = {"signed": "https://signed.example/x/?signature=secret"}
    with pytest.raises((DecodeError, NotAllowedError)) as error:
        resolve(location, ALLOWED, containers)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("data", "text"),
    [(b"plain", "plain"), (b"\xff", "base64:/w=="), (b"base64:x", "base64:YmFzZTY0Ong=")],
)
def test_bytes_in_a_set_are_text_or_base64(data: bytes, text: str) -> None:
    """Bytes that are no text, or look like base64, are written in base64, and read back."""
    assert inline_text(data) == text
    assert inline_bytes(text.encode()) == data
