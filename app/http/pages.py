"""Pages of links that people browse, and from which fsspec learns the members of a group."""

import html
from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from typing import Final

from app.formats.listing import Name
from app.http.target import spell

MOST_LINKS: Final = 10_000
"""More are not shown on one page."""
_CONTENT_TYPES: Final = {
    "json": b"application/json",
    "info": b"application/json",
    "zarray": b"application/json",
    "zattrs": b"application/json",
    "zgroup": b"application/json",
    "zmetadata": b"application/json",
    "txt": b"text/plain; charset=utf-8",
    "md": b"text/plain; charset=utf-8",
    "png": b"image/png",
    "jpg": b"image/jpeg",
    "jpeg": b"image/jpeg",
}
"""By the name, or what follows its last dot; nothing that a browser would run."""


def content_type(key: str) -> bytes:
    """Name the media type of an object by its *key*."""
    ending = key.rpartition("/")[2].rpartition(".")[2]
    return _CONTENT_TYPES.get(ending, b"application/octet-stream")


def listing_page(path: str, listed: Sequence[Name]) -> bytes:
    """Write the page of *path*, which ends in a slash; every link is relative to it.

    Arrays can have more chunks than a page has room for; what is left out is said.
    """
    rows = "\n".join(map(_row, listed[:MOST_LINKS]))
    if len(listed) > MOST_LINKS:
        rows += "\n<li>and more: <code>?list-type=2</code> gives all by the page</li>"
    title = html.escape(path)
    return (
        f"<!doctype html>\n<html><head><title>{title}</title></head>\n"
        f"<body><h1>{title}</h1>\n<ul>\n{rows}\n</ul></body></html>\n"
    ).encode()


def page_headers(*, style: str = "", script: str = "") -> list[tuple[bytes, bytes]]:
    """Let a page use its own *style* and *script*, load nothing else, and tell where it is to none.

    Names from elsewhere are in it, and a token may be in its address.
    """
    policy = ["default-src 'none'", "base-uri 'none'", "form-action 'none'", "img-src data:"]
    if style:
        policy.append(f"style-src '{digest(style)}'")
    if script:
        policy += [f"script-src '{digest(script)}'", "connect-src 'self'"]
    return [
        (b"content-security-policy", "; ".join([*policy, "frame-ancestors 'none'"]).encode()),
        (b"referrer-policy", b"no-referrer"),
    ]


def digest(text: str) -> str:
    """Name a style or script in a page as a policy does that allows it."""
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"


def _row(listed: Name) -> str:
    name, nbytes = listed
    size = "" if nbytes is None else f" {nbytes:,} bytes"
    # "./" keeps a name with a colon from being read as a scheme.
    return f'<li><a href="./{spell(name)}">{html.escape(name)}</a>{size}</li>'
