"""The programs in `README.md` and `docs/` run: formats, HTTP, Icechunk, clients, streaming."""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Generator
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import httpx
import icechunk
import obstore.store
import pytest
import s3fs
import xarray
import zarr
from packaging.version import Version

from shardgate.settings import CacheSettings, DatasetSettings, Settings
from tests.support import commands
from tests.support.documents import ROOT, blocks, program
from tests.support.examples import datasets_of
from tests.support.gateways import gateway_process
from tests.support.processes import environ
from tests.support.seaweedfs import SeaweedFS
from tests.support.serving import client_of, serving
from tests.support.writable_repositories import Api, new_place

_URL: Final = "http://127.0.0.1:8000"
_LONGEST_S: Final = 300
_ELSEWHERE: Final = (
    *("# write.py", "# read.py", "# many.py", "# sharded.py", "app.mount(", "class PackedLayout("),
    *("CloudVolume(", "skip_signature", "SingleHdf5ToZarr(", "open_zarr("),
)
"""Texts in the programs that `test_docs.py` and the other `test_docs_*.py` run."""
_HERE: Final = (
    *("open_array(", "S3Store(", "httpx.Client(", "repository/@tag.v1", "garbage_collect"),
    *("# camera.py", "shardgate.open_session(", "icechunk.s3_storage("),
)
_FROM_NPM: Final = {"zarrita": "zarrita", "OpenLayers": "ol"}
"""Clients in the table of clients, and their packages."""


def test_each_program_in_the_documents_is_run() -> None:
    """Each Python block of the documents is one that a test runs."""
    programs = blocks("python")
    unknown = [b for b in programs if not any(known in b for known in _HERE + _ELSEWHERE)]

    assert programs
    assert unknown == []


