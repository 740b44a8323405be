"""The written arrays hold what their names say, seen without any reader of arrays."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.clients.arrays import BY_NAME, CASES
from tests.clients.writing import Json, by_zarr_v2

EMPTY = 2**64 - 1


@pytest.mark.parametrize("name", [c.name for c in CASES if not c.edit and c.write != by_zarr_v2])
def test_the_writer_kept_the_codecs(bucket: Path, name: str) -> None:
    """``zarr.json`` names the codecs of the case, none more, in their order."""
    document = json.loads((bucket / name / "zarr.json").read_text())

    assert _spelled_out(document["codecs"]) == _spelled_out(BY_NAME[name].codecs)


@pytest.mark.parametrize("name", [c.name for c in CASES if c.name.startswith("fill/")])
def test_arrays_with_holes_lack_a_shard_and_entries(bucket: Path, name: str) -> None:
    """One shard is absent, and one has three empty entries of four."""
    assert not (bucket / name / "c/0/1").exists()
    index = struct.unpack("<8Q", (bucket / name / "c/1/1").read_bytes()[-68:-4])
    assert index.count(EMPTY) == 6


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
