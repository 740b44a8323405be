"""Both faces of shards under one name: `@sharded` beside inner chunks, read and written."""

import re
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import pytest
import zarr

from shardgate.settings import CallerSettings, DatasetSettings, Settings
from tests.support.clients.reading import OPENERS, open_tensorstore
from tests.support.clients.services import Taker, ask, connect, sizes_of, taking_into_folder
from tests.support.clients.writing import counted, quiet, same
from tests.support.deferred import Deferred
from tests.support.files import read_files
from tests.support.serving import serving

xarray: Any = Deferred("xarray")
dask_array: Any = Deferred("dask.array")

VALUES: Final = counted((16, 12), "u2")
SHARDS: Final = (16, 3)
CHUNKS: Final = (4, 3)
CHUNK_NBYTES: Final = 24
SHARD: Final = "/data/@sharded/em/s0/c/0/1"
INNER: Final = "/data/em/s0/c/1/1"
"""The second of the four inner chunks in `SHARD`."""


def write_group(path: Path) -> None:
    """Write a group with a sharded array, without a compressor."""
    group = zarr.create_group(path)
    array = group.create_array(
        "s0",
        shape=VALUES.shape,
        shards=SHARDS,
        chunks=CHUNKS,
        dtype=VALUES.dtype,
        compressors=None,
        dimension_names=("y", "x"),
    )
    array[...] = VALUES


@pytest.fixture(scope="module")
def read_only(tmp_path_factory: pytest.TempPathFactory) -> Generator[Taker]:
    """Serve a folder with a group, an archive of the same, and another object."""
    folder = tmp_path_factory.mktemp("faces")
    write_group(folder / "em")
    with quiet(), zarr.storage.ZipStore(folder / "em.zarr.zip", mode="w") as store:
        zarr.create_array(store, data=VALUES, shards=SHARDS, chunks=CHUNKS)
    (folder / "note").write_text("no container has it")
    with taking_into_folder(folder) as taker:
        yield taker


@pytest.fixture
def taker(tmp_path: Path) -> Generator[Taker]:
    """Serve a group that the test may change."""
    write_group(tmp_path / "em")
    with taking_into_folder(tmp_path) as opened:
        yield opened


def test_sharded_face_has_the_stored_objects(read_only: Taker) -> None:
    """Below `@sharded` every stored object is listed, and read whole, in part and by HEAD."""
    files = read_files(read_only.folder)
    assert sizes_of(read_only.client, "data", "@sharded/") == {
        key: len(data) for key, data in files.items()
    }

    for key, data in files.items():
        path = f"/data/@sharded/{key}"
        whole = ask(read_only.client, path)
        part = ask(read_only.client, path, range="bytes=-7")
        head = ask(read_only.client, path, "HEAD")
        again = ask(read_only.client, path, if_none_match=whole.headers["etag"])

        assert (whole.content, part.content) == (data, data[-7:])
        assert (part.status_code, again.status_code) == (206, 304)
        assert head.headers["content-length"] == str(len(data))
        assert whole.headers["etag"] == part.headers["etag"] == head.headers["etag"]
        assert "access-control-allow-origin" in ask(read_only.client, path, origin="a://b").headers


def test_absent_shard_is_404_below_sharded(read_only: Taker) -> None:
    """A shard, a spelling of an inner chunk and a second `@sharded` that name no object are 404."""
    for key in ("em/s0/c/9/9", "em/s0/c/01/0", "em/s0/c/3/3", "@sharded/em/zarr.json"):
        assert ask(read_only.client, f"/data/@sharded/{key}").status_code == 404


def test_pages_of_links_lead_through_the_sharded_face(read_only: Taker) -> None:
    """The pages of links below `@sharded` lead to every stored object outside of archives."""

    def follow(path: str) -> Iterator[str]:
        page = ask(read_only.client, path)
        for name in re.findall(r'href="\./([^"]*)"', page.text):
            if name.endswith("/"):
                yield from follow(path + name)
            else:
                yield path.removeprefix("/data/@sharded/") + name

    assert set(follow("/data/@sharded/")) == set(read_files(read_only.folder))


def test_stored_face_needs_no_sound_metadata(taker: Taker) -> None:
    """Below `@sharded` objects are read whether or not the metadata of their array are sound."""
    shard = (taker.folder / "em/s0/c/0/1").read_bytes()
    assert ask(taker.client, INNER).status_code == 200
    (taker.folder / "em/s1").mkdir()
    for path in ("s1/zarr.json", "s1/7"):
        (taker.folder / "em" / path).write_bytes(b"{")
        assert ask(taker.client, f"/data/em/{path}").status_code == 424
        assert ask(taker.client, f"/data/@sharded/em/{path}").content == b"{"
    (taker.folder / "em/s0/zarr.json").unlink()

    assert ask(taker.client, SHARD).content == shard


