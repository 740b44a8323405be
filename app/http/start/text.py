"""Text from elsewhere, as a page may show it."""

from collections.abc import Sequence
from typing import Final

from app.http.target import spell

_TIMES: Final = " \N{MULTIPLICATION SIGN} "
_MOST_LETTERS: Final = 200
_MOST_SIZES: Final = 12
_UNITS: Final = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


def visible(text: str, most: int = _MOST_LETTERS) -> str:
    """Shorten *text*, and write out what is no visible character: what turns lines around, too."""
    shown = "".join(c if c.isprintable() else _escape(c) for c in text[:most])
    return shown if len(text) <= most else f"{shown}…"


def spell_path(path: str) -> str:
    """Write *path*, a key or the beginning of one, as the part of a URL."""
    return "/".join(map(spell, path.split("/")))


def spell_shape(shape: Sequence[int] | None) -> str:
    """Write a shape."""
    if shape is None:
        return ""
    sizes = [str(size) for size in shape[:_MOST_SIZES]]
    return _TIMES.join(sizes + ["…"] * (len(shape) > _MOST_SIZES)) or "scalar"


def spell_nbytes(nbytes: int) -> str:
    """Write a number of bytes in the largest unit that leaves something before the point."""
    size, unit = float(nbytes), 0
    while size >= 1024 and unit < len(_UNITS) - 1:  # noqa: PLR2004 - what the units mean
        size, unit = size / 1024, unit + 1
    return f"{size:.1f} {_UNITS[unit]}" if unit else f"{nbytes} {_UNITS[0]}"


def spell_seconds(seconds: float) -> str:
    """Write a time in its two largest units."""
    minutes, hours, days = (int(seconds // per) for per in (60, 3600, 86400))
    if days:
        return f"{days} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min {int(seconds % 60)} s" if minutes else f"{int(seconds)} s"


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()
