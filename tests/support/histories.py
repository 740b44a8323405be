"""What many writers did to a set of registers, and what of it may be seen."""

from dataclasses import dataclass
from math import inf


@dataclass(slots=True)
class Write:
    """A value that was put under *key*, `None` if it was deleted; times are those of one clock."""

    key: str
    value: bytes | None
    begin: float
    end: float = inf
    """When it was acknowledged: never, if that is infinite."""


def possible(writes: list[Write], key: str) -> set[bytes | None]:
    """Tell what may be under *key* once all is quiet.

    An acknowledged write is gone only where another may have come after it: one that had not
    ended when it began. A key begins with nothing.
    """
    of_key = [Write(key, None, -inf, -inf), *(each for each in writes if each.key == key)]
    return {
        each.value
        for each in of_key
        if not any(other.end < inf and other.begin > each.end for other in of_key)
    }


def ever(writes: list[Write], key: str) -> set[bytes | None]:
    """Tell what a reader may have seen under *key* at any time."""
    return {None, *(each.value for each in writes if each.key == key)}
