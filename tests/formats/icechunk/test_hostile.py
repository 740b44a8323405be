"""Hostile repositories, and such with randomly changed files: right bytes, or an error.

Only indexes of shards have checksums, so a change of a reference or of an inline chunk can go
unnoticed. It must not lead out of the repository, or cause more work than the file is large.
"""

import asyncio
import gc
import json
import re
import time
import tracemalloc
from collections.abc import Mapping
from functools import lru_cache, reduce
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardgate.errors import DamagedError, NotAllowedError, OfflineError, StorageError
from shardgate.formats.icechunk.layout import Icechunk
from shardgate.model import ObjectRef
from shardgate.storage.local import LocalStore
from tests.support.attacks.mutating import Change, changes
from tests.support.files import write_files
from tests.support.formats.icechunk import building_repo
from tests.support.formats.icechunk.building import (
    MANIFEST,
    REPO_INFO,
    SNAPSHOT,
    Ref,
    Table,
    envelope,
)
from tests.support.formats.icechunk.building_repo import NOON, U8, U64
from tests.support.formats.icechunk.case import PLAIN, SHARDED
from tests.support.formats.icechunk.repositories import Builder, digest, node_id, repo, spell
from tests.support.formats.icechunk.served import ARCHIVE, LINE, SECRET, Served
from tests.support.formats.zarr.building import LITTLE, array_metadata, encode_shard
from tests.support.processor import processor_time_below
from tests.support.resolving import ROOT, Reading, reading

GOOD = b"the good chunk"


async def _check_rest(data: Served | Reading) -> None:
    """Assert that the undamaged array is read."""
    assert await data.read("good/c/0") == GOOD
    assert await data.read("good/c/1") is None
    assert json.loads(await data.read("good/zarr.json") or b"") == LINE


async def _why(data: Served | Reading, key: str) -> str:
    """Return the error of *key*, and assert that the rest is read."""
    with pytest.raises(DamagedError) as caught:
        await data.read(key)
    await _check_rest(data)
    return str(caught.value)


def _builder() -> Builder:
    builder = Builder()
    builder.group("/")
    builder.array("/good", LINE, [4], [builder.native([0], GOOD)])
    return builder


def _with(*refs: Ref | Table, **more: Any) -> Served:
    """Serve a repository with the references *refs* of an array of 4 chunks."""
    builder = _builder()
    tables = [ref.table if isinstance(ref, Ref) else ref for ref in refs]
    builder.array("/bad", LINE, [4], tables, **more)
    return Served(builder.build())


_OF_NODE = r"manifests/[0-9A-Z]{20}: chunk \[0\] of node "
_NO_FILE = b"no such file"
_AT_ARCHIVE: dict[str, Any] = {"location": "s3://archive/era5/a.nc"}
VIRTUAL: dict[str, Any] = {"offset": 2, "length": 3}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        *((fields, f"{_OF_NODE}{spell(node_id('/bad'))}: ") for fields in (
            {"inline": b"x", "chunk_id": bytes(12)},
            {"chunk_id": bytes(12), "offset": 2**64 - 1, "length": 2},
            {"checksum_etag": "x", "checksum_last_modified": 1})),
        ({"location": "http://169.254.169.254/latest/meta-data/", **VIRTUAL}, "manifests/"),
        ({"chunk_id": _NO_FILE, "length": 1}, f"chunks/{spell(_NO_FILE)}"),
        ({"location": "s3://archive/era5/b.nc", "length": 1}, f"{ARCHIVE}/b.nc: does not exist"),
        *(({**_AT_ARCHIVE, **fields}, f"{ARCHIVE}/a.nc: .*{reason}") for fields, reason in (
            ({"offset": 8, "length": 3}, "10 bytes"),
            ({"offset": 10, "length": 1}, "10 bytes"),
            ({"offset": 2**63 - 2, "length": 1}, "10 bytes"),
            ({"offset": 0, "length": 2**63 - 1}, "10 bytes"),
            ({**VIRTUAL, "checksum_etag": "another"}, "not as it was"),
            ({**VIRTUAL, "checksum_last_modified": 1}, "not as it was"),
            ({"offset": 8, "length": 3, "checksum_last_modified": 2**32 - 1}, "10 bytes"))),
    ],
)  # fmt: skip
async def test_invalid_reference_is_damage(fields: dict[str, Any], reason: str) -> None:
    """A contradictory reference, or one to a missing, short or changed object, is damage.

    The error names the manifest and node, or the object.
    """
    assert re.search(reason, await _why(_with(Ref(index=[0], **fields)), "bad/c/0"))


