"""Metadata documents for hostile values."""

import json
from typing import Any, Final

from tests.support.formats.neuroglancer_precomputed.case import volume_info
from tests.support.formats.neuroglancer_precomputed.shards import RAW_SHARDING
from tests.support.formats.zarr.building import array_metadata, sharding

ARRAY: Final = array_metadata([8, 8], [4, 4], [sharding([2, 2])])


def with_text(document: Any, text: str) -> bytes:
    """Encode *document* with the JSON *text* in the place of the string ``?``."""
    return json.dumps(document).replace('"?"', text).encode()


def info(*, minishard_bits: int = 1, shard_bits: int = 1, **scale: Any) -> Any:
    """Return an info with one sharded scale, whose members are replaced by those of *scale*."""
    bits = {"minishard_bits": minishard_bits, "shard_bits": shard_bits}
    members = {"size": [64] * 3, "voxel_offset": [0] * 3, "chunk_sizes": [[32] * 3], "key": "s"}
    return volume_info(RAW_SHARDING | bits, **members | scale)
