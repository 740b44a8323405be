"""Hierarchies with the storage transformer, encoded with `struct` from the drafts of 2022."""

import itertools
import json
from collections.abc import Mapping
from functools import partial
from math import prod
from typing import Any

from tests.support.formats.case import Case
from tests.support.formats.zarr import building
from tests.support.zipped import zipped

CORE = "https://purl.org/zarr/spec/protocol/core/3.0"
SHARDING = "https://purl.org/zarr/spec/storage_transformers/sharding/1.0"
ANY_LENGTH: dict[str, Any] = {"compressor": {"codec": "https://purl.org/zarr/spec/codec/gzip/1.0"}}
"""Member with which chunks of any length are valid."""
ENTRY_POINT: dict[str, Any] = {
    "zarr_format": CORE,
    "metadata_encoding": CORE,
    "metadata_key_suffix": ".json",
    "extensions": [],
}
BY_ZARR_PYTHON: dict[str, Any] = {
    "attributes": {},
    "chunk_grid": {"chunk_shape": [2, 2], "separator": ".", "type": "regular"},
    "chunk_memory_layout": "C",
    "compressor": {
        "codec": "https://purl.org/zarr/spec/codec/blosc/1.0",
        "configuration": {"blocksize": 0, "clevel": 5, "cname": "lz4", "shuffle": 1},
    },
    "data_type": "<i4",
    "dimension_separator": ".",
    "extensions": [],
    "fill_value": 0,
    "shape": [5, 7],
    "storage_transformers": [
        {"configuration": {"chunks_per_shard": [2, 3]}, "extension": SHARDING, "type": "indexed"}
    ],
}
"""Metadata that zarr-python 2.18.2 wrote, member for member."""


encode_index = partial(building.encode_index, crc=False)
encode_shard = partial(building.encode_shard, crc=False)


def sharding(chunks_per_shard: Any) -> dict[str, Any]:
    """Return the storage transformer."""
    return {
        "extension": SHARDING,
        "type": "indexed",
        "configuration": {"chunks_per_shard": chunks_per_shard},
    }


def array_metadata(
    shape: list[int],
    chunk_shape: list[int],
    transformers: list[Any] | None = None,
    *,
    separator: str = "/",
    **members: Any,
) -> dict[str, Any]:
    """Return the metadata of a uint8 array; *transformers* None leaves out the member."""
    return {
        "shape": shape,
        "data_type": "u1",
        "chunk_grid": {"type": "regular", "chunk_shape": chunk_shape, "separator": separator},
        "chunk_memory_layout": "C",
        "fill_value": 0,
        "extensions": [],
        "attributes": {},
        **({} if transformers is None else {"storage_transformers": transformers}),
        **members,
    }


def encode(document: Any) -> bytes:
    """Encode *document* as JSON."""
    return json.dumps(document).encode()


def build(
    chunks: Mapping[str, bytes],
    *,
    shape: tuple[int, ...] = (5, 7),
    per_shard: tuple[int, ...] = (2, 2),
    path: str = "",
    separator: str = "/",
    entry_point: Mapping[str, Any] = ENTRY_POINT,
    suffix: str = ".json",
    **members: Any,
) -> dict[str, bytes]:
    """Return the objects of an array in chunks of 2 per dimension; *chunks* are by key."""
    metadata = array_metadata(
        list(shape),
        [2] * len(shape),
        [sharding(list(per_shard))],
        separator=separator,
        **ANY_LENGTH,
        **members,
    )
    objects = {"zarr.json": encode(entry_point), f"meta/root{path}.array{suffix}": encode(metadata)}
    stem = f"data/root{path}/c"
    grid = [range(-(-n // (2 * count))) for n, count in zip(shape, per_shard, strict=True)]
    for shard in itertools.product(*grid):
        inner = [
            chunks.get(
                stem
                + separator.join(
                    str(s * n + i) for s, n, i in zip(shard, per_shard, at, strict=True)
                )
            )
            for at in itertools.product(*map(range, per_shard))
        ]
        if any(chunk is not None for chunk in inner):
            objects[stem + separator.join(map(str, shard))] = encode_shard(inner)
    return objects


def build_padded(chunks: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return an array as zarr-python wrote it for ``chunks_per_shard=2`` and two dimensions."""
    return build(chunks, per_shard=(2, 1), storage_transformers=[sharding([2])])


def build_scalar(chunks: Mapping[str, bytes], *, per_shard: list[int]) -> dict[str, bytes]:
    """Return a scalar array, with *per_shard* of one number as zarr-python wrote it."""
    key = "data/root/scalar/c0" if per_shard else "data/root/scalar/c"
    metadata = array_metadata([], [], [sharding(per_shard)], **ANY_LENGTH)
    empty = [None] * (prod(per_shard) - 1)
    return {
        "zarr.json": encode(ENTRY_POINT),
        "meta/root/scalar.array.json": encode(metadata),
        **({key: encode_shard([chunks[key], *empty])} if key in chunks else {}),
    }


def _case(
    name: str,
    write: Any,
    present: list[str],
    absent: list[str],
    *,
    metadata: str = ".json",
    nbytes: int = 4,
) -> Case:
    return Case(
        name,
        write,
        {key: zipped(bytes([number] * nbytes)) for number, key in enumerate(present)},
        tuple(absent),
        checksummed=False,
        metadata=(metadata, "zarr.json"),
    )


def _grid(stem: str, separator: str) -> tuple[list[str], list[str]]:
    """Return keys of chunks of the array of 5 x 7 elements, and keys of none."""
    present = ["0/0", "0/1", "1/0", "2/3", "0/3"]
    absent = ["1/1", "2/0", "3/0", "0/4", "0/0/0", "00/0", "0", "", "/0/0", "-1/0"]

    def name(keys: list[str]) -> list[str]:
        return [f"data/root{stem}/c{key.replace('/', separator)}" for key in keys]

    other = ".0" if separator == "/" else "/0"
    return name(present), [*name(absent), f"data/root{stem}/c0{other}", "data/root/x/c0/0", "c0/0"]


CASES = (
    _case("nested-node", partial(build, path="/foo/bar"), *_grid("/foo/bar", "/")),
    _case("node-named-like-a-chunk", partial(build, path="/c0/1"), *_grid("/c0/1", "/")),
    _case(
        "dots-and-suffix",
        partial(
            build,
            separator=".",
            entry_point={**ENTRY_POINT, "metadata_key_suffix": ".meta"},
            suffix=".meta",
        ),
        *_grid("", "."),
        metadata=".meta",
    ),
    _case("zarr-python-padded", build_padded, *_grid("", "/")),
    _case(
        "three-dimensions",
        partial(build, shape=(4, 8, 6), per_shard=(1, 3, 2), path="/cube"),
        [f"data/root/cube/c{n}" for n in ("0/0/0", "0/2/1", "1/3/2", "1/0/0")],
        [f"data/root/cube/c{n}" for n in ("0/1/1", "1/3/3", "2/0/0", "1/2/2", "0/0")],
        nbytes=8,
    ),
    _case(
        "no-dimension",
        partial(build_scalar, per_shard=[]),
        ["data/root/scalar/c"],
        ["data/root/scalar/c0", "data/root/scalar/c/0", "data/root/scalar"],
        nbytes=1,
    ),
    _case(
        "zarr-python-no-dimension",
        partial(build_scalar, per_shard=[3]),
        ["data/root/scalar/c0"],
        ["data/root/scalar/c", "data/root/scalar/c1", "data/root/scalar"],
        nbytes=1,
    ),
)