@pytest.mark.parametrize(
    ("offset", "length"),
    [(0, 15), (14, 1), (5, 2**32), (0, 2**63 - 1)],
)
async def test_reference_past_the_end_of_its_file_is_damage(
    offset: int, length: int, tmp_path: Path
) -> None:
    """A reference past the end of its chunk file raises DamagedError that names the file.

    The library would return the remaining bytes.
    """
    builder = _builder()
    ref = Ref(index=[0], chunk_id=builder.chunk(GOOD), offset=offset, length=length)
    builder.array("/bad", LINE, [4], [ref])
    objects = builder.build()
    write_files(objects, tmp_path)
    root = ObjectRef(tmp_path.as_uri(), "")
    local = reading(LocalStore(), root=root, formats=(Icechunk(2**20, 2**20),))

    for data in (Served(objects), local):
        assert f"chunks/{spell(digest(GOOD))}" in await _why(data, "bad/c/0")


async def test_unusual_references_are_read() -> None:
    """Empty chunks are empty and not absent, and chunks off the grid are absent.

    Of two references to a chunk the first counts, in one manifest or in two. A scalar's may have a
    dimension, and manifests need not be listed.
    """
    builder = _builder()
    ref = Ref(index=[1], chunk_id=builder.chunk(GOOD), offset=3, length=0)
    virtual: list[dict[str, Any]] = [{}, {"offset": 10}, {"offset": 3, "length": 0}]
    empty = [Ref(index=[at], **_AT_ARCHIVE, **fields) for at, fields in enumerate(virtual)]
    beyond = [Ref(index=[at], inline=b"x") for at in (3, 4, 2**32 - 1)]
    here = [Ref(index=[0], inline=b"1"), Ref(index=[0], inline=b"2")]
    there = [Ref(index=[0], inline=b"3"), Ref(index=[1], inline=b"4")]
    ids = [builder.manifest([(node_id("/two"), refs)]) for refs in (here, there)]
    boxes = [((0, 2),), ((0, 4),)]
    builder.array("/a", LINE, [4], [Ref(index=[0], inline=b""), ref, *beyond])
    builder.array("/virtual", LINE, [4], empty)
    builder.array("/two", LINE, [4], manifests=list(zip(ids, boxes, strict=True)))
    for index in ([], [0]):
        path = f"/s{len(index)}"
        refs = [(node_id(path), [Ref(index=index, inline=b"x")])]
        manifests = [(builder.manifest(refs), [(0, 1) for _ in index])]
        builder.array(path, array_metadata([], [], [LITTLE]), [], manifests=manifests, shape=[])
    builder.manifests.clear()
    data = Served(builder.build())

    found = [await data.read(f"a/c/{at}") for at in (0, 1, 2, 3, 4, 2**32 - 1)]
    assert found == [b"", b"", None, b"x", None, None]
    assert [await data.read(f"virtual/c/{at}") for at in range(4)] == [b"", b"", b"", None]
    assert [await data.read(f"two/c/{at}") for at in range(4)] == [b"1", b"4", None, None]
    assert [await data.read(f"s{ndim}/c") for ndim in (0, 1)] == [b"x", b"x"]


async def test_chunk_outside_of_all_extents_is_absent_without_a_read() -> None:
    """A chunk outside of a manifest's extents is absent, even if the manifest is missing."""
    data = _with(manifests=[(b"no such file", [(1, 2)])])

    assert await data.read("bad/c/0") is None
    assert f"manifests/{spell(b'no such file')}" in await _why(data, "bad/c/1")


