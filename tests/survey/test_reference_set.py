"""`shardgate.survey.reference_set`: references that fsspec, zarr-python and the service read."""

import json
import os
import warnings
import zipfile
from pathlib import Path
from typing import Any, Final

import fsspec
import numpy as np
import pytest
import zarr
import zarr.storage

from shardgate.configuration import RootOptions
from shardgate.datasets import with_root
from shardgate.errors import ConfigurationError, NotAllowedError
from shardgate.model import GuardedBucket, ObjectRef
from shardgate.read.listing import Root
from shardgate.settings import DatasetSettings, Settings
from shardgate.survey.reference_set import url_of_object, write_references
from tests.support.commands import run
from tests.support.files import write_files
from tests.support.formats.case import Case
from tests.support.formats.icechunk.case import CASES as ICECHUNK
from tests.support.formats.neuroglancer_precomputed.case import CASES as PRECOMPUTED
from tests.support.formats.zarr.building import build
from tests.support.formats.zarr.case import CASES as ZARR
from tests.support.serving import client_of
from tests.support.survey.virtual import virtual_lab

CASES: Final = (*ZARR, *PRECOMPUTED, *ICECHUNK)
INFLATED: Final = ("gzip-data", "skeletons", "gzip-meshes")
"""Cases with chunks that are stored with gzip."""


async def references_of(folder: Path, prefix: str = "", **options: Any) -> dict[str, Any]:
    """Return the reference set of the keys below *prefix* of a local root."""
    parts: list[str] = []

    async def write(root: Root) -> int:
        return await write_references(root, prefix, parts.append)

    count = await with_root(str(folder), write, RootOptions(**options))
    document: dict[str, Any] = json.loads("".join(parts))
    assert document["version"] == 1
    assert len(document["refs"]) == count
    return document


def fsspec_of(document: dict[str, Any]) -> Any:
    """Open a set with fsspec."""
    return fsspec.filesystem("reference", fo=document, remote_protocol="file")


@pytest.mark.parametrize("case", [each for each in CASES if each.name not in INFLATED], ids=str)
async def test_references_lead_to_all_chunks(case: Case, tmp_path: Path) -> None:
    """Each chunk of a sharded container is read by fsspec, and absent chunks are no keys."""
    write_files(case.build(case.chunks), tmp_path)
    document = await references_of(tmp_path)
    peer = fsspec_of(document)

    assert {key: peer.cat_file(key) for key in case.chunks} == case.chunks
    assert not [key for key in case.absent if key in document["refs"]]


@pytest.mark.parametrize("case", [each for each in CASES if each.name in INFLATED], ids=str)
async def test_chunks_that_are_served_inflated_are_refused(case: Case, tmp_path: Path) -> None:
    """A chunk that is stored compressed, and served inflated, ends the set with its key."""
    write_files(case.build(case.chunks), tmp_path)

    with pytest.raises(ConfigurationError, match="stored with gzip, which a reference cannot say"):
        await references_of(tmp_path)


@pytest.mark.parametrize("is_sparse", [False, True])
async def test_zarr_reads_arrays_by_their_references(tmp_path: Path, *, is_sparse: bool) -> None:
    """zarr-python reads a sharded hierarchy by references as unsharded arrays, without a service.

    The service itself serves the set with the same keys and bytes.
    """
    group = zarr.create_group(tmp_path / "a b.zarr", attributes={"title": "é"})
    array = group.create_array("x", shape=(80, 40), dtype="i4", chunks=(2, 2), shards=(40, 20))
    if is_sparse:
        array[79, 39] = 7
    else:
        array[:16] = np.arange(640).reshape(16, 40)
    document = await references_of(tmp_path / "a b.zarr")
    (path := tmp_path / "refs.json").write_text(json.dumps(document))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fsspec's local files are not asynchronous
        options = {"fo": str(path), "remote_protocol": "file"}
        found: Any = zarr.open_group("reference://", storage_options=options, mode="r")
        assert found.attrs["title"] == "é"
        assert found["x"].shards is None
        np.testing.assert_array_equal(found["x"][...], array[...])
    table = {"url": str(path), "format": "kerchunk", "virtual_chunk_prefixes": (tmp_path.as_uri(),)}
    datasets = {
        "set": DatasetSettings.model_validate(table),
        "data": DatasetSettings(url=str(tmp_path / "a b.zarr")),
    }
    with client_of(Settings(datasets=datasets)) as client:
        for key in document["refs"]:
            assert client.get(f"/set/{key}").content == client.get(f"/data/{key}").content


