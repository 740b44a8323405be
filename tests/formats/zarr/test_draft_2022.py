"""Hierarchies of the draft of 2022: chunks located, written, listed and surveyed.

Indexes are read and rewritten by the code of ZEP 2, which has its own tests.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest

from shardgate.concurrency import run_in_thread
from shardgate.errors import (
    BadBodyError,
    BadKeyError,
    ConflictError,
    DamagedError,
    UnknownCodingError,
)
from shardgate.formats.contract import Document
from shardgate.formats.listing import PLAIN
from shardgate.formats.surveying import ChunkCollection, Description
from shardgate.model import MISSING, ByteRange, Inline, SuffixRange, VirtualKey, Whole
from shardgate.read.listing import list_names
from shardgate.read.metadata_cache import uncached_reads
from tests.support.formats.case import Container, filled, write_chunks
from tests.support.formats.zarr.draft import (
    CORE,
    ENTRY_POINT,
    array_metadata,
    build,
    encode,
    encode_index,
    sharding,
)
from tests.support.read.stores import WatchedStore
from tests.support.resolving import ROOT, reading

_META = "meta/root/foo/bar.array.json"
_DATA = "data/root/foo/bar"
_CHUNKS = {f"{_DATA}/c0/0": b"first", f"{_DATA}/c0/1": b"second", f"{_DATA}/c2/3": b"third"}


async def _collections(objects: Mapping[str, bytes]) -> Sequence[ChunkCollection | DamagedError]:
    case = Container(objects)
    listing = partial(list_names, case.store, ROOT)
    return await (await case.open()).collections(case.fetch, listing, run_in_thread)


def _bar(**options: Any) -> dict[str, bytes]:
    return build(_CHUNKS, path="/foo/bar", **options)


async def test_metadata_is_served_without_the_transformer() -> None:
    """Array and consolidated metadata are served without transformer, with ETags of their own."""
    objects = _bar()
    key = "meta/root/consolidated/.zmetadata"
    consolidated = encode({"metadata": {_META: json.loads(objects[_META])}})
    case = Container({**objects, key: consolidated})

    for each in (_META, key):
        location = await case.locate(each)
        assert isinstance(location, Inline)
        assert b"storage_transformers" not in location.data
        assert location.etag not in case.etags.values()
        assert location.etag.startswith(case.etags[each][:-1])
    assert await case.locate("meta/root/bar.array.json") == MISSING


@pytest.mark.parametrize("transformers", [None, [], [{"extension": "https://example.org/mirror"}]])
async def test_array_without_a_known_transformer_is_served_as_stored(transformers: Any) -> None:
    """An array without a known transformer is served with its stored document, ETag and chunks."""
    key = "meta/root/plain.array.json"
    data = encode(array_metadata([4], [2], transformers))
    case = Container({"zarr.json": encode(ENTRY_POINT), key: data})

    assert await case.locate(key) == Inline(data, case.etags[key])
    assert await case.locate("data/root/plain/c0") == Whole(ROOT.join("data/root/plain/c0"))


@pytest.mark.parametrize(
    "key",
    ["zarr.json", "meta/root.group.json", "meta/root/foo.group.json", "notes.txt", _DATA,
     f"{_DATA}/checksums", f"{_DATA}/c00/0", f"{_DATA}/c0/0/0", f"{_DATA}/c0", f"{_DATA}/c",
     f"{_DATA}/c0.0", "data/root/other/c0/0", "data/root/c0/0", "c0/0"],
)  # fmt: skip
async def test_other_key_is_the_object_of_that_name(key: str) -> None:
    """A key that is no chunk of a known array names an object."""
    assert await Container(_bar()).locate(key) == Whole(ROOT.join(key))


async def test_chunk_is_located_by_two_reads() -> None:
    """A chunk is located by one read of its metadata and one of its index.

    A key past the edge is absent by the metadata alone.
    """
    expected = [(f"data/{_META}", ByteRange(0, 2**20 + 1))]
    for key in ("c3/0", "c0/4", "c999999/0", "c0/9999999999999999999"):
        case = Container(_bar())
        assert await case.locate(f"{_DATA}/{key}") == MISSING
        assert [(call.ref.key, call.request) for call in case.store.calls] == expected
    case = Container(_bar())
    await case.locate(f"{_DATA}/c0/0")

    assert [(call.ref.key, call.request) for call in case.store.calls] == [
        *expected,
        (f"data/{_DATA}/c0/0", SuffixRange(64)),
    ]


@pytest.mark.parametrize("key", [_META, f"{_DATA}/c0/0"])
@pytest.mark.parametrize(
    ("stored", "reason"),
    [
        (b"{", "no JSON"),
        (b"[]", "no object"),
        (b" " * (2**20 + 1), "metadata of more than 1048576 bytes"),
    ],
)
async def test_damaged_metadata_is_damage_of_the_array_and_its_chunks(
    key: str, stored: bytes, reason: str
) -> None:
    """Damaged metadata raise DamagedError that names them, for the array and its chunks."""
    with pytest.raises(DamagedError, match=reason) as caught:
        await Container({**_bar(), _META: stored}).locate(key)

    assert caught.value.ref == ROOT.join(_META)


async def test_hierarchy_of_an_unknown_encoding_is_served_as_stored() -> None:
    """A hierarchy of an unknown encoding is served as stored and described with a reason."""
    entry_point = {"zarr_format": CORE, "metadata_encoding": "https://example.org/cbor"}
    objects = {**_bar(), "zarr.json": encode(entry_point)}
    case = Container(objects)

    for key in (_META, f"{_DATA}/c0/0"):
        assert await case.locate(key) == await case.target(key) == Whole(ROOT.join(key))
    layout = await case.open()
    assert (await layout.listing_rules(VirtualKey(f"{_DATA}/"), case.fetch)).is_plain
    (found,) = await _collections(objects)
    assert isinstance(found, ChunkCollection)
    assert (found.description.kind, found.shards) == ("hierarchy", None)
    assert "not encoded as JSON" in found.description.why_sharded


@pytest.mark.parametrize(
    ("key", "is_shown"),
    [("zarr.json", True), ("meta/", True), (_META, True), ("data/root/", True),
     ("data/root/foo/bar/", True), (f"{_DATA}/notes.txt", True), (f"{_DATA}/c0/", False),
     (f"{_DATA}/c/", True), (f"{_DATA}/c0.0", False), ("data/root/c0/", True)],
)  # fmt: skip
async def test_objects_named_like_chunks_are_not_listed(key: str, *, is_shown: bool) -> None:
    """Objects whose names are those of chunks are not listed."""
    case = Container(_bar())
    path = key[: key.rstrip("/").rfind("/") + 1]
    rules = await (await case.open()).listing_rules(VirtualKey(path), case.fetch)

    assert rules.shows is not None
    assert rules.shows(key.removeprefix(path)) is is_shown


async def test_objects_of_an_array_without_shards_are_listed() -> None:
    """Below an array that is served as stored all objects are listed."""
    objects = {**_bar(), "meta/root/plain.array.json": encode(array_metadata([4], [2]))}
    case = Container(objects)

    assert await (await case.open()).listing_rules(VirtualKey("data/root/plain/"), case.fetch) == (
        PLAIN
    )


async def test_chunk_off_the_grid_is_refused() -> None:
    """A write to a chunk off the grid raises BadKeyError; a scalar array has one chunk."""
    metadata = array_metadata([], [], [sharding([])])
    objects = {**build({}), "meta/root/scalar.array.json": encode(metadata)}

    await write_chunks(objects, {"data/root/scalar/c": b"x"})

    assert objects["data/root/scalar/c"] == b"x" + encode_index([(0, 1)])
    for name in ("c3/0", "c0/4", "c0", "c0.0", "c00/0"):
        key = f"data/root/{name}"
        with pytest.raises(BadKeyError, match=rf"{key} is no chunk of an array of shape \[3, 4\]"):
            await Container(build({})).slot(key)


_SHARDED = encode(array_metadata([4], [2], [sharding([2])]))
_PLAIN = encode(array_metadata([4], [2]))


@pytest.mark.parametrize(
    ("name", "sent", "stored", "is_allowed"),
    [
        (".array.json", _PLAIN, None, True),
        ("/a.array.json", _PLAIN, _PLAIN, True),
        ("/a.array.json", _PLAIN, b"{", True),
        ("/a.array.json", _SHARDED, None, False),
        ("/a.array.json", _PLAIN, _SHARDED, False),
        ("/consolidated/.zmetadata", encode({"metadata": {}}), None, False),
    ],
)
async def test_metadata_of_a_sharded_array_is_read_only(
    name: str, sent: bytes, stored: bytes | None, *, is_allowed: bool
) -> None:
    """A write of a sharded array's metadata raises ConflictError; that of others is stored."""
    target = await Container(build({})).target(f"meta/root{name}")
    assert isinstance(target, Document)
    assert target.ref == ROOT.join(f"meta/root{name}")
    translate = target.translator.translate
    fetch = uncached_reads(WatchedStore())

    with pytest.raises(BadBodyError):
        await translate(b"[]", stored, fetch, run_in_thread)
    if is_allowed:
        assert await translate(sent, stored, fetch, run_in_thread) == sent
        assert target.translator.is_marker(sent)
    else:
        with pytest.raises(ConflictError, match="are read-only here"):
            await translate(sent, stored, fetch, run_in_thread)


