"""Templates of pages, their filters and headers."""

from collections.abc import Sequence
from http import HTTPStatus
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from starlette.responses import HTMLResponse

from shardgate.concurrency import run_in_thread
from shardgate.server.request import Headers, quote_key, quote_segment
from shardgate.server.responses import NO_STORE, page_headers

VARY_BY_ACCEPT: Final = (b"vary", b"Accept")
_TEMPLATES: Final = Path(__file__).parent / "templates"
_ENVIRONMENT: Final = Environment(
    loader=FileSystemLoader(_TEMPLATES),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_MOST_SIZES: Final = 12
_UNITS: Final = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def template(name: str) -> Template:
    """Return the template of a part of a page."""
    return _ENVIRONMENT.get_template(name)


class PageTemplate:
    """A page with the common style and a script, which are in it.

    One that *is_sandboxed* is of no origin: it cannot look into windows of the service's own pages,
    nor these into it.
    """

    def __init__(
        self, name: str, script_name: str = "page.js", *, is_sandboxed: bool = False
    ) -> None:
        self._template = template(name)
        style = (_TEMPLATES / "page.css").read_text("utf-8")
        script = (_TEMPLATES / script_name).read_text("utf-8")
        self._parts = {"style": style, "script": script, "version": version("shardgate")}
        headers = dict(page_headers(style=style, script=script))
        if is_sandboxed:
            headers[b"content-security-policy"] += b"; sandbox allow-scripts"
        self._headers = headers

    def headers_of(self, page: bytes) -> Headers:
        """Return headers of *page*, whose URL has something else for programs."""
        length = (b"content-length", b"%d" % len(page))
        html = (b"content-type", b"text/html; charset=utf-8")
        return [html, length, *self._headers.items(), NO_STORE, VARY_BY_ACCEPT]

    async def render(self, *, home: str, has_api: bool = True, **values: Any) -> bytes:
        """Return the page with *values*; long lists would hold up the event loop.

        Its header leads *home*, a URL with a final slash, and to the routes of the API if it
        *has_api*; an empty one leads nowhere.
        """
        named = {"home": home, "has_api": has_api}
        text = await run_in_thread(self._template.render, self._parts | named | values)
        return text.encode(errors="backslashreplace")

    async def respond(self, status: HTTPStatus = HTTPStatus.OK, **values: Any) -> HTMLResponse:
        """Return the page with *values* as the response of a route."""
        headers = {name.decode(): value.decode() for name, value in self._headers.items()}
        return HTMLResponse(await self.render(**values), status, headers)


def visible(text: str, most: int = 200) -> str:
    """Shorten *text* and escape unprintable characters, such as marks that reverse a line."""
    shown = "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:most]
    )
    return shown if len(text) <= most else f"{shown}…"


def format_shape(shape: Sequence[int] | None) -> str:
    """Format a shape; empty if it is unknown."""
    if shape is None:
        return ""
    sizes = [str(size) for size in shape[:_MOST_SIZES]]
    if len(shape) > _MOST_SIZES:
        sizes.append("…")
    return " \N{MULTIPLICATION SIGN} ".join(sizes) or "scalar"


def format_nbytes(nbytes: int) -> str:
    """Format a number of bytes in the largest unit that it has one of: ``1.5 MiB``."""
    power = (max(nbytes, 1).bit_length() - 1) // 10
    if power >= len(_UNITS):
        return f"over 1,024 {_UNITS[-1]}"
    if power == 0:
        return f"{nbytes:,} byte{'' if nbytes == 1 else 's'}"
    return f"{nbytes / 1024**power:,.1f} {_UNITS[power]}"


_ENVIRONMENT.filters |= {
    "visible": visible,
    "shape": format_shape,
    "nbytes": format_nbytes,
    "quote_key": quote_key,
    "quote_segment": quote_segment,
    "ref_name": lambda ref: unquote(ref.partition(".")[2]),
}
