"""The dataset and the virtual key that a request's path names."""

import re
from functools import lru_cache
from typing import Final
from urllib.parse import unquote

from app.errors import BadKeyError
from app.model import VirtualKey

MAX_KEY_BYTES: Final = 1024
"""As in S3."""
_FORBIDDEN: Final = re.compile(r"[\x00-\x1f\x7f]|^/|//|(?:^|/)\.\.?(?:/|$)")


@lru_cache(maxsize=4096)
def split_target(raw_path: bytes) -> tuple[str, VirtualKey | None]:
    """Split ``/{dataset}/{virtual key}``; the key is `None` without a slash behind the dataset.

    Raises: `BadKeyError` for what is not UTF-8 once decoded, has control characters, ``.``,
    ``..`` or empty segments, or is too long. A key may end in a slash, as a prefix.
    """
    try:
        path = raw_path.decode("ascii")
        if "%" in path:
            path = unquote(path, errors="strict")
    except UnicodeDecodeError:
        raise BadKeyError("the path is not percent-encoded UTF-8") from None
    dataset, slash, key = path[1:].partition("/")
    if len(key) > MAX_KEY_BYTES or (not key.isascii() and len(key.encode()) > MAX_KEY_BYTES):
        raise BadKeyError(f"the key is longer than {MAX_KEY_BYTES} bytes")
    if _FORBIDDEN.search(key):
        raise BadKeyError("the key has a control character or an empty, '.' or '..' segment")
    return dataset, VirtualKey(key) if slash else None
