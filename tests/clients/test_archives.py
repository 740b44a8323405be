"""Archives of zarr-python's `ZipStore` behind the service: read, listed, replaced, damaged."""

import json
import shutil
import zipfile
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import zarr
import zarr.storage

from shardgate.settings import DatasetSettings, LimitSettings, Settings
from tests.support.clients.reading import OPENERS, open_tensorstore
from tests.support.clients.services import ask, connect, sizes_of
from tests.support.clients.writing import counted, quiet, same
from tests.support.commands import run, running
from tests.support.files import read_files
from tests.support.serving import serving

VALUES: Final = counted((6, 5, 9))
SHARDS: Final = (4, 6, 8)
CHUNKS: Final = (2, 3, 4)
COMMENT: Final = {"ome": {"version": "0.5", "zipFile": {"centralDirectory": {"jsonFirst": True}}}}
"""Comment of an archive by NGFF RFC-9."""


def write_store(path: Path, method: int) -> None:
    """Write a sharded array, and one that is not sharded, into an archive."""
    with quiet(), zarr.storage.ZipStore(path, mode="w", compression=method) as store:
        group = zarr.create_group(store, attributes={"title": "archive"})
        for name, shards in (("sharded", SHARDS), ("plain", None)):
            array = group.create_array(
                name, shape=VALUES.shape, dtype=VALUES.dtype, chunks=CHUNKS, shards=shards
            )
            array[...] = VALUES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write archives, and a folder of the entries of one."""
    root = tmp_path_factory.mktemp("archives")
    write_store(root / "stored.zarr.zip", zipfile.ZIP_STORED)
    write_store(root / "deflated.ZIP", zipfile.ZIP_DEFLATED)
    with zipfile.ZipFile(root / "stored.zarr.zip") as archive:
        archive.extractall(root / "extracted")
    shutil.copy(root / "stored.zarr.zip", root / "scan.data")
    files = sorted(read_files(root / "extracted").items(), key=lambda file: "/c/" in file[0])
    with zipfile.ZipFile(root / "scan.ozx", "w") as archive:
        for name, data in files:
            archive.writestr(name, data)
        archive.comment = json.dumps(COMMENT).encode()
    whole = (root / "stored.zarr.zip").read_bytes()
    (root / "truncated.zip").write_bytes(whole[:-30])
    return root


@pytest.fixture(scope="module")
def url(folder: Path) -> Generator[str]:
    """Serve the folder, and two archives as roots."""
    datasets = {
        "all": DatasetSettings(url=str(folder), writable=True),
        "scan": DatasetSettings(url=str(folder / "scan.ozx")),
        "named": DatasetSettings(url=str(folder / "scan.data"), format="zip"),
    }
    with serving(Settings(datasets=datasets)) as served:
        yield served


ARCHIVES: Final = ("all/stored.zarr.zip", "all/deflated.ZIP", "all/scan.ozx", "scan", "named")
in_each_archive = pytest.mark.parametrize("root", ARCHIVES)


@in_each_archive
def test_clients_read_arrays_of_an_archive(url: str, root: str) -> None:
    """zarr-python and TensorStore read the arrays of an archive, below it or as a root.

    zarr-python sees no shards.
    """
    for opener in OPENERS.values():
        group = opener(f"{url}/{root}")
        assert group.attrs["title"] == "archive"
        for name in ("sharded", "plain"):
            assert (group[name].shards, group[name].chunks) == (None, CHUNKS)
            same(group[name][...], VALUES)
            same(open_tensorstore(f"{url}/{root}/{name}").read().result(), VALUES)


@in_each_archive
def test_archive_is_listed_as_the_folder_of_its_entries(client: httpx.Client, root: str) -> None:
    """The keys below an archive, their sizes and bytes are those of the folder of its entries."""
    dataset, _, prefix = root.partition("/")
    prefix = prefix and f"{prefix}/"

    expected = sizes_of(client, "all", "extracted/")
    assert sizes_of(client, dataset, prefix) == expected
    assert len(expected) == 3 + 2 * 18
    for key in expected:
        paths = f"/{dataset}/{prefix}{key}", f"/all/extracted/{key}"
        inside, outside = (client.get(path) for path in paths)
        assert inside.content == outside.content
        assert len(inside.content) == expected[key]


def test_archive_is_served_under_its_own_name(client: httpx.Client, folder: Path) -> None:
    """The archive itself is an object, which can be read in parts."""
    data = (folder / "scan.ozx").read_bytes()

    assert client.get("/all/scan.ozx").content == data
    assert ask(client, "/all/scan.ozx", range="bytes=-22").content == data[-22:]


@pytest.mark.parametrize("accepted", ["*", ""])
def test_deflated_entry_is_sent_inflated(client: httpx.Client, accepted: str) -> None:
    """A deflated entry has no content coding, whatever the client accepts; its ETag revalidates."""
    path, plain = "/all/deflated.ZIP/plain/c/0/0/0", "/all/stored.zarr.zip/plain/c/0/0/0"
    expected = client.get(plain).content
    got = ask(client, path, accept_encoding=accepted)
    head = ask(client, path, "HEAD", accept_encoding=accepted)
    part = ask(client, path, range="bytes=2-9", accept_encoding=accepted)
    again = ask(client, path, if_none_match=got.headers["etag"], accept_encoding=accepted)
    s3 = ask(client, path, authorization="AWS4-HMAC-SHA256 any", accept_encoding=accepted)

    assert {"content-encoding"} & {*got.headers, *head.headers, *part.headers, *s3.headers} == set()
    assert (got.content, s3.content, part.content) == (expected, expected, expected[2:10])
    assert head.headers["content-length"] == str(len(expected))
    assert again.status_code == 304


def test_entry_is_copied_inflated(client: httpx.Client) -> None:
    """S3's CopyObject of a deflated entry stores its content."""
    source = "/all/deflated.ZIP/plain/c/0/0/1"
    copied = ask(client, "/all/copied", "PUT", x_amz_copy_source=source)

    assert copied.status_code == 200
    assert client.get("/all/copied").content == client.get(source).content


