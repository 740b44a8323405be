"""Repositories with randomly changed files: right bytes, or an error that names the damage.

Only indexes of shards have checksums, so a change of a reference or of an inline chunk can go
unnoticed. It must not lead out of the repository, or cause more work than the file is large.
"""

import asyncio
import gc
import json
import time
from collections.abc import Mapping
from functools import lru_cache, reduce

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardgate.errors import DamagedError, NotAllowedError, OfflineError, StorageError
from tests.support.attacks.mutating import Change, changes
from tests.support.formats.icechunk import building_repo
from tests.support.formats.icechunk.building import Ref
from tests.support.formats.icechunk.case import SHARDED
from tests.support.formats.icechunk.repositories import Builder
from tests.support.formats.icechunk.served import ARCHIVE, SECRET, Served
from tests.support.formats.zarr.building import LITTLE, array_metadata, encode_shard
from tests.support.processor import processor_time_below
from tests.support.resolving import ROOT

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


@pytest.mark.parametrize("examples", [25, pytest.param(4_500, marks=pytest.mark.soak)])
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
    damaged = [data[:length] for length in (*range(0, len(data), 11), len(data) - 1)]
    damaged += [
        data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]
        for at in range(12 if name == "repo" else 0, HEADER)
    ]
    for each in damaged:
        found = await _read_all({**objects, file: each})
        is_same_header = each[:12] + each[36:HEADER] == data[:12] + data[36:HEADER]
        if is_same_header and len(each) == len(data):
            assert found == right
        assert all(
            value == right[key] or isinstance(value, DamagedError) for key, value in found.items()
        )
