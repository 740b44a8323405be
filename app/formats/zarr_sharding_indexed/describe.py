"""What the metadata of a node tells to people."""

import json
from collections.abc import Sequence
from operator import floordiv
from typing import Any

from app.formats.reading import DecodeError
from app.formats.surveying import Description
from app.formats.zarr_sharding_indexed.metadata import Node
from app.formats.zarr_sharding_indexed.unshard import codec_name, configuration, shape_of

type Json = Any


def describe(node: Node) -> Description:
    """Describe an array.

    Raises: `DecodeError` where it is served as it is and its metadata cannot be understood.
    """
    served: dict[str, Json] = json.loads(node.served)
    array = node.array
    codecs = served.get("codecs")
    if not isinstance(codecs, list):
        raise DecodeError("the array has no list of codecs")
    inner = array.inner_chunk_shape if array else _chunk_shape(served.get("chunk_grid"))
    return Description(
        path="",
        format="zarr",
        kind="array",
        shape=shape_of(served.get("shape"), "shape", least=0),
        data_type=codec_name(served.get("data_type")),
        dimension_names=_dimension_names(served.get("dimension_names")),
        inner_chunk_shape=inner,
        codecs=tuple(map(codec_name, codecs)),
        shard_shape=array.shard_shape if array else None,
        chunks_per_shard=tuple(map(floordiv, array.shard_shape, inner)) if array else None,
        index_location=tuple(
            level.index.location.value for level in (array.unsharded.levels if array else ())
        ),
        why_sharded=node.why_sharded,
    )


def array_names(node: Node) -> Sequence[str] | None:
    """Name the arrays in a group's consolidated metadata; `None` if it has none."""
    consolidated = json.loads(node.served).get("consolidated_metadata")
    nodes = consolidated.get("metadata") if isinstance(consolidated, dict) else None
    if not isinstance(nodes, dict):
        return None
    return [
        name
        for name, below in sorted(nodes.items())
        if isinstance(below, dict) and below.get("node_type") == "array"
    ]


def _chunk_shape(grid: Json) -> tuple[int, ...]:
    """Read the shape of all chunks; there is none where they differ."""
    if codec_name(grid) != "regular":
        return ()
    return shape_of(configuration(grid).get("chunk_shape"), "chunk_shape", least=0)


def _dimension_names(names: Json) -> tuple[str | None, ...] | None:
    if names is None:
        return None
    if not isinstance(names, list) or not all(isinstance(name, str | None) for name in names):
        raise DecodeError(f"dimension_names is no list of names: {str(names)[:80]}")
    return tuple(names)
