"""Hierarchies of the draft of 2022: chunks located, written, listed and surveyed.

Indexes are read, checked and rewritten by the code of ZEP 2, which has its own tests.
"""

import json
import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pytest

from app.errors import (
    BadBodyError,
    BadKeyError,
    DamagedError,
    StorageUnavailableError,
    UnknownCodingError,
)
from app.formats.contract import Document, Slot, Target
from app.formats.surveying import Collection, Entry, Fault
from app.formats.zarr.draft_2022 import HierarchyLayout
from app.model import (
    MISSING,
    ByteRange,
    Inline,
    Location,
    ObjectRef,
    Stored,
    SuffixRange,
    VirtualKey,
    Whole,
)
from app.resolve.listing import list_names
from app.resolve.metadata_cache import MetadataCache, ReadCache
from app.resolve.perform import DirectFetch
from app.storage.contract import Listed
from tests.formats.case import filled, render
from tests.formats.zarr.building import EMPTY
from tests.formats.zarr.building import build as build_v3
from tests.formats.zarr.draft import (
    CORE,
    ENTRY_POINT,
    array_metadata,
    build,
    encode,
    encode_index,
    sharding,
)
from tests.resolve.stores import Clock, WatchedStore
from tests.support.resolving import ROOT, known_formats, reading

_LIMIT = 2**16
_META = "meta/root/foo/bar.array.json"
_DATA = "data/root/foo/bar"
_CHUNKS = {f"{_DATA}/c0/0": b"first", f"{_DATA}/c0/1": b"second", f"{_DATA}/c2/3": b"third"}


class _Case:
    """A hierarchy in a watched store."""

    def __init__(self, objects: Mapping[str, bytes], store: WatchedStore | None = None) -> None:
        self.store = store or WatchedStore()
        self.clock = Clock()
        self.etags = {key: self.store.place(ROOT.join(key), data) for key, data in objects.items()}
        self.format, *_ = known_formats(metadata_nbytes=_LIMIT)
        self.fetch = ReadCache(self.store, MetadataCache(2**20), ttl_s=60, clock=self.clock)

    async def open(self) -> HierarchyLayout:
        """Open the hierarchy, and forget the reads of that."""
        layout = await self.format.open(ROOT, self.fetch)
        assert isinstance(layout, HierarchyLayout)
        self.store.calls.clear()
        return layout

    async def locate(self, key: str) -> Location:
        """Open the hierarchy and locate *key*."""
        return await (await self.open()).locate(VirtualKey(key), self.fetch)

    async def target(self, key: str) -> Target:
        """Open the hierarchy and find where *key* is written."""
        return await (await self.open()).target(VirtualKey(key), self.fetch)

    async def slot(self, key: str) -> Slot:
        """Find where a chunk is written."""
        slot = await self.target(key)
        assert isinstance(slot, Slot)
        return slot

    async def collections(self) -> Sequence[Collection | DamagedError]:
        """Describe all arrays."""
        listing = lambda prefix: list_names(self.store, ROOT, prefix)  # noqa: E731
        return await (await self.open()).collections(DirectFetch(self.store), listing)


def _bar(**options: Any) -> dict[str, bytes]:
    return build(_CHUNKS, path="/foo/bar", **options)


async def test_the_final_specification_is_still_read() -> None:
    """Hierarchies of both kinds lie at any depth of one bucket."""
    store = WatchedStore()
    filled({f"lab/old/{key}": data for key, data in _bar().items()}, store)
    new = build_v3({"c/0/0": b"new"})
    filled({f"lab/new/{key}": data for key, data in new.items()}, store)
    bucket = reading(store)

    assert await bucket.read(f"lab/old/{_DATA}/c0/1") == b"second"
    assert await bucket.read("lab/new/c/0/0") == b"new"


