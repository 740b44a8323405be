"""The written arrays hold what their names say, seen without any reader of arrays."""

import json
import struct
from math import prod
from pathlib import Path
from typing import Any

import crc32c
import pytest
import tensorstore

from tests.clients.arrays import BY_NAME, CASES
from tests.clients.writing import Json, by_zarr_v2

EMPTY = 2**64 - 1


def test_every_case_has_a_name_of_its_own() -> None:
    """No two cases are written to one place."""
    assert len(BY_NAME) == len(CASES)


@pytest.mark.parametrize("name", [c.name for c in CASES if not c.edit and c.write != by_zarr_v2])
def test_the_writer_kept_the_codecs(bucket: Path, name: str) -> None:
    """``zarr.json`` names the codecs of the case, none more, in their order."""
    document = json.loads((bucket / name / "zarr.json").read_text())

    assert _spelled_out(document["codecs"]) == _spelled_out(BY_NAME[name].codecs)


@pytest.mark.parametrize("name", [c.name for c in CASES if c.name.startswith("index/")])
def test_the_index_lies_where_the_name_says(bucket: Path, name: str) -> None:
    """Offsets, byte order, checksum and place of each shard's index are those of the case."""
    _, location, endian, crc = name.removeprefix("index/").split("_")
    shards = list((bucket / name / "c").rglob("?"))
    shards = [shard for shard in shards if shard.is_file()]
    assert len(shards) == 4
    for shard in shards:
        data = shard.read_bytes()
        size = 16 * prod(a // b for a, b in zip((4, 6, 8), (2, 3, 4), strict=True))
        whole = size + (4 if crc == "crc" else 0)
        index = data[:whole] if location == "start" else data[-whole:]
        order = "<" if endian == "little" else ">"
        numbers = struct.unpack(f"{order}{size // 8}Q", index[:size])
        start = whole if location == "start" else 0
        for offset, nbytes in zip(numbers[::2], numbers[1::2], strict=True):
            assert offset == nbytes == EMPTY or (
                nbytes == 48 and start <= offset <= start + len(data) - whole - nbytes
            )
        if crc == "crc":
            assert struct.unpack("<I", index[size:]) == (crc32c.crc32c(index[:size]),)


@pytest.mark.parametrize("name", [c.name for c in CASES if c.name.startswith("fill/")])
def test_arrays_with_holes_lack_a_shard_and_entries(bucket: Path, name: str) -> None:
    """One shard is absent, and one has three empty entries of four."""
    assert not (bucket / name / "c/0/1").exists()
    index = struct.unpack("<8Q", (bucket / name / "c/1/1").read_bytes()[-68:-4])
    assert index.count(EMPTY) == 6


@pytest.mark.parametrize(
    ("name", "spelling"),
    [
        ("document/endian_in_index_codecs", ("bytes", "endian")),
        ("document/endian_in_inner_codecs", ("endian", "bytes")),
        ("document/endian_in_both", ("endian", "endian")),
    ],
)
def test_the_older_spelling_is_there(bucket: Path, name: str, spelling: tuple[str, str]) -> None:
    """ZEP 2's name of the bytes codec stands where the case says."""
    document = json.loads((bucket / name / "zarr.json").read_text())
    configuration = document["codecs"][0]["configuration"]

    assert configuration["codecs"][0]["name"] == spelling[0]
    assert configuration["index_codecs"][0]["name"] == spelling[1]


@pytest.mark.parametrize("name", [c.name for c in CASES if c.name.startswith(("nested/", "tran"))])
def test_tensorstore_finds_the_same_inner_chunks(bucket: Path, name: str) -> None:
    """What a case expects to be served is what TensorStore calls the read chunk."""
    spec = {"driver": "zarr3", "kvstore": f"file://{bucket / name}/"}
    array = tensorstore.open(spec).result()

    assert BY_NAME[name].served == tuple(array.chunk_layout.read_chunk.shape or ())


def _spelled_out(codecs: Any) -> list[Json]:
    """Add what a writer may leave out."""
    full = []
    for codec in codecs:
        configuration = dict(codec.get("configuration", {}))
        if codec["name"] == "sharding_indexed":
            configuration.setdefault("index_location", "end")
            for member in ("codecs", "index_codecs"):
                configuration[member] = _spelled_out(configuration[member])
        if codec["name"] == "bytes":
            configuration.setdefault("endian", "little")
        if codec["name"] == "zstd":
            configuration.setdefault("checksum", False)
        full.append({"name": codec["name"], "configuration": configuration})
    return full
