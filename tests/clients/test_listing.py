"""Clients of S3 list everything that is served, and find the keys that the sources tell of."""

import asyncio
import itertools
from collections.abc import Generator, Iterator, Sequence
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import obstore
import pytest
import s3fs
import tensorstore
import zarr
from cloudfiles import CloudFiles
from cloudfiles.interfaces import reset_connection_pools
from zarr.storage import FsspecStore, ObjectStore

from app.settings import DatasetSettings, Settings
from tests.clients.filling import open_boto3, open_obstore
from tests.clients.precomputed.volumes import sharding as precomputed_sharding
from tests.clients.writing import Values
from tests.formats.neuroglancer_precomputed.case import MURMUR, build_meshes
from tests.formats.zarr.draft import build as build_draft
from tests.seaweedfs import SeaweedFS
from tests.serving import serving

_BUCKET: Final = "bucket"
_V2: Final = {"name": "v2", "separator": "."}
_MANY: Final = ("", "em", "em/cube/c/")
"""Below these are hundreds of keys, so that pages of one key each take long."""
_FEW: Final = ("em/cube/c/1", "em/s0-v2/1", "volume/8_8_8/-", "lab 1/a")
_PAGES: Final = [
    *itertools.product((*_MANY, *_FEW), (83, 1000)),
    *itertools.product(_FEW, (1,)),
    *(pytest.param(prefix, 1, marks=pytest.mark.soak) for prefix in _MANY),
]


