"""Clients of S3 list the keys of a ref of an Icechunk repository, and read what they list."""

import random
from collections.abc import Generator, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree as ET

import httpx
import icechunk
import numpy as np
import obstore
import pytest
import tensorstore
import zarr
from botocore.exceptions import ClientError
from zarr.storage import ObjectStore

from app.settings import DatasetSettings, Settings
from tests.clients.filling import open_boto3, open_obstore
from tests.serving import serving

_TAG: Final = "@tag.v 1/"
_ODD: Final = ("a/b", "100%", "a%2Fc")


def _write(path: Path) -> None:
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


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """Serve a repository, by itself and below a bucket, and an array that is in none."""
    folder = tmp_path_factory.mktemp("listing")
    _write(folder / "lab/repository")
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


def _list(
    s3: Any, prefix: str = "", page: int = 1000, operation: str = "list_objects_v2", **query: str
) -> list[str]:
    pages = s3.get_paginator(operation).paginate(
        Bucket=query.pop("bucket", "repository"),
        Prefix=prefix,
        PaginationConfig={"PageSize": page},
        **query,
    )
    found: list[str] = []
    for each in pages:
        contents = [entry["Key"] for entry in each.get("Contents", ())]
        folded = [entry["Prefix"] for entry in each.get("CommonPrefixes", ())]
        found += sorted([*contents, *folded], key=str.encode)
    return found


def _present(url: str, prefix: str, shape: Sequence[int]) -> list[str]:
    """Ask for each chunk that there could be."""
    with httpx.Client(base_url=f"{url}/repository/") as client:
        keys = [f"{prefix}/c/{'/'.join(map(str, at))}" for at in np.ndindex(*shape)]
        return [key for key in keys if client.head(key).status_code == httpx.codes.OK]


def test_what_is_listed_is_what_is_there(url: str, s3: Any) -> None:
    """Documents, and the chunks that a GET finds, the inner ones of shards; no others."""
    chunks = _present(url, "numbers", (120,)) + _present(url, "a/image", (13, 4))
    nodes = ["", "0/", "a/", "a-b/", "a/image/", "a/nothing/", "a/scalar/", "away/", "numbers/"]
    expected = [*chunks, "a/scalar/c", "away/c/1", *(f"{node}zarr.json" for node in nodes)]

    assert 8 < len(chunks) < 120
    assert _list(s3) == sorted(expected, key=str.encode)


@pytest.mark.parametrize("ref", ["", _TAG])
def test_times_are_those_of_the_ref(url: str, s3: Any, ref: str) -> None:
    """A branch has the time of its last change, a tag that of its snapshot; HEAD agrees."""
    [entry] = httpx.get(f"{url}/api/datasets/repository/history").json()["history"][:1]
    flushed = datetime.fromisoformat(entry["flushed_at"]).replace(microsecond=0)
    for listed in s3.list_objects_v2(Bucket="repository", Prefix=f"{ref}numbers/")["Contents"]:
        head = s3.head_object(Bucket="repository", Key=listed["Key"])
        assert head["LastModified"] == listed["LastModified"]
        assert timedelta() <= listed["LastModified"] - flushed <= timedelta(minutes=1)
        assert not ref or listed["LastModified"] == flushed


def test_a_ref_is_listed_by_its_name(s3: Any) -> None:
    """Keys of a tag begin with its segment, and are otherwise those of the branch."""
    assert _list(s3, _TAG) == [f"{_TAG}{key}" for key in _list(s3)]


@pytest.mark.parametrize(
    ("page", "operation"),
    [(1, "list_objects_v2"), (2, "list_objects"), (7, "list_objects_v2")],
)
@pytest.mark.parametrize("delimiter", ["", "/"])
@pytest.mark.parametrize("prefix", ["", "a/", "a/image/c/", "numbers/c/1", f"{_TAG}a"])
def test_pages_make_up_the_whole(
    s3: Any, prefix: str, delimiter: str, page: int, operation: str
) -> None:
    """However small the pages are, nothing is listed twice and nothing left out."""
    whole = _list(s3, prefix, Delimiter=delimiter)

    assert _list(s3, prefix, page, operation, Delimiter=delimiter) == whole


@pytest.mark.parametrize("prefix", ["", "a/", "a/image/", "numbers/c/", "numb", f"{_TAG}a/"])
def test_keys_are_folded_at_the_delimiter(s3: Any, prefix: str) -> None:
    """What has a slash behind the prefix is told up to there, once."""
    every = _list(s3, prefix)
    folded = {
        prefix + key.partition("/")[0] + "/" * ("/" in key)
        for key in (key.removeprefix(prefix) for key in every)
    }

    assert _list(s3, prefix, Delimiter="/") == sorted(folded, key=str.encode)


def test_a_listing_begins_where_it_is_told(s3: Any) -> None:
    """Behind any key, there or not."""
    every = _list(s3)
    for start in [*random.Random(1).sample(every, 20), "a", "numbers/c/1/", "zz", "\x01"]:
        expected = [key for key in every if key > start]
        assert _list(s3, StartAfter=start) == expected
        assert _list(s3, operation="list_objects", Marker=start) == expected


@pytest.mark.parametrize("start", ["", "0", "@", "@tag", "@tag.v 1", _TAG, "@tag.v 2/", "a"])
def test_a_listing_of_a_ref_may_begin_outside_of_it(s3: Any, start: str) -> None:
    """Before it all is listed, behind it nothing."""
    every = _list(s3, _TAG)

    assert _list(s3, _TAG, StartAfter=start) == [key for key in every if key > start]


