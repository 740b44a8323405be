"""Records with some members changed."""

from typing import Any, NamedTuple


def replaced[R: NamedTuple](record: R, **changes: Any) -> R:
    """Return *record* with *changes*, as `copy.replace` does from Python 3.13 on.

    The method of named tuples is public, though its name has an underscore.
    """
    return record._replace(**changes)
