"""Paths of requests: ``/{dataset}/{virtual key}``, or ``/~TOKEN/{dataset}/{virtual key}``."""

import re
from functools import lru_cache
from typing import Final
from urllib.parse import quote, unquote

from shardgate.errors import BadKeyError
from shardgate.model import NAMED_REFS, VirtualKey, escape_ref
from shardgate.storage.contract import TEMPORARY

MAX_KEY_BYTES: Final = 1024
"""As in S3."""
_FORBIDDEN: Final = re.compile(r"[\x00-\x1f\x7f]|^/|//|(?:^|/)\.\.?(?:/|$)")
TOKEN_PREFIXES: Final = (b"/~", b"/%7E", b"/%7e")
"""Beginnings of paths with a token."""
_TILDE: Final = ord("~")


@lru_cache(maxsize=4096)
def split_target(raw_path: bytes) -> tuple[str, VirtualKey | None]:
    """Split ``/{dataset}/{virtual key}``; the key is `None` if no slash follows the dataset.

    A key may end in a slash, as a prefix.

    Raises: `BadKeyError` for a key that is not UTF-8 once decoded, has control characters, ``.``,
    ``..`` or empty segments, is too long, or is reserved for temporary objects.
    """
    try:
        path = raw_path.decode("ascii")
        if "%" in path:
            path = "/".join(map(_decode, path.split("/")))
    except UnicodeDecodeError:
        raise BadKeyError("the path is not percent-encoded UTF-8") from None
    dataset, slash, key = path[1:].partition("/")
    return dataset, check_key(key) if slash else None


def check_key(key: str) -> VirtualKey:
    """Return the decoded *key*; raise `BadKeyError` as `split_target` does."""
    if len(key) > MAX_KEY_BYTES or (not key.isascii() and len(key.encode()) > MAX_KEY_BYTES):
        raise BadKeyError(f"the key {key[:40]!r}… is longer than {MAX_KEY_BYTES} bytes")
    if TEMPORARY in key:
        raise BadKeyError(f"{key!r} is no key: {TEMPORARY} is reserved for unfinished objects")
    if _FORBIDDEN.search(key):
        raise BadKeyError(f"{key!r} has a control character or an empty, '.' or '..' segment")
    return VirtualKey(key)


def quote_segment(name: str) -> str:
    """Percent-encode one segment of a key, which may end in a slash, for a URL."""
    return quote(name, safe="/%@" if name.startswith(NAMED_REFS) else "/")


def quote_key(key: str) -> str:
    """Percent-encode a key, or the beginning of one, for a URL."""
    return "/".join(map(quote_segment, key.split("/")))


def _decode(segment: str) -> str:
    """Decode a segment; in names of refs stays escaped what a segment cannot hold."""
    text = unquote(segment, errors="strict")
    return escape_ref(text) if text.startswith(NAMED_REFS) else text


def split_token(raw_path: bytes) -> tuple[bytes | None, bytes]:
    """Split ``/~TOKEN/{dataset}/{virtual key}`` into ``/~TOKEN`` and the rest."""
    if not raw_path.startswith(TOKEN_PREFIXES):
        return None, raw_path
    end = raw_path.find(b"/", 1)
    if end < 0:
        return raw_path, b""
    return raw_path[:end], raw_path[end:]


def token_in(segment: bytes) -> str:
    """Return the token of ``/~TOKEN``, percent-encoded as it was sent."""
    start = len(b"/~") if segment[1] == _TILDE else len(b"/%7E")
    return segment[start:].decode("latin-1")
