"""Documents that TensorStore reads from a folder, and must read through the service as well."""

import json
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Final

import httpx
import pytest

from tests.clients.precomputed.cases import SOME, VALUES
from tests.clients.precomputed.volumes import (
    Scale,
    Volume,
    by_tensorstore,
    document,
    read_cloudvolume,
    read_tensorstore,
    sharding,
)
from tests.clients.stores import from_folder
from tests.clients.writing import Json, same

ELSEWHERE: Final = ("outside", "outside_in_a_container")


def _spell_as_floats(scale: Json) -> None:
    for name in ("size", "voxel_offset"):
        scale[name] = [float(n) for n in scale[name]]
    scale["chunk_sizes"] = [[float(n) for n in size] for size in scale["chunk_sizes"]]


def _spell_bits_as_floats(scale: Json) -> None:
    how = scale["sharding"]
    how.update({name: float(how[name]) for name in how if name.endswith("_bits")})


def _leave_out_defaults(scale: Json) -> None:
    del scale["voxel_offset"]
    del scale["sharding"]["minishard_index_encoding"], scale["sharding"]["data_encoding"]


def _leave(_: Json) -> None:
    pass


ODD: Final[dict[str, tuple[str, Callable[[Json], None]]]] = {
    "floats": ("8_8_8", _spell_as_floats),
    "floats_for_bits": ("8_8_8", _spell_bits_as_floats),
    "defaults": ("8_8_8", _leave_out_defaults),
    "nested": ("a/b/c", _leave),
    "up_and_down": ("a/../8_8_8", _leave),
    "outside": ("../other/8_8_8", _leave),
    "outside_in_a_container": ("../nested/elsewhere", _leave),
}
"""The key of a volume's one scale, and what its writer spelled in another way."""


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a volume of each kind."""
    root = tmp_path_factory.mktemp("odd")
    for name, (key, edit) in ODD.items():
        scale = Scale(VALUES, sharding(SOME), key=key)
        by_tensorstore(Volume(name, by_tensorstore, [scale]), root / name, sharded=True)
        info = document(root / name)
        edit(info["scales"][0])
        (root / name / "info").write_text(json.dumps(info))
    return root


@pytest.fixture(scope="module")
def url(bucket: Path) -> Generator[str]:
    """Serve them from the folder."""
    with from_folder(bucket) as base:
        yield f"{base}/bucket"


@pytest.mark.parametrize("name", ODD)
def test_reads_the_values(bucket: Path, url: str, name: str) -> None:
    """TensorStore finds the values in the folder, and through the service."""
    same(read_tensorstore(f"file://{bucket / name}/"), VALUES)
    assert httpx.get(f"{url}/{name}/info").status_code == 200
    same(read_tensorstore(f"{url}/{name}/"), VALUES)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_shards_elsewhere_stay_shards(bucket: Path, url: str, name: str) -> None:
    """A scale outside of the volume is served as it is: its chunks are asked for elsewhere."""
    assert httpx.get(f"{url}/{name}/info").json() == document(bucket / name)
    same(read_cloudvolume(f"precomputed://{url}/{name}"), VALUES)


@pytest.mark.parametrize("name", [name for name in ODD if name not in ELSEWHERE])
def test_other_scales_are_unsharded(url: str, name: str) -> None:
    """What is spelled in another way is understood, not passed through."""
    assert "sharding" not in httpx.get(f"{url}/{name}/info").text
