"""Clients of S3 list all keys that can be read, and no others."""

import asyncio
import itertools
import random
from collections.abc import Generator, Iterator, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree as ET

import httpx
import icechunk
import numpy as np
import obstore
import pytest
import s3fs
import tensorstore
import zarr
from botocore.exceptions import ClientError
from zarr.storage import ObjectStore

from shardgate.settings import DatasetSettings, Settings
from tests.support.clients.filling import open_boto3, open_obstore, s3fs_options
from tests.support.clients.precomputed import volumes
from tests.support.clients.services import from_folder
from tests.support.clients.writing import Case, Values, by_tensorstore, sharding
from tests.support.deferred import Deferred
from tests.support.files import write_files
from tests.support.formats.neuroglancer_precomputed.case import MURMUR, build_meshes
from tests.support.formats.zarr.draft import build as build_draft
from tests.support.serving import serving

cloudfiles: Any = Deferred("cloudfiles")

_BUCKET: Final = "bucket"
_V2: Final = {"name": "v2", "separator": "."}
_MANY: Final = ("", "em", "em/cube/c/", "em/cube/c/1")
"""Prefixes of hundreds of keys, for which pages of one key each take long."""
_PREFIXES: Final = ("", "em/cube/c/1", "em/s0-v2/1", "volume/8_8_8/-", "lab 1/a")
_TAG: Final = "@tag.v 1/"
_ODD: Final = ("a/b", "100%", "a%2Fc")


def _list(
    s3: Any, prefix: str = "", page: int = 1000, operation: str = "list_objects_v2", **query: str
) -> list[str]:
    """List the keys and common prefixes below *prefix*, page by page."""
    pages = s3.get_paginator(operation).paginate(
        Bucket=query.pop("bucket", "repository"),
        Prefix=prefix,
        PaginationConfig={"PageSize": page},
        **query,
    )
    found: list[str] = []
    for each in pages:
        names = [entry["Key"] for entry in each.get("Contents", ())]
        names += [entry["Prefix"] for entry in each.get("CommonPrefixes", ())]
        assert len(names) == each.get("KeyCount", len(names)) <= page
        found += sorted(names, key=str.encode)
    return found


def _names(keys: Sequence[str], prefix: str) -> list[str]:
    """Return the keys below *prefix* with common prefixes for the delimiter `/`."""
    below = [key.removeprefix(prefix) for key in keys if key.startswith(prefix)]
    folded = (prefix + name.partition("/")[0] + "/" * ("/" in name) for name in below)
    return list(dict.fromkeys(folded))


