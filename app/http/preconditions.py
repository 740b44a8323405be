"""What If-Match and If-None-Match demand of what a write replaces (RFC 9110 §13.1)."""

import re
from collections.abc import Sequence
from typing import Final

from app.errors import BadHeaderError
from app.model import ETag
from app.resolve.bodies import Demand

_TAG: Final = r'(?:W/)?"[\x21\x23-\x7e\x80-\xff]*"|[^\s",*][^\s",]*'
"""Clients of S3 may leave the quotes out."""
_LIST: Final = re.compile(rf"[\s,]*(?:{_TAG})(?:\s*,[\s,]*(?:{_TAG}))*[\s,]*")
_EACH: Final = re.compile(_TAG)


def parse_demand(if_match: str | None, if_none_match: str | None) -> Demand | None:
    """Read both headers; `None` if there is neither.

    Raises: `BadHeaderError`: a condition that is not understood is not taken for fulfilled.
    """
    if if_match is None and if_none_match is None:
        return None
    is_wanted = None if if_match is None else _names("If-Match", if_match, weakly=False)
    is_unwanted = (
        None if if_none_match is None else _names("If-None-Match", if_none_match, weakly=True)
    )

    def demand(current: Sequence[ETag]) -> bool:
        if is_wanted is not None and not is_wanted(current):
            return False
        return is_unwanted is None or not is_unwanted(current)

    return demand


def _names(name: str, value: str, *, weakly: bool) -> Demand:
    """Read a header, which names some versions, or with ``*`` each that there may be."""
    if value.strip() == "*":
        return bool
    if not _LIST.fullmatch(value):
        raise BadHeaderError(f"{name} is no list of entity tags")
    tags = {tag if tag.endswith('"') else f'"{tag}"' for tag in _EACH.findall(value)}
    if weakly:
        tags = {tag.removeprefix("W/") for tag in tags}
    return lambda current: not tags.isdisjoint(current)
