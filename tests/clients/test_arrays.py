"""Random sharded arrays read back equal through one running service."""

import struct
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from itertools import count
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import tensorstore
import zarr
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from app.settings import DatasetSettings, Settings
from tests.clients.arrays import CASES
from tests.clients.writing import (
    BIG,
    CRC32C,
    GZIP,
    LITTLE,
    ZSTD,
    Case,
    Json,
    Shape,
    Values,
    by_tensorstore,
    by_zarr,
    default_keys,
    quiet,
    same,
    sharding,
    transpose,
    untranspose,
    v2_keys,
    write,
)
from tests.serving import serving

EMPTY = 2**64 - 1


@pytest.mark.parametrize("name", [c.name for c in CASES if c.name.startswith("fill/")])
def test_arrays_with_holes_lack_a_shard_and_entries(bucket: Path, name: str) -> None:
    """One shard is absent, and one has three empty entries of four."""
    assert not (bucket / name / "c/0/1").exists()
    index = struct.unpack("<8Q", (bucket / name / "c/1/1").read_bytes()[-68:-4])
    assert index.count(EMPTY) == 6


MAX_CHUNKS: Final = 150
"""Of a read array, so that an example stays quick."""
ENCODINGS: Final = (default_keys("/"), default_keys("."), v2_keys("/"), v2_keys("."))


@dataclass(frozen=True, slots=True)
class Service:
    """A folder that gets new arrays, and the URL it is served under."""

    folder: Path
    url: str
    numbers: Iterator[int]
    """Give each array a name of its own, as caches are allowed to remember."""


@pytest.fixture(scope="module")
def served_folder(tmp_path_factory: pytest.TempPathFactory) -> Generator[Service]:
    """Serve an empty folder."""
    folder = tmp_path_factory.mktemp("random")
    with serving(Settings(datasets={"d": DatasetSettings(url=str(folder))})) as url:
        yield Service(folder, f"{url}/d", count())


def _transposed(draw: st.DrawFn, chunk: Shape) -> tuple[Shape, list[Json]]:
    """Put a transpose before what encodes *chunk*, or nothing; give the shape before it."""
    if not draw(st.booleans()):
        return chunk, []
    codecs = [transpose(*draw(st.permutations(range(len(chunk)))))]
    return untranspose(chunk, codecs), codecs


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Build a chain of codecs from the innermost chunk outwards, and an array around it."""
    ndim = draw(st.integers(0, 4))
    sizes = st.lists(st.integers(1, 3), min_size=ndim, max_size=ndim).map(tuple)
    codecs: list[Json] = [draw(st.sampled_from([LITTLE, BIG]))]
    codecs += draw(st.lists(st.sampled_from([ZSTD, GZIP, CRC32C]), max_size=2))
    shape, filters = _transposed(draw, draw(sizes))
    codecs = filters + codecs
    for _ in range(draw(st.integers(1, 3))):
        per_shard = draw(sizes)
        index = [draw(st.sampled_from([LITTLE, BIG])), *draw(st.sampled_from([[], [CRC32C]]))]
        location = draw(st.sampled_from(["start", "end"]))
        codecs = [sharding(shape, codecs, index=index, location=location)]
        codecs += draw(st.sampled_from([[], [], [CRC32C]]))
        shape = tuple(a * b for a, b in zip(shape, per_shard, strict=True))
        shape, filters = _transposed(draw, shape)
        codecs = filters + codecs
    writers = st.sampled_from([by_tensorstore, by_zarr])
    values = _values(draw, tuple(draw(st.integers(0, 2 * n + 1)) for n in shape))
    return Case(
        name="a",
        write=by_zarr if _has_checksum_after(codecs) else draw(writers),
        values=values,
        shards=shape,
        codecs=codecs,
        fill_value=7,
        key_encoding=draw(st.sampled_from(ENCODINGS)),
    )


def _values(draw: st.DrawFn, shape: Shape) -> Values:
    """Make an array of which a part is the fill value, so that chunks and shards are absent."""
    seed = draw(st.integers(0, 2**32 - 1))
    density = draw(st.sampled_from([0.02, 0.3, 1.0]))
    random = np.random.default_rng(seed)
    values = random.integers(0, 60000, shape, dtype=np.uint16)
    return np.where(random.random(shape) < density, values, np.uint16(7)).reshape(shape)


def _has_checksum_after(codecs: Any) -> bool:
    """Tell whether a checksum follows a sharding codec, which TensorStore does not allow."""
    names = [codec["name"] for codec in codecs]
    if "sharding_indexed" not in names:
        return False
    at = names.index("sharding_indexed")
    return at + 1 < len(names) or _has_checksum_after(codecs[at]["configuration"]["codecs"])


def _written(case: Case, path: Path) -> bool:
    """Write *case*; `False` if that is one of what zarr-python cannot write."""
    try:
        write(case, path)
    except ValueError:
        if case.write is by_tensorstore:
            raise
        return False
    return True


_PATIENT: Final = settings(
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow]
)


@pytest.mark.parametrize("examples", [100, pytest.param(2000, marks=pytest.mark.soak)])
def test_any_array_reads_back(served_folder: Service, examples: int) -> None:
    """Whatever the shapes, transposes, nesting and index, both readers see the written values."""

    @settings(_PATIENT, max_examples=examples)
    @given(case=cases(), data=st.data())
    def check(case: Case, data: st.DataObject) -> None:
        _read_back(served_folder, case, data)

    check()


def _read_back(served_folder: Service, case: Case, data: st.DataObject) -> None:
    grid = [-(-n // chunk) for n, chunk in zip(case.values.shape, case.served, strict=True)]
    assume(prod(grid) <= MAX_CHUNKS)
    name = f"{case.name}{next(served_folder.numbers)}"
    assume(_written(case, served_folder.folder / name))
    if data.draw(st.booleans(), label="read with TensorStore"):
        spec = {"driver": "zarr3", "kvstore": f"{served_folder.url}/{name}/"}
        array: Any = tensorstore.open(spec, open=True).result()
        chunks, values = tuple(array.chunk_layout.read_chunk.shape or ()), array.read().result()
    else:
        with quiet():
            array = zarr.open_array(f"{served_folder.url}/{name}", mode="r", zarr_format=3)
            assert array.shards is None
            chunks, values = array.chunks, np.asarray(array[...])

    assert chunks == case.served
    same(values, case.values)