async def test_write_target_of_other_keys_is_the_object() -> None:
    """The write target of groups, the entry point and unknown arrays' chunks is the object."""
    case = Container(build({}))
    for key in ("zarr.json", "meta/root/x.group.json", "meta/root.group.json", "data/root/x/c0/0"):
        assert await case.target(key) == Whole(ROOT.join(key))


@pytest.mark.parametrize(
    ("data_type", "members", "nbytes"),
    [("<i4", {}, 8), ("|u1", {}, 2), ("bool", {}, 2), (">c16", {}, 32), ("r24", {}, 6),
     ("<i4", {"compressor": None, "attributes": {"filters": []}}, 8), ("r7", {}, None),
     ("<U3", {}, None), ({"type": "<i4"}, {}, None), ("<i4", {"compressor": {"codec": "x"}}, None),
     ("<i4", {"attributes": {"filters": [{"id": "delta"}]}}, None)],
)  # fmt: skip
async def test_chunk_of_a_known_length_is_checked(
    data_type: Any, members: dict[str, Any], nbytes: int | None
) -> None:
    """A chunk of a core data type without compression must have its length, or BadBodyError."""
    metadata = array_metadata([8], [2], [sharding([2])], data_type=data_type, **members)
    objects = {**build({}), "meta/root.array.json": encode(metadata)}
    shard, entry = await Container(objects).slot("data/root/c3")

    assert shard.encode(entry, bytes(nbytes or 5), coding="") == bytes(nbytes or 5)
    with pytest.raises(BadBodyError):
        shard.encode(entry, bytes(nbytes + 1 if nbytes else 0), coding="")
    with pytest.raises(UnknownCodingError):
        shard.encode(entry, bytes(nbytes or 5), coding="gzip")


