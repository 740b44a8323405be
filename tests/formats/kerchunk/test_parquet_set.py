"""Reference sets in Parquet: keys, listings, and hostile catalogs and tables."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardgate.errors import DamagedError
from shardgate.formats.kerchunk.parquet_set import decode_catalog, decode_table
from shardgate.formats.kerchunk.reference_table import (
    InvalidReference,
    ReferenceGrid,
    SourcePart,
    TableBuilder,
)
from shardgate.formats.listing import Window
from shardgate.formats.reading import DecodeError
from shardgate.formats.zarr.keys import ChunkKeys
from shardgate.model import ByteRange
from tests.support.formats.kerchunk.sets import (
    LIMIT_NBYTES,
    kerchunk_of,
    opening,
    read_by_fsspec,
    write_hdf5,
    write_json,
    write_parquet,
)

ZARRAY = {"zarr_format": 2, "shape": [4, 6], "chunks": [2, 2], "dtype": "<i4"}


def _catalog(**changes: Any) -> bytes:
    array = ZARRAY | changes.pop("array", {})
    metadata = {".zgroup": {"zarr_format": 2}, "t/.zarray": array}
    return json.dumps({"metadata": metadata, "record_size": 4} | changes).encode()


def _parsed(found: Mapping[str, bytes | None]) -> dict[str, Any]:
    """Parse documents, which two libraries write with spaces and without."""
    return {
        name: json.loads(data or b"") if "/.z" in f"/{name}" else data
        for name, data in found.items()
    }


@pytest.mark.parametrize(("record_size", "inline_nbytes"), [(5, 0), (1000, 100)])
async def test_keys_of_a_file_are_read_as_by_fsspec(
    tmp_path: Path, record_size: int, inline_nbytes: int
) -> None:
    """Each key of a set that kerchunk made of an HDF5 file has the bytes that fsspec reads, and
    the names are those of the set in JSON.
    """
    write_hdf5(tmp_path / "a.h5")
    refs = kerchunk_of(tmp_path / "a.h5", inline_nbytes=inline_nbytes)
    write_parquet(path := tmp_path / "refs.parq", refs, record_size)

    async with opening(path) as opened:
        names = await opened.names()
        found = {name: await opened.read(name) for name in names}

    assert list(names) == sorted([*refs["refs"], ".zmetadata"])
    assert names == {name: len(data or b"") for name, data in found.items()}
    del found[".zmetadata"]
    assert _parsed(found) == _parsed(read_by_fsspec(path, found))


async def test_listing_is_that_of_the_set_in_json(tmp_path: Path) -> None:
    """Names from any prefix, any name on, folded or not, are those of the same set in JSON."""
    write_hdf5(tmp_path / "a.h5")
    refs = kerchunk_of(tmp_path / "a.h5")
    write_parquet(path := tmp_path / "refs.parq", refs)
    write_json(json_path := tmp_path / "refs.json", refs)
    prefixes = ["", "t/1", "g/u/1", "x"]

    async with opening(path) as opened, opening(json_path) as expected:
        some = ["", *[*await expected.names()][::3], "t/1", "t/1.", "t0", "zz"]
        for window in product(prefixes, some, ["", "/"]):
            assert list(await opened.names(*window)) == list(await expected.names(*window)), window


@given(
    counts=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    separator=st.sampled_from(["/", "."]),
    chance=st.randoms(use_true_random=False),
)
def test_numbers_and_keys_of_a_grid_are_inverse(
    counts: list[int], separator: str, chance: Any
) -> None:
    """Keys of present chunks come in the order of their bytes, and each names its number."""
    grid = ReferenceGrid(ChunkKeys("", separator, len(counts)), tuple(counts))
    present = np.array([chance.random() < 0.5 for _ in range(math.prod(counts))])
    found = list(grid.names(present.reshape(counts), "t/", Window("")))

    assert sorted(number for _, number in found) == np.flatnonzero(present).tolist()
    assert [key for key, _ in found] == sorted(key for key, _ in found)
    references = replace(TableBuilder(0).build(()), arrays={"t": grid})
    assert [references.find_chunk(key) for key, _ in found] == [("t", n) for _, n in found]


async def test_keys_in_folders_are_listed_in_them(tmp_path: Path) -> None:
    """Chunks of an array whose keys have slashes are folded, and listed, by folders."""
    write_hdf5(tmp_path / "a.h5")
    write_parquet(path := tmp_path / "refs.parq", kerchunk_of(tmp_path / "a.h5"))
    catalog = path / ".zmetadata"
    catalog.write_text(
        catalog.read_text().replace('"dimension_separator":"."', '"dimension_separator":"/"')
    )

    async with opening(path) as opened:
        folders = [*await opened.names("t/", delimiter="/")]
        inside = [*await opened.names("t/1/", "t/1/0", "/")]

    assert folders == ["t/.zarray", "t/.zattrs", "t/0/", "t/1/", "t/2/", "t/3/"]
    assert inside == ["t/1/1", "t/1/2"]


def test_document_of_a_catalog_may_be_text() -> None:
    """A metadata document that is a text is served as it is."""
    metadata = {"t/.zarray": json.dumps(ZARRAY)}
    catalog = decode_catalog(
        json.dumps({"metadata": metadata, "record_size": 4}).encode(), LIMIT_NBYTES
    )
    row = catalog.names.position("t/.zarray")

    assert row is not None
    assert catalog.table.lookup(row) == json.dumps(ZARRAY).encode()
    assert catalog.find_chunk("t/0.0") == ("t", 0)


def test_consolidated_metadata_are_no_catalog() -> None:
    """Consolidated metadata of a Zarr v2 group have no size of records."""
    data = json.dumps({"metadata": {}, "zarr_consolidated_format": 1}).encode()

    assert not decode_catalog(data, LIMIT_NBYTES).is_metadata
    assert decode_catalog(_catalog(), LIMIT_NBYTES).is_metadata


@pytest.mark.parametrize("size", [0, -4, 2**22 + 1])
def test_invalid_catalog_is_refused(size: int) -> None:
    """A catalog whose tables have an impossible size is refused with a reason."""
    with pytest.raises(DecodeError, match="record_size: expected"):
        decode_catalog(_catalog(record_size=size), LIMIT_NBYTES)


@pytest.mark.parametrize(
    "document",
    [
        3,
        "{",
        "[]",
        "[" * 100_000,
        {},
        ZARRAY | {"shape": [4]},
        ZARRAY | {"shape": [4, -6]},
        ZARRAY | {"shape": [4, 1.5]},
        ZARRAY | {"chunks": [2, 0]},
        ZARRAY | {"shape": [2**62, 2**62]},
        ZARRAY | {"dimension_separator": "-"},
    ],
)
def test_invalid_document_fails_its_own_array(document: Any) -> None:
    """An array whose document is invalid is damage with its chunks, and other arrays are found."""
    metadata = {"t/.zarray": document, "u/.zarray": ZARRAY}
    data = json.dumps({"metadata": metadata, "record_size": 4}).encode()
    catalog = decode_catalog(data, LIMIT_NBYTES)
    row = catalog.names.position("t/.zarray")

    assert row is not None
    assert isinstance(catalog.table.lookup(row), InvalidReference)
    assert isinstance(catalog.find_chunk("t/0.0"), InvalidReference)
    assert catalog.find_chunk("u/0.0") == ("u", 0)
    assert catalog.names.position(".zmetadata") is None


@pytest.mark.parametrize("data", [b"", b"[1", b"{" * 100_000, b"\xff", b'{"a": ' + b"[" * 10**5])
def test_malformed_catalog_is_refused(data: bytes) -> None:
    """A catalog that is no JSON is refused."""
    with pytest.raises(DecodeError, match="no JSON"):
        decode_catalog(data, LIMIT_NBYTES)


async def test_array_of_too_many_chunks_is_not_listed(tmp_path: Path) -> None:
    """Chunks of any number are found, but not listed: absent ones would have to be looked up."""
    path = tmp_path / "refs.parq"
    path.mkdir()
    (path / ".zmetadata").write_bytes(_catalog(array={"shape": [2**40, 2], "chunks": [1, 1]}))

    async with opening(path) as opened:
        assert await opened.read("t/1099511627775.1") is None
        assert list(await opened.names(delimiter="/")) == [".zgroup", ".zmetadata", "t/"]
        with pytest.raises(DamagedError, match="too many to be listed"):
            await opened.names()


async def test_array_without_chunks_is_listed_at_once(tmp_path: Path) -> None:
    """An array of any extent along one dimension, and none along another, has no chunks."""
    path = tmp_path / "refs.parq"
    path.mkdir()
    (path / ".zmetadata").write_bytes(_catalog(array={"shape": [2**40, 0], "chunks": [1, 1]}))

    async with opening(path) as opened:
        assert list(await opened.names()) == [".zgroup", ".zmetadata", "t/.zarray"]


def test_array_whose_path_is_no_key_has_no_tables() -> None:
    """Paths that would lead out of the set are left out with the documents there."""
    metadata = {"t/.zarray": ZARRAY, "../x/.zarray": ZARRAY, "/.zarray": ZARRAY, "a//.zarray": 3}
    data = json.dumps({"metadata": metadata, "record_size": 4}).encode()
    catalog = decode_catalog(data, LIMIT_NBYTES)

    assert set(catalog.arrays) == {"t"}
    assert catalog.left_out.number == 3


def _table(tmp_path: Path, refs: dict[str, Any], record_size: int = 4) -> bytes:
    path = tmp_path / "refs.parq"
    documents = {"t/.zarray": json.dumps(ZARRAY)}
    write_parquet(path, {"version": 1, "refs": documents | refs}, record_size)
    return (path / "t" / "refs.0.parq").read_bytes()


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        (["s3://b/x", 1, -3], "no part of an object"),
        (["s3://b/x", 2**63 - 1, 1], "no part of an object"),
        ("base64:YmFzZTY0OkE=", "no base64"),
    ],
)
def test_invalid_reference_fails_its_own_key(tmp_path: Path, reference: Any, reason: str) -> None:
    """A reference to no part of an object, or that is no base64, leaves others of its table."""
    refs = {"t/0.0": reference, "t/0.1": ["s3://b/x", 1, 2], "t/0.2": "base64:AAE="}
    table = decode_table(_table(tmp_path, refs), 4, LIMIT_NBYTES)

    assert isinstance(invalid := table.lookup(0), InvalidReference)
    assert reason in invalid.reason
    assert table.lookup(1) == SourcePart("s3://b/x", ByteRange(1, 3))
    assert table.lookup(2) == b"\0\1"


def test_table_that_inflates_above_the_limit_is_refused(tmp_path: Path) -> None:
    """A table is refused by the bytes of its pages, before they are inflated."""
    data = _table(tmp_path, {"t/0.0": "x" * 10**6})

    assert len(data) < 10**4
    assert len(decode_table(data, 4, 10**6 + 2000)) == 4
    with pytest.raises(DecodeError, match="of more than 1000000 bytes"):
        decode_table(data, 4, 10**6)


def test_reference_takes_twenty_bytes(tmp_path: Path) -> None:
    """Ten thousand references to a few files take 20 bytes each."""
    count = 10_000
    refs: dict[str, Any] = {f"t/{n}": [f"s3://bucket/{n % 5}.nc", n, 1000] for n in range(count)}
    refs["t/.zarray"] = json.dumps(ZARRAY | {"shape": [count], "chunks": [1]})
    table = decode_table(_table(tmp_path, refs, count), count, LIMIT_NBYTES)

    assert table.nbytes <= 20 * count + 1000
    assert table.lookup(9999) == SourcePart("s3://bucket/4.nc", ByteRange(9999, 10_999))