async def test_virtual_references_keep_their_places(tmp_path: Path) -> None:
    """A virtual chunk of Icechunk has the place that its manifest names, below any ref."""
    lab = virtual_lab(tmp_path)
    for prefix in ("", "@tag.v 1/"):
        document = await references_of(lab.folder, prefix, allow_virtual=[lab.prefix])

        assert document["refs"]["a/c/0"] == [f"file://{lab.source}", 3, 2]
        assert fsspec_of(document).cat_file("a/c/0") == b"xy"


async def test_virtual_reference_that_is_not_allowed_is_refused(tmp_path: Path) -> None:
    """A virtual chunk outside of the allowed prefixes ends the set with its key."""
    with pytest.raises(NotAllowedError, match="a/c/0: a virtual reference below no prefix of"):
        await references_of(virtual_lab(tmp_path).folder)


async def test_keys_below_a_prefix_are_relative_to_it(tmp_path: Path) -> None:
    """Keys of a folder alone are written without its name."""
    for name in ("a", "b"):
        zarr.create_array(tmp_path / name, data=np.arange(4), chunks=(2,), shards=(4,))

    document = await references_of(tmp_path, "b/")

    assert sorted(document["refs"]) == ["c/0", "c/1", "zarr.json"]


def _archive(path: Path, method: int, shards: tuple[int, ...] | None) -> Path:
    with zarr.storage.ZipStore(path, mode="w", compression=method) as store:
        zarr.create_array(store, data=np.arange(8), chunks=(2,), shards=shards)
    return path


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
async def test_references_lead_into_archives(tmp_path: Path, method: int) -> None:
    """Inner chunks of shards in an archive have their places in it, or are in the set."""
    document = await references_of(_archive(tmp_path / "a.zip", method, (4,)))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as above
        options = {"fo": document, "remote_protocol": "file"}
        found: Any = zarr.open_array("reference://", storage_options=options, mode="r")
        np.testing.assert_array_equal(found[...], np.arange(8))
    is_inline = isinstance(document["refs"]["c/0"], str)
    assert is_inline is (method == zipfile.ZIP_DEFLATED)


async def test_deflated_entries_are_refused(tmp_path: Path) -> None:
    """An entry that is served inflated ends the set with its key."""
    with pytest.raises(
        ConfigurationError, match="c/0: its bytes are stored with raw DEFLATE, which"
    ):
        await references_of(_archive(tmp_path / "a.zip", zipfile.ZIP_DEFLATED, None))


async def test_plain_objects_are_referred_to_as_a_whole(tmp_path: Path) -> None:
    """Objects that are served as they are stored have no offset."""
    zarr.create_array(tmp_path / "a", data=np.arange(4), chunks=(2,))

    document = await references_of(tmp_path)

    assert document["refs"]["a/c/1"] == [f"file://{tmp_path}/a/c/1"]


@pytest.mark.parametrize(
    ("ref", "expected"),
    [
        (ObjectRef("s3://bucket", "a b%/c"), "s3://bucket/a b%/c"),
        (ObjectRef(GuardedBucket("s3+lab://bucket"), "a"), "s3://bucket/a"),
        (ObjectRef("https://host", "a b%/c"), "https://host/a%20b%25/c"),
        (ObjectRef(GuardedBucket("https://host/a%20b"), "c d"), "https://host/a%20b/c%20d"),
        (ObjectRef("file:///a%20b", "c d%"), "file:///a b/c d%"),
    ],
)
def test_url_is_spelled_as_fsspec_reads_it(ref: ObjectRef, expected: str) -> None:
    """Keys of buckets and names of files are literal; paths on web servers are encoded."""
    assert url_of_object(ref) == expected


