"""Charts of the figures as SVG."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from jinja2 import Template

from .figures import Figure
from .views import BUCKET_VIEW, HTTP1_VIEW, HTTP2_VIEW

_LABEL_WIDTH: Final = 300
_BAR_WIDTH: Final = 330
_TOP: Final = 48
_ROW: Final = 28
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
{%- for y, heading in headings %}
  <text x="{{ left }}" y="{{ y + 14 }}">{{ heading }}</text>
{%- endfor %}
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


class Bar(NamedTuple):
    """A bar of a chart."""

    what: str
    """Name of its figure."""
    label: str
    is_ours: bool = True


class Axis(NamedTuple):
    """Bars of one unit, which share a scale."""

    bars: Sequence[Bar]
    heading: str = ""
    end: float = 0
    """Value of the longest possible bar; 0 for that of the longest bar."""


def draw(folder: Path, figures: Sequence[Figure]) -> None:
    """Write the charts whose figures have been measured into *folder*."""
    by_name = {figure.what: figure for figure in figures}
    for name, (title, axes) in _CHARTS.items():
        if all(bar.what in by_name for axis in axes for bar in axis.bars):
            bars, headings, y = [], [], _TOP
            for axis in axes:
                if axis.heading:
                    headings.append((y, axis.heading))
                    y += _ROW
                most = axis.end or max(by_name[bar.what].value for bar in axis.bars)
                for what, label, is_ours in axis.bars:
                    length = _BAR_WIDTH * by_name[what].value / most
                    colour = "ours" if is_ours else "other"
                    end = f"{_LABEL_WIDTH + length + 8:.1f}"
                    bars.append((y, label, colour, f"{length:.1f}", _spell(by_name[what]), end))
                    y += _ROW
            size = {"left": _LABEL_WIDTH, "width": 720, "height": y + 8}
            drawn = _SVG.render(title=title, bars=bars, headings=headings, **size)
            (folder / f"{name}.svg").write_text(drawn, "utf-8")


def _spell(figure: Figure) -> str:
    number = f"{figure.value:g}" if figure.value.is_integer() else f"{figure.value:.2f}"
    return f"{number} {figure.unit}"


_CHARTS: Final = {
    "views": (
        "First view of a sharded array in Neuroglancer, 50 ms away (less is better)",
        [
            Axis(
                [
                    Bar(BUCKET_VIEW, "the bucket itself, HTTP/1.1", is_ours=False),
                    Bar(HTTP1_VIEW, "Shardgate, HTTP/1.1"),
                    Bar(HTTP2_VIEW, "nginx with HTTP/2, and Shardgate"),
                ]
            )
        ],
    ),
    "rates": (
        "Rate of Shardgate's requests, nginx's = 1 (more is better)",
        [
            Axis(
                [
                    Bar("4 KiB: ratio to static file", "4 KiB, cached"),
                    Bar("ratio to static file", "64 KiB, cached"),
                    Bar("1 MiB: ratio to static file", "1 MiB, cached"),
                    Bar("8 MiB: ratio to static file", "8 MiB, cached"),
                    Bar("4 KiB: ratio to proxying nginx", "4 KiB, read from the store"),
                    Bar("ratio to proxying nginx", "64 KiB, read from the store"),
                    Bar("1 MiB: ratio to proxying nginx", "1 MiB, read from the store"),
                    Bar("8 MiB: ratio to proxying nginx", "8 MiB, read from the store"),
                ]
            )
        ],
    ),
    "far": (
        "A store 30 ms away (less is better)",
        [
            Axis(
                [
                    Bar("store 30 ms away: first chunk of a dataset", "first chunk of a dataset"),
                    Bar("  the same, of a known format", "first chunk, format configured"),
                    Bar("  a chunk of another shard", "first chunk of another shard"),
                ],
                "Waits for the store until a chunk is answered",
            ),
            Axis(
                [
                    Bar(
                        "  a plane of 64 chunks over 4 Morton shards",
                        "plane of 64 chunks, 4 shards",
                    )
                ],
                "Reads of the store; the axis ends at the 64 requests",
                end=64,
            ),
        ],
    ),
}
"""For each file the title and the axes, from top to bottom."""
