"""Table of sharded volumes: every combination of options that the service must unshard."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, Final

import numpy as np

from tests.support.clients.precomputed.volumes import (
    IDENTITY,
    MURMUR,
    Bits,
    Point,
    Scale,
    Volume,
    Writer,
    by_cloudvolume,
    by_igneous,
    by_tensorstore,
    sharding,
)
from tests.support.clients.writing import Json, Values, counted

SHAPE: Final = (18, 10, 7)
"""Five by three by two chunks: the bits of their grid are 3, 2 and 1, none of them used up."""
VALUES: Final = counted((*SHAPE, 1))
HASHES: Final = (IDENTITY, MURMUR)
ENCODINGS: Final = ("raw", "gzip")
SOME: Final[Bits] = (1, 1, 2)
"""Several chunks per minishard, minishards per shard, and shards."""

BITS: Final[tuple[Bits, ...]] = (
    (0, 0, 0),
    (0, 0, 6),
    (0, 6, 0),
    (6, 0, 0),
    (1, 2, 3),
    (2, 2, 2),
    (0, 2, 1),
    (3, 1, 4),
    (9, 3, 5),
    (0, 9, 1),
    (0, 3, 61),
    (1, 0, 63),
    (0, 0, 64),
)
"""Sums below, at and above the six bits of the grid; up to all 64."""


def _bits() -> Iterator[Volume]:
    for bits, name in product(BITS, HASHES):
        path = f"bits/{name}_{'_'.join(map(str, bits))}"
        yield Volume(path, by_tensorstore, [Scale(VALUES, sharding(bits, name))])


def _encodings_of_shards() -> Iterator[Volume]:
    for name, index, data in product(HASHES, ENCODINGS, ENCODINGS):
        how = sharding(SOME, name, index=index, data=data)
        path = f"shards/{name}_index_{index}_data_{data}"
        yield Volume(path, by_tensorstore, [Scale(VALUES, how)])


def _data_types() -> Iterator[Volume]:
    table = product(("u1", "i1", "u2", "i4", "u4", "u8", "f4"), (1, 4))
    for dtype, channels in table:
        values = counted((*SHAPE, channels), dtype)
        if dtype == "u8":
            values += np.uint64(2**60)
        path = f"dtype/{values.dtype.name}_{channels}"
        yield Volume(path, by_tensorstore, [Scale(values, sharding(SOME))])


def _encodings_of_chunks() -> Iterator[Volume]:
    blocks: Json = {"compressed_segmentation_block_size": [4, 2, 8]}
    table: list[tuple[str, str, int, Json]] = [
        ("compressed_segmentation", "u4", 1, blocks),
        ("compressed_segmentation", "u8", 1, blocks),
        ("compressed_segmentation", "u8", 4, blocks),
        ("jpeg", "u1", 1, {"jpeg_quality": 60}),
        ("jpeg", "u1", 3, {}),
        ("png", "u1", 1, {"png_level": 3}),
        ("png", "u2", 1, {}),
        ("png", "u1", 3, {}),
        ("png", "u1", 4, {}),
    ]
    for (encoding, dtype, channels, options), data in product(table, ENCODINGS):
        values = counted((*SHAPE, channels), dtype)
        kind = "segmentation" if encoding == "compressed_segmentation" else "image"
        scale = Scale(values, sharding(SOME, data=data), encoding=encoding, options=options)
        path = f"encoding/{encoding}_{values.dtype.name}_{channels}_{data}"
        yield Volume(path, by_tensorstore, [scale], kind)


def _grids() -> Iterator[Volume]:
    table: dict[str, tuple[Point, Point, Point, Bits]] = {
        "offset": (SHAPE, (4, 4, 4), (3, 100, 7), SOME),
        "negative_offset": (SHAPE, (4, 4, 4), (-7, -100, -4), SOME),
        "offset_from_minus_to_plus": (SHAPE, (4, 4, 4), (-6, -4, -1), SOME),
        "unequal_chunks": (SHAPE, (3, 5, 2), (0, 0, 0), (1, 2, 3)),
        "no_edge": ((8, 8, 8), (4, 4, 4), (0, 0, 0), (1, 1, 1)),
        "one_chunk": ((3, 2, 1), (4, 4, 4), (5, 0, 0), (0, 0, 0)),
        "one_chunk_of_many_shards": ((3, 2, 1), (4, 4, 4), (0, 0, 0), (0, 2, 9)),
        "a_row": ((1, 1, 40), (4, 4, 2), (0, 0, 0), (1, 2, 2)),
        "voxels": ((3, 5, 2), (1, 1, 1), (0, 0, 0), (2, 2, 2)),
        "one_axis_long": ((70, 3, 5), (2, 2, 2), (0, 0, 0), (3, 3, 3)),
    }
    for name, (shape, chunk, offset, bits) in table.items():
        scale = Scale(counted((*shape, 1)), sharding(bits), chunk=chunk, offset=offset)
        yield Volume(f"grid/{name}", by_tensorstore, [scale])


def with_holes() -> Values:
    """Return values of which only three chunks of 4x4x4 are not zero."""
    values = np.zeros((16, 16, 16, 1), "u2")
    values[:4, :4, :4] = 7
    values[4:8, :4, :4] = 9
    values[12:, 12:, 15:] = 11
    return values


def _holes() -> Iterator[Volume]:
    for name, data in product(HASHES, ENCODINGS):
        scale = Scale(with_holes(), sharding((1, 1, 4), name, data=data))
        yield Volume(f"holes/{name}_{data}", by_tensorstore, [scale])
    scale = Scale(with_holes(), sharding((0, 2, 4), index="gzip"))
    yield Volume("holes/cloudvolume", by_cloudvolume, [scale])
    nothing = Scale(np.zeros((16, 8, 8, 1), "u2"), sharding((1, 1, 2)))
    yield Volume("holes/everything", by_tensorstore, [nothing])


def pyramid() -> list[Scale]:
    """Return scales with different shardings, one without, and one with a key of its own."""
    values = counted((16, 12, 8, 2), "u1")
    return [
        Scale(values, sharding((1, 1, 3))),
        Scale(
            values[::2, ::2],
            sharding((1, 0, 3), MURMUR, index="gzip", data="gzip"),
            chunk=(2, 4, 3),
            offset=(1, -2, 3),
            resolution=(16, 16, 8),
        ),
        Scale(values[::4, ::4, ::2], None, resolution=(32, 32, 16)),
        Scale(
            values[::8, ::8, ::4],
            sharding((0, 2, 0), index="gzip"),
            chunk=(1, 1, 1),
            resolution=(64, 64, 32),
            key="64 nm",
        ),
    ]


def _scales() -> Iterator[Volume]:
    yield Volume("scales/all", by_tensorstore, pyramid())
    yield Volume("scales/cloudvolume", by_cloudvolume, pyramid()[:1] + pyramid()[2:3])
    plain = [replace(scale, sharding=None) for scale in pyramid()]
    yield Volume("scales/not_sharded", by_tensorstore, plain)


def _not_sharded() -> Iterator[Volume]:
    for writer in (by_tensorstore, by_cloudvolume):
        name = writer.__name__.removeprefix("by_")
        yield Volume(f"plain/{name}", writer, [Scale(VALUES, None, offset=(-2, 0, 9))])


def _by_clouds() -> Iterator[Volume]:
    yield Volume("igneous/image", by_igneous, [Scale(VALUES, None)])
    writer: Writer = by_cloudvolume
    for name, index, data in product(HASHES, ENCODINGS, ENCODINGS):
        # cloud-volume writes a box of chunks per shard: all bits of the grid, or one shard by hash
        bits = (1, 2, 3) if name == IDENTITY else (1, 2, 0)
        scale = Scale(VALUES, sharding(bits, name, index=index, data=data))
        yield Volume(f"cloudvolume/{name}_index_{index}_data_{data}", writer, [scale])
    table: list[tuple[str, str, int, Any]] = [
        ("raw", "u8", 1, {}),
        ("raw", "f4", 3, {}),
        ("compressed_segmentation", "u8", 1, {"compressed_segmentation_block_size": [8, 8, 8]}),
        ("png", "u1", 1, {}),
        ("jpeg", "u1", 1, {}),
    ]
    for encoding, dtype, channels, options in table:
        values = counted((*SHAPE, channels), dtype)
        how = sharding((0, 2, 4), index="gzip")
        scale = Scale(values, how, encoding=encoding, options=options, offset=(4, -8, 12))
        path = f"cloudvolume/{encoding}_{values.dtype.name}_{channels}"
        yield Volume(path, writer, [scale])


CASES: Final[tuple[Volume, ...]] = (
    *_bits(),
    *_encodings_of_shards(),
    *_data_types(),
    *_encodings_of_chunks(),
    *_grids(),
    *_holes(),
    *_scales(),
    *_not_sharded(),
    *_by_clouds(),
)

BY_NAME: Final = {case.name: case for case in CASES}
LESS: Final = (
    "bits/", "dtype/", "cloudvolume/", "grid/one_axis", "plain/", "shards/murmurhash3",
)  # fmt: skip
FURTHER: Final = [
    name
    for name in BY_NAME
    if (name.startswith(LESS) and name != "cloudvolume/identity_index_raw_data_raw")
    or name.endswith(("_data_gzip", "_1_raw"))
    or (name.startswith("encoding/") and name.endswith("_gzip"))
]
"""Cases that differ in ways that do not affect shards, or that take long."""