@pytest.fixture(scope="module")
def url(demo_paths: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """Serve the examples of the demo, the image again as ``em``, and the empty root ``lab``."""
    folder = tmp_path_factory.mktemp("examples")
    image = shutil.copytree(demo_paths["image"], folder / "image.zarr")
    (folder / "lab").mkdir()
    roots = datasets_of(demo_paths)
    roots["em"] = DatasetSettings(url=str(image), writable=True)
    repository = icechunk.Repository.create(icechunk.local_filesystem_storage(str(folder / "v1")))
    session = repository.writable_session("main")
    rain = xarray.Dataset({"rain": ("day", [0.0, 1.5])})
    rain.to_zarr(session.store, zarr_format=3, consolidated=False)
    repository.create_tag("v1", session.commit("two days"))
    roots["repository"] = DatasetSettings(url=str(folder / "v1"))
    roots["lab"] = DatasetSettings(url=str(folder / "lab"), writable=True)
    roots["repositories"] = DatasetSettings(url=str(folder), writable=True, view="raw")
    with serving(Settings(datasets=roots)) as running:
        yield running


def run(text: str, url: str, **names: Any) -> dict[str, Any]:
    """Run a program against the service at *url*, and return its names."""
    exec(text.replace(_URL, url), names)  # noqa: S102 - our own text
    return names


def test_shards_are_read_below_sharded(
    url: str, demo_paths: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """The program of the page on formats opens the array as it is stored."""
    run(program("docs/formats.md", "@sharded"), url)
    stored = zarr.open_array(demo_paths["image"] / "s0", mode="r")

    assert capsys.readouterr().out.strip() == str(stored.shards)


def test_readme_opens_the_image_without_shards(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The program of the README prints the chunks that its comment states."""
    text = program("README.md", "zarr.open_array")

    run(text, url)

    assert capsys.readouterr().out.strip() == text.strip().rpartition("# ")[2]


def test_readme_shows_headers_that_are_sent(url: str) -> None:
    """The answer in the README has the status and the headers of a real one, but for the ETag."""
    text = (ROOT / "README.md").read_text("utf-8")
    (shown,) = re.findall(rf"\$ curl [^\n]* {_URL}(\S+)\n(.*?)```", text, re.DOTALL)
    path, (status, *lines) = shown[0], shown[1].splitlines()
    headers = dict(line.split(": ", 1) for line in lines)

    answer = httpx.get(f"{url}{path}")

    assert status == f"HTTP/1.1 {answer.status_code} {answer.reason_phrase}"
    assert headers.keys() <= answer.headers.keys()
    for name in headers.keys() - {"etag", "content-length"}:
        assert answer.headers[name] == headers[name]


def test_http_page_writes_an_array(url: str) -> None:
    """The program of the page on HTTP writes to the sharded array of the demo."""
    array = run(program("docs/http.md", "S3Store"), url, obstore=obstore, zarr=zarr)["array"]

    assert (array[:64] == 1).all()
    assert not (array[64:] == 1).all()


def test_http_page_opens_an_array_by_s3fs(url: str) -> None:
    """The line for s3fs on the page on HTTP opens the array without shards."""
    page = (ROOT / "docs/http.md").read_text("utf-8")
    (line,) = re.findall(r"With s3fs \([^)]*\): `([^`]*)`", page)

    array = eval(line.replace(_URL, url), {"zarr": zarr, "s3fs": s3fs})  # noqa: S307 - our own text

    assert array.chunks == (32, 32, 32)


def test_http_page_stores_a_chunk_by_curl(url: str, tmp_path: Path) -> None:
    """The commands of the page on HTTP store a chunk under the key of another one."""
    page = (ROOT / "docs/http.md").read_text("utf-8")
    curls = [line for line in re.findall(r"^\$ (curl .*)$", page, re.MULTILINE) if "/em/" in line]
    assert len(curls) == 2

    for command in curls:
        subprocess.run(shlex.split(command.replace(_URL, url)), cwd=tmp_path, check=True)

    (target,) = re.findall(r"curl -T \S+ (\S+)", page)
    stored = httpx.get(target.replace(_URL, url)).content
    assert stored == (tmp_path / "chunk").read_bytes()


def test_icechunk_page_opens_a_tag(url: str) -> None:
    """The first program of the page on Icechunk opens a tag by xarray."""
    text = program("docs/icechunk.md", "repository/@tag.v1").strip()

    opened = eval(text.replace(_URL, url), {"xarray": xarray})  # noqa: S307 - our own text

    assert opened.rain.values.tolist() == [0.0, 1.5]


def test_icechunk_page_keeps_house_beside_the_service(seaweedfs: SeaweedFS, tmp_path: Path) -> None:
    """The program of the library migrates a repository that is served, and keeps those snapshots of
    today; then the service commits to it.
    """
    place = new_place(tmp_path, seaweedfs)
    repository = icechunk.Repository.create(place.storage, spec_version=1)
    session = repository.writable_session("main")
    zarr.create_group(session.store)
    snapshot_id = session.commit("today")
    text = program("docs/icechunk.md", "garbage_collect")
    assert text.count('icechunk.s3_storage(bucket="lab", prefix="rain", from_env=True)') == 1
    settings = place.settings().model_copy(update={"cache": CacheSettings(ttl_s=1e-6)})
    with client_of(settings) as client:
        api = Api(client)
        assert api.names("branches") == {"main": snapshot_id}
        refused = api.send("POST", "/sessions", {})
        assert refused.status_code == 405

        names = run(
            re.sub(r"icechunk\.s3_storage\(.*\)", "storage", text), "", storage=place.storage
        )

        rewritten, kept, *_ = (each.id for each in place.open().ancestry(branch="main"))
        assert kept == snapshot_id
        assert names["limit"] < place.open().lookup_snapshot(kept).written_at
        assert api.names("branches") == {"main": rewritten}
        assert api.do("POST", "/sessions", {}).json()["parent_id"] == rewritten


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


def test_camera_writes_sessions_of_slices(tmp_path: Path) -> None:
    """The commands and the program of the page on streaming commit shards of all slices."""
    page = (ROOT / "docs/streaming.md").read_text("utf-8")
    (script,) = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    folder, serve, create, camera = script.splitlines()
    assert (folder, camera) == ("mkdir lab", "python camera.py 10 60")
    (tmp_path / "lab").mkdir()
    arguments = shlex.split(serve.removeprefix("shardgate serve ").removesuffix(" &"))
    with gateway_process({}, *arguments, "--port", "0", cwd=tmp_path) as (_, service):
        subprocess.run(shlex.split(create.replace(_URL, service)), check=True)
        text = program("docs/streaming.md", "# camera.py").replace(_URL, service)
        (tmp_path / "camera.py").write_text(text)
        done = subprocess.run(
            [sys.executable, "camera.py", "2", "0.2"],
            env=environ(PYTHONWARNINGS="ignore"),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=_LONGEST_S,
        )
    assert done.returncode == 0, done.stderr
    repository = icechunk.Repository.open(icechunk.local_filesystem_storage(str(tmp_path / "lab")))
    made = [each.id for each in repository.ancestry(branch="main")]
    told = done.stdout.splitlines()
    assert [told[3], told[1]] == made[:2]
    assert all(line.startswith(f"live: {service}/lab/@session.") for line in told[::2])
    film: Any = zarr.open_array(repository.readonly_session("main").store, path="film", mode="r")
    assert film.shards == (64, 512, 1024)
    assert film[:3, 0, 0].tolist()[0] == 1


def test_program_with_a_session_commits(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The program with `open_session` commits an array, and prints the snapshot."""
    httpx.post(f"{url}/api/datasets", json={"name": "lab"})  # unless another test has made it
    run(program("docs/icechunk.md", "shardgate.open_session("), url)

    newest = httpx.get(f"{url}/api/datasets/lab/history").json()["history"][0]
    assert newest["message"] == "the fourth night"
    assert capsys.readouterr().out.strip() == newest["snapshot_id"]


def test_library_commits_through_the_service(url: str) -> None:
    """The program of the library commits through a raw dataset in a local folder."""
    names = run(program("docs/icechunk.md", "icechunk.s3_storage(\n"), url)

    newest = next(iter(names["repository"].ancestry(branch="main")))
    assert newest.message == "a group"


def test_troubleshooting_inspects_a_key(demo_paths: dict[str, Path]) -> None:
    """The command for a failing key prints its shard and the range of its bytes."""
    page = (ROOT / "docs/troubleshooting.md").read_text("utf-8")
    (command,) = re.findall(r"^\$ shardgate (inspect .*)$", page, re.MULTILINE)
    arguments = shlex.split(command.replace("s3://bucket/em.zarr", str(demo_paths["image"])))

    done = commands.run(*arguments)

    assert done.returncode == 0, done.stderr
    assert "s0/c/0/0/1" in done.stdout


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


def test_tested_clients_have_the_documented_versions() -> None:
    """The installed clients have the versions in the table of clients, or newer ones."""
    page = (ROOT / "docs/clients.md").read_text("utf-8")
    rows: dict[str, str] = dict(re.findall(r"^\| ([\w-]+) \| (\d[\d.]*) \|", page, re.MULTILINE))
    for name in _FROM_NPM:
        del rows[name]
    names = {"zarr-python": "zarr"}
    assert rows
    older = {
        name: found
        for name, shown in rows.items()
        if Version(found := version(names.get(name, name))) < Version(shown)
    }

    assert older == {}


@pytest.mark.parametrize(("name", "package"), _FROM_NPM.items())
def test_documented_version_of_a_client_is_that_of_its_package(name: str, package: str) -> None:
    """The table of clients has the versions in the manifest of the JavaScript tests."""
    page = (ROOT / "docs/clients.md").read_text("utf-8")
    manifest = (ROOT / "tests/clients/js/package.json").read_text("utf-8")

    (shown,) = re.findall(rf"^\| {name} \| ([\d.]+) \|", page, re.MULTILINE)
    assert f'"{package}": "{shown}.' in manifest
