"""Chunks of sharded folders by their 64-bit ids alone, as the key-value store that shards are."""

import json
import struct
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import pytest
import tensorstore

from tests.support.clients.precomputed.cases import VALUES as VOXELS
from tests.support.clients.precomputed.reading import opened
from tests.support.clients.precomputed.segments import IDS, number_fragments, write_legacy
from tests.support.clients.precomputed.volumes import (
    MURMUR,
    Scale,
    sharding,
    write_scale,
    write_shards,
)
from tests.support.clients.services import Taker, ask, taking_into_folder
from tests.support.clients.writing import Json

VALUES: Final = {0: b"zero", 12345: b"a value", 2**64 - 1: b"the last"}
HOW: Final = sharding((0, 1, 2), MURMUR, index="gzip", data="gzip")
SCALE: Final = Scale(VOXELS, sharding((1, 2, 3)), key="s")


@pytest.fixture(scope="module")
def taker(tmp_path_factory: pytest.TempPathFactory) -> Generator[Taker]:
    """Serve values beside a sharding document, a volume, and meshes in numbered fragments."""
    folder = tmp_path_factory.mktemp("numbers")
    (folder / "values").mkdir()
    write_shards(folder / "values", HOW, VALUES)
    (folder / "values/info").write_text(json.dumps(HOW))
    write_scale(SCALE, folder / "volume")
    write_legacy(folder / "legacy")
    with taking_into_folder(folder) as opened_service:
        yield opened_service


def open_shards(base: str, how: Json) -> Any:
    """Open the shards in *base*, a URL with a final slash, as TensorStore's key-value store."""
    spec = {"driver": "neuroglancer_uint64_sharded", "base": base, "metadata": how}
    return tensorstore.KvStore.open(spec).result()


def test_value_is_read_and_written_by_its_number(taker: Taker) -> None:
    """Values that TensorStore stored are read by numbers, and TensorStore reads one that was PUT.

    Only the canonical spelling of 64 bits is a key.
    """
    for number, value in VALUES.items():
        assert ask(taker.client, f"/data/values/{number}").content == value
    for absent in ("7", "00", "012345", "+12345", "-0", "12345.0", str(2**64)):
        assert ask(taker.client, f"/data/values/{absent}").status_code == 404
    assert taker.client.put("/data/values/7", content=b"seven").status_code == 200

    for face in (f"file://{taker.folder}/values/", f"{taker.url}/data/@sharded/values/"):
        stored = open_shards(face, HOW)
        assert stored[struct.pack(">Q", 7)] == b"seven"
        assert stored[struct.pack(">Q", 12345)] == b"a value"


def test_chunk_of_a_volume_is_read_by_its_morton_code(taker: Taker) -> None:
    """Each chunk that TensorStore finds in the shards is served by its code and by its name."""
    stored = open_shards(f"file://{taker.folder}/volume/s/", SCALE.sharding or {})
    by_number = {
        ask(taker.client, f"/data/volume/s/{number}").content: stored[key]
        for key in stored.list().result()
        for (number,) in [struct.unpack(">Q", key)]
    }
    by_name = [ask(taker.client, f"/data/volume/s/{name}") for name, _ in SCALE.chunks()]

    assert len(by_number) > 10
    assert all(served == kept for served, kept in by_number.items())
    assert {each.content for each in by_name if each.status_code == 200} == set(by_number)
    assert ask(taker.client, "/data/volume/s/4096").status_code == 404


def test_cloudvolume_reads_meshes_whose_fragments_are_numbers(taker: Taker, tmp_path: Path) -> None:
    """cloud-volume reads meshes whose manifests name fragments in shards by numbers."""
    write_legacy(tmp_path / "plain")
    number_fragments(taker.folder / "legacy", HOW)
    served = opened(f"precomputed://{taker.url}/data/legacy").mesh
    plain = opened(f"file://{tmp_path}/plain").mesh

    for segment in IDS:
        assert served.get(segment) == plain.get(segment)


def test_folders_of_numbers_are_described(taker: Taker) -> None:
    """The description of a dataset has the folder of values with its sharding."""
    arrays = taker.client.get("/api/datasets/data").json()["arrays"]
    (values,) = [each for each in arrays if each["path"] == "values"]

    assert (values["kind"], values["format"]) == ("values", "precomputed")
    assert values["sharding"].startswith(MURMUR)
