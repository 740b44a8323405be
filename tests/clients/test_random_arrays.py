"""Random arrays are read as libraries wrote them, and libraries read what is written to them."""

from collections.abc import Generator
from itertools import count
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, assume, given, reject, settings
from hypothesis import strategies as st

from tests.support.clients.filling import over_obstore
from tests.support.clients.reading import OPENERS, open_tensorstore
from tests.support.clients.services import Taker, taking_into_folder
from tests.support.clients.writing import (
    Case,
    Json,
    Shape,
    Values,
    by_tensorstore,
    default_keys,
    quiet,
    read_tensorstore,
    read_zarr,
    rectilinear_allowed,
    same,
    v2_keys,
)
from tests.support.formats.zarr.nesting import Nesting, nestings

MAX_CHUNKS: Final = 150
"""Most chunks of a random array."""
FILL: Final = 7
ENCODINGS: Final = (default_keys("/"), default_keys("."), v2_keys("/"), v2_keys("."))
_numbers: Final = count()


@pytest.fixture(scope="module")
def taker(tmp_path_factory: pytest.TempPathFactory) -> Generator[Taker]:
    """Serve a folder."""
    with taking_into_folder(tmp_path_factory.mktemp("random")) as taker:
        yield taker


@pytest.mark.parametrize("examples", [25, pytest.param(2000, marks=pytest.mark.soak)])
def test_random_array_reads_and_writes_as_stored(taker: Taker, examples: int) -> None:
    """An array of any shape, grid, transposes, nesting and index reads as a library wrote it.

    A region that a client writes is read from the shards by that library.
    """

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(nestings(letters=False), st.sampled_from(ENCODINGS), st.data())
    def check(nesting: Nesting, keys: Json, data: st.DataObject) -> None:
        assume(sum(1 for _ in nesting.coords()) <= MAX_CHUNKS)
        folder = taker.folder / f"a{next(_numbers)}"
        is_by_tensorstore = _is_known_to_tensorstore(nesting) and data.draw(st.booleans())
        write = _write_by_tensorstore if is_by_tensorstore else _write_by_zarr
        expected = write(folder, nesting, keys, _draw_values(data, nesting))
        url = f"{taker.url}/data/{folder.name}"
        by_zarr = OPENERS["obstore"](url)
        assert (by_zarr.chunks, by_zarr.shards) == (nesting.inner_chunk_shape, None)
        same(by_zarr[...], expected)
        same(open_tensorstore(url).read().result(), expected)

        region = _draw_region(data, nesting.shape)
        expected[region] = data.draw(st.sampled_from([0, FILL]), label="written")
        written: Any = zarr.open_array(over_obstore(taker.url, folder.name), mode="r+")
        written[region] = expected[region]
        same((read_tensorstore if is_by_tensorstore else read_zarr)(folder), expected)
        same(written[...], expected)

    with quiet():
        check()


def _is_known_to_tensorstore(nesting: Nesting) -> bool:
    """Return whether no checksum follows a sharding codec, and the grid is regular."""
    codecs = nesting.codecs
    while "sharding_indexed" in (names := [codec["name"] for codec in codecs]):
        if names[-1] != "sharding_indexed":
            return False
        codecs = codecs[-1]["configuration"]["codecs"]
    return _is_regular(nesting)


def _is_regular(nesting: Nesting) -> bool:
    return bool(nesting.document["chunk_grid"]["name"] == "regular")


def _draw_values(data: st.DataObject, nesting: Nesting) -> Values:
    """Draw values of all shards, with a share of fill values, so that chunks are absent."""
    shape = tuple(map(sum, nesting.edges))
    density = data.draw(st.sampled_from([0.02, 0.3, 1.0]), label="density")
    random = np.random.default_rng(prod(shape))
    values = random.integers(0, 60000, shape, dtype=np.uint16)
    values = np.where(random.random(shape) < density, values, np.uint16(FILL)).reshape(shape)
    if shape:
        values[_draw_region(data, shape)] = FILL
    return values


def _draw_region(data: st.DataObject, shape: Shape) -> tuple[slice, ...]:
    ends = (data.draw(st.tuples(*[st.integers(0, size)] * 2), label="region") for size in shape)
    return tuple(slice(min(each), max(each)) for each in ends)


def _write_by_tensorstore(folder: Path, nesting: Nesting, keys: Json, values: Values) -> Values:
    values = np.array(values[tuple(map(slice, nesting.shape))])
    options: Any = {"fill_value": FILL, "key_encoding": keys}
    shards = tuple(nesting.document["chunk_grid"]["configuration"]["chunk_shape"])
    by_tensorstore(Case("", by_tensorstore, values, shards, nesting.codecs, **options), folder)
    return values


def _write_by_zarr(folder: Path, nesting: Nesting, keys: Any, values: Values) -> Values:
    """Fill all shards, and resize the array to its shape."""
    with rectilinear_allowed():
        try:
            array: Any = zarr.create(
                store=folder,
                shape=values.shape,
                chunks=nesting.shard_shape if _is_regular(nesting) else nesting.edges,
                codecs=nesting.codecs,
                dtype=values.dtype,
                fill_value=FILL,
                chunk_key_encoding=keys,
                zarr_format=3,
            )
        except ValueError:  # zarr-python refuses transposes of unequal chunks before sharding
            reject()
        array[...] = values
        if nesting.shape:
            array.resize(nesting.shape)
    return np.array(values[tuple(map(slice, nesting.shape))])
