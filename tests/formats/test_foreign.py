"""Roots that are files of other formats, as their real writers write them."""

from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import xarray
from PIL import Image

from shardgate.formats.foreign import BEGIN_NBYTES, explain_file
from shardgate.settings import DatasetSettings, Settings
from tests.support.commands import run
from tests.support.serving import client_of, serving

ADVICE = "make a reference set of it, and serve that (docs/netcdf.md)"


def _hdf5(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["a"] = np.arange(9)


def _netcdf(path: Path) -> None:
    xarray.Dataset({"a": ("x", [1.5])}).to_netcdf(path, engine="scipy", format="NETCDF3_CLASSIC")


def _netcdf_64(path: Path) -> None:
    xarray.Dataset({"a": ("x", [1.5])}).to_netcdf(path, engine="scipy", format="NETCDF3_64BIT")


def _tiff(path: Path) -> None:
    Image.new("L", (8, 8)).save(path, "TIFF")


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (_hdf5, "an HDF5 file"),
        (_netcdf, "a classic NetCDF file"),
        (_netcdf_64, "a classic NetCDF file"),
        (_tiff, "a TIFF file"),
    ],
)
def test_command_says_what_a_file_is(
    write: Callable[[Path], None], name: str, tmp_path: Path
) -> None:
    """A local root that is such a file ends the command, which says what it is and what to do."""
    write(tmp_path / "data.bin")
    done = run("inspect", str(tmp_path / "data.bin"))

    assert done.returncode == 2
    assert f"data.bin: is {name}" in done.stderr
    assert ADVICE in done.stderr


def test_other_files_are_not_explained() -> None:
    """Other beginnings of files have no explanation."""
    for data in (b"", b"\x89PNG\r\n\x1a\n", b"CDF\x03", b"II*", bytes(BEGIN_NBYTES)):
        assert explain_file(data) == ""


def test_remote_root_says_what_it_is(tmp_path: Path) -> None:
    """A file of a web server as a root: its page, description and keys say what it is."""
    _hdf5(tmp_path / "field.nc")
    raw = DatasetSettings(url=str(tmp_path), view="raw")
    with serving(Settings(datasets={"raw": raw})) as url:
        remote = {
            "field": DatasetSettings(url=f"{url}/raw/field.nc"),
            "gone": DatasetSettings(url=f"{url}/raw/gone.nc"),
        }
        with client_of(Settings(datasets=remote)) as client:
            page = client.get("/field/", headers={"accept": "text/html"})
            (damage,) = client.get("/api/datasets/field").json()["damaged"]
            key = client.get("/field/a/.zarray")
            gone = client.get("/gone/a")

    assert (page.status_code, ADVICE in page.text) == (424, True)
    assert damage["reason"].startswith("is an HDF5 file")
    assert (key.status_code, ADVICE in key.json()["detail"]) == (424, True)
    assert gone.status_code == 503
