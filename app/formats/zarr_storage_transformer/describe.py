"""What the metadata of an array tell to people."""

import json
import re
from collections.abc import Sequence
from operator import mul
from typing import Any, Final

from app.formats.surveying import Description
from app.formats.zarr_sharding_indexed.unshard import shape_of
from app.formats.zarr_storage_transformer.keys import MetadataKeys
from app.formats.zarr_storage_transformer.metadata import Document

type Json = Any

_CODEC: Final = re.compile("https?://.*/codecs?/(.+)")


def describe(path: str, document: Document) -> Description:
    """Describe the array at *path*.

    Raises: `DecodeError` where it is served as it is and its metadata cannot be understood.
    """
    served: dict[str, Json] = json.loads(document.served)
    shape = shape_of(served.get("shape"), "shape", least=0)
    chunk_shape = _chunk_shape(served.get("chunk_grid"))
    per_shard = document.array.grid.chunks_per_shard if document.array else None
    return Description(
        path=path,
        format="zarr",
        kind="array",
        shape=shape,
        data_type=_data_type(served.get("data_type")),
        inner_chunk_shape=chunk_shape,
        codecs=_codecs(served.get("compressor")),
        shard_shape=tuple(map(mul, chunk_shape, per_shard)) if per_shard is not None else None,
        chunks_per_shard=per_shard,
        index_location=("end",) if document.array else (),
        why_sharded=document.why_sharded,
    )


def array_paths(consolidated: Document, keys: MetadataKeys) -> Sequence[str]:
    """Name the arrays in the metadata of a hierarchy that zarr-python 2 gathered."""
    document = json.loads(consolidated.served)
    nodes = document.get("metadata") if isinstance(document, dict) else None
    found = map(keys.parse, nodes if isinstance(nodes, dict) else ())
    return sorted(path for path in found if path is not None)


def _chunk_shape(grid: Json) -> tuple[int, ...]:
    """Read the shape of all chunks; there is none where they differ."""
    if not isinstance(grid, dict) or grid.get("type") != "regular" or "extension" in grid:
        return ()
    return shape_of(grid.get("chunk_shape"), "chunk_shape", least=0)


def _data_type(data_type: Json) -> str | None:
    """Spell a data type; one that an extension defines has a type in it."""
    found = data_type.get("type") if isinstance(data_type, dict) else data_type
    return found if isinstance(found, str) else None


def _codecs(compressor: Json) -> tuple[str, ...]:
    """Name the compressor, if there is one, by the end of its URI: ``blosc/1.0``."""
    uri = compressor.get("codec") if isinstance(compressor, dict) else None
    return (_CODEC.sub(r"\1", uri),) if isinstance(uri, str) else ()
