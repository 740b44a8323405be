"""What the service says of writing agrees with what PUT does, for all that is read only."""

import json
import time
import zipfile
from collections.abc import Generator
from typing import Final
from xml.etree import ElementTree as ET

import httpx
import icechunk
import pytest

from shardgate.settings import DatasetSettings, Settings
from tests.support import repositories
from tests.support.formats.zarr.building import LITTLE, array_metadata
from tests.support.gates import Gate
from tests.support.pages import open_page
from tests.support.processes import wait_until
from tests.support.serving import client_of

ARRAY: Final = json.dumps(array_metadata([4], [2], [LITTLE]))
LONGEST_S: Final = 10.0
"""Long for one wait, and short for one after another of 200 datasets."""
READS: Final = "GET, HEAD, OPTIONS"
WRITABLE: Final = {
    "plain": True,
    "raw": True,
    "archive": False,
    "set": False,
    "repo": True,
    "old": False,
    "fixed": False,
    "distant": False,
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Generator[httpx.Client]:
    """Serve a folder with an archive, an archive, a reference set and repositories, writable, and
    a folder and a server that are not.
    """
    root = tmp_path_factory.mktemp("read-only")
    (root / "plain/a").mkdir(parents=True)
    (root / "plain/a/zarr.json").write_text(ARRAY)
    for path in (root / "a.zip", root / "plain/in.zip"):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a/zarr.json", ARRAY)
    (root / "set.json").write_text(json.dumps({"version": 1, "refs": {".zgroup": "{}"}}))
    icechunk.Repository.create(icechunk.local_filesystem_storage(str(root / "repo")))
    repositories.version_1(root / "old")
    urls = {
        "plain": "plain",
        "raw": "plain",
        "archive": "a.zip",
        "set": "set.json",
        "repo": "repo",
        "old": "old",
    }
    datasets = {
        name: DatasetSettings(
            url=str(root / path),
            writable=True,
            format="kerchunk" if name == "set" else "auto",
            view="raw" if name == "raw" else "unsharded",
        )
        for name, path in urls.items()
    }
    datasets["fixed"] = DatasetSettings(url=str(root / "plain"))
    datasets["distant"] = DatasetSettings(url="http://127.0.0.1:9/nothing")
    with client_of(Settings(datasets=datasets)) as opened:
        yield opened


@pytest.mark.parametrize(
    ("path", "is_written"),
    [
        ("plain/new", True),
        ("plain/folder/", True),
        ("plain/in.zip/new", False),
        ("plain/in.zip/folder/", False),
        ("raw/new", True),
        ("raw/folder/", True),
        ("archive/new", False),
        ("archive/a/zarr.json", False),
        ("archive/folder/", False),
        ("set/new", False),
        ("set/folder/", False),
        ("repo/a/c/0", False),
        ("repo/@branch.main/a/c/0", False),
        ("repo/@tag.v1/a/c/0", False),
        ("repo/@branch.main/folder/", False),
        (f"repo/@{repositories.ROOT_ID}/a/c/0", False),
        ("old/a/x/c/0", False),
        ("old/@branch.main/a/x/zarr.json", False),
        ("old/folder/", False),
        ("fixed/new", False),
        ("distant/new", False),
        ("distant/folder/", False),
    ],
)
def test_options_agree_with_put_and_delete(
    client: httpx.Client, path: str, *, is_written: bool
) -> None:
    """OPTIONS lists PUT and DELETE where they are served; `Allow` of 405 equals that of OPTIONS."""
    allowed = client.options(f"/{path}").headers["allow"]
    put = client.put(f"/{path}")
    deleted = client.delete(f"/{path}")

    assert ("PUT" in allowed, "DELETE" in allowed) == (is_written, is_written)
    assert put.status_code == (200 if is_written else 405)
    assert deleted.status_code == (204 if is_written else 405)
    if not is_written:
        assert put.headers["allow"] == deleted.headers["allow"] == allowed == READS


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("POST", "fixed?delete"), ("DELETE", "fixed?prefix=c/"), ("POST", "fixed/c/0/0?uploads")),
        *(("POST", "plain/new"), ("PATCH", "plain/new")),
    ],
)
def test_method_that_is_not_served_is_405(client: httpx.Client, method: str, path: str) -> None:
    """A method that is not served is 405, and Allow equals that of OPTIONS (RFC 9110 §15.5.6)."""
    answer = client.request(method, f"/{path}", content=b"x")
    preflight = client.options(f"/{path}").headers

    assert answer.status_code == 405
    assert method not in answer.headers["allow"].split(", ") or "?delete" in path
    assert answer.headers["allow"] == preflight["allow"]
    assert preflight["access-control-allow-methods"] == preflight["allow"]


@pytest.mark.parametrize("path", ["fixed/", "plain/"])
def test_webdav_is_refused_with_a_way_on(client: httpx.Client, path: str) -> None:
    """A method of WebDAV is 405, whose reason names the listings that are served."""
    answer = client.request("PROPFIND", f"/{path}", headers={"depth": "1"})

    assert answer.status_code == 405
    assert "WebDAV is not served: list by S3" in answer.json()["detail"]


def test_folder_in_an_archive_is_not_deleted_by_s3_clients(client: httpx.Client) -> None:
    """DeleteObjects names a folder in an archive among its errors, and deletes the others."""
    keys = ("in.zip/folder/", "folder/")
    listed = "".join(f"<Object><Key>{key}</Key></Object>" for key in keys)
    answer = client.post("/plain?delete", content=f"<Delete>{listed}</Delete>")
    results = {each.findtext("{*}Key"): each for each in ET.fromstring(answer.text)}  # noqa: S314

    assert results["folder/"].tag.endswith("Deleted")
    assert results["in.zip/folder/"].findtext("{*}Code") == "MethodNotAllowed"


def test_api_and_start_page_agree_with_put(client: httpx.Client) -> None:
    """Archives and reference sets are called writable by no answer, whatever the settings."""
    listed = client.get("/api/datasets").json()["datasets"]
    near = [name for name in WRITABLE if name != "distant"]
    alone = {name: client.get(f"/api/datasets/{name}").json()["writable"] for name in near}
    wait_until(lambda: not open_page(client).all("tr[@data-pending]"))
    page = open_page(client)
    shown = {name: "writable" in page.row(name).texts("th")[0] for name in WRITABLE}

    assert {each["name"]: each["writable"] for each in listed} == WRITABLE
    assert alone == {name: WRITABLE[name] for name in near}
    assert shown == WRITABLE


def test_list_waits_once_for_all_stores_that_hang() -> None:
    """Datasets of stores that hang are listed after the wait for one, and called writable."""
    many = {f"d{n}": DatasetSettings(url=f"memory://d{n}", writable=True) for n in range(200)}
    with client_of(Settings(datasets=many), wrap=Gate().wrap) as client:
        began_s = time.monotonic()
        listed = client.get("/api/datasets", timeout=30).json()["datasets"]
        took_s = time.monotonic() - began_s

    assert [each["writable"] for each in listed] == [True] * 200
    assert took_s < LONGEST_S
