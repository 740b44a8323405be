"""Table of sharded volumes: every option that the service must unshard, each option once."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from tests.support.clients.precomputed.volumes import (
    IDENTITY,
    MURMUR,
    Bits,
    Point,
    Scale,
    Volume,
    by_cloudvolume,
    by_igneous,
    by_tensorstore,
    sharding,
)
from tests.support.clients.writing import Json, Values, counted

SHAPE: Final = (18, 10, 7)
"""Five by three by two chunks: the bits of their grid are 3, 2 and 1, none of them used up."""
VALUES: Final = counted((*SHAPE, 1))
SOME: Final[Bits] = (1, 1, 2)
"""Several chunks per minishard, minishards per shard, and shards."""

BITS: Final[Sequence[tuple[str, Bits]]] = (
    (IDENTITY, (0, 0, 0)),
    (IDENTITY, (0, 6, 0)),
    (IDENTITY, (1, 2, 3)),
    (IDENTITY, (9, 3, 5)),
    (IDENTITY, (0, 3, 61)),
    (IDENTITY, (0, 0, 64)),
    (MURMUR, (0, 2, 1)),
    (MURMUR, (3, 1, 4)),
    (MURMUR, (1, 0, 63)),
)
"""Sums below, at and above the six bits of the grid; up to all 64."""


def _bits() -> Iterator[Volume]:
    for name, bits in BITS:
        path = f"bits/{name}_{'_'.join(map(str, bits))}"
        yield Volume(path, by_tensorstore, [Scale(VALUES, sharding(bits, name))])


def _encodings_of_shards() -> Iterator[Volume]:
    table = ((IDENTITY, "gzip", "gzip"), (IDENTITY, "gzip", "raw"), (MURMUR, "raw", "gzip"))
    for name, index, data in table:
        how = sharding(SOME, name, index=index, data=data)
        path = f"shards/{name}_index_{index}_data_{data}"
        yield Volume(path, by_tensorstore, [Scale(VALUES, how)])


def _data_types() -> Iterator[Volume]:
    for dtype, channels in (("u8", 1), ("f4", 4)):
        values = counted((*SHAPE, channels), dtype)
        if dtype == "u8":
            values += np.uint64(2**60)
        path = f"dtype/{values.dtype.name}_{channels}"
        yield Volume(path, by_tensorstore, [Scale(values, sharding(SOME))])


def _encodings_of_chunks() -> Iterator[Volume]:
    blocks: Json = {"compressed_segmentation_block_size": [4, 2, 8]}
    table: list[tuple[str, str, int, Json]] = [
        ("compressed_segmentation", "u4", 1, blocks),
        ("compressed_segmentation", "u8", 4, blocks),
        ("jpeg", "u1", 1, {"jpeg_quality": 60}),
        ("jpeg", "u1", 3, {}),
        ("png", "u1", 1, {"png_level": 3}),
        ("png", "u2", 1, {}),
        ("png", "u1", 3, {}),
        ("png", "u1", 4, {}),
    ]
    for encoding, dtype, channels, options in table:
        values = counted((*SHAPE, channels), dtype)
        is_segmentation = encoding == "compressed_segmentation"
        how = sharding(SOME, data="gzip" if is_segmentation else "raw")
        scale = Scale(values, how, encoding=encoding, options=options)
        path = f"encoding/{encoding}_{values.dtype.name}_{channels}"
        kind = "segmentation" if is_segmentation else "image"
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
        "one_axis_long": ((35, 3, 5), (2, 2, 2), (0, 0, 0), (3, 3, 3)),
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
    for name, data in ((IDENTITY, "raw"), (MURMUR, "gzip")):
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
    for name, writer in (("tensorstore", by_tensorstore), ("cloudvolume", by_cloudvolume)):
        yield Volume(f"plain/{name}", writer, [Scale(VALUES, None, offset=(-2, 0, 9))])


def _by_clouds() -> Iterator[Volume]:
    yield Volume("igneous/image", by_igneous, [Scale(VALUES, None)])
    # cloud-volume writes a box of chunks per shard: all bits of the grid, or one shard by hash
    table = ((IDENTITY, (1, 2, 3), "raw", "raw"), (MURMUR, (1, 2, 0), "gzip", "gzip"))
    for name, bits, index, data in table:
        scale = Scale(VALUES, sharding(bits, name, index=index, data=data))
        path = f"cloudvolume/{name}_index_{index}_data_{data}"
        yield Volume(path, by_cloudvolume, [scale])
    scale = Scale(
        counted((*SHAPE, 1), "u8"),
        sharding((0, 2, 4), index="gzip"),
        encoding="compressed_segmentation",
        options={"compressed_segmentation_block_size": [8, 8, 8]},
        offset=(4, -8, 12),
    )
    yield Volume("cloudvolume/compressed_segmentation_uint64_1", by_cloudvolume, [scale])


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
