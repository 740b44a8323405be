"""Charts of the figures as SVG, light and dark as the reader's system is."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Final, NamedTuple

from .figures import Figure
from .views import BUCKET_VIEW, HTTP1_VIEW, HTTP2_VIEW


class _Bar(NamedTuple):
    label: str
    value: float
    text: str
    is_ours: bool


_WIDTH: Final = 720
_LABEL_WIDTH: Final = 300
_TEXT_WIDTH: Final = 90
_ROW: Final = 28
_TOP: Final = 48
_STYLE: Final = """
    text { font: 13px system-ui, sans-serif; fill: #24292f }
    .title { font-weight: 600; font-size: 15px }
    .ours { fill: #0969da } .other { fill: #8c959f }
    @media (prefers-color-scheme: dark) {
      text { fill: #e6edf3 } .ours { fill: #58a6ff } .other { fill: #6e7681 }
    }
"""


def draw(folder: Path, figures: Sequence[Figure]) -> None:
    """Write those charts into *folder* whose figures have been measured."""
    by_name = {figure.what: figure for figure in figures}
    for name, (title, lines) in _CHARTS.items():
        if all(what in by_name for what, _, _ in lines):
            bars = [
                _Bar(label, by_name[what].value, _spell(by_name[what]), is_ours)
                for what, label, is_ours in lines
            ]
            (folder / f"{name}.svg").write_text(_svg(title, bars), "utf-8")


def _spell(figure: Figure) -> str:
    number = f"{figure.value:g}" if figure.value.is_integer() else f"{figure.value:.2f}"
    return f"{number} {figure.unit}"


def _svg(title: str, bars: Sequence[_Bar]) -> str:
    height = _TOP + _ROW * len(bars) + 8
    scale = (_WIDTH - _LABEL_WIDTH - _TEXT_WIDTH) / max(bar.value for bar in bars)
    rows = []
    for number, bar in enumerate(bars):
        y = _TOP + _ROW * number
        length = bar.value * scale
        colour = "ours" if bar.is_ours else "other"
        label, text = escape(bar.label), escape(bar.text)
        end = _LABEL_WIDTH + length
        rows += [
            f'  <text x="{_LABEL_WIDTH - 10}" y="{y + 14}" text-anchor="end">{label}</text>',
            f'  <path class="{colour}" d="M{_LABEL_WIDTH} {y}h{length:.1f}v20h-{length:.1f}z"/>',
            f'  <text x="{end + 8:.1f}" y="{y + 14}">{text}</text>',
        ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" role="img">'
    )
    style = f"  <style>{_STYLE}  </style>"
    heading = f'  <text class="title" x="8" y="24">{escape(title)}</text>'
    name = f"  <title>{escape(title)}</title>"
    return "\n".join([head, name, style, heading, *rows, "</svg>", ""])


_CHARTS: Final = {
    "views": (
        "First view of a sharded array in Neuroglancer, 50 ms away (less is better)",
        (
            (BUCKET_VIEW, "the bucket itself, HTTP/1.1", False),
            (HTTP1_VIEW, "Shardgate, HTTP/1.1", True),
            (HTTP2_VIEW, "nginx with HTTP/2, and Shardgate", True),
        ),
    ),
    "rates": (
        "Rate of Shardgate's requests, nginx's = 1 (more is better)",
        (
            ("4 KiB: ratio to static file", "4 KiB, cached", True),
            ("ratio to static file", "64 KiB, cached", True),
            ("1 MiB: ratio to static file", "1 MiB, cached", True),
            ("8 MiB: ratio to static file", "8 MiB, cached", True),
            ("4 KiB: ratio to proxying nginx", "4 KiB, read from the store", True),
            ("ratio to proxying nginx", "64 KiB, read from the store", True),
            ("1 MiB: ratio to proxying nginx", "1 MiB, read from the store", True),
            ("8 MiB: ratio to proxying nginx", "8 MiB, read from the store", True),
        ),
    ),
    "far": (
        "Store 30 ms away: how often a request waits for it (less is better)",
        (
            ("store 30 ms away: first chunk of a dataset", "first chunk of a dataset", True),
            ("  the same, of a known format", "first chunk, format configured", True),
            ("  a chunk of another shard", "first chunk of another shard", True),
            (
                "  a plane of 64 chunks over 4 Morton shards",
                "plane of 64 chunks in 4 shards, reads",
                True,
            ),
        ),
    ),
}
"""By file: the title, and for each bar the figure, its label, and whether it is ours."""