async def test_metadata_are_served_without_the_transformer() -> None:
    """The document has a version of its own, made of that of the stored one."""
    objects = _bar()
    key = "meta/root/consolidated/.zmetadata"
    consolidated = encode({"metadata": {_META: json.loads(objects[_META])}})
    case = _Case({**objects, key: consolidated})

    for each in (_META, key):
        location = await case.locate(each)
        assert isinstance(location, Inline)
        assert b"storage_transformers" not in location.data
        assert location.etag not in case.etags.values()
        assert location.etag.startswith(case.etags[each][:-1])
    assert await case.locate("meta/root/bar.array.json") == MISSING


@pytest.mark.parametrize("transformers", [None, [], [{"extension": "https://example.org/mirror"}]])
async def test_an_array_without_a_known_transformer_is_served_unchanged(transformers: Any) -> None:
    """Its document, its version and its chunks."""
    key = "meta/root/plain.array.json"
    data = encode(array_metadata([4], [2], transformers))
    case = _Case({"zarr.json": encode(ENTRY_POINT), key: data})

    assert await case.locate(key) == Inline(data, case.etags[key])
    assert await case.locate("data/root/plain/c0") == Whole(ROOT.join("data/root/plain/c0"))


@pytest.mark.parametrize(
    "key",
    ["zarr.json", "meta/root.group.json", "meta/root/foo.group.json", "notes.txt", _DATA,
     f"{_DATA}/checksums", f"{_DATA}/c00/0", f"{_DATA}/c0/0/0", f"{_DATA}/c0", f"{_DATA}/c",
     f"{_DATA}/c0.0", "data/root/other/c0/0", "data/root/c0/0", "c0/0"],
)  # fmt: skip
async def test_what_is_no_chunk_is_the_object_of_that_name(key: str) -> None:
    """Other keys, and those of unknown arrays, name objects below the hierarchy."""
    assert await _Case(_bar()).locate(key) == Whole(ROOT.join(key))


async def test_a_chunk_costs_its_metadata_and_its_index() -> None:
    """One read for the array, one for the shard; each is as long as it must be.

    A key past the edge of the array is proved absent by its metadata.
    """
    expected = [(f"data/{_META}", ByteRange(0, _LIMIT + 1))]
    for key in ("c3/0", "c0/4", "c999999/0", "c0/9999999999999999999"):
        case = _Case(_bar())
        assert await case.locate(f"{_DATA}/{key}") == MISSING
        assert [(call.ref.key, call.request) for call in case.store.calls] == expected
    case = _Case(_bar())
    await case.locate(f"{_DATA}/c0/0")

    assert [(call.ref.key, call.request) for call in case.store.calls] == [
        *expected,
        (f"data/{_DATA}/c0/0", SuffixRange(64)),
    ]


@pytest.mark.parametrize("key", [*_CHUNKS, f"{_DATA}/c1/1", "data/root/other/c0", _META])
async def test_when_warm_nothing_is_read(key: str) -> None:
    """The array that owns a key, or that there is none, is cached like any metadata."""
    case = _Case(_bar())
    await case.locate(key)
    await case.locate(key)

    assert case.store.calls == []


async def test_after_a_while_metadata_are_asked_for_again() -> None:
    """An array that became another is served as that one when its time is over."""
    case = _Case(_bar())
    assert isinstance(await case.locate(f"{_DATA}/c0/1"), Stored)
    case.store.place(ROOT.join(_META), encode(array_metadata([5, 7], [2, 2])))
    case.clock.now += 61

    assert await case.locate(f"{_DATA}/c0/1") == Whole(ROOT.join(f"{_DATA}/c0/1"))