def _paths(found: Sequence[ChunkCollection | DamagedError]) -> list[str]:
    return [
        each.description.path if isinstance(each, ChunkCollection) else str(each.ref)
        for each in found
    ]


async def test_every_array_of_a_hierarchy_is_described() -> None:
    """Every array of a hierarchy is described, the root too, and damaged ones are listed."""
    objects = build({}, path="/foo/bar") | build({}) | {"meta/root/a.array.json": b"{"}
    objects |= {
        "meta/root/foo.group.json": b"{}",
        "meta/root/plain.array.json": encode(array_metadata([5], [2])),
        "meta/root/b.array.json": encode(array_metadata([5], [2]) | {"shape": 5}),
    }

    found = await _collections(objects)

    damaged = [f"{ROOT}/meta/root/{name}.array.json" for name in "ab"]
    assert _paths(found) == ["", *damaged, "foo/bar", "plain"]
    assert [isinstance(each, ChunkCollection) and each.shards is not None for each in found] == [
        *(True, False, False, True, False)
    ]


async def test_sharded_array_that_is_not_understood_is_described_by_the_reason() -> None:
    """A sharded array whose metadata are not understood is described by the reason alone."""
    document = array_metadata([4], [2], [sharding([2])]) | {"shape": 5}
    found = await _collections({**build({}), "meta/root/x.array.json": encode(document)})

    (only,) = (each for each in found if isinstance(each, ChunkCollection) and each.shards is None)
    assert only.description == Description(
        *("x", "zarr", "array"), why_sharded="shape is no list of sizes: 5"
    )


_WRITTEN_2_18 = {
    "data/root/one/c0": bytes.fromhex(
        "050000000600000001000000020000000300000004000000"
        "08000000000000000800000000000000"
        "10000000000000000800000000000000"
        "00000000000000000800000000000000"
    ),
    "data/root/one/c1": bytes.fromhex(
        "090000000a0000000700000008000000"
        "08000000000000000800000000000000"
        "00000000000000000800000000000000"
        "ffffffffffffffffffffffffffffffff"
    ),
    "data/root/zero/c0": bytes.fromhex("0100000000000000000000000400000000000000"),
}
"""Numbers from 1 on: ten in chunks of two, three per shard; and a scalar array."""


async def test_arrays_written_by_zarr_python_2_are_read() -> None:
    """Chunks that zarr-python 2.18 wrote are read, of an array and of a scalar."""
    one = {**array_metadata([10], [2], [sharding([3])]), "data_type": "<i4"}
    zero = {**array_metadata([], [], [sharding([1])]), "data_type": "<i4"}
    documents = {"zarr.json": ENTRY_POINT, "meta/root/one.array.json": one,
                 "meta/root/zero.array.json": zero}  # fmt: skip
    store = WatchedStore()
    filled({**_WRITTEN_2_18, **{k: encode(v) for k, v in documents.items()}}, store)
    hierarchy = reading(store)

    for at in range(5):
        expected = struct.pack("<2i", 2 * at + 1, 2 * at + 2)
        assert await hierarchy.read(f"data/root/one/c{at}") == expected
    assert await hierarchy.read("data/root/one/c5") is None
    assert await hierarchy.read("data/root/zero/c0") == b"\1\0\0\0"