def _sparse(shape: Sequence[int], seed: int) -> Values:
    """Make numbers of which about half of the blocks of 3 are zero."""
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 2, [-(-n // 3) for n in shape], np.uint8)
    for axis, n in enumerate(shape):
        blocks = np.take(np.repeat(blocks, 3, axis), range(n), axis)
    return blocks


def _chunks(values: Values, chunk: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Give the coordinates of the chunks that hold other numbers than zero."""
    counts = [range(-(-n // size)) for n, size in zip(values.shape, chunk, strict=True)]
    for at in itertools.product(*counts):
        place = tuple(slice(i * n, i * n + n) for i, n in zip(at, chunk, strict=True))
        if values[place].any():
            yield at


def _write_arrays(folder: Path) -> set[str]:
    """Write what zarr-python writes: sharded, sharded twice, with other keys, and not sharded."""
    zarr.create_group(folder / "em")
    flat, cube = _sparse((40, 23), 1), _sparse((7, 12, 30), 2)
    for name, values, chunk, options in (
        ("s0", flat, (2, 3), {"shards": (8, 6)}),
        ("s0-v2", flat, (2, 3), {"shards": (8, 6), "chunk_key_encoding": _V2}),
        ("cube", cube, (1, 2, 5), {"shards": (4, 4, 10)}),
        ("plain", cube, (4, 4, 10), {}),
    ):
        array = zarr.create_array(
            folder / "em" / name, data=values, chunks=chunk, fill_value=0, **options
        )
        assert array.shape == values.shape
    inner = {"name": "sharding_indexed", "configuration": _inner((2, 4), [_inner_codec((1, 2))])}
    tensorstore.open(
        {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": str(folder / "em/nested")},
            "metadata": {
                "shape": list(flat.shape),
                "data_type": "uint8",
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [8, 8]}},
                "codecs": [inner],
            },
        },
        create=True,
    ).result().write(flat).result()
    return {
        "em/zarr.json",
        *(f"em/{name}/zarr.json" for name in ("s0", "s0-v2", "cube", "plain", "nested")),
        *("em/s0/c/" + "/".join(map(str, at)) for at in _chunks(flat, (2, 3))),
        *("em/s0-v2/" + ".".join(map(str, at)) for at in _chunks(flat, (2, 3))),
        *("em/cube/c/" + "/".join(map(str, at)) for at in _chunks(cube, (1, 2, 5))),
        *("em/plain/c/" + "/".join(map(str, at)) for at in _chunks(cube, (4, 4, 10))),
        *("em/nested/c/" + "/".join(map(str, at)) for at in _chunks(flat, (1, 2))),
    }


def _inner(chunk: Sequence[int], codecs: list[Any]) -> dict[str, Any]:
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    index = [little, {"name": "crc32c"}]
    return {"chunk_shape": list(chunk), "codecs": codecs, "index_codecs": index}


def _inner_codec(chunk: Sequence[int]) -> dict[str, Any]:
    return {"name": "sharding_indexed", "configuration": _inner(chunk, [{"name": "bytes"}])}


def _write_volume(folder: Path) -> set[str]:
    """Write what TensorStore writes, in shards by a hash, with gzip in all places."""
    values = _sparse((30, 17, 9), 3) + np.uint8(1)
    hashed = precomputed_sharding((1, 2, 2), "murmurhash3_x86_128", index="gzip", data="gzip")
    tensorstore.open(
        {
            "driver": "neuroglancer_precomputed",
            "kvstore": {"driver": "file", "path": str(folder / "volume")},
            "multiscale_metadata": {"type": "image", "data_type": "uint8", "num_channels": 1},
            "scale_metadata": {
                "size": list(values.shape),
                "voxel_offset": [-7, 0, 95],
                "chunk_size": [4, 4, 4],
                "resolution": [8, 8, 8],
                "encoding": "raw",
                "sharding": hashed,
            },
        },
        create=True,
    ).result()[..., 0].translate_to[0, 0, 0].write(values).result()

    def bounds(at: int, size: int, offset: int) -> str:
        return f"{offset + at * 4}-{offset + min(at * 4 + 4, size)}"

    origin = (-7, 0, 95)
    return {"volume/info"} | {
        "volume/8_8_8/" + "_".join(map(bounds, at, values.shape, origin))
        for at in _chunks(values, (4, 4, 4))
    }


def _write(folder: Path) -> set[str]:
    """Write everything; give the keys of it that can be asked for."""
    keys = _write_arrays(folder) | _write_volume(folder)
    meshes = {str(n * n): bytes([n]) * 9 for n in range(2, 60)}
    draft = {f"data/root/a/c{i}/{j}": b"chunk" for i, j in ((0, 0), (0, 3), (1, 1), (2, 2))}
    shards = build_meshes(meshes, sharding=MURMUR)
    stored = {f"meshes/{name}": data for name, data in shards.items()}
    stored |= {f"draft/{name}": data for name, data in build_draft(draft, path="/a").items()}
    plain = ("em-notes", "em.txt", "lab 1/a+b/é.json", "lab 1/a/b", "zarr/1", "volume.bak/info")
    stored |= dict.fromkeys(plain, b"{}")
    for name, data in stored.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    keys |= {"meshes/info"} | {f"meshes/{n}{end}" for n in meshes for end in ("", ".index")}
    keys |= {f"draft/{name}" for name in ("zarr.json", "meta/root/a.array.json", *draft)}
    return keys | set(plain)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Write a folder, and tell its keys in order."""
    folder = tmp_path_factory.mktemp("listing")
    return folder, sorted(_write(folder), key=str.encode)


@pytest.fixture(scope="module", params=["folder", "seaweedfs"])
def url(request: pytest.FixtureRequest, sources: tuple[Path, list[str]]) -> Generator[str]:
    """Serve it from the folder, and from a server that has its own order of keys."""
    folder, _ = sources
    settings = Settings(datasets={_BUCKET: DatasetSettings(url=folder.as_uri())})
    if request.param == "seaweedfs":
        server: SeaweedFS = request.getfixturevalue("seaweedfs")
        server.upload_folder(folder, "listing")
        at = DatasetSettings(url=f"s3://{server.bucket}/listing", store="lab")
        settings = Settings(datasets={_BUCKET: at}, stores={"lab": server.settings})
    with serving(settings) as served:
        yield served


@pytest.fixture(scope="module")
def keys(sources: tuple[Path, list[str]]) -> list[str]:
    """Tell what can be asked for."""
    return sources[1]


@pytest.fixture(scope="module")
def s3(url: str) -> Any:
    """Open boto3's client."""
    return open_boto3(url)


def _names(keys: Sequence[str], prefix: str) -> list[str]:
    """Fold the keys below *prefix*."""
    below = [key.removeprefix(prefix) for key in keys if key.startswith(prefix)]
    folded = (prefix + name.partition("/")[0] + "/" * ("/" in name) for name in below)
    return list(dict.fromkeys(folded))


@pytest.mark.parametrize(("prefix", "size"), _PAGES)
def test_boto3_pages_through_the_keys(s3: Any, keys: list[str], prefix: str, size: int) -> None:
    """They are those that were written, in their order, with and without a delimiter."""
    for delimiter in ("", "/"):
        pages = s3.get_paginator("list_objects_v2").paginate(
            Bucket=_BUCKET, Prefix=prefix, Delimiter=delimiter, PaginationConfig={"PageSize": size}
        )
        found: list[str] = []
        for page in pages:
            names = [each["Key"] for each in page.get("Contents", ())]
            names += [each["Prefix"] for each in page.get("CommonPrefixes", ())]
            assert len(names) == page["KeyCount"] <= size
            found += sorted(names, key=str.encode)
        wanted = [key for key in keys if key.startswith(prefix)]
        assert found == (_names(keys, prefix) if delimiter else wanted)


def test_sizes_tags_and_times_are_those_of_the_entities(s3: Any, url: str) -> None:
    """A listing has the size, ETag and time of a GET; of gzip, those of a client that takes it."""
    listed = [
        entry
        for page in s3.get_paginator("list_objects_v2").paginate(Bucket=_BUCKET)
        for entry in page["Contents"]
    ]
    with httpx.Client(base_url=f"{url}/{_BUCKET}/", headers={"accept-encoding": "gzip"}) as client:
        for entry in listed[::7]:
            with client.stream("GET", entry["Key"]) as answer:
                tag = answer.headers["etag"].replace('-gzip"', '"')
                assert int(answer.headers["content-length"]) == entry["Size"], entry
                assert tag == entry["ETag"], entry
                modified = parsedate_to_datetime(answer.headers["last-modified"])
                assert modified == entry["LastModified"], entry


def test_s3fs_finds_and_globs(url: str, keys: list[str]) -> None:
    """Fsspec's file system of S3 sees the tree."""
    fs = s3fs.S3FileSystem(key="any", secret="any", endpoint_url=url, skip_instance_cache=True)

    assert sorted(fs.find(_BUCKET)) == sorted(f"{_BUCKET}/{key}" for key in keys)
    fs.invalidate_cache()  # of folders it made up itself, some twice
    assert sorted(fs.ls(f"{_BUCKET}/em", detail=False)) == sorted(
        f"{_BUCKET}/{name.rstrip('/')}" for name in _names(keys, "em/")
    )
    assert sorted(fs.glob(f"{_BUCKET}/em/*/c/1/*")) == sorted(
        {f"{_BUCKET}/{'/'.join(k.split('/')[:5])}" for k in keys if k.split("/")[2:4] == ["c", "1"]}
    )
    assert fs.cat(f"{_BUCKET}/em-notes") == b"{}"


def test_obstore_and_zarr_list(url: str, keys: list[str], s3: Any) -> None:
    """zarr-python's store lists prefixes and directories, and opens what it finds."""
    store = open_obstore(url, _BUCKET)
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


def test_zarr_opens_groups_through_s3fs(url: str) -> None:
    """So it does through fsspec."""
    options = {"key": "any", "secret": "any", "endpoint_url": url}
    store = FsspecStore.from_url(f"s3://{_BUCKET}/em", storage_options=options, read_only=True)
    group = zarr.open_group(store, mode="r", use_consolidated=False)

    assert sorted(group.array_keys()) == ["cube", "nested", "plain", "s0", "s0-v2"]
    assert np.array_equal(np.asarray(group["cube"]), _sparse((7, 12, 30), 2))


def test_cloud_files_lists_by_prefix(url: str, keys: list[str]) -> None:
    """What copies volumes sees the chunks; below a prefix or all."""
    secrets = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any"}
    reset_connection_pools()  # which are by bucket, whatever the endpoint
    files = CloudFiles(f"s3://{url}/{_BUCKET}/volume", secrets=secrets)
    inside = [key.removeprefix("volume/") for key in keys if key.startswith("volume/")]

    assert sorted(files.list()) == sorted(inside)
    assert sorted(files.list(flat=True)) == ["8_8_8/", "info"]
    below = sorted(key for key in inside if key.startswith("8_8_8/-3"))
    assert sorted(files.list("8_8_8/-3")) == below


def test_a_server_that_cannot_be_listed_is_told_of(url: str) -> None:
    """Over HTTP there is no listing of what lies in no repository: that is no empty bucket."""
    settings = Settings(datasets={"web": DatasetSettings(url=f"{url}/{_BUCKET}")})
    with serving(settings) as served:
        answer = httpx.get(f"{served}/web?list-type=2")

    assert answer.status_code == httpx.codes.SERVICE_UNAVAILABLE
    assert "cannot be listed" in answer.text
