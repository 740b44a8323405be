"""`shardgate.survey.inspect`: summary of a dataset for its overview."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.core.buffer import cpu

from shardgate.errors import BadParameterError, StorageUnavailableError
from shardgate.formats.surveying import LEFT_OUT, Description, RefDescription
from shardgate.model import ObjectRef, VirtualKey, join_path
from shardgate.read.containers import Containers
from shardgate.read.listing import Root
from shardgate.storage.contract import Found, NotModified
from shardgate.storage.memory import MemoryStore
from shardgate.storage.wrappers import Call, TracedStore
from shardgate.survey.inspect import (
    MAX_COLLECTIONS,
    MAX_MEASURED,
    MAX_REPOSITORIES,
    DamageReport,
    FolderOverview,
    StoredSize,
    inspect_key,
    inspect_page,
    inspect_refs,
    inspect_root,
    measure,
    summarize,
)
from shardgate.survey.verify import verify
from tests.support.formats.icechunk.repositories import Builder, digest, lab, spell
from tests.support.formats.neuroglancer_precomputed.case import volume_info
from tests.support.formats.zarr.building import array_metadata, consolidated, sharding
from tests.support.formats.zip.archives import Entry, archive
from tests.support.read.stores import Unlisted, WatchedStore, settle
from tests.support.resolving import ROOT, reading
from tests.support.survey.documents import ARRAY, filled

IMAGE: dict[str, Any] = {
    "zarr_format": 3,
    "node_type": "group",
    "attributes": {
        "ome": {"version": "0.5", "multiscales": [{"axes": [], "datasets": [{"path": "s0"}]}]}
    },
}


async def look(store: MemoryStore, folder: str = "", within_s: float = 60) -> FolderOverview:
    """Summarize *folder* of *store*."""
    opened = reading(store)
    key = VirtualKey(folder)
    return await summarize(opened.resolver, opened.dataset, key, within_s=within_s)


async def test_sound_arrays_have_their_node() -> None:
    """A sound array has a node; one with invalid metadata has none."""
    array = zarr.open_array({"zarr.json": cpu.Buffer.from_bytes(json.dumps(ARRAY).encode())})
    assert np.all(array[...] == 0)
    seen = await look(filled(MemoryStore(), a=ARRAY, b={"zarr_format": 3, "node_type": "array"}))

    assert [(each.path, each.node) for each in seen.collections] == [("a", "a"), ("b", None)]
    assert (seen.is_all, seen.reason) == (True, "")


async def test_level_has_its_image() -> None:
    """An array right below an OME-Zarr group is a level of that image; others are none."""
    seen = await look(filled(MemoryStore(), _=IMAGE, s0=ARRAY, sub__a=ARRAY))
    (only,) = (await look(filled(MemoryStore(), _=ARRAY))).collections

    assert [(each.path, each.image) for each in seen.collections] == [("s0", ""), ("sub/a", None)]
    assert (only.path, only.node, only.image) == ("", "", None)


async def test_folder_is_summarized_with_paths_below_it() -> None:
    """Paths in the summary of a folder begin below it, nodes at the root of the dataset."""
    store = filled(MemoryStore(), g=IMAGE, g__s0=ARRAY, other=ARRAY)

    seen = await look(store, "g/")
    (only,) = (await look(store, "g/s0/")).collections

    assert [(each.path, each.node, each.image) for each in seen.collections] == [
        ("s0", "g/s0", "g")
    ]
    assert (only.path, only.node) == ("", "g/s0")
    assert (await look(store, "g/s0/c/")).collections == ()


@pytest.mark.parametrize("folder", ["", "lab/", "lab/a.zip/"])
async def test_names_of_an_archive_that_are_no_keys_are_summarized(folder: str) -> None:
    """The summary of a folder, and of an archive itself, has the number of names that are no keys,
    and an example.
    """
    store = MemoryStore()
    store.place(ROOT.join("lab/a.zip"), archive(Entry(b"./a"), Entry(b"./b"), Entry(b"c")))

    (only,) = (await look(store, folder)).collections

    assert join_path(folder.rstrip("/"), only.path) == "lab/a.zip"
    assert only.found.kind == LEFT_OUT
    assert only.found.why_sharded == "2 names are no keys, such as './a'"


async def test_names_that_are_no_keys_are_inspected_and_not_verified() -> None:
    """Names of an archive that are no keys are told by `inspect`, in the reason of a page of
    descriptions, and by `verify` as not checked, which is no damage.
    """
    store = MemoryStore()
    store.place(ROOT.join("lab/a.zip"), archive(Entry(b"../a")))
    root = reading(store).root
    reason = "1 name is no key, such as '../a'"

    (inspected,) = await inspect_root(root)
    page = await inspect_page(root, limit=9)
    report = await verify(root, chunks=False)

    assert isinstance(inspected, Description)
    assert (inspected.path, inspected.why_sharded) == ("lab/a.zip", reason)
    assert (page.is_all, page.reason) == (True, f"lab/a.zip: {reason}")
    assert report.not_checked == {"lab/a.zip": reason}
    assert not report.damages


async def test_summary_is_bounded() -> None:
    """A summary has the first `MAX_COLLECTIONS` arrays.

    A root without a listing has those of its consolidated metadata.
    """
    arrays = {f"a{number}": ARRAY for number in range(MAX_COLLECTIONS + 1)}
    seen = await look(filled(MemoryStore(), **arrays))

    assert len(seen.collections) == MAX_COLLECTIONS
    assert (seen.is_all, seen.reason) == (False, "")

    seen = await look(filled(Unlisted(), _=consolidated({"a": ARRAY}), a=ARRAY))
    assert [each.path for each in seen.collections] == ["a"]


async def test_slow_or_failing_store_has_a_reason() -> None:
    """A read beyond the time limit is cancelled.

    The summary has the reason, like that of a failed read.
    """
    store = filled(WatchedStore(), a=ARRAY)
    store.gate.clear()

    seen = await look(store, within_s=0.02)
    await settle()

    assert (seen.collections, seen.is_all) == ((), False)
    assert seen.reason == "the store took longer than 0.02 s"
    assert store.cancelled == 1
    store.gate.set()
    store.failure = StorageUnavailableError(ObjectRef("memory://bucket", "x"), "is on fire")
    assert "is on fire" in (await look(store)).reason


class _Stuck(MemoryStore):
    """Never answers reads of metadata in a folder ``b``."""

    async def get(self, ref: ObjectRef, *args: Any, **options: Any) -> Found | NotModified | None:
        """Wait, or read."""
        if ref.key.endswith("b/zarr.json"):
            await asyncio.Event().wait()
        return await super().get(ref, *args, **options)


async def test_page_has_what_was_found_in_time() -> None:
    """A page that takes too long has the collections found until then, and the reason."""
    root = reading(filled(_Stuck(), a=ARRAY, b=ARRAY)).root

    page = await inspect_page(root, limit=9, within_s=3)

    assert [each.path for each in page.reports] == ["a"]
    assert (page.is_all, page.reason) == (False, "the store took longer than 3 s")


@pytest.mark.parametrize(("after", "expected"), [("", ["a", "b"]), ("b", ["c"]), ("c", [])])
async def test_page_begins_behind_a_path(after: str, expected: list[str]) -> None:
    """A page has the collections behind a path, up to its limit, and tells if these are all."""
    root = reading(filled(MemoryStore(), a=ARRAY, b=ARRAY, c=ARRAY)).root

    page = await inspect_page(root, after=after, limit=2)

    assert [each.path for each in page.reports] == expected
    assert (page.is_all, page.reason) == (after != "", "")


async def test_pages_end_where_several_collections_have_one_path() -> None:
    """Pages of one collection each have all, also those at the root and of the same path."""
    store = filled(MemoryStore(), a=ARRAY)
    store.place(
        ROOT.join("a.zip"), archive(Entry(b"./a"), Entry(b"zarr.json", json.dumps(ARRAY).encode()))
    )
    volume = volume_info(None)
    volume["scales"] = [{"key": "1"}, *volume["scales"], {"key": "2"}]
    store.place(ROOT.join("info"), json.dumps(volume).encode())
    root = reading(store).root
    every = await inspect_page(root, limit=99)

    pages = [await inspect_page(root, limit=1)]
    while pages[-1].next is not None and len(pages) < 99:
        pages.append(await inspect_page(root, after=pages[-1].next, limit=1))

    assert [each for page in pages for each in page.reports] == every.reports
    assert len({each.path for each in every.reports}) < len(every.reports)


async def test_page_behind_a_collection_that_is_gone_is_an_error() -> None:
    """A page behind a path without a collection is refused: an empty one would seem the last."""
    root = reading(filled(MemoryStore(), a=ARRAY, c=ARRAY)).root

    with pytest.raises(BadParameterError, match="'b'"):
        await inspect_page(root, after="b", limit=2)


async def test_scale_of_a_volume_has_no_node() -> None:
    """A scale of a precomputed volume has its container, and no Zarr node."""
    store = MemoryStore()
    store.place(ROOT.join("v/info"), json.dumps(volume_info(None)).encode())
    (only,) = (await look(store)).collections

    assert (only.path, only.container, only.node) == ("v/s0", "v", None)


@pytest.mark.parametrize("method", [None, 0, 8], ids=["folder", "stored", "deflated"])
async def test_stored_chunks_are_counted_from_the_indexes(method: int | None) -> None:
    """The indexes of a sharded array, in an archive too, tell how many shards, chunks and bytes it
    has.
    """
    arrays = zarr.storage.MemoryStore()
    array = zarr.create_array(
        arrays, shape=(8, 8), chunks=(2, 2), shards=(4, 4), dtype="u1", compressors=None
    )
    array[:4, :6] = 1
    store, entries = MemoryStore(), list[Entry]()
    async for key in arrays.list():
        data = await arrays.get(key, cpu.buffer_prototype)
        assert data is not None
        entries.append(Entry(key.encode(), data.to_bytes(), method or 0))
        if method is None:
            store.place(ROOT.join(key), data.to_bytes())
    if method is not None:
        store.place(ROOT.join("lab/a.zip"), archive(*entries))
    (only,) = (await look(store)).collections

    assert await measure(reading(store).root, only) == (2, 6, 24)


def repository(builder: Builder, store: MemoryStore | None = None) -> Root:
    """Open the root with the files of *builder*."""
    store = store or MemoryStore()
    for key, data in builder.build().items():
        store.place(ROOT.join(key), data)
    return reading(store).root


@pytest.mark.parametrize(
    ("key", "state", "reference", "has_shard"),
    [
        ("s/c/5", "stored", "native", True),
        ("s/c/1", "inline", "inline", False),
        ("a/c/1", "stored", "native", False),
        ("s/c/9", "absent", None, False),
        ("s/zarr.json", "inline", None, False),
        ("none", "absent", None, False),
    ],
)
async def test_key_of_a_repository_has_its_reference_and_the_index_of_its_shard(
    key: str, state: str, reference: str | None, *, has_shard: bool
) -> None:
    """A key of a repository has the kind of its reference; a chunk in a stored shard, its index."""
    report = await inspect_key(repository(lab()), VirtualKey(key))

    assert (report.state, report.reference, report.shard is not None) == (
        *(state, reference, has_shard),
    )
    assert (report.manifest is None) == (reference is None)


async def test_absent_key_that_no_grid_explains_has_a_reason() -> None:
    """A key that lies in no array is absent for the reason that there is no such key."""
    report = await inspect_key(repository(lab()), VirtualKey("none"))

    assert report.reason == "there is no such key"


async def test_refs_of_files_are_main_alone_where_the_store_cannot_list() -> None:
    """Refs in files are all named by a store that lists, and only ``main`` by another one."""
    builder = Builder(version=1)
    builder.group("/")
    listed = await inspect_refs(repository(builder))
    unlisted = await inspect_refs(repository(builder, Unlisted()))

    assert listed == [
        RefDescription("", name, spell(digest(builder.nodes)))
        for name in ("@branch.main", "@tag.v1")
    ]
    assert unlisted == listed[:1]


async def test_damaged_ref_is_reported_as_damage() -> None:
    """A damaged ref of a repository is reported with its file and the reason."""
    builder = Builder(version=1)
    builder.group("/")
    store = MemoryStore()
    root = repository(builder, store)
    store.place(ROOT.join("refs/branch.x/ref.json"), b"{")

    (report,) = await inspect_refs(root)
    assert isinstance(report, DamageReport)
    assert report.object == str(ROOT.join("refs/branch.x/ref.json"))
    assert report.reason.startswith("invalid JSON")


async def test_damaged_snapshot_is_reported_as_damage_of_its_repository() -> None:
    """A repository whose snapshot is damaged is reported with the name of that file."""
    builder = lab()
    store = MemoryStore()
    root = repository(builder, store)
    snapshot = ROOT.join(f"snapshots/{spell(digest(builder.nodes))}")
    store.place(snapshot, b"damaged")

    (report,) = await inspect_root(root)
    assert isinstance(report, DamageReport)
    assert report.object == str(snapshot)


async def test_damaged_array_of_a_ref_is_summarized_with_the_reason() -> None:
    """The summary of a ref has its sound arrays, and of a damaged one the path and the reason."""
    store = MemoryStore()
    repository(lab(document=array_metadata([6], [2], []) | {"codecs": 5}), store)
    seen = await look(store, "@branch.main/")

    assert [(each.node, each.found.why_sharded) for each in seen.collections] == [
        (None, "/a: the array has no list of codecs"),
        ("@branch.main/s", ""),
    ]


async def test_ref_at_a_missing_snapshot_is_summarized_without_its_commit() -> None:
    """The summary of a repository has a ref without a message where its snapshot is missing."""
    builder = Builder(version=1)
    builder.group("/")
    store = MemoryStore()
    repository(builder, store)
    snapshot_id = spell(digest(builder.nodes))
    store.remove(ROOT.join(f"snapshots/{snapshot_id}"))

    (found,) = (await look(store)).repositories
    assert [(tip.ref, tip.snapshot_id, tip.message) for tip in found.tips] == [
        ("@branch.main", snapshot_id, ""),
        ("@tag.v1", snapshot_id, ""),
    ]


async def test_repositories_of_a_summary_are_bounded() -> None:
    """The summary of many repositories has the first ones, and says that there are others."""
    store, builder = MemoryStore(), Builder()
    builder.group("/")
    for number in range(MAX_REPOSITORIES + 1):
        for key, data in builder.build().items():
            store.place(ROOT.join(f"r{number}/{key}"), data)

    seen = await look(store)
    assert [each.path for each in seen.repositories] == [f"r{n}" for n in range(MAX_REPOSITORIES)]
    assert not seen.is_all


async def test_shards_too_many_to_read_are_not_measured() -> None:
    """Shards are measured where each index can be read, and not where they are too many."""
    store = MemoryStore()
    for name, size in (("few", 4 * MAX_MEASURED), ("many", 4 * MAX_MEASURED + 1)):
        metadata = array_metadata([size], [4], [sharding([1])])
        store.place(ROOT.join(f"{name}/zarr.json"), json.dumps(metadata).encode())
    root = reading(store).root
    few, many = (await look(store)).collections

    assert await measure(root, few) == StoredSize(0, 0, 0)
    assert await measure(root, many) is None


async def test_empty_root_has_the_reason() -> None:
    """A page of nothing says what one walk has looked for; of a raw dataset, that nothing was."""
    calls: list[Call] = []
    opened = reading(TracedStore(MemoryStore(), calls.append))
    nothing = await inspect_page(opened.root, limit=9)
    lists = [call for call in calls if call.method == "list"]
    raw = replace(opened.root, containers=Containers(()))

    assert (nothing.reports, nothing.is_all) == ([], True)
    assert "no container found" in nothing.reason
    assert len(lists) == 1
    assert "nothing was looked for" in (await inspect_page(raw, limit=9)).reason


async def test_group_without_arrays_has_no_reason() -> None:
    """A page of a group that has no arrays is complete, without a reason."""
    group = {"zarr_format": 3, "node_type": "group"}
    page = await inspect_page(reading(filled(MemoryStore(), _=group)).root, limit=9)

    assert (page.reports, page.is_all, page.reason) == ([], True, "")