def test_truncated_archive_is_damage_with_a_reason(client: httpx.Client) -> None:
    """Keys of a truncated archive are 424 with its name and the reason; it can be fetched."""
    for key in ("zarr.json", "plain/c/0/0/0", "other"):
        answer = client.get(f"/all/truncated.zip/{key}")
        assert answer.status_code == 424
        assert "truncated.zip: it has no end record" in answer.json()["detail"]
    assert client.get("/all/truncated.zip").status_code == 200


def test_command_takes_an_archive_as_a_root(folder: Path) -> None:
    """`serve`, `inspect` and `verify` take an archive; the dataset is called as it is."""
    archive = str(folder / "scan.ozx")
    with running("serve", "--port", "0", archive) as (_, (line,)):
        address = line.split()[0]
        document = httpx.get(f"{address}sharded/zarr.json").json()
    inspected = run("inspect", archive)
    verified = run("verify", archive, "--chunks")

    assert address.endswith("/scan/")
    assert document["chunk_grid"]["configuration"]["chunk_shape"] == list(CHUNKS)
    assert "sharded" in inspected.stdout
    assert (verified.returncode, "18 inner chunks" in verified.stdout) == (0, True)


@pytest.mark.parametrize(
    ("name", "options"),
    [("a.ozx", {}), ("scan", {"format": "zip"}), ("refs.json", {"format": "kerchunk"})],
)
def test_root_that_does_not_exist_is_no_absence(
    tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    """Keys below a root that is one object, and missing, are 503 that names it, as is `/readyz`."""
    datasets = {"lab": DatasetSettings(url=f"{tmp_path}/{name}", **options)}
    with serving(Settings(datasets=datasets)) as url, connect(url) as client:
        paths = ("/lab/zarr.json", "/lab/c/0", "/lab/?list-type=2", "/readyz")
        answers = [client.get(path) for path in paths]

    assert [answer.status_code for answer in answers] == [503] * 4
    assert all(name in answer.text for answer in answers)


def test_other_files_in_a_folder_of_archives_are_no_archives(folder: Path, tmp_path: Path) -> None:
    """Objects below a folder are archives only by their names, also with `format = "zip"`."""
    shutil.copy(folder / "scan.ozx", tmp_path / "scan.ozx")
    (tmp_path / "README.txt").write_bytes(b"text")
    datasets = {"all": DatasetSettings(url=str(tmp_path), format="zip")}
    with serving(Settings(datasets=datasets)) as url, connect(url) as client:
        described = client.get("/api/datasets/all").json()
        text, below = (client.get(f"/all/README.txt{rest}") for rest in ("", "/zarr.json"))

    assert described["damaged"] == []
    assert {array["path"] for array in described["arrays"]} == {
        "scan.ozx/plain",
        "scan.ozx/sharded",
    }
    assert (text.content, below.status_code) == (b"text", 404)


def test_replaced_archive_is_read_anew(folder: Path, tmp_path: Path) -> None:
    """A key of an archive that is replaced is that of the new one, also at once if it was not
    looked up before.
    """
    path = tmp_path / "a.zip"
    shutil.copy(folder / "stored.zarr.zip", path)
    settings = Settings(datasets={"all": DatasetSettings(url=str(tmp_path))})
    with serving(settings) as served, connect(served) as client:
        before = client.get("/all/a.zip/plain/c/0/0/0")
        with zipfile.ZipFile(tmp_path / "new", "w") as archive:
            archive.writestr("filler", bytes(99))
            archive.writestr("plain/c/0/0/1", b"new")
        (tmp_path / "new").replace(path)
        after = client.get("/all/a.zip/plain/c/0/0/1")

    assert before.status_code == 200
    assert after.content == b"new"


def test_bomb_in_an_archive_is_refused(tmp_path: Path) -> None:
    """An entry that inflates to more than the limit is 424, and no more of it is inflated."""
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb", bytes(2**22))
        archive.writestr("fits", bytes(2**20))
    limits = LimitSettings(decoded_bytes=2**20)
    datasets = {"all": DatasetSettings(url=str(tmp_path))}
    with serving(Settings(datasets=datasets, limits=limits)) as url, connect(url) as client:
        bomb, fits = client.get("/all/a.zip/bomb"), client.get("/all/a.zip/fits")

    assert bomb.status_code == 424
    assert "4194304 bytes once inflated, more than 1048576" in bomb.json()["detail"]
    assert fits.content == bytes(2**20)