def _sparse(shape: Sequence[int], seed: int) -> Values:
    """Return an array of which about half of the blocks of 3 are zero."""
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 2, [-(-n // 3) for n in shape], np.uint8)
    for axis, n in enumerate(shape):
        blocks = np.take(np.repeat(blocks, 3, axis), range(n), axis)
    return blocks


def _chunks(values: Values, chunk: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the coordinates of the chunks that are not all zero."""
    counts = [range(-(-n // size)) for n, size in zip(values.shape, chunk, strict=True)]
    for at in itertools.product(*counts):
        place = tuple(slice(i * n, i * n + n) for i, n in zip(at, chunk, strict=True))
        if values[place].any():
            yield at


def _write_arrays(folder: Path) -> set[str]:
    """Write arrays with zarr-python, sharded and not; return the expected keys."""
    zarr.create_group(folder / "em")
    flat, cube = _sparse((24, 13), 1), _sparse((5, 8, 20), 2)
    for name, values, chunk, options in (
        ("s0", flat, (2, 3), {"shards": (8, 6)}),
        ("s0-v2", flat, (2, 3), {"shards": (8, 6), "chunk_key_encoding": _V2}),
        ("cube", cube, (1, 2, 5), {"shards": (4, 4, 10)}),
        ("plain", cube, (4, 4, 10), {}),
    ):
        zarr.create_array(folder / "em" / name, data=values, chunks=chunk, fill_value=0, **options)
    nested = Case("", by_tensorstore, flat, (8, 8), [sharding((2, 4), [sharding((1, 2))])])
    by_tensorstore(nested, folder / "em/nested")
    return {
        "em/zarr.json",
        *(f"em/{name}/zarr.json" for name in ("s0", "s0-v2", "cube", "plain", "nested")),
        *("em/s0/c/" + "/".join(map(str, at)) for at in _chunks(flat, (2, 3))),
        *("em/s0-v2/" + ".".join(map(str, at)) for at in _chunks(flat, (2, 3))),
        *("em/cube/c/" + "/".join(map(str, at)) for at in _chunks(cube, (1, 2, 5))),
        *("em/plain/c/" + "/".join(map(str, at)) for at in _chunks(cube, (4, 4, 10))),
        *("em/nested/c/" + "/".join(map(str, at)) for at in _chunks(flat, (1, 2))),
    }


def _write_volume(folder: Path) -> set[str]:
    """Write a volume with TensorStore, sharded by a hash and gzip; return the expected keys."""
    values = _sparse((30, 17, 9), 3)[..., np.newaxis] + np.uint8(1)
    hashed = volumes.sharding((1, 2, 2), volumes.MURMUR, index="gzip", data="gzip")
    scale = volumes.Scale(values, hashed, offset=(-7, 0, 95))
    volumes.write_scale(scale, folder / "volume")
    return {"volume/info", *(f"volume/8_8_8/{name}" for name, _ in scale.chunks())}


def _write(folder: Path) -> set[str]:
    """Write all containers and plain objects; return the expected keys."""
    keys = _write_arrays(folder) | _write_volume(folder)
    meshes = {str(n * n): bytes([n]) * 9 for n in range(2, 60)}
    draft = {f"data/root/a/c{i}/{j}": b"chunk" for i, j in ((0, 0), (0, 3), (1, 1), (2, 2))}
    shards = build_meshes(meshes, sharding=MURMUR)
    stored = {f"meshes/{name}": data for name, data in shards.items()}
    stored |= {f"draft/{name}": data for name, data in build_draft(draft, path="/a").items()}
    plain = ("em-notes", "em.txt", "lab 1/a+b/é.json", "lab 1/a/b", "zarr/1", "volume.bak/info")
    stored |= dict.fromkeys(plain, b"{}")
    write_files(stored, folder)
    keys |= {"meshes/info"} | {f"meshes/{n}{end}" for n in meshes for end in ("", ".index")}
    keys |= {f"draft/{name}" for name in ("zarr.json", "meta/root/a.array.json", *draft)}
    return keys | set(plain)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Write all data; return the folder and its expected keys in order."""
    folder = tmp_path_factory.mktemp("listing")
    return folder, sorted(_write(folder), key=str.encode)


@pytest.fixture(scope="module")
def keys(sources: tuple[Path, list[str]]) -> list[str]:
    """Return the expected keys in order."""
    return sources[1]


@pytest.fixture(
    scope="module", params=["folder", pytest.param("seaweedfs", marks=pytest.mark.soak)]
)
def bucket_url(request: pytest.FixtureRequest, sources: tuple[Path, list[str]]) -> Generator[str]:
    """Serve the data from the folder, and from SeaweedFS, which has its own order of keys."""
    folder, _ = sources
    seaweedfs = request.getfixturevalue("seaweedfs") if request.param == "seaweedfs" else None
    with from_folder(folder, seaweedfs, "listing") as served:
        yield served


@pytest.fixture(scope="module")
def bucket_s3(bucket_url: str) -> Any:
    """Open boto3's client of the data."""
    return open_boto3(bucket_url)


@pytest.mark.parametrize(
    ("bucket_url", "prefix", "size"),
    [
        *(("folder", prefix, 83) for prefix in _PREFIXES),
        ("seaweedfs", "lab 1/a", 1),
        ("folder", "", 1000),
        *(pytest.param("seaweedfs", each, 1, marks=pytest.mark.soak) for each in _MANY),
    ],
    indirect=["bucket_url"],
)
def test_boto3_pages_through_the_keys(
    bucket_s3: Any, keys: list[str], prefix: str, size: int
) -> None:
    """boto3 lists all expected keys in order for each page size, with and without a delimiter."""
    whole = [key for key in keys if key.startswith(prefix)]
    assert _list(bucket_s3, prefix, size, bucket=_BUCKET) == whole
    folded = _list(bucket_s3, prefix, size, bucket=_BUCKET, Delimiter="/")
    assert folded == _names(keys, prefix)


def test_s3fs_finds_and_globs(bucket_url: str, keys: list[str]) -> None:
    """s3fs finds, lists and globs the expected keys."""
    fs = s3fs.S3FileSystem(**s3fs_options(bucket_url), skip_instance_cache=True)

    assert sorted(fs.find(_BUCKET)) == sorted(f"{_BUCKET}/{key}" for key in keys)
    assert sorted(fs.ls(f"{_BUCKET}/em", detail=False)) == sorted(
        f"{_BUCKET}/{name.rstrip('/')}" for name in _names(keys, "em/")
    )
    assert sorted(fs.glob(f"{_BUCKET}/em/*/c/1/*")) == sorted(
        {f"{_BUCKET}/{'/'.join(k.split('/')[:5])}" for k in keys if k.split("/")[2:4] == ["c", "1"]}
    )
    assert fs.cat(f"{_BUCKET}/em-notes") == b"{}"


def test_obstore_and_zarr_list(bucket_url: str, keys: list[str]) -> None:
    """Obstore and zarr-python list the expected keys, and open the arrays of a listed group."""
    store = open_obstore(bucket_url, _BUCKET)
    found = [entry["path"] for batch in obstore.list(store) for entry in batch]
    rolled = obstore.list_with_delimiter(store, "em/s0/c")
    names = [*rolled["common_prefixes"], *(entry["path"] for entry in rolled["objects"])]
    by_zarr = ObjectStore(store, read_only=True)

    async def gather(call: Any, prefix: str) -> list[str]:
        return sorted([name async for name in call(prefix)])

    assert sorted(found) == sorted(keys)
    assert sorted(names) == sorted(name.rstrip("/") for name in _names(keys, "em/s0/c/"))
    for prefix in ("em/cube/", "em/nested/c/"):
        below = sorted(key for key in keys if key.startswith(prefix))
        assert asyncio.run(gather(by_zarr.list_prefix, prefix)) == below
    assert asyncio.run(gather(by_zarr.list_dir, "em")) == sorted(
        name.removeprefix("em/").rstrip("/") for name in _names(keys, "em/")
    )
    group = zarr.open_group(by_zarr, path="em", mode="r", use_consolidated=False)
    assert sorted(group.array_keys()) == ["cube", "nested", "plain", "s0", "s0-v2"]
    nested = group["nested"]
    assert isinstance(nested, zarr.Array)
    assert nested.nchunks_initialized == sum(key.startswith("em/nested/c") for key in keys)


def test_cloud_files_lists_by_prefix(bucket_url: str, keys: list[str]) -> None:
    """cloud-files lists the keys of a volume, all, flat, and below a prefix."""
    secrets = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any"}
    cloudfiles.interfaces.reset_connection_pools()  # which are by bucket, whatever the endpoint
    files = cloudfiles.CloudFiles(f"s3://{bucket_url}/{_BUCKET}/volume", secrets=secrets)
    inside = [key.removeprefix("volume/") for key in keys if key.startswith("volume/")]

    assert sorted(files.list()) == sorted(inside)
    assert sorted(files.list(flat=True)) == ["8_8_8/", "info"]
    below = sorted(key for key in inside if key.startswith("8_8_8/-3"))
    assert sorted(files.list("8_8_8/-3")) == below


def _write_repository(path: Path) -> None:
    repository = icechunk.Repository.create(icechunk.local_filesystem_storage(str(path)))
    session = repository.writable_session("main")
    root = zarr.create_group(session.store)
    numbers = root.create_array("numbers", shape=(120,), chunks=(1,), dtype="i2", compressors=None)
    numbers[[3, 7, 10, 11, 12, 100, 110, 119]] = 1
    image = root.create_array(
        "a/image", shape=(25, 7), shards=(10, 4), chunks=(2, 2), dtype="u1", compressors=None
    )
    image[:9, 5:] = 3
    image[21:] = 4
    root.create_array("a/scalar", shape=(), dtype="f8")[...] = 1
    root.create_array("a/nothing", shape=(9,), chunks=(3,), dtype="f8")
    root.create_group("a-b")
    root.create_group("0")
    root.create_array("away", shape=(2,), chunks=(1,), dtype="u1", compressors=None)
    session.store.set_virtual_ref(
        "away/c/1", "file:///nowhere/x", offset=3, length=5, validate_container=False
    )
    snapshot_id = session.commit("all")
    repository.create_tag("v 1", snapshot_id=snapshot_id)
    for name in _ODD:
        repository.create_branch(name, snapshot_id)


def _write_sparse_repository(path: Path) -> list[str]:
    """Write an array of 2^60 elements with one chunk in each of 20 shards; return their keys."""
    repository = icechunk.Repository.create(icechunk.local_filesystem_storage(str(path)))
    session = repository.writable_session("main")
    array = zarr.create_group(session.store).create_array(
        "a", shape=(2**20,) * 3, shards=(16,) * 3, chunks=(1,) * 3, dtype="u1", compressors=None
    )
    cells = np.random.default_rng(4).integers(0, 2**20, (20, 3)).tolist()
    for cell in map(tuple, cells):
        array[cell] = 1
    repository.create_tag("v1", snapshot_id=session.commit("sparse"))
    return sorted("a/c/" + "/".join(map(str, cell)) for cell in cells)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """Serve a repository, alone and within a bucket, and an array beside it."""
    folder = tmp_path_factory.mktemp("listing")
    _write_repository(folder / "lab/repository")
    zarr.create_array(folder / "lab/array", shape=(4,), shards=(4,), chunks=(2,), dtype="u1")
    datasets = {
        "repository": DatasetSettings(url=(folder / "lab/repository").as_uri()),
        "bucket": DatasetSettings(url=folder.as_uri()),
    }
    with serving(Settings(datasets=datasets)) as served:
        yield served


@pytest.fixture(scope="module")
def s3(url: str) -> Any:
    """Open boto3's client."""
    return open_boto3(url)


def _present(url: str, prefix: str, shape: Sequence[int]) -> list[str]:
    """Return the keys of the chunks in a grid that HEAD finds."""
    with httpx.Client(base_url=f"{url}/repository/") as client:
        keys = [f"{prefix}/c/{'/'.join(map(str, at))}" for at in np.ndindex(*shape)]
        return [key for key in keys if client.head(key).status_code == httpx.codes.OK]


def test_listing_of_a_repository_has_exactly_the_readable_keys(url: str, s3: Any) -> None:
    """A listing of a repository has exactly its documents and the chunks that HEAD finds."""
    chunks = _present(url, "numbers", (120,)) + _present(url, "a/image", (13, 4))
    nodes = ["", "0/", "a/", "a-b/", "a/image/", "a/nothing/", "a/scalar/", "away/", "numbers/"]
    expected = [*chunks, "a/scalar/c", "away/c/1", *(f"{node}zarr.json" for node in nodes)]

    assert 8 < len(chunks) < 120
    assert _list(s3) == sorted(expected, key=str.encode)


@pytest.mark.parametrize("ref", ["", _TAG])
def test_listed_times_are_those_of_the_ref(url: str, s3: Any, ref: str) -> None:
    """Listed times are those of the branch's last change or the tag's snapshot, as in HEAD."""
    [entry] = httpx.get(f"{url}/api/datasets/repository/history").json()["history"][:1]
    flushed = datetime.fromisoformat(entry["flushed_at"]).replace(microsecond=0)
    for listed in s3.list_objects_v2(Bucket="repository", Prefix=f"{ref}numbers/")["Contents"]:
        head = s3.head_object(Bucket="repository", Key=listed["Key"])
        assert head["LastModified"] == listed["LastModified"]
        assert timedelta() <= listed["LastModified"] - flushed <= timedelta(minutes=1)
        assert not ref or listed["LastModified"] == flushed


def test_listing_below_a_ref_has_its_prefix(s3: Any) -> None:
    """Keys below a ref's prefix are those of the branch; an unknown or partial ref has none."""
    every, path = _list(s3), "lab/repository/"
    below = _list(s3, f"{path}@branch.main/a/", bucket="bucket")

    assert _list(s3, _TAG) == [f"{_TAG}{key}" for key in every]
    assert below == [f"{path}@branch.main/{key}" for key in _list(s3, "a/")]
    assert _list(s3, bucket="bucket") == ["lab/array/zarr.json", *(path + key for key in every)]
    assert _list(s3, "lab/", bucket="bucket", Delimiter="/") == ["lab/array/", path]
    for prefix in ("@tag.v2/", "@tag.v 1", "nothing/"):
        assert _list(s3, prefix) == []


def test_sparse_array_of_a_repository_is_listed_in_one_page(tmp_path: Path) -> None:
    """The chunks of a sparse sharded array of a repository are listed in one page of any ref."""
    expected = _write_sparse_repository(tmp_path)
    datasets = {"sparse": DatasetSettings(url=tmp_path.as_uri())}
    with serving(Settings(datasets=datasets)) as served:
        s3 = open_boto3(served)
        pages = {
            ref: s3.list_objects_v2(Bucket="sparse", Prefix=f"{ref}a/c/")
            for ref in ("", "@tag.v1/")
        }

    for ref, page in pages.items():
        assert [entry["Key"] for entry in page["Contents"]] == [ref + key for key in expected]
        assert not page["IsTruncated"]


def test_listing_starts_after_the_given_key(s3: Any) -> None:
    """A listing with `start-after` or `marker` has the greater keys only, for any start."""
    every, tagged = _list(s3), _list(s3, _TAG)
    for start in [*random.Random(1).sample(every, 6), "a", "numbers/c/1/", "zz", "\x01"]:
        expected = [key for key in every if key > start]
        assert _list(s3, StartAfter=start) == expected
        assert _list(s3, operation="list_objects", Marker=start) == expected
    for start in ("", "0", "@", "@tag", "@tag.v 1", _TAG, "@tag.v 2/", "a"):
        assert _list(s3, _TAG, StartAfter=start) == [key for key in tagged if key > start]


def test_chunk_of_a_forbidden_reference_is_listed(s3: Any) -> None:
    """A chunk with a forbidden virtual reference is listed with its length; reading it gets 403."""
    (entry,) = s3.list_objects_v2(Bucket="repository", Prefix="away/c/")["Contents"]

    assert (entry["Key"], entry["Size"], "ETag" in entry) == ("away/c/1", 5, False)
    with pytest.raises(ClientError, match=r"\(403\)"):
        s3.head_object(Bucket="repository", Key=entry["Key"])


def test_refs_of_any_name_are_listed_and_read(url: str, s3: Any) -> None:
    """A branch with `/` or `%` in its name is listed and read by boto3.

    TensorStore reads it although it percent-encodes the path again.
    """
    for name in _ODD:
        ref = f"@branch.{name.replace('%', '%25').replace('/', '%2F')}/"
        listed = _list(s3, ref)
        assert listed == [f"{ref}{key}" for key in _list(s3)]
        assert s3.get_object(Bucket="repository", Key=listed[0])["Body"].read()

    path = "/repository/@branch.a%2Fb/a/image/"
    kvstore = {"driver": "http", "base_url": url, "path": path}
    array = tensorstore.open({"driver": "zarr3", "kvstore": kvstore}, open=True).result()
    assert array[24, 6].read().result() == 4


def test_unsigned_request_with_a_delimiter_is_list_objects(url: str, s3: Any) -> None:
    """An unsigned GET with S3's parameters gets a ListObjects result, as GDAL requires."""
    answer = httpx.get(f"{url}/repository/?delimiter=%2F&max-keys=2&prefix=a%2F")
    root = ET.fromstring(answer.content)  # noqa: S314  the service wrote it
    told = {each.tag.rpartition("}")[2]: "".join(each.itertext()) for each in root}

    assert told == {
        "Name": "repository",
        "Prefix": "a/",
        "Delimiter": "/",
        "MaxKeys": "2",
        "IsTruncated": "true",
        "Marker": "",
        "NextMarker": "a/nothing/",
        "CommonPrefixes": "a/nothing/",
    }


@pytest.mark.parametrize(
    "query",
    [
        "list-type=1", "marker=%01", "max-keys=-1",
        *(
            f"list-type=2&{parameter}"
            for parameter in (
                "delimiter=x", "max-keys=-1", f"max-keys={'9' * 5000}", "continuation-token=%21",
                "prefix=%01", "prefix=%ff", "prefix=a/../", "prefix=a//b",
                "prefix=../repository/@branch.main/a", "encoding-type=url&prefix=%00/",
            )
        ),
    ],
)  # fmt: skip
def test_invalid_listing_parameter_is_refused_with_400(url: str, query: str) -> None:
    """A listing with an invalid delimiter, count, token or prefix fails with 400."""
    assert httpx.get(f"{url}/repository?{query}").status_code == httpx.codes.BAD_REQUEST
