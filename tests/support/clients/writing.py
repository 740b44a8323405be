"""Test cases of arrays, and their writing and reading by real libraries."""

import json
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
import tensorstore
import zarr

from tests.support.formats.zarr import building

type Json = dict[str, Any]
type Values = np.ndarray[Any, Any]
type Shape = tuple[int, ...]

GZIP: Final[Json] = {"name": "gzip", "configuration": {"level": 1}}
ZSTD: Final[Json] = {"name": "zstd", "configuration": {"level": 1, "checksum": False}}
VLEN_UTF8: Final[Json] = {"name": "vlen-utf8"}


def transpose(*order: int) -> Json:
    """Return the codec that puts dimension ``order[i]`` at position *i*."""
    return {"name": "transpose", "configuration": {"order": list(order)}}


def sharding(
    inner: Sequence[int],
    codecs: Sequence[Json] = (building.LITTLE,),
    *,
    index: Sequence[Json] = (building.LITTLE, building.CRC),
    location: str = "end",
) -> Json:
    """Return the sharding codec with inner chunks of the shape *inner*."""
    members = {"index_codecs": list(index), "index_location": location}
    codec: Json = building.sharding(list(inner), list(codecs), **members)
    return codec


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """An array with known *values*, and its storage."""

    name: str
    """Name and path in the bucket: ``index/start``."""
    write: "Writer"
    values: Values
    shards: Shape
    """Shape of a stored object's chunk."""
    codecs: Sequence[Json]
    data_type: Any = None
    """Data type where it differs from that of *values*."""
    fill_value: Any = 0
    key_encoding: Json = field(default_factory=lambda: default_keys("/"))
    dimension_names: Sequence[str | None] | None = None
    attributes: Json = field(default_factory=dict)
    edges: Sequence[int | Sequence[int]] | None = None
    """Lengths of the shards along each dimension, where they differ; *shards* has the largest."""
    edit: Callable[[Json], Json] | None = None
    """Edit of the written ``zarr.json``, for forms that no current writer produces."""

    @property
    def served(self) -> Shape:
        """Shape of the chunks that readers of the service see."""
        return unsharded(self.shards, self.codecs)


type Writer = Callable[[Case, Path], None]


def default_keys(separator: str) -> Json:
    """Return the encoding of keys like ``c/0/1``."""
    return {"name": "default", "configuration": {"separator": separator}}


def v2_keys(separator: str) -> Json:
    """Return the encoding of keys like ``0.1``."""
    return {"name": "v2", "configuration": {"separator": separator}}


def unsharded(chunks: Shape, codecs: Sequence[Json]) -> Shape:
    """Return the chunk shape after all removable sharding codecs are removed.

    Only fixed-size checksums may follow such a codec.
    """
    names = [codec["name"] for codec in codecs]
    if "sharding_indexed" not in names:
        return chunks
    at = names.index("sharding_indexed")
    if set(names[at + 1 :]) - {"crc32c"}:
        return chunks
    configuration = codecs[at]["configuration"]
    inner = unsharded(tuple(configuration["chunk_shape"]), configuration["codecs"])
    return untranspose(inner, codecs[:at])


def untranspose(shape: Shape, filters: Sequence[Json]) -> Shape:
    """Map *shape* back through the transpose codecs *filters*."""
    for codec in reversed(filters):
        order = codec["configuration"]["order"]
        shape = tuple(shape[order.index(axis)] for axis in range(len(order)))
    return shape


def write(case: Case, path: Path) -> None:
    """Write *case* to *path*, and assert that its writer reads the same values."""
    with quiet():
        case.write(case, path)
        read = read_tensorstore if case.write is by_tensorstore else read_zarr
        same(read(path), case.values)
    if case.edit:
        file = path / "zarr.json"
        file.write_text(json.dumps(case.edit(json.loads(file.read_text()))))


def by_zarr(case: Case, path: Path) -> None:
    """Write with zarr-python."""
    options = {"codecs": case.codecs, "chunk_key_encoding": case.key_encoding, "zarr_format": 3}
    dtype, names = case.data_type or case.values.dtype, case.dimension_names
    _create(case, path, dtype=dtype, dimension_names=names, **options)


def by_zarr_v2(case: Case, path: Path) -> None:
    """Write with zarr-python in format 2, which knows no shards."""
    _create(case, path, dtype=case.values.dtype, zarr_format=2)


def _create(case: Case, path: Path, **options: Any) -> None:
    with rectilinear_allowed():
        array: Any = zarr.create(
            store=path,
            shape=case.values.shape,
            chunks=case.edges or case.shards,
            fill_value=case.fill_value,
            attributes=case.attributes,
            **options,
        )
        array[...] = case.values


def by_tensorstore(case: Case, path: Path) -> None:
    """Write with TensorStore."""
    metadata: Json = {
        "shape": case.values.shape,
        "data_type": case.data_type or case.values.dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": case.shards}},
        "chunk_key_encoding": case.key_encoding,
        "codecs": case.codecs,
        "fill_value": case.fill_value,
        "attributes": case.attributes,
    }
    if case.dimension_names is not None:
        metadata["dimension_names"] = case.dimension_names
    spec = {"driver": "zarr3", "kvstore": f"file://{path}/", "metadata": metadata}
    tensorstore.open(spec, create=True).result().write(case.values).result()


def rectilinear_allowed() -> Any:
    """Return a block in which zarr-python knows grids of chunks of several sizes."""
    return zarr.config.set({"array.rectilinear_chunks": True})


def read_zarr(store: Any) -> Values:
    """Read all of an array with zarr-python, from a folder or a store."""
    with rectilinear_allowed():
        return np.asarray(zarr.open_array(store, mode="r")[...])


def read_tensorstore(path: Path | Json) -> Values:
    """Read all of an array with TensorStore, from a folder or a kvstore."""
    spec = {"driver": "zarr3", "kvstore": f"file://{path}/" if isinstance(path, Path) else path}
    return np.asarray(tensorstore.open(spec).result().read().result())


def same(found: Any, expected: Values) -> None:
    """Assert equal types, shapes and values, where NaN equals NaN."""
    np.testing.assert_array_equal(np.asarray(found), expected, strict=True)


def counted(shape: Shape, dtype: Any = "u2") -> Values:
    """Return an array of nonzero elements, most of which differ."""
    return (np.arange(prod(shape)) % 250 + 1).astype(dtype).reshape(shape)


@contextmanager
def quiet() -> Generator[None]:
    """Suppress warnings of zarr-python within the block."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def write_group(path: Path, attributes: Mapping[str, Any] | None = None) -> None:
    """Write the ``zarr.json`` of a group with zarr-python."""
    zarr.create_group(path, attributes=dict(attributes or {}))


def consolidate(path: Path) -> None:
    """Add the metadata of all nodes below the group at *path* to its ``zarr.json``.

    zarr-python refuses to parse transposes of unequal chunks before sharding.
    """
    nodes = {
        file.parent.relative_to(path).as_posix(): json.loads(file.read_text())
        for file in sorted(path.rglob("zarr.json"))
    }
    group = nodes.pop(".")
    group["consolidated_metadata"] = {"kind": "inline", "must_understand": False, "metadata": nodes}
    (path / "zarr.json").write_text(json.dumps(group))