@pytest.mark.parametrize("key", [_META, f"{_DATA}/c0/0"])
@pytest.mark.parametrize(
    ("stored", "reason"),
    [
        (b"{", "no JSON"),
        (b"[]", "no object"),
        (encode(array_metadata([5, 7], [2, 2], [sharding([0, 2])])), "chunks_per_shard"),
        (b" " * (_LIMIT + 1), "metadata of more than 65536 bytes"),
    ],
)
async def test_damaged_metadata_are_named(key: str, stored: bytes, reason: str) -> None:
    """Neither the array nor its chunks are absent when their metadata cannot be right."""
    with pytest.raises(DamagedError, match=reason) as caught:
        await _Case({**_bar(), _META: stored}).locate(key)

    assert caught.value.ref == ROOT.join(_META)


async def test_a_hierarchy_that_is_not_understood_is_served_unchanged() -> None:
    """Nothing of it is rewritten, and nothing hidden; the reason is told."""
    entry_point = {"zarr_format": CORE, "metadata_encoding": "https://example.org/cbor"}
    case = _Case({**_bar(), "zarr.json": encode(entry_point)})

    for key in (_META, f"{_DATA}/c0/0"):
        assert await case.locate(key) == await case.target(key) == Whole(ROOT.join(key))
    layout = await case.open()
    assert (await layout.listing_rules(VirtualKey(f"{_DATA}/"), case.fetch)).is_plain
    (found,) = await case.collections()
    assert isinstance(found, Collection)
    assert (found.description.kind, found.shards) == ("hierarchy", None)
    assert "not encoded as JSON" in found.description.why_sharded


@pytest.mark.parametrize(
    ("key", "is_shown"),
    [("zarr.json", True), ("meta/", True), (_META, True), ("data/root/", True),
     ("data/root/foo/bar/", True), (f"{_DATA}/notes.txt", True), (f"{_DATA}/c0/", False),
     (f"{_DATA}/c/", True), (f"{_DATA}/c0.0", False), ("data/root/c0/", True)],
)  # fmt: skip
async def test_shards_are_hidden(key: str, *, is_shown: bool) -> None:
    """Objects whose names are those of chunks cannot be asked for."""
    case = _Case(_bar())
    path = key[: key.rstrip("/").rfind("/") + 1]
    rules = await (await case.open()).listing_rules(VirtualKey(path), case.fetch)

    assert rules.shows is not None
    assert rules.shows(key.removeprefix(path)) is is_shown


@pytest.mark.parametrize("reason", ["truncated", r"inner chunk 1 .* overlaps the shard index"])
async def test_a_damaged_shard_is_named(reason: str) -> None:
    """Damage is no absence; however large a shard is said to be, no memory is taken for it."""
    is_short = reason == "truncated"
    per_shard = [2**63 - 1] * 2 if is_short else [2, 2]
    objects = build({}, storage_transformers=[sharding(per_shard)])
    objects["data/root/c0/0"] = b"abc" + encode_index([(0, 3), (1, 3), EMPTY, EMPTY])
    case = _Case(objects)

    with pytest.raises(DamagedError, match=rf"data/root/c0/0: .*{reason}"):
        await case.locate("data/root/c0/1")
    if not is_short:
        with pytest.raises(DamagedError, match=rf"data/root/c0/0: {reason}"):
            await _write(objects, {"data/root/c1/1": b"new"})


async def _write(objects: dict[str, bytes], changes: Mapping[str, bytes | None]) -> None:
    """Write chunks, one shard after the other."""
    shards: dict[Any, dict[Any, bytes | None]] = {}
    for key, body in changes.items():
        shard, entry = await _Case(objects).slot(key)
        shards.setdefault(shard, {})[entry] = body
    for shard, entries in shards.items():
        key = shard.ref.key.removeprefix(f"{ROOT.key}/")
        plan = shard.plan(await shard.open(entries, _Case(objects).fetch), entries)
        if plan is None:
            objects.pop(key, None)
        else:
            objects[key] = render(plan.pieces, objects.get(key, b""))


