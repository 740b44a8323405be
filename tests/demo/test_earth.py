"""`shardgate.demo.earth`: the field, as xarray reads it from the service."""

import json
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
import xarray

from shardgate import demo
from shardgate.errors import ConfigurationError
from shardgate.settings import Settings
from tests.support.examples import datasets_of
from tests.support.serving import serving


def test_field_is_read_through_its_reference_set(demo_paths: dict[str, Path]) -> None:
    """The field has the values in the NetCDF file, with its dimensions, units and dates."""
    with h5py.File(demo_paths["weather"].parent / demo.FIELD) as file:
        stored = file["t2m"][:]

    with serving(Settings(datasets=datasets_of(demo_paths))) as url:
        opened = xarray.open_zarr(f"{url}/weather").load()

    np.testing.assert_array_equal(opened.t2m, stored)
    assert opened.t2m.dims == ("time", "lat", "lon")
    assert opened.t2m.attrs["standard_name"] == "air_temperature"
    assert str(opened.time.values[1]).startswith("2026-01-01T06:00")
    assert opened.lat.attrs["units"] == "degrees_north"


def test_references_of_a_moved_folder_lead_to_its_field(
    demo_paths: dict[str, Path], tmp_path: Path
) -> None:
    """The set is written anew where the folder has been moved, and leads to the file there."""
    for path in (demo_paths["weather"].with_name(demo.FIELD), demo_paths["weather"]):
        shutil.copy(path, tmp_path)
    for name in demo.ROOTS.values():
        (tmp_path / name).touch()

    references = json.loads(demo.write(tmp_path)["weather"].read_text())["refs"]

    assert references["t2m/0.0.0"][0] == (tmp_path / demo.FIELD).as_uri()


def test_field_that_is_no_netcdf_is_a_clear_error(tmp_path: Path) -> None:
    """An error of a library that names no file, as for a full disk, names the folder."""
    for name in (demo.FIELD, *demo.ROOTS.values()):
        (tmp_path / name).touch()

    with pytest.raises(ConfigurationError, match=f"cannot write to {tmp_path}: .*open file"):
        demo.write(tmp_path)
