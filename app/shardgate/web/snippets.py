"""Code that reads what a page shows, for curl and the libraries of Python."""

import json
import shlex
from collections.abc import Mapping
from typing import Final
from urllib.parse import quote

from shardgate.survey.arrays import MOST_LETTERS, ArrayView

_ZARR: Final = """# pip install zarr 'fsspec[http]'
import zarr

{name} = zarr.open_{name}("{url}", mode="r")
print({name}.info)"""
_ZARR_OF_UNEQUAL_CHUNKS: Final = """# pip install zarr 'fsspec[http]'
import zarr

with zarr.config.set({{"array.rectilinear_chunks": True}}):
    array = zarr.open_array("{url}", mode="r")
print(array.info)"""
_TENSORSTORE: Final = """# pip install tensorstore
import tensorstore

spec = {{"driver": "{driver}", "kvstore": "{url}/"}}
array = tensorstore.open(spec, read=True).result()
print(array)"""
_XARRAY: Final = """# pip install xarray zarr 'fsspec[http]'
import xarray

dataset = xarray.open_zarr("{url}", consolidated={is_consolidated}{drop})
print(dataset)"""
_DASK: Final = """# pip install 'dask[array]' zarr 'fsspec[http]'
import dask.array

array = dask.array.from_zarr("{url}", chunks={chunks})
print(array)"""
_XARRAY_OF_DASK: Final = """# pip install xarray 'dask[array]' zarr 'fsspec[http]'
import dask.array
import xarray

array = dask.array.from_zarr("{url}", chunks={chunks})
print(xarray.DataArray(array, dims={dims}))"""

_ARRAY: Final = {
    "zarr_format": 3,
    "node_type": "array",
    "shape": [1024, 1024],
    "data_type": "uint16",
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [256, 256]}},
    "chunk_key_encoding": {"name": "default"},
    "fill_value": 0,
    "codecs": [
        {"name": "bytes", "configuration": {"endian": "little"}},
        {"name": "zstd", "configuration": {"level": 3, "checksum": False}},
    ],
}
"""An array without shards: those with shards are not written under the keys of inner chunks."""


def creation_snippets(base: str, dataset: str) -> dict[str, str]:
    """Return requests of curl that begin an empty *dataset* below the URL *base*."""
    url = f"{base}/{quote(dataset, safe='')}/a/zarr.json"
    repository = shlex.quote(json.dumps({"name": dataset}))
    array = shlex.quote(json.dumps(_ARRAY))
    return {
        "An Icechunk repository": f"curl -sS -d {repository} {shlex.quote(f'{base}/api/datasets')}",
        "A Zarr array": f"curl -sS -X PUT -d {array} {shlex.quote(url)}",
    }


def curl(url: str) -> dict[str, str]:
    """Return code that prints the document at *url*."""
    return {"curl": f"curl -sS {shlex.quote(url)}"}


def array_snippets(url: str, found: ArrayView) -> dict[str, str]:
    """Return code that opens the Zarr array *found* at *url*, by client.

    Chunks of dask are whole shards, which the array at *url* does not tell. Chunks that differ in
    size are read by zarr-python alone.
    """
    if found.has_unequal_chunks:
        return {"zarr-python": _ZARR_OF_UNEQUAL_CHUNKS.format(url=url)}
    chunks = tuple(found.shard_shape or found.inner_chunk_shape or ())
    snippets = {"zarr-python": _ZARR.format(name="array", url=url)}
    if found.is_plain:
        snippets["TensorStore"] = _TENSORSTORE.format(driver=found.driver, url=url)
    if chunks:
        snippets["dask"] = _DASK.format(url=url, chunks=chunks)
    if chunks and has_dimensions(found):
        dims = ascii(tuple(found.dimension_names or ()))
        snippets["xarray"] = _XARRAY_OF_DASK.format(url=url, chunks=chunks, dims=dims)
    return snippets


def group_snippets(
    url: str, arrays: Mapping[str, ArrayView], *, is_consolidated: bool
) -> dict[str, str]:
    """Return code that opens the Zarr group at *url* with *arrays* right below it, by client."""
    snippets = {"zarr-python": _ZARR.format(name="group", url=url)}
    if arrays and all(
        has_dimensions(found) and not found.has_unequal_chunks for found in arrays.values()
    ):
        dropped = _conflicting(arrays)
        drop = f", drop_variables={json.dumps(dropped)}" if dropped else ""
        snippets["xarray"] = _XARRAY.format(url=url, is_consolidated=is_consolidated, drop=drop)
    return snippets


def volume_snippets(url: str) -> dict[str, str]:
    """Return code that opens the precomputed volume at *url*, by client."""
    return {"TensorStore": _TENSORSTORE.format(driver="neuroglancer_precomputed", url=url)}


def has_dimensions(found: ArrayView) -> bool:
    """Return whether all dimensions of *found* have names of their own, none of them long."""
    names = [name for name in found.dimension_names or () if name and len(name) <= MOST_LETTERS]
    return len(set(names)) == len(found.shape or ())


def _conflicting(arrays: Mapping[str, ArrayView]) -> list[str]:
    """Return the names of arrays with a dimension that an earlier one has in another size."""
    sizes: dict[str | None, int] = {}
    dropped = []
    for name, found in arrays.items():
        own = dict(zip(found.dimension_names or (), found.shape or (), strict=False))
        if any(sizes.get(dimension, size) != size for dimension, size in own.items()):
            dropped.append(name)
        else:
            sizes |= own
    return dropped
