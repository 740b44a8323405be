"""The dataset and the virtual key that a request's path names."""

import re
from functools import lru_cache
from typing import Final
from urllib.parse import quote, unquote

from app.errors import BadKeyError
from app.model import NAMED_REFS, VirtualKey, escape_ref
from app.storage.contract import TEMPORARY

MAX_KEY_BYTES: Final = 1024
"""As in S3."""
_FORBIDDEN: Final = re.compile(r"[\x00-\x1f\x7f]|^/|//|(?:^|/)\.\.?(?:/|$)")


@lru_cache(maxsize=4096)
def split_target(raw_path: bytes) -> tuple[str, VirtualKey | None]:
    """Split ``/{dataset}/{virtual key}``; the key is `None` without a slash behind the dataset.

    Raises: `BadKeyError` for what is not UTF-8 once decoded, has control characters, ``.``,
    ``..`` or empty segments, is too long, or names what is ours. A key may end in a slash, as a
    prefix.
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
    """Give *key*, once decoded, if it is one.

    Raises: `BadKeyError`.
    """
    if len(key) > MAX_KEY_BYTES or (not key.isascii() and len(key.encode()) > MAX_KEY_BYTES):
        raise BadKeyError(f"the key {key[:40]!r}… is longer than {MAX_KEY_BYTES} bytes")
    if TEMPORARY in key:
        raise BadKeyError(f"{key!r} is no key: unfinished objects have {TEMPORARY} in their names")
    if _FORBIDDEN.search(key):
        raise BadKeyError(f"{key!r} has a control character or an empty, '.' or '..' segment")
    return VirtualKey(key)


def spell(name: str) -> str:
    """Write *name*, a segment of a key or one with a slash behind it, as the part of a URL."""
    return quote(name, safe="/%@" if name.startswith(NAMED_REFS) else "/")


def _decode(segment: str) -> str:
    """Decode a segment; the names of refs stay escaped as far as segments cannot hold them."""
    text = unquote(segment, errors="strict")
    return escape_ref(text) if text.startswith(NAMED_REFS) else text