async def test_only_chunks_of_the_grid_are_written() -> None:
    """Others would be objects that nobody finds; one is that of an array without dimensions."""
    metadata = array_metadata([], [], [sharding([])])
    objects = {**build({}), "meta/root/scalar.array.json": encode(metadata)}

    await _write(objects, {"data/root/scalar/c": b"x"})

    assert objects["data/root/scalar/c"] == b"x" + encode_index([(0, 1)])
    for name in ("c3/0", "c0/4", "c0", "c0.0", "c00/0"):
        key = f"data/root/{name}"
        with pytest.raises(BadKeyError, match=rf"{key} is no chunk of an array of shape \[3, 4\]"):
            await _Case(build({})).slot(key)


async def test_other_keys_are_objects_or_documents() -> None:
    """Metadata of arrays are documents, stored or not."""
    case = _Case(build({}))
    for key in ("zarr.json", "meta/root/x.group.json", "meta/root.group.json", "data/root/x/c0/0"):
        assert await case.target(key) == Whole(ROOT.join(key))
    for name in (".array.json", "/new.array.json", "/consolidated/.zmetadata"):
        target = await case.target(f"meta/root{name}")
        assert isinstance(target, Document)
        assert target.ref == ROOT.join(f"meta/root{name}")


@pytest.mark.parametrize(
    ("members", "nbytes"),
    [
        ({"data_type": "<i4"}, 8),
        ({"data_type": "|u1"}, 2),
        ({"data_type": "bool"}, 2),
        ({"data_type": ">c16"}, 32),
        ({"data_type": "r24"}, 6),
        ({"data_type": "<i4", "compressor": None, "attributes": {"filters": []}}, 8),
        ({"data_type": "r7"}, None),
        ({"data_type": "<U3"}, None),
        ({"data_type": {"type": "<i4"}}, None),
        ({"data_type": "<i4", "compressor": {"codec": "x"}}, None),
        ({"data_type": "<i4", "attributes": {"filters": [{"id": "delta"}]}}, None),
    ],
)
async def test_the_length_of_a_chunk_is_checked_where_it_is_known(
    members: dict[str, Any], nbytes: int | None
) -> None:
    """That of core data types, where nothing compresses."""
    metadata = array_metadata([8], [2], [sharding([2])], **members)
    objects = {**build({}), "meta/root.array.json": encode(metadata)}
    shard, entry = await _Case(objects).slot("data/root/c3")

    assert shard.encode(entry, bytes(nbytes or 5), is_gzip=False) == bytes(nbytes or 5)
    with pytest.raises(BadBodyError):
        shard.encode(entry, bytes(nbytes + 1 if nbytes else 0), is_gzip=False)
    with pytest.raises(UnknownCodingError):
        shard.encode(entry, bytes(nbytes or 5), is_gzip=True)


@pytest.mark.parametrize("path", ["", "/a/b"])
async def test_shards_are_named_by_the_path_of_their_array(path: str) -> None:
    """Entries are named by their chunks, and wrong ones are faults of those."""
    stem = f"data/root{path}"
    objects = build({f"{stem}/c0/1": b"first"}, path=path, per_shard=(2, 3))
    shard = bytearray(objects[f"{stem}/c0/0"])
    shard[-16:] = (99).to_bytes(8, "little") * 2
    case = _Case({**objects, f"{stem}/c0/0": bytes(shard)})
    shards = await (await case.open()).shards_at(VirtualKey(f"{stem}/c0/0"), case.fetch)

    assert shards is not None
    assert shards.prefix == f"{stem}/"
    assert [each.key for each in shards.every() or ()] == [
        f"{stem}/c{chunk}" for chunk in ("0/0", "0/3", "2/0", "2/3")
    ]
    assert shards.holding(VirtualKey(f"{stem}/c2/3")) == shards.named(f"{stem}/c1/1")
    others = (f"{stem}/c2/0", f"{stem}/c0/2", "data/root/x/c0/0", f"{stem}/c00/0", "c0/0")
    assert [shards.named(key) for key in others] == [None] * 5
    assert shards.holding(VirtualKey(f"{stem}/c3/0")) is None

    first = shards.named(f"{stem}/c0/0")
    survey = None if first is None else await first.survey(case.fetch)
    assert survey is not None
    table = survey.table()
    (entry,) = table
    assert (entry, survey.key(entry.number)) == (Entry(1, ByteRange(0, 5)), f"{stem}/c0/1")
    reason = "inner chunk 5 at [99, 198) ends past 104 bytes"
    assert (table.empty, list(table.faults)) == (4, [Fault(VirtualKey(f"{stem}/c1/2"), reason)])


