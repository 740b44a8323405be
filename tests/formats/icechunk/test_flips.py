"""Repositories with flipped bits: right bytes, or an error that says what is damaged.

Nothing in a repository but the entries of shards has a checksum. So a flip may change where a
reference leads, or what is in an inline chunk, and nobody can tell; what it cannot do is lead out
of the repository, or make more work than the file is large.
"""

import asyncio
import gc
import json
import time
import tracemalloc
from collections.abc import Callable, Mapping
from functools import lru_cache

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.errors import DamagedError, NotAllowedError, OfflineError, StorageError
from app.formats.icechunk.layout import Icechunk
from app.formats.icechunk.virtual import Allowed, parse_prefix
from app.model import ObjectRef
from tests.formats.case import filled
from tests.formats.icechunk import building_repo
from tests.formats.icechunk.building import Ref
from tests.formats.icechunk.case import SHARDED
from tests.formats.icechunk.repositories import Builder
from tests.formats.zarr.building import LITTLE, array_metadata, encode_shard
from tests.resolve.stores import WatchedStore
from tests.support.resolving import ROOT, reading

LIMIT = 2**20
HEADER = 39
LINE = array_metadata([12], [2], [LITTLE])
ARCHIVE = ObjectRef("memory://archive", "era5")
ALLOWED = (Allowed(parse_prefix("s3://archive/era5/"), ARCHIVE),)
OURS = (DamagedError, OfflineError, NotAllowedError)
FILES = ("repo", "snapshots/", "manifests/")
SECRET = b"what is in no repository"


@lru_cache(maxsize=2)
def _objects(version: int = 2) -> Mapping[str, bytes]:
    """Write a repository with chunks of every kind."""
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
    builder.array("/g/a", LINE, [6], refs)
    shard = encode_shard([b"one", None, b"three", b"four"])
    shards = [builder.native([0, 1], shard), Ref(index=[1, 1], inline=shard)]
    builder.array("/s", SHARDED, [2, 2], shards)
    more = {} if version == 1 else {"branches": [building_repo.ref("main", 0)]}
    return builder.build(**more)


KEYS = (
    *(f"g/a/c/{at}" for at in range(6)),
    *(f"s/c/{i}/{j}" for i in range(3) for j in range(4)),
    *("zarr.json", "g/zarr.json", "g/a/zarr.json", "s/zarr.json", "@tag.v1/g/a/c/0"),
)


def _store(objects: Mapping[str, bytes]) -> WatchedStore:
    store = WatchedStore()
    filled(objects, store)
    store.place(ARCHIVE.join("a.nc"), b"0123456789", modified_s=1000)
    for key in ("secret", "a.nc"):
        store.place(ObjectRef("memory://archive", key), SECRET)
        store.place(ObjectRef("memory://bucket", key), SECRET)
    return store


async def _read_all(objects: Mapping[str, bytes]) -> dict[str, bytes | Exception | None]:
    """Read all keys, and see that no read leaves the repository and what is allowed."""
    store = _store(objects)
    data = reading(store, formats=(Icechunk(LIMIT, LIMIT, ALLOWED),))
    found: dict[str, bytes | Exception | None] = {}
    for key in KEYS:
        try:
            found[key] = await data.read(key)
        except OURS as error:
            found[key] = error
        except StorageError as error:
            pytest.fail(f"{key}: {error}")
    for call in store.calls:
        assert (call.ref.bucket, call.ref.key.partition("/")[0]) in {
            (ROOT.bucket, ROOT.key),
            (ARCHIVE.bucket, ARCHIVE.key),
        }
        assert {"..", "."}.isdisjoint(call.ref.key.split("/"))
    return found


