"""What the service says of writing agrees with what PUT does, for all that is read only."""

import json
import zipfile
from collections.abc import Generator
from typing import Final

import httpx
import icechunk
import pytest

from shardgate.settings import DatasetSettings, Settings
from tests.formats.zarr.building import LITTLE, array_metadata
from tests.support.pages import open_page
from tests.support.serving import client_of

ARRAY: Final = json.dumps(array_metadata([4], [2], [LITTLE]))
READS: Final = "GET, HEAD, OPTIONS"
WRITABLE: Final = {"plain": True, "archive": False, "set": False, "repo": True, "fixed": False}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Generator[httpx.Client]:
    """Serve a folder with an archive, an archive, a reference set and a repository, writable, and
    a folder that is not.
    """
    root = tmp_path_factory.mktemp("read-only")
    (root / "plain/a").mkdir(parents=True)
    (root / "plain/a/zarr.json").write_text(ARRAY)
    for path in (root / "a.zip", root / "plain/in.zip"):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a/zarr.json", ARRAY)
    (root / "set.json").write_text(json.dumps({"version": 1, "refs": {".zgroup": "{}"}}))
    icechunk.Repository.create(icechunk.local_filesystem_storage(str(root / "repo")))
    urls = {"plain": "plain", "archive": "a.zip", "set": "set.json", "repo": "repo"}
    datasets = {
        name: DatasetSettings(
            url=str(root / path), writable=True, format="kerchunk" if name == "set" else "auto"
        )
        for name, path in urls.items()
    }
    datasets["fixed"] = DatasetSettings(url=str(root / "plain"))
    with client_of(Settings(datasets=datasets)) as opened:
        yield opened


@pytest.mark.parametrize(
    ("path", "is_written"),
    [
        ("plain/new", True),
        ("plain/folder/", True),
        ("plain/in.zip/new", False),
        ("plain/in.zip/folder/", False),
        ("archive/new", False),
        ("archive/a/zarr.json", False),
        ("set/new", False),
        ("repo/a/c/0", False),
        ("repo/@branch.main/a/c/0", False),
        ("repo/@tag.v1/a/c/0", False),
        ("repo/@1CECHNKREP0F1RSTCMT0/zarr.json", False),
        ("fixed/new", False),
    ],
)
def test_options_agree_with_put(client: httpx.Client, path: str, *, is_written: bool) -> None:
    """OPTIONS lists PUT where it is served, and `Allow` of 405 equals that of OPTIONS."""
    allowed = client.options(f"/{path}").headers["allow"]
    put = client.put(f"/{path}")

    assert ("PUT" in allowed) is is_written
    assert put.status_code == (200 if is_written else 405)
    if not is_written:
        assert put.headers["allow"] == allowed == READS


def test_api_and_start_page_agree_with_put(client: httpx.Client) -> None:
    """Archives and reference sets are called writable by no answer, whatever the settings."""
    listed = client.get("/api/datasets").json()["datasets"]
    alone = {name: client.get(f"/api/datasets/{name}").json()["writable"] for name in WRITABLE}
    page = open_page(client)
    shown = {name: "writable" in page.row(name).texts("th")[0] for name in WRITABLE}

    assert {each["name"]: each["writable"] for each in listed} == WRITABLE
    assert alone == WRITABLE
    assert shown == WRITABLE