class _Unlisted(WatchedStore):
    """A store that cannot list, as HTTP cannot."""

    lasting = True

    async def list(
        self, prefix: ObjectRef, *, delimiter: str = "", after: str = ""
    ) -> AsyncIterator[Listed]:
        """Raise when iterated."""
        nothing: list[Listed] = []
        for listed in nothing:
            yield listed
        raise StorageUnavailableError(prefix, "cannot be listed", lasting=self.lasting)


def _paths(found: Sequence[Collection | DamagedError]) -> list[str]:
    return [
        each.description.path if isinstance(each, Collection) else str(each.ref) for each in found
    ]


async def test_every_array_of_a_hierarchy_is_described() -> None:
    """The root too, and damaged ones."""
    objects = build({}, path="/foo/bar") | build({}) | {"meta/root/a.array.json": b"{"}
    objects |= {
        "meta/root/foo.group.json": b"{}",
        "meta/root/plain.array.json": encode(array_metadata([5], [2])),
        "meta/root/b.array.json": encode(array_metadata([5], [2]) | {"shape": 5}),
    }

    found = await _Case(objects).collections()

    damaged = [f"{ROOT}/meta/root/{name}.array.json" for name in "ab"]
    assert _paths(found) == ["", *damaged, "foo/bar", "plain"]
    assert [isinstance(each, Collection) and each.shards is not None for each in found] == [
        *(True, False, False, True, False)
    ]


@pytest.mark.parametrize("nodes", [{}, 7, {"meta/root.array.json": {}, "x.group.json": {}}])
async def test_without_a_listing_consolidated_metadata_are_used(nodes: Any) -> None:
    """An array that they name and that does not exist is damage."""
    if isinstance(nodes, dict):
        nodes = {**nodes, "meta/root/foo.array.json": {}, "meta/root/gone.array.json": {}}
    objects = build({}, path="/foo") | build({})
    objects["meta/root/consolidated/.zmetadata"] = encode({"metadata": nodes})

    found = await _Case(objects, _Unlisted()).collections()

    root = [""] if isinstance(nodes, dict) and "meta/root.array.json" in nodes else []
    gone = f"{ROOT}/meta/root/gone.array.json"
    assert _paths(found) == ([*root, "foo", gone] if isinstance(nodes, dict) else [])


async def test_without_a_listing_the_root_may_be_the_array() -> None:
    """Then there is no other; damaged consolidated metadata are told.

    Without any names nothing is claimed, nor where the store cannot list for a moment only.
    """
    damaged, store = "meta/root/consolidated/.zmetadata", _Unlisted()
    store.lasting = False

    assert _paths(await _Case(build({}), _Unlisted()).collections()) == [""]
    found = await _Case({**build({}), damaged: b"{"}, _Unlisted()).collections()
    assert _paths(found) == [f"{ROOT}/{damaged}"]
    for objects, unlisted in ((build({}, path="/foo"), _Unlisted()), (build({}), store)):
        with pytest.raises(StorageUnavailableError):
            await _Case(objects, unlisted).collections()


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
"""Numbers from 1 on: ten in chunks of two, three to a shard; and one without dimensions."""


async def test_what_zarr_python_2_wrote_is_read() -> None:
    """Each chunk has its numbers; the scalar, of which it counts one dimension, has its one."""
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