def test_references_of_a_set_are_its_own(tmp_path: Path) -> None:
    """`inspect --references` of a reference set writes the references that it has."""
    (tmp_path / "source").write_bytes(b"0123456789")
    refs = {"a/.zarray": "{}", "a/0": [f"file://{tmp_path}/source", 2, 3], "a/1": "text"}
    (tmp_path / "refs.json").write_text(json.dumps(refs))
    options = "--references", "--allow-virtual", tmp_path.as_uri()
    written = run("inspect", str(tmp_path / "refs.json"), *options)

    assert json.loads(written.stdout) == {"version": 1, "refs": refs}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda source: source.unlink(), "does not exist, though it is referred to"),
        (
            lambda source: os.truncate(source, 153),
            "has 153 bytes, and bytes up to 154 are referred to",
        ),
        (
            lambda source: os.truncate(source, 20),
            "has 20 bytes, and bytes up to 154 are referred to",
        ),
    ],
)
def test_source_of_two_shards_is_named_once(tmp_path: Path, change: Any, reason: str) -> None:
    """`verify` names a source that lacks what several shards refer to once, with the reason."""
    source = _refer_to_shards(tmp_path)
    change(source)
    shown = run("verify", str(tmp_path / "refs.json"), "--allow-virtual", tmp_path.as_uri())

    assert shown.returncode == 1
    assert shown.stdout.count("damaged: ") == 1
    assert f"damaged: {source.as_uri()}: " in shown.stdout
    assert f": {reason}\n" in shown.stdout


def _run_with(command: str, tmp_path: Path, members: Any, **others: Any) -> Any:
    """Run *command* on a set of two shards, with *members* added or replaced, in version 1."""
    _refer_to_shards(tmp_path)
    refs = json.loads((tmp_path / "refs.json").read_text()) | members
    (tmp_path / "refs.json").write_text(json.dumps({"version": 1, "refs": refs, **others}))
    return run(*command.split(), str(tmp_path / "refs.json"), "--allow-virtual", tmp_path.as_uri())


def test_shard_that_is_not_allowed_is_not_checked(tmp_path: Path) -> None:
    """`verify` names a shard outside of the allowed prefixes, and checks all others."""
    shown = _run_with("verify", tmp_path, {"a/c/0/0": ["/elsewhere/source", 0, 9]})

    assert shown.returncode == 0
    assert "not checked: .: 1 of its references, such as a/c/0/0: virtual ref" in shown.stdout
    assert "1 inner chunk of 7 bytes: none damaged" in shown.stdout


@pytest.mark.parametrize(
    ("command", "others"),
    [("verify", "2 inner chunks of 12 bytes: none damaged"), ("inspect", " a      zarr array")],
)
@pytest.mark.parametrize("name", ["b/zarr.json", "zarr.json", "b/info"])
def test_metadata_that_are_not_allowed_are_left_out(
    tmp_path: Path, command: str, others: str, name: str
) -> None:
    """`verify` and `inspect` name metadata outside of the allowed prefixes, and go on."""
    shown = _run_with(command, tmp_path, {name: ["/elsewhere/source", 0, 9]})

    assert (shown.returncode, shown.stderr) == (0, "")
    assert "virtual references below file:///elsewhere/ are not allowed" in shown.stdout
    assert others in shown.stdout