def test_member_of_an_archive_is_served_as_it_is(read_only: Taker) -> None:
    """Below `@sharded` a sharded array in an archive has its shards, which zarr-python reads."""
    lead = "@sharded/em.zarr.zip/"
    archive = zarr.storage.ZipStore(read_only.folder / "em.zarr.zip", mode="r")
    stored = zarr.open_array(archive, mode="r")
    sizes = sizes_of(read_only.client, "data", lead)
    array = zarr.open_array(f"{read_only.url}/data/{lead}", mode="r")

    assert sizes.keys() == {"zarr.json", *(f"c/0/{x}" for x in range(4))}
    assert array.shards == stored.shards == SHARDS
    same(array[...], VALUES)


def by_dask(url: str) -> Any:
    """Open an array with dask."""
    return dask_array.from_zarr(url)


def by_xarray(url: str) -> Any:
    """Open the variable of the group above the array."""
    return xarray.open_zarr(url.removesuffix("/s0"), consolidated=False)["s0"]


READERS: Final[dict[str, Callable[[str], Any]]] = {
    **OPENERS,
    "dask": by_dask,
    "xarray": by_xarray,
    "tensorstore": open_tensorstore,
}


@pytest.mark.parametrize("reader", READERS)
def test_client_reads_both_faces(read_only: Taker, reader: str) -> None:
    """Each client reads the same values as inner chunks and as shards."""
    for face in ("", "@sharded/"):
        array = READERS[reader](f"{read_only.url}/data/{face}em/s0")
        values = array.read().result() if reader == "tensorstore" else np.asarray(array[...])

        same(values, VALUES)
        if reader in OPENERS:
            assert array.shards == (SHARDS if face else None)


def test_write_of_a_shard_without_a_version_is_428(taker: Taker) -> None:
    """A PUT or DELETE below `@sharded` that could erase unseen chunks is 428, with the reason."""
    before = read_files(taker.folder)
    blind = [{}, {"if-match": "*"}, {"if-none-match": '"x"'}, {"if-none-match": '""'}]
    copied = {"x-amz-copy-source": "data/em/s0/zarr.json", "if-match": "*"}
    requests = [
        *(("PUT", SHARD, headers) for headers in blind),
        ("PUT", SHARD, copied),
        ("DELETE", SHARD, {"if-match": "*"}),
        ("PUT", "/data/@sharded/em/s0/zarr.json", {}),
        ("DELETE", SHARD, {}),
        ("DELETE", "/data?prefix=@sharded/em/s0/", {}),
    ]
    for method, path, headers in requests:
        answer = taker.client.request(method, path, headers=headers, content=b"new")
        assert answer.status_code == 428, path
        assert "If-Match" in answer.json()["detail"]
        assert answer.headers["content-type"] == "application/problem+json"

    assert read_files(taker.folder) == before


def test_second_sharded_is_the_name_of_a_folder(taker: Taker) -> None:
    """Behind `@sharded` the name is that of a stored folder, also in writes. The folder is listed
    only there, as its keys without the first `@sharded` name other objects.
    """
    document = (taker.folder / "em/s0/zarr.json").read_bytes()
    path = "/data/@sharded/@sharded/em/s1/zarr.json"
    put = taker.client.put(path, headers={"if-none-match": "*"}, content=document)
    stored = taker.folder / "@sharded/em/s1/zarr.json"
    arrays = taker.client.get("/api/datasets/data").json()["arrays"]

    assert (put.status_code, stored.read_bytes()) == (200, document)
    assert ask(taker.client, path).content == document
    assert not (taker.folder / "em/s1").exists()
    assert sizes_of(taker.client, "data", "@sharded/@sharded/") == {
        "em/s1/zarr.json": len(document)
    }
    assert {key.partition("/")[0] for key in sizes_of(taker.client, "data", "")} == {"em"}
    assert "@sharded" not in ask(taker.client, "/data/").text
    assert [each["path"] for each in arrays] == ["em/s0"]


@pytest.mark.parametrize("content", [b"a note", b"{}", b"<html></html>"])
def test_marker_replaced_below_sharded_is_an_object(taker: Taker, content: bytes) -> None:
    """An `info` that is replaced by other bytes marks no container, and harms no key beside it."""
    folder = taker.folder / "volume"
    folder.mkdir()
    (folder / "info").write_text('{"@type": "neuroglancer_skeletons"}')
    (folder / "7").write_bytes(b"a skeleton")
    assert ask(taker.client, "/data/volume/7").status_code == 200
    path = "/data/@sharded/volume/info"
    etag = ask(taker.client, path).headers["etag"]
    put = taker.client.put(path, headers={"if-match": etag}, content=content)

    assert put.status_code == 200
    assert ask(taker.client, "/data/volume/7").content == b"a skeleton"
    assert ask(taker.client, "/data/volume/info").content == content