@pytest.mark.parametrize(
    ("file", "data"),
    [
        ("repo", envelope(bytes(2**26), REPO_INFO)),
        ("snapshots", envelope(bytes(2**26), SNAPSHOT)),
        ("snapshots", envelope(bytes(2**20), SNAPSHOT, compression=0)),
        ("manifests", envelope(bytes(2**26), MANIFEST)),
    ],
    ids=["repo", "snapshot", "snapshot as it is stored", "manifest"],
)
async def test_decompression_bomb_is_refused_in_bounded_memory(file: str, data: bytes) -> None:
    """A file that decompresses beyond the limit raises DamagedError within 4 MiB of memory."""
    objects = _builder().build()
    name = next(name for name in objects if name.startswith(file))
    served = Served({**objects, name: data}, 2**16)
    tracemalloc.start()
    try:
        with pytest.raises(DamagedError, match=f"{name}: (.*more than 65536|it has no id)"):
            await served.read("good/c/0")
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("document", [b"{", b"\xff", {**LINE, "shape": [8, 8]}, PLAIN])
async def test_damaged_node_is_not_absent(document: Any) -> None:
    """Document and chunks of a damaged node raise DamagedError that names snapshot and node."""
    builder = _builder()
    builder.array("/bad", document, [4], [Ref(index=[0], inline=b"x")])
    data = Served(builder.build())

    for key in ("bad/zarr.json", "bad/c/0", "bad/c/9"):
        assert re.search(r"snapshots/[0-9A-Z]{20}: /bad: ", await _why(data, key))


async def test_offline_repository_raises_offline_error() -> None:
    """Every key of an offline repository raises OfflineError with the reason."""
    builder = _builder()
    status = {0: U8(2), 1: U64(NOON), 2: "under repair"}
    data = Served(builder.build(status=status))
    for key in (
        *("good/c/0", "@tag.v1/good/c/0", f"@{spell(builder.snapshot())}/zarr.json", "x"),
        "@branch.none/zarr.json",
    ):
        with pytest.raises(OfflineError, match="under repair"):
            await data.read(key)


async def test_ref_at_a_missing_snapshot_is_damage() -> None:
    """A branch at a missing snapshot raises DamagedError that names both; a bare id is absent."""
    objects = _builder().build()
    gone = spell(b"gone for now")
    snapshots = [building_repo.snapshot(b"gone for now"), building_repo.snapshot(b"not at all..")]
    objects["repo"] = repo(b"", snapshots=snapshots)
    data = Served(objects)
    with pytest.raises(DamagedError, match=f"snapshots/{gone}: .*@branch.main"):
        await data.read("good/c/0")
    assert await data.read(f"@{gone}/good/c/0") is None


SHARD = encode_shard([b"one", None, b"three", None])


@pytest.mark.parametrize(
    ("shard", "reason"), [(b"x" * 67, "too few"), (SHARD[:-1] + b"x", "checksum")]
)
async def test_damaged_inline_shard_is_damage(shard: bytes, reason: str) -> None:
    """A damaged inline shard raises DamagedError that names the manifest.

    Shards in files are covered by the conformance suite.
    """
    builder = _builder()
    builder.array("/bad", SHARDED, [2, 2], [Ref(index=[0, 0], inline=shard)])
    why = await _why(Served(builder.build()), "bad/c/1/0")

    assert re.search(reason, why)
    assert "/manifests/" in why


HEADER = 39
OURS = (DamagedError, OfflineError, NotAllowedError)
FILES = ("repo", "snapshots/", "manifests/")
KEYS = (
    *(f"g/a/c/{at}" for at in range(6)),
    *(f"s/c/{i}/{j}" for i in range(3) for j in range(4)),
    *("zarr.json", "g/zarr.json", "g/a/zarr.json", "s/zarr.json", "@tag.v1/g/a/c/0"),
)


