"""Drawings of the range and the distribution of the values that a picture is made of."""

from collections.abc import Sequence
from fractions import Fraction
from math import log1p
from typing import Final, NamedTuple

from shardgate.web.previews import Histogram, PlaneValues
from shardgate.web.rendering import template

_WIDTH: Final = 252
_HEIGHT: Final = 80


class _Curve(NamedTuple):
    """A histogram as it is drawn, and the values from black to its full colour below it."""

    color: str
    """Empty for shades of grey."""
    outline: str
    ramp: tuple[float, float] | None
    """Where the ramp begins, and its width."""


def draw_histogram(values: PlaneValues) -> bytes:
    """Return the drawing of *values* in SVG: heights are logarithms of counts."""
    low = min((each.low for each in values.histograms), default=0.0)
    high = max((each.high for each in values.histograms), default=0.0)
    most = max((count for each in values.histograms for count in each.counts), default=0)
    text = template("histogram.svg").render(
        curves=[_draw(each, low, high, most) for each in values.histograms],
        low=_spell(low),
        high=_spell(high),
        width=_WIDTH,
        height=_HEIGHT,
        lines=_describe(values),
    )
    return text.encode()


def _draw(shown: Histogram, low: float, high: float, most: int) -> _Curve:
    def place(value: float) -> float:
        if high == low:
            return 0.0
        # Exact: the difference of floats may be infinite, and so may be its reciprocal.
        inside = Fraction(min(max(value, low), high)) - Fraction(low)
        return float(inside / (Fraction(high) - Fraction(low))) * _WIDTH

    first = place(shown.low)
    step = (place(shown.high) - first or _WIDTH) / len(shown.counts)
    tops = [_HEIGHT * (1 - log1p(count) / log1p(most or 1)) for count in shown.counts]
    steps = "".join(f"V{top:.1f}H{first + step * (at + 1):.1f}" for at, top in enumerate(tops))
    ramp = None
    if shown.shown is not None and high > low:
        start, stop = map(place, shown.shown)
        ramp = start, max(stop - start, 1)
    return _Curve(shown.color or "", f"M{first:.1f} {_HEIGHT}{steps}V{_HEIGHT}z", ramp)


def _describe(values: PlaneValues) -> Sequence[str]:
    """Return the lines below a drawing."""
    read = f"{values.count:,} values read; logarithmic scale"
    if values.labels is not None:
        count, least, greatest = values.labels
        lines = [f"{count:,} labels in the picture", f"from {least} to {greatest}"]
        return lines if count else lines[:1]
    if not values.histograms:
        return ["no values are known of this plane"]
    if values.contrast is None or len(values.histograms) > 1:
        return [read]
    low, high = map(_spell, values.contrast)
    return [f"98 % lie between {low} and {high}", read]


def _spell(value: float) -> str:
    return f"{value:,.0f}" if value.is_integer() and abs(value) < 1e15 else f"{value:.5g}"  # noqa: PLR2004 - more have no comma
