"""What people say of a snapshot or a repository, as it is written in version 2."""

from collections.abc import Mapping, Sequence

from app.formats.documents import Json
from app.formats.icechunk.flatbuffer_writing import Items, NewTable, Text, data_vector
from app.formats.icechunk.flexbuffer_writing import encode_flexbuffer


def encode_metadata(values: Mapping[str, Json]) -> tuple[tuple[str, bytes], ...]:
    """Spell *values* as items, by name.

    Raises: `ValueError` for what cannot be spelled.
    """
    return tuple((name, encode_flexbuffer(values[name])) for name in sorted(values, key=str.encode))


def items_vector(items: Sequence[tuple[str, bytes]]) -> Items:
    """Write items in their order."""
    return Items([NewTable((Text(name), data_vector(value))) for name, value in items])
