"""What FastAPI finds out about the types in routes, shared by all services of a process.

It would take most of the time of a start, and is the same in each service.
"""

from typing import Any, get_args

from pydantic import ConfigDict, TypeAdapter

_known: dict[tuple[Any, str, str], TypeAdapter[Any]] = {}


def adapt(annotation: Any, *, config: ConfigDict | None) -> TypeAdapter[Any]:
    """Return the adapter of a type, which is made once."""
    kind, *more = get_args(annotation)
    key = kind, repr(more), repr(config)
    if key not in _known:
        _known[key] = TypeAdapter(annotation, config=config)
    return _known[key]