def _flip(data: bytes, bits: list[int]) -> bytes:
    flipped = bytearray(data)
    for bit in bits:
        flipped[bit // 8 % len(data)] ^= 1 << bit % 8
    return bytes(flipped)


def _flip_inside(data: bytes, bits: list[int]) -> bytes:
    """Flip bits of the FlatBuffer, and compress it again."""
    payload = zstandard.decompress(data[HEADER:])
    return data[:HEADER] + zstandard.compress(_flip(payload, bits))


def _check(flip: Callable[[bytes], bytes], name: str, version: int = 2) -> None:
    """Flip one file, and read: only what lies in the repository, soon and in little memory."""
    objects = dict(_objects(version))
    (file,) = [key for key in objects if key.startswith(name)][:1]
    objects[file] = flip(objects[file])
    gc.freeze()  # to walk what other tests left took 3 s in a long run
    try:
        began = time.process_time()
        found = asyncio.run(_read_all(objects))
        assert time.process_time() - began < 2
    finally:
        gc.unfreeze()
    for key, each in found.items():
        if isinstance(each, bytes):
            assert SECRET not in each
            assert len(each) < 2**16
            if key.endswith("zarr.json"):
                assert json.loads(each)
        if isinstance(each, DamagedError):
            assert each.reason


BITS = st.lists(st.integers(0, 2**20), min_size=1, max_size=3)
bounded = settings(max_examples=60, suppress_health_check=list(HealthCheck))
every_file = pytest.mark.parametrize("name", FILES)
EXAMPLES = pytest.mark.parametrize("examples", [25, pytest.param(3_000, marks=pytest.mark.soak)])


@EXAMPLES
@every_file
@pytest.mark.parametrize("flip", [_flip, _flip_inside])
def test_flips_lead_nowhere_else(
    flip: Callable[[bytes, list[int]], bytes], name: str, examples: int
) -> None:
    """In the file as it is stored, and in the FlatBuffer in it."""

    @settings(bounded, max_examples=examples)
    @given(bits=BITS)
    def check(bits: list[int]) -> None:
        _check(lambda data: flip(data, bits), name)

    check()


@bounded
@given(bits=BITS, name=st.sampled_from(["refs/branch.main", "snapshots/", "manifests/"]))
def test_flips_of_version_1_lead_nowhere_else(bits: list[int], name: str) -> None:
    """There a ref is a file of JSON."""
    _check(lambda data: _flip(data, bits), name, 1)


@every_file
@pytest.mark.parametrize("bit", range(8))
async def test_a_flip_of_the_header_is_damage_or_changes_nothing(name: str, bit: int) -> None:
    """What says whose file it is does not count, all else does; a marker can turn into none."""
    objects = _objects()
    right = await _read_all(objects)
    (file,) = [key for key in objects if key.startswith(name)][:1]
    for at in range(HEADER):
        flipped = _flip(objects[file], [at * 8 + bit])
        found = await _read_all({**objects, file: flipped})
        if 12 <= at < 36:
            assert found == right
        elif name == "repo" and at < 12:
            assert set(found.values()) == {None}
        else:
            wrong = {key: each for key, each in found.items() if each != right[key]}
            assert all(isinstance(each, DamagedError) for each in wrong.values())


@every_file
async def test_a_truncated_file_is_damage(name: str) -> None:
    """However much is cut off, no chunk that was there is absent, and none is another one."""
    objects = _objects()
    (file,) = [key for key in objects if key.startswith(name)][:1]
    data = objects[file]
    right = await _read_all(objects)
    assert not any(isinstance(each, Exception) for each in right.values())
    for length in (*range(0, len(data), 7), len(data) - 1):
        found = await _read_all({**objects, file: data[:length]})
        for key, each in found.items():
            assert each == right[key] or isinstance(each, DamagedError)


def test_flips_take_little_memory() -> None:
    """Counts and sizes that are not true make nothing large."""
    objects = dict(_objects())
    tracemalloc.start()
    try:
        for name in FILES:
            (file,) = [key for key in objects if key.startswith(name)][:1]
            nbytes = len(zstandard.decompress(objects[file][HEADER:]))
            for at in range(0, nbytes, 20):
                high = _flip_inside(objects[file], [at * 8 + 31, at * 8 + 29])
                asyncio.run(_read_all({**objects, file: high}))
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()
