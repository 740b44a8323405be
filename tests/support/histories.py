"""Histories of concurrent writes, and the values that may be read after them."""

from dataclasses import dataclass
from math import inf


@dataclass(slots=True)
class Write:
    """A value written under *key*, `None` if deleted; times are those of one clock."""

    key: str
    value: bytes | None
    begin: float
    end: float = inf
    """Time of the acknowledgement, infinite if there is none."""


def possible(writes: list[Write], key: str) -> set[bytes | None]:
    """Return the values that *key* may have after all writes.

    An acknowledged write may be replaced only by one that had not ended when it began. A key begins
    with nothing.
    """
    of_key = [Write(key, None, -inf, -inf), *(each for each in writes if each.key == key)]
    return {
        each.value
        for each in of_key
        if not any(other.end < inf and other.begin > each.end for other in of_key)
    }


def ever(writes: list[Write], key: str) -> set[bytes | None]:
    """Return the values that a reader may have read of *key* at any time."""
    return {None, *(each.value for each in writes if each.key == key)}
