"""Charts of the figures as SVG."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from jinja2 import Template

from .figures import Figure
from .views import BUCKET_VIEW, HTTP1_VIEW, HTTP2_VIEW

_LABEL_WIDTH: Final = 300
_BAR_WIDTH: Final = 330
_SVG: Final = Template(
    """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {{ width }} {{ height }}" width="{{ width }}"\
 height="{{ height }}" role="img">
  <title>{{ title }}</title>
  <style>
    text { font: 13px system-ui, sans-serif; fill: #24292f }
    .title { font-weight: 600; font-size: 15px }
    .ours { fill: #0969da } .other { fill: #8c959f }
    @media (prefers-color-scheme: dark) {
      text { fill: #e6edf3 } .ours { fill: #58a6ff } .other { fill: #6e7681 }
    }
  </style>
  <text class="title" x="8" y="24">{{ title }}</text>
{%- for y, label, colour, length, text, end in bars %}
  <text x="{{ left - 10 }}" y="{{ y + 14 }}" text-anchor="end">{{ label }}</text>
  <path class="{{ colour }}" d="M{{ left }} {{ y }}h{{ length }}v20h-{{ length }}z"/>
  <text x="{{ end }}" y="{{ y + 14 }}">{{ text }}</text>
{%- endfor %}
</svg>
""",
    autoescape=True,
    keep_trailing_newline=True,
)
"""Chart in light or dark colours, as the reader's system prefers."""


def draw(folder: Path, figures: Sequence[Figure]) -> None:
    """Write the charts whose figures have been measured into *folder*."""
    by_name = {figure.what: figure for figure in figures}
    for name, (title, lines) in _CHARTS.items():
        if all(what in by_name for what, _, _ in lines):
            most = max(by_name[what].value for what, _, _ in lines)
            bars = []
            for row, (what, label, is_ours) in enumerate(lines):
                y, colour = 48 + 28 * row, "ours" if is_ours else "other"
                length = _BAR_WIDTH * by_name[what].value / most
                end = f"{_LABEL_WIDTH + length + 8:.1f}"
                bars.append((y, label, colour, f"{length:.1f}", _spell(by_name[what]), end))
            size = {"left": _LABEL_WIDTH, "width": 720, "height": 56 + 28 * len(bars)}
            drawn = _SVG.render(title=title, bars=bars, **size)
            (folder / f"{name}.svg").write_text(drawn, "utf-8")


def _spell(figure: Figure) -> str:
    number = f"{figure.value:g}" if figure.value.is_integer() else f"{figure.value:.2f}"
    return f"{number} {figure.unit}"


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
"""For each file the title, and for each bar the figure, label, and whether it is Shardgate's."""
