"""Virtual references: the objects below allowed prefixes that they lead to, or their bytes."""

import base64
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple
from urllib.parse import quote, unquote

from shardgate.errors import NotAllowedError
from shardgate.formats.reading import DecodeError
from shardgate.model import ObjectRef, decode_path

SCHEMES: Final = ("s3", "http", "https", "gs", "az", "file")
SLASHES: Final = re.compile("//+")
"""Slashes that are one in the path of a local file."""
_WEB: Final = ("http", "https")
_BASE64: Final = b"base64:"  # begins bytes that are written as text
_LOCATION: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/?#]*)/?([^?#]*).*", re.DOTALL)
_CONTAINER: Final = "vcc://"
_USER: Final = re.compile(r"^([^/]*//)[^/]*@")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # and halves of surrogate pairs
_SPELLINGS: Final = {"local": "file", "s3a": "s3", "gcs": "gs", "azure": "az", "abfs": "az"}


class VirtualUrl(NamedTuple):
    """A parsed URL."""

    scheme: str
    authority: str
    """Bucket or host; empty for files."""
    key: str
    """That of a web server as `decode_path` returns it."""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}/{self.key}"

    def contains(self, other: "VirtualUrl") -> bool:
        """Return `True` if *other* lies below this, which is a prefix of whole segments."""
        key = other.decoded
        prefix = self.decoded
        return self[:2] == other[:2] and key.startswith(prefix) and len(key) > len(prefix)

    @property
    def decoded(self) -> str:
        """The key in one spelling, where only a slash within a segment is escaped."""
        if self.scheme not in _WEB:
            return self.key
        return unquote(self.key.replace("%25", "%2525").replace("%2F", "%252F"))


class Allowed(NamedTuple):
    """A prefix below which virtual references are followed."""

    prefix: VirtualUrl
    root: ObjectRef


def parse_place(url: str) -> VirtualUrl:
    """Parse an absolute URL without credentials; the path, decoded once, ends at ``?`` or ``#``."""
    found = _LOCATION.fullmatch(url)
    spelled = found[1].lower() if found else ""
    scheme = _SPELLINGS.get(spelled, spelled)
    if found is None or scheme not in SCHEMES:
        raise DecodeError(f"a virtual reference is not a URL of a known scheme: {_shown(url)}")
    authority = found[2]
    if "@" in authority:
        raise DecodeError("a virtual reference holds credentials")
    try:
        key = decode_path(found[3]) if scheme in _WEB else unquote(found[3], errors="strict")
    except UnicodeDecodeError:
        raise DecodeError(f"a virtual reference is not UTF-8: {_shown(url)}") from None
    if scheme in _WEB:
        authority = authority.lower().removesuffix(":80" if scheme == "http" else ":443")
    if scheme == "file" and authority.lower() == "localhost":
        authority = ""
    if bool(authority) == (scheme == "file") or _CONTROL.search(authority + key):
        raise DecodeError(
            f"a virtual reference has no bucket or host, or control characters: {_shown(url)}"
        )
    return VirtualUrl(scheme, authority, key)


def parse_prefix(url: str) -> VirtualUrl:
    """Parse the URL of a prefix of whole segments. Raises: `DecodeError`."""
    place = parse_place(url)
    return place._replace(key=f"{place.key.strip('/')}/".lstrip("/"))


def allow(url: str, root: ObjectRef) -> Allowed:
    """Allow references below *url* in the settings, which is not percent-encoded, at *root*."""
    place = parse_prefix(url)
    if place.scheme in ("s3", "gs", "az"):
        place = parse_prefix(f"{place.scheme}://{quote(url.partition('://')[2])}")
    if place.scheme == "file":
        place = place._replace(key=SLASHES.sub("/", place.key))
    return Allowed(place, root)


def resolve(
    location: str, allowed: Sequence[Allowed], containers: Mapping[str, str] | None = None
) -> ObjectRef:
    """Return the object at *location*; *containers* are prefixes by name, for ``vcc://name/``.
    Raises: `NotAllowedError`, with the prefix that would have to be allowed; `DecodeError`.
    """
    if location.startswith(_CONTAINER):
        if containers is None:
            raise NotAllowedError("a virtual reference into a named container")
        name, _, rest = location.removeprefix(_CONTAINER).partition("/")
        if name not in containers:
            raise DecodeError(f"a virtual reference to the unknown container {name[:80]!r}")
        location = f"{containers[name].rstrip('/')}/{rest}"
    place = parse_place(location)
    if place.key.endswith("/") or not place.key:
        raise DecodeError(f"a virtual reference to a folder: {_shown(location)}")
    if _climbs(place):
        raise NotAllowedError(f"a virtual reference has segments . or ..: {_shown(location)}")
    within = [each for each in allowed if each.prefix.contains(place)]
    if not within:
        prefix = _suggested(place, containers or {})
        raise NotAllowedError(
            f"virtual references below {prefix} are not allowed: virtual_chunk_prefixes lacks it"
        )
    nearest = max(within, key=lambda each: len(each.prefix.key))
    # The prefix may be spelled in another way, so that it cannot be cut off as text.
    segments = nearest.prefix.key.count("/")
    return nearest.root.join(place.key.split("/", segments)[segments])


def _climbs(place: VirtualUrl) -> bool:
    """Return `True` if a store could resolve the key to another; files lack empty segments."""
    key = unquote(place.key) if place.scheme in _WEB else place.key
    parts = key.removesuffix("/").split("/")
    return not {".", ".."}.isdisjoint(parts) or (place.scheme == "file" and "" in parts[:-1])


def _suggested(place: VirtualUrl, containers: Mapping[str, str]) -> str:
    """Return the prefix of the container of *place*, or its bucket, host or folder."""
    for prefix in sorted(containers.values(), key=len, reverse=True):
        with suppress(DecodeError):
            if parse_prefix(prefix).contains(place):
                return _without_secrets(prefix)
    folder = place.key.rpartition("/")[0] if place.scheme == "file" else ""
    return str(place._replace(key=f"{folder}/".lstrip("/")))


def _without_secrets(url: str) -> str:
    """Remove the user, and the query, which may be a signature."""
    return _USER.sub(r"\1", url.partition("?")[0].partition("#")[0])


def _shown(url: str) -> str:
    return repr(_without_secrets(url)[:200])


def inline_bytes(text: bytes) -> bytes:
    """Return the bytes that *text* in a reference set stands for. Raises: `ValueError`."""
    return base64.b64decode(text[len(_BASE64) :]) if text.startswith(_BASE64) else text


def inline_text(data: bytes) -> str:
    """Return the text that stands for *data* in a reference set."""
    if not data.startswith(_BASE64):
        with suppress(UnicodeDecodeError):
            return data.decode()
    return (_BASE64 + base64.b64encode(data)).decode()