def test_sizes_and_tags_are_those_of_the_entities(url: str, s3: Any) -> None:
    """What a listing tells of a key is what HEAD tells of it."""
    listed = s3.list_objects_v2(Bucket="repository")["Contents"]
    for entry in listed:
        if entry["Key"] == "away/c/1":
            continue
        head = s3.head_object(Bucket="repository", Key=entry["Key"])
        assert (entry["Size"], entry["ETag"]) == (head["ContentLength"], head["ETag"])


def test_what_may_not_be_followed_is_listed(s3: Any) -> None:
    """The reference tells its length; reading it is refused, which is no absence."""
    (entry,) = s3.list_objects_v2(Bucket="repository", Prefix="away/c/")["Contents"]

    assert (entry["Key"], entry["Size"], "ETag" in entry) == ("away/c/1", 5, False)
    with pytest.raises(ClientError) as caught:
        s3.head_object(Bucket="repository", Key=entry["Key"])
    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == httpx.codes.FORBIDDEN


@pytest.mark.parametrize("name", _ODD)
def test_refs_of_any_name_are_listed_and_read(s3: Any, name: str) -> None:
    """What is listed can be read, though the client percent-encodes it once more."""
    ref = f"@branch.{name.replace('%', '%25').replace('/', '%2F')}/"
    listed = _list(s3, ref)

    assert listed == [f"{ref}{key}" for key in _list(s3)]
    assert s3.get_object(Bucket="repository", Key=listed[0])["Body"].read()


def test_tensorstore_is_told_the_path_by_itself(url: str) -> None:
    """It percent-encodes what is percent-encoded already, and finds the ref all the same."""
    path = "/repository/@branch.a%2Fb/a/image/"
    kvstore = {"driver": "http", "base_url": url, "path": path}
    array = tensorstore.open({"driver": "zarr3", "kvstore": kvstore}, open=True).result()

    assert array[24, 6].read().result() == 4


def test_a_repository_below_a_bucket_is_listed(s3: Any) -> None:
    """Keys begin with the path of the repository."""
    found = _list(s3, "lab/repository/@branch.main/a/", bucket="bucket")

    assert found == [f"lab/repository/@branch.main/{key}" for key in _list(s3, "a/")]


def test_no_such_ref_has_no_keys(s3: Any) -> None:
    """Nor has a ref whose name is not complete."""
    assert _list(s3, "@tag.v2/") == _list(s3, "@tag.v 1") == _list(s3, "nothing/") == []


def test_obstore_lists_and_reads(url: str) -> None:
    """Obstore's client finds the keys, and zarr-python the nodes of the group with it."""
    store = open_obstore(url, "repository")
    found = [entry["path"] for batch in obstore.list(store, _TAG) for entry in batch]
    group = zarr.open_group(
        ObjectStore(store, read_only=True), path=_TAG.rstrip("/"), mode="r", use_consolidated=False
    )
    names = sorted(name for name, _ in group.members(max_depth=None))

    assert len(found) == len(set(found)) > 30
    assert names == ["0", "a", "a-b", "a/image", "a/nothing", "a/scalar", "away", "numbers"]
    assert np.asarray(group["a/image"])[24, 6] == 4


def test_clients_that_do_not_sign_list_by_parameters(url: str, s3: Any) -> None:
    """ListObjects, as GDAL asks for it where it is told not to sign."""
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


def test_a_marker_may_lie_behind_the_last_key(tmp_path: Path) -> None:
    """A page of few keys ends after many that are absent; the client goes on from there."""
    array = zarr.create_array(
        tmp_path, shape=(12_000,), shards=(12_000,), chunks=(1,), dtype="u1", compressors=None
    )
    array[9_999] = 1
    with serving(Settings(datasets={"sparse": DatasetSettings(url=tmp_path.as_uri())})) as served:
        s3 = open_boto3(served)
        assert _list(s3, "c/", 1, "list_objects", bucket="sparse") == ["c/9999"]


@pytest.mark.parametrize(
    "query",
    [
        "list-type=1",
        "marker=%01",
        "max-keys=-1",
        "list-type=2&delimiter=x",
        "list-type=2&max-keys=-1",
        f"list-type=2&max-keys={'9' * 5000}",
        "list-type=2&continuation-token=%21",
        "list-type=2&prefix=%01",
        "list-type=2&prefix=%ff",
        "list-type=2&prefix=a/../",
        "list-type=2&prefix=../repository/@branch.main/a",
        "list-type=2&prefix=a//b",
        "list-type=2&encoding-type=url&prefix=%00/",
    ],
)
def test_what_cannot_be_listed_is_refused(url: str, query: str) -> None:
    """Other delimiters, odd numbers, foreign tokens, folders that no key can be in."""
    assert httpx.get(f"{url}/repository?{query}").status_code == httpx.codes.BAD_REQUEST


def test_what_is_in_no_repository_is_listed_beside(s3: Any) -> None:
    """Of a repository among other things the keys are those of its branch ``main``."""
    expected = [f"lab/repository/{key}" for key in _list(s3)]

    assert _list(s3, bucket="bucket") == ["lab/array/zarr.json", *expected]
    assert _list(s3, "lab/", bucket="bucket", Delimiter="/") == ["lab/array/", "lab/repository/"]