def test_group_that_is_not_allowed_hides_no_array(tmp_path: Path) -> None:
    """An array is served whose group has metadata outside of the allowed prefixes."""
    _run_with("inspect", tmp_path, {"zarr.json": ["/elsewhere/source"]})
    root = DatasetSettings(
        url=str(tmp_path / "refs.json"),
        format="kerchunk",
        virtual_chunk_prefixes=(tmp_path.as_uri(),),
    )
    with client_of(Settings(datasets={"set": root})) as client:
        assert client.get("/set/a/c/0/0").content == b"first"
        assert client.get("/set/zarr.json").status_code == 403


def test_references_of_a_shard_that_is_not_allowed_name_it(tmp_path: Path) -> None:
    """`inspect --references` ends with the key of a shard outside of the allowed prefixes: without
    it readers of the new set would see fill values.
    """
    shown = _run_with("inspect --references", tmp_path, {"a/c/0/0": ["/elsewhere/source", 0, 9]})

    assert shown.returncode == 2
    assert "error: a/c/0/0: virtual references below file:///elsewhere/ are" in shown.stderr


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        (["relative/x", 0, 9], "a reference to 'relative/x': expected a URL, or the absolute path"),
        (["/a", -1, 2], "offset: expected an integer of 0 to 9223372036854775807, found -1"),
    ],
)
@pytest.mark.parametrize("key", ["x", "a/c/0/0"])
def test_invalid_reference_is_named_once(
    tmp_path: Path, key: str, reference: Any, reason: str
) -> None:
    """`verify` names an invalid reference of a plain key or a shard once, with the reason."""
    shown = _run_with("verify", tmp_path, {key: reference})

    assert shown.returncode == 1
    assert shown.stdout.count("damaged: ") == 1
    assert f"damaged: {tmp_path.as_uri()}/refs.json/{key}: {key}: {reason}" in shown.stdout


@pytest.mark.parametrize("part", [(), (0, 9)])
@pytest.mark.parametrize("key", ["z/zarr.json", "a/c/0/0", "x"])
def test_absent_source_is_named_once(tmp_path: Path, key: str, part: tuple[int, ...]) -> None:
    """`verify` names an absent source of metadata, a shard or a plain key once."""
    shown = _run_with("verify", tmp_path, {key: [f"{tmp_path}/absent", *part]})

    assert shown.returncode == 1
    (line,) = [line for line in shown.stdout.splitlines() if line.startswith("damaged: ")]
    (source, named, reason) = line.removeprefix("damaged: ").rsplit(": ", 2)
    assert source == f"{tmp_path.as_uri()}/absent"
    assert named in (key, key.partition("/")[0])
    assert reason == "does not exist, though it is referred to"


@pytest.mark.parametrize(
    ("command", "others"),
    [("verify", "2 inner chunks of 12 bytes: 1 damaged"), ("inspect", " a      zarr array")],
)
def test_pattern_of_unknown_keys_is_reported_beside_arrays(
    tmp_path: Path, command: str, others: str
) -> None:
    """`verify` and `inspect` of a set with a pattern of unknown keys go on with its arrays."""
    patterns = [{"key": "{{unknown}}", "url": "/x", "dimensions": {"i": {"stop": 3}}}]
    shown = _run_with(command, tmp_path, {}, gen=patterns)

    assert (shown.returncode, shown.stderr) == (1, "")
    assert "refs.json: " in shown.stdout
    assert "gen: 'unknown' is undefined" in shown.stdout
    assert others in shown.stdout


def _refer_to_shards(tmp_path: Path) -> Path:
    """Write a source that holds two shards, and a set that refers to them. Return the source."""
    refs: dict[str, Any] = {}
    data = b""
    for name, stored in build({"c/0/0": b"first", "c/2/3": b"second!"}).items():
        refs[f"a/{name}"] = [f"{tmp_path}/source", len(data), len(stored)]
        if name == "zarr.json":
            refs[f"a/{name}"] = stored.decode()
            continue
        data += stored
    (tmp_path / "source").write_bytes(data)
    (tmp_path / "refs.json").write_text(json.dumps(refs))
    return tmp_path / "source"
