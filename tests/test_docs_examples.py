"""The programs in `README.md`, `docs/http.md`, `docs/icechunk.md` and `docs/clients.md` run."""

import re
import subprocess
import sys
from collections.abc import Generator
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import zarr

from shardgate import demo
from shardgate.settings import DatasetSettings, Settings
from tests.support.processes import environ
from tests.support.serving import serving

ROOT: Final = Path(__file__).parent.parent
_URL: Final = "http://127.0.0.1:8000"
_LONGEST_S: Final = 300


def program(page: str, containing: str) -> str:
    """Return the Python block of *page* that contains a text."""
    text = (ROOT / page).read_text("utf-8")
    (found,) = [b for b in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if containing in b]
    return str(found)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """Serve the examples of the demo, the image again as ``em``, and the empty root ``lab``."""
    folder = tmp_path_factory.mktemp("examples")
    examples = demo.write(folder)
    (folder / "lab").mkdir()
    roots = {name: DatasetSettings(url=str(path)) for name, path in examples.items()}
    roots["em"] = DatasetSettings(url=str(examples["image"]), writable=True)
    roots["lab"] = DatasetSettings(url=str(folder / "lab"), writable=True)
    with serving(Settings(datasets=roots)) as running:
        yield running


def run(text: str, url: str, **names: Any) -> dict[str, Any]:
    """Run a program against the service at *url*, and return its names."""
    exec(text.replace(_URL, url), names)  # noqa: S102 - our own text
    return names


def test_readme_opens_the_image_without_shards(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The program of the README prints the chunks that its comment states."""
    text = program("README.md", "zarr.open_array")

    run(text, url)

    assert capsys.readouterr().out.strip() == text.strip().rpartition("# ")[2]


def test_http_page_writes_an_array(url: str) -> None:
    """The program of the page on HTTP writes to the sharded array of the demo."""
    import obstore.store  # noqa: PLC0415

    array = run(program("docs/http.md", "S3Store"), url, obstore=obstore, zarr=zarr)["array"]

    assert (array[:64] == 1).all()
    assert not (array[64:] == 1).all()


def test_session_by_httpx_is_committed(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The program of the page on clients commits a chunk, and prints the snapshot."""
    api = f"{url}/api/datasets"
    assert httpx.post(api, json={"name": "lab"}).status_code == 201
    group = {"zarr_format": 3, "node_type": "group", "attributes": {}}
    change = {"op": "put_node", "path": "/", "metadata": group}
    commit = {"message": "root", "changes": [change]}
    assert httpx.post(f"{api}/lab/commits", json=commit).status_code == 201

    run(program("docs/clients.md", "httpx.Client"), url)

    newest = httpx.get(f"{api}/lab/history").json()["history"][0]
    assert newest["message"] == "ten hours"
    assert capsys.readouterr().out.strip() == newest["snapshot_id"]
    assert httpx.get(f"{url}/lab/hours/c/0").content == bytes(range(10))


def test_no_chunk_is_lost_through_the_gateway() -> None:
    """The script of lost chunks loses none through the gateway.

    How many zarr-python alone loses depends on the machine.
    """
    folder = Path(sys.executable).parent
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs/lost_chunks.py")],
        env=environ(PATH=f"{folder}:/usr/bin:/bin", PYTHONWARNINGS="ignore"),
        capture_output=True,
        text=True,
        check=False,
        timeout=_LONGEST_S,
    )

    assert "through Shardgate: 0 of 64 lost" in done.stdout, (done.stdout, done.stderr)
    assert re.search(r"zarr-python alone: \d+ of 64 lost", done.stdout)


def test_documented_versions_are_those_that_run() -> None:
    """The table of clients has the versions that are installed, to the digits that it shows."""
    page = (ROOT / "docs/clients.md").read_text("utf-8")
    rows = re.findall(r"^\| ([\w-]+) \| (\d[\d.]*) \|", page, re.MULTILINE)
    packages = {name: shown for name, shown in rows if name != "zarrita"}
    names = {"zarr-python": "zarr"}
    assert packages
    wrong = {
        name: (shown, version(names.get(name, name)))
        for name, shown in packages.items()
        if not f"{version(names.get(name, name))}.".startswith(f"{shown}.")
    }

    assert wrong == {}


def test_documented_version_of_zarrita_is_the_one_that_is_installed() -> None:
    """The table of clients has the version of zarrita in the manifest of the JavaScript tests."""
    page = (ROOT / "docs/clients.md").read_text("utf-8")
    manifest = (ROOT / "tests/clients/js/package.json").read_text("utf-8")

    (shown,) = re.findall(r"^\| zarrita \| ([\d.]+) \|", page, re.MULTILINE)
    assert f'"zarrita": "{shown}.' in manifest