@lru_cache(maxsize=2)
def _objects(version: int = 2) -> Mapping[str, bytes]:
    """Return a repository with chunks of every kind."""
    builder = Builder(version)
    builder.group("/")
    builder.group("/g", {"zarr_format": 3, "node_type": "group", "attributes": {"x": 1}})
    location = "s3://archive/era5/a.nc"
    refs = [
        builder.native([0], b"native", b"before"),
        Ref(index=[1], inline=b"inline"),
        Ref(index=[2], location=location, offset=2, length=5),
        Ref(index=[4], location=location, offset=0, length=3, checksum_last_modified=2**31),
    ]
    builder.array("/g/a", array_metadata([12], [2], [LITTLE]), [6], refs)
    shard = encode_shard([b"one", None, b"three", b"four"])
    shards = [builder.native([0, 1], shard), Ref(index=[1, 1], inline=shard)]
    builder.array("/s", SHARDED, [2, 2], shards)
    more = {} if version == 1 else {"branches": [building_repo.ref("main", 0)]}
    return builder.build(**more)


async def _read_all(objects: Mapping[str, bytes]) -> dict[str, bytes | Exception | None]:
    """Read all keys; assert that no read leaves the repository and the allowed prefix."""
    served = Served(objects)
    found: dict[str, bytes | Exception | None] = {}
    for key in KEYS:
        try:
            found[key] = await served.read(key)
        except OURS as error:
            found[key] = error
        except StorageError as error:
            pytest.fail(f"{key}: {error}")
    for call in served.store.calls:
        assert (call.ref.bucket, call.ref.key.partition("/")[0]) in {
            (ROOT.bucket, ROOT.key),
            (ARCHIVE.bucket, ARCHIVE.key),
        }
        assert {"..", "."}.isdisjoint(call.ref.key.split("/"))
    return found


@pytest.mark.parametrize("examples", [12, pytest.param(4_500, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    ("name", "version"),
    [*((name, 2) for name in FILES), *((name, 1) for name in ("refs/branch.main", *FILES[1:]))],
)
def test_changed_file_leads_to_no_other_object(name: str, version: int, examples: int) -> None:
    """Reads of a repository with a changed file stay in allowed places and take less than 2 s."""
    objects = dict(_objects(version))
    file = next(key for key in objects if key.startswith(name))

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(st.lists(changes(), min_size=1, max_size=3))
    def check(made: list[Change]) -> None:
        data = reduce(lambda data, change: change(data), made, objects[file])
        with processor_time_below(2, time.process_time):
            found = asyncio.run(_read_all({**objects, file: data}))
        for key, each in found.items():
            if isinstance(each, bytes):
                assert SECRET not in each
                assert len(each) < 2**16
                if key.endswith("zarr.json"):
                    assert json.loads(each)
            if isinstance(each, DamagedError):
                assert each.reason

    gc.freeze()  # to walk what other tests left took 3 s in a long run
    check()


@pytest.mark.parametrize("name", FILES)
async def test_truncated_file_or_damaged_header_is_never_absence(name: str) -> None:
    """A truncated file or damaged header leaves each key right or raises DamagedError.

    The writer's name in the header does not matter.
    """
    objects = _objects()
    file = next(key for key in objects if key.startswith(name))
    data, right = objects[file], await _read_all(objects)
    assert not any(isinstance(each, Exception) for each in right.values())
    damaged = [data[:length] for length in (*range(0, len(data), 31), len(data) - 1)]
    damaged += [
        data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]
        for at in (0, 11, 12, 35, 36, 37, 38)
        if at >= 12 or name != "repo"  # which is recognized by its first bytes
    ]
    for each in damaged:
        found = await _read_all({**objects, file: each})
        is_same_header = each[:12] + each[36:HEADER] == data[:12] + data[36:HEADER]
        if is_same_header and len(each) == len(data):
            assert found == right
        assert all(
            value == right[key] or isinstance(value, DamagedError) for key, value in found.items()
        )
