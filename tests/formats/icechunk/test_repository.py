"""What virtual references of a repository lead to, and the containers they name."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from flatbuffers import flexbuffers

from app.errors import DamagedError, NotAllowedError
from app.formats.icechunk.layout import Icechunk
from app.formats.icechunk.virtual import Allowed, parse_prefix
from app.model import (
    EVERYTHING,
    ByteRange,
    ETag,
    Fixed,
    ObjectRef,
    Part,
    Referenced,
    Stored,
    UnmodifiedSince,
    VirtualKey,
)
from tests.formats.icechunk.building import Ref
from tests.formats.icechunk.case import SHARDED
from tests.formats.icechunk.repositories import Builder, node_id
from tests.formats.zarr.building import LITTLE, array_metadata, encode_shard
from tests.resolve.stores import Clock, WatchedStore
from tests.resolving import ROOT, Reading, reading

LINE = array_metadata([16], [2], [LITTLE])
ARCHIVE = ObjectRef("memory://archive", "era5")
DATA = b"0123456789"
ALLOWED = (
    Allowed(parse_prefix("s3://archive/era5/"), ARCHIVE),
    Allowed(parse_prefix("s3://archive/era5/inner/"), ObjectRef("memory://inner", "")),
)
ERA = {"name": "era", "url_prefix": "s3://archive/era5/", "store": "s3"}
SECRET = {"name": "secret", "url_prefix": "s3://secret/", "store": "s3"}


class _Case:
    """An array ``a`` of virtual chunks; more than ``repo`` tells of containers is in *config*."""

    def __init__(
        self, *refs: Ref, config: bytes | None = None, version: int = 2, **more: Any
    ) -> None:
        builder = Builder(version)
        builder.group("/")
        builder.manifest([])
        manifest_id = builder.manifest([(node_id("/a"), refs)], **more)
        builder.array("/a", LINE, [8], manifests=[(manifest_id, [(0, 8)])])
        self.store = WatchedStore()
        repo: dict[str, Any] = {}
        if config is not None and version != 1:
            repo["more"] = {9: config}
        for key, data in builder.build(**repo).items():
            self.store.place(ROOT.join(key), data)
        if config is not None and version == 1:
            self.store.place(ROOT.join("config.yaml"), config)
        self.etag = self.store.place(ARCHIVE.join("a.nc"), DATA, modified_s=1000)
        self.store.place(ObjectRef("memory://inner", "b.nc"), DATA[::-1])
        self.clock = Clock()
        formats = (Icechunk(2**20, 2**20, ALLOWED),)
        self.data: Reading = reading(
            self.store, formats=formats, chunk_bytes=0, clock=self.clock, ttl_s=60
        )

    async def locate(self, at: int = 0) -> Referenced:
        """Locate a chunk."""
        layout = await Icechunk(2**20, 2**20, ALLOWED).open(ROOT, self.data.fetch)
        assert layout is not None
        found = await layout.locate(VirtualKey(f"a/c/{at}"), self.data.fetch)
        assert isinstance(found, Referenced)
        return found

    async def read(self, at: int = 0) -> bytes | None:
        """Read a chunk."""
        return await self.data.read(f"a/c/{at}")


def _virtual(at: int = 0, location: str = "s3://archive/era5/a.nc", **fields: Any) -> Ref:
    return Ref(index=[at], location=location, **{"offset": 2, "length": 3, **fields})


def _config(*containers: Mapping[str, Any]) -> bytes:
    by_prefix = {each["url_prefix"]: each for each in containers}
    return bytes(flexbuffers.Dumps({"virtual_chunk_containers": by_prefix}))


async def test_without_a_checksum_the_object_is_taken_as_it_is() -> None:
    """A part of it, which can be another one tomorrow."""
    place, by, is_lasting, _ = await _Case(_virtual()).locate()

    assert place == Part(ARCHIVE.join("a.nc"), ByteRange(2, 5))
    assert (len(by), is_lasting) == (16, False)


@pytest.mark.parametrize(
    ("fields", "condition"),
    [
        ({"checksum_etag": "abc"}, ETag('"abc"')),
        ({"checksum_etag": '"abc"'}, ETag('"abc"')),
        ({"checksum_etag": "abc", "checksum_last_modified": 1000}, ETag('"abc"')),
    ],
)
async def test_with_a_tag_the_object_is_fixed(fields: dict[str, Any], condition: ETag) -> None:
    """It has to be the one that was referred to; its tag counts more than its time."""
    place = (await _Case(_virtual(**fields)).locate()).place

    assert place == Stored(ARCHIVE.join("a.nc"), ByteRange(2, 5), Fixed(condition, condition))


async def test_with_a_time_the_object_is_looked_at() -> None:
    """Several versions may be as old as that."""
    place = (await _Case(_virtual(checksum_last_modified=1000)).locate()).place

    assert place == Part(ARCHIVE.join("a.nc"), ByteRange(2, 5), UnmodifiedSince(1000))


async def test_a_checksum_that_holds_is_read_through() -> None:
    """By the ETag of the store, or its time; the rest of the array does not wait for it."""
    etag = WatchedStore().place(ROOT, DATA)
    refs = [
        _virtual(0, checksum_etag=etag),
        _virtual(1, checksum_etag=etag.strip('"')),
        _virtual(2, checksum_last_modified=1000),
        _virtual(3, checksum_last_modified=999),
        _virtual(4, checksum_etag="another"),
    ]
    case = _Case(*refs)

    assert [await case.read(at) for at in range(3)] == [b"234"] * 3
    for at in (3, 4):
        with pytest.raises(DamagedError, match=r"a\.nc: is missing, or not as it was"):
            await case.read(at)


async def test_references_of_one_version_to_two_objects_are_told_apart() -> None:
    """Clients that hold one of them must not take the other for it."""
    refs = [
        _virtual(0, checksum_last_modified=7),
        _virtual(1, "s3://archive/era5/b.nc", checksum_last_modified=7),
        _virtual(2, "s3://archive/era5/%61.nc", checksum_last_modified=7),
    ]
    case = _Case(*refs)
    one, two, three = [(await case.locate(at)).by for at in range(3)]

    assert one != two
    assert one == three


async def test_a_container_is_looked_up_in_repo() -> None:
    """Which was read already."""
    case = _Case(_virtual(0, "vcc://era/a.nc"), config=_config(ERA))
    assert await case.read() == b"234"

    keys = [call.ref.key.removeprefix(f"{ROOT.key}/") for call in case.store.calls]
    assert [key.partition("/")[0] for key in keys][:1] == ["repo"]
    assert len([key for key in keys if key in ("repo", "config.yaml")]) == 1


async def test_in_version_1_a_container_is_looked_up_in_a_file() -> None:
    """Which is read once, and only if a reference names a container."""
    config = json.dumps({"virtual_chunk_containers": {"era": ERA}}).encode()
    refs = [_virtual(0), *(_virtual(at, "vcc://era/a.nc") for at in (1, 2))]
    case = _Case(*refs, config=config, version=1)
    counts = []
    for at in range(3):
        assert await case.read(at) == b"234"
        counts.append([call.ref.key for call in case.store.calls].count("data/config.yaml"))

    assert counts == [0, 1, 1]


@pytest.mark.parametrize("config", [None, _config(), _config(ERA, {**SECRET, "name": None})])
async def test_a_container_that_the_repository_does_not_name_is_damage(
    config: bytes | None,
) -> None:
    """The manifest is named, and the container."""
    case = _Case(_virtual(0, "vcc://nobody/a.nc"), _virtual(1), config=config)
    with pytest.raises(DamagedError, match=r"manifests/.*unknown container 'nobody'"):
        await case.read(0)
    assert await case.read(1) == b"234"


async def test_a_damaged_configuration_hurts_only_who_needs_it() -> None:
    """Its file is named."""
    case = _Case(_virtual(0, "vcc://era/a.nc"), _virtual(1), config=b"\xff\xff")
    with pytest.raises(DamagedError, match=f"{ROOT}/repo: "):
        await case.read(0)
    assert await case.read(1) == b"234"


@pytest.mark.parametrize("location", ["vcc://secret/x/a.nc", "s3://secret/x/a.nc"])
async def test_a_refusal_names_the_container(location: str) -> None:
    """That is what the operator would have to allow; whoever writes a repository cannot."""
    case = _Case(_virtual(0, location), config=_config(ERA, SECRET))
    with pytest.raises(NotAllowedError, match="below s3://secret/ are not allowed"):
        await case.read()


@pytest.mark.parametrize(
    "fields", [{}, {"checksum_last_modified": 1000}, {"checksum_last_modified": 999}]
)
async def test_a_shard_may_be_virtual(fields: dict[str, Any]) -> None:
    """Its index is read in the object, under the condition that the reference tells."""
    shard = encode_shard([b"one", None, b"three", None])
    builder = Builder()
    builder.group("/")
    location = "s3://archive/era5/shard"
    ref = Ref(index=[0, 1], location=location, offset=4, length=len(shard), **fields)
    builder.array("/s", SHARDED, [2, 2], [ref])
    case = _Case()
    for key, data in builder.build().items():
        case.store.place(ROOT.join(key), data)
    case.store.place(ARCHIVE.join("shard"), b"more" + shard + b"more", modified_s=1000)
    if fields.get("checksum_last_modified") == 999:
        with pytest.raises(DamagedError, match="era5/shard: "):
            await case.data.read("s/c/0/2")
        return

    assert await case.data.read("s/c/0/2") == b"one"
    assert await case.data.read("s/c/1/3") is None
    assert {call.if_match for call in case.store.calls if call.ref == ARCHIVE.join("shard")} <= {
        UnmodifiedSince(1000),
        None,
        case.store.place(ARCHIVE.join("shard"), b"more" + shard + b"more"),
    }


async def test_an_object_that_is_replaced_is_read_anew() -> None:
    """Without a checksum nobody promised that it stays."""
    case = _Case(_virtual())
    assert await case.read() == b"234"
    case.store.place(ARCHIVE.join("a.nc"), b"abcdefgh")

    assert await case.read() == b"cde"


async def test_a_virtual_chunk_is_one_read_when_warm() -> None:
    """Of its range, and nothing is asked of the object before."""
    case = _Case(_virtual(0), _virtual(1, offset=5), _virtual(2, checksum_last_modified=1000))
    await case.data.read("a/zarr.json")
    await case.read(7)
    case.store.calls.clear()
    for at in range(3):
        await case.data.read(f"a/c/{at}", EVERYTHING)

    assert [(call.method, call.request) for call in case.store.calls] == [
        ("get", ByteRange(2, 5)),
        ("get", ByteRange(5, 8)),
        ("get", ByteRange(2, 5)),
    ]