def test_new_sharded_array_is_written_below_sharded(taker: Taker) -> None:
    """A sharded array that `If-None-Match: *` creates is served by inner chunks at once."""
    assert ask(taker.client, "/data/em/s1/zarr.json").status_code == 404
    for key, data in read_files(taker.folder / "em/s0").items():
        path = f"/data/@sharded/em/s1/{key}"
        assert [
            taker.client.put(path, headers={"if-none-match": "*"}, content=data).status_code
            for _ in range(2)
        ] == [200, 412]

    array = zarr.open_array(f"{taker.url}/data/em/s1", mode="r")
    assert array.shards is None
    same(array[...], VALUES)


def test_inner_chunk_is_seen_in_its_shard_at_once(taker: Taker) -> None:
    """After a PUT of an inner chunk `@sharded` has the new shard, under another ETag."""
    before = ask(taker.client, SHARD)
    new = bytes(range(CHUNK_NBYTES))
    assert taker.client.put(INNER, content=new).status_code == 200
    after = ask(taker.client, SHARD)
    late = taker.client.put(
        SHARD, headers={"if-match": before.headers["etag"]}, content=before.content
    )

    assert after.headers["etag"] != before.headers["etag"]
    assert after.content[CHUNK_NBYTES : 2 * CHUNK_NBYTES] == new
    assert (late.status_code, ask(taker.client, INNER).content) == (412, new)


def test_shard_is_seen_in_its_inner_chunks_at_once(taker: Taker) -> None:
    """After a PUT of a shard its inner chunks are new, and after a DELETE they are absent."""
    shard, inner = ask(taker.client, SHARD), ask(taker.client, INNER)
    other = ask(taker.client, "/data/@sharded/em/s0/c/0/2").content
    put = taker.client.put(SHARD, headers={"if-match": shard.headers["etag"]}, content=other)
    changed = ask(taker.client, INNER)
    assert put.status_code == 200
    assert changed.content == other[CHUNK_NBYTES : 2 * CHUNK_NBYTES] != inner.content
    assert changed.headers["etag"] != inner.headers["etag"]

    deleted = ask(taker.client, SHARD, "DELETE", if_match=put.headers["etag"])

    assert (deleted.status_code, ask(taker.client, INNER).status_code) == (204, 404)


def test_concurrent_writes_through_both_faces_lose_no_chunk(taker: Taker) -> None:
    """Every inner chunk is kept that some clients PUT by itself, and others by whole shards.

    The clients write to two replicas.
    """
    rounds = 6
    rows = range(4)
    bodies = [[bytes([10 * row + each] * CHUNK_NBYTES) for each in range(rounds)] for row in rows]

    def put_inner(client: httpx.Client, row: int) -> None:
        for body in bodies[row]:
            assert client.put(f"/data/em/s0/c/{row}/1", content=body).status_code == 200

    def put_shard(client: httpx.Client, row: int) -> None:
        start = row * CHUNK_NBYTES
        for body in bodies[row]:
            status = 412
            while status == 412:
                read = ask(client, SHARD)
                data = read.content[:start] + body + read.content[start + CHUNK_NBYTES :]
                condition = {"if-match": read.headers["etag"]}
                status = client.put(SHARD, headers=condition, content=data).status_code
            assert status == 200

    with ExitStack() as stack:
        other = stack.enter_context(taking_into_folder(taker.folder))
        pool = stack.enter_context(ThreadPoolExecutor(len(rows)))
        clients = [stack.enter_context(connect(url)) for url in (taker.url, other.url) * 2]
        jobs = [pool.submit((put_inner, put_shard)[row // 2], clients[row], row) for row in rows]
        for job in jobs:
            job.result()

    array = np.asarray(zarr.open_array(taker.folder / "em/s0", mode="r")[...])
    found = [array[4 * row : 4 * row + 4, 3:6].tobytes() for row in rows]
    assert found == [written[-1] for written in bodies]


def test_private_dataset_is_private_below_sharded(tmp_path: Path) -> None:
    """Below `@sharded` a private dataset is read with its token only, and may be cached by none."""
    write_group(tmp_path / "em")
    url = tmp_path.as_uri()
    token = "a-secret"
    callers = {"ana": CallerSettings(token_sha256=[sha256(token.encode()).hexdigest()])}
    private = DatasetSettings(url=url, read=["ana"])
    settings = Settings(callers=callers, datasets={"data": private})
    with serving(settings) as service, connect(service) as client:
        refused = ask(client, SHARD)
        answers = [
            ask(client, SHARD, authorization=f"Bearer {token}"),
            ask(client, f"/~{token}{SHARD}"),
        ]

    assert refused.status_code == 401
    for answer in answers:
        assert answer.status_code == 200
        assert answer.headers["cache-control"].startswith("private")
