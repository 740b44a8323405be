"""The steps of `docs/netcdf.md`: from a NetCDF file to its values in xarray, and a picture."""

import io
import re
import shlex
from contextlib import redirect_stdout
from pathlib import Path

import httpx
import pytest
from PIL import Image

from shardgate.demo.earth import write_field
from tests.support.commands import running
from tests.support.documents import ROOT, program

PAGE = "docs/netcdf.md"


def test_steps_of_the_page_lead_from_a_file_to_its_values_and_a_picture(tmp_path: Path) -> None:
    """The set that the page writes is served by its command, and xarray has the mean of a map."""
    write_field(tmp_path / "field.nc")
    exec(program(PAGE, "SingleHdf5ToZarr(").replace("/data", str(tmp_path)))  # noqa: S102
    text = (ROOT / PAGE).read_text("utf-8")
    (command,) = re.findall(r"^\$ shardgate (.*)$", text, re.MULTILINE)
    arguments = shlex.split(command.replace("/data", str(tmp_path)))

    with running(*arguments, "--port", "0") as (_, (line,)):
        base = line.partition("/field/")[0]
        assert line == f"{base}/field/  serves  file://{tmp_path}/field.json"
        with redirect_stdout(io.StringIO()) as printed:
            code = program(PAGE, "xarray.open_zarr(").replace("http://127.0.0.1:8000", base)
            exec(code)  # noqa: S102
        page = httpx.get(f"{base}/field/t2m/", headers={"accept": "text/html"}, timeout=60)
        picture = httpx.get(f"{base}/api/datasets/field/preview.png?path=t2m", timeout=60)

    assert float(printed.getvalue()) == pytest.approx(280, abs=10)
    assert "<dt>Unit</dt><dd>K</dd>" in page.text
    assert Image.open(io.BytesIO(picture.content)).size == (180, 90)
