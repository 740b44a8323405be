"""`shardgate.survey.inspect`: summary of a dataset for its overview."""

import json
from typing import Any, Final

import numpy as np
import pytest
import zarr
from zarr.core.buffer import cpu

from shardgate.errors import StorageUnavailableError
from shardgate.model import ObjectRef
from shardgate.storage.memory import MemoryStore
from shardgate.survey.inspect import (
    MAX_COLLECTIONS,
    DatasetOverview,
    GroupSummary,
    summarize,
    summarize_group,
)
from tests.formats.neuroglancer_precomputed.case import volume_info
from tests.formats.zarr.building import LITTLE, array_metadata, consolidated
from tests.read.stores import Unlisted, WatchedStore, settle
from tests.support.resolving import ROOT, reading

ARRAY: Final = array_metadata([4, 6], [2, 3], [LITTLE])
IMAGE: dict[str, Any] = {
    "zarr_format": 3,
    "node_type": "group",
    "attributes": {"ome": {"version": "0.5", "multiscales": [{}]}},
}


def filled[S: MemoryStore](store: S, **documents: Any) -> S:
    """Store ``zarr.json`` documents in folders."""
    for path, document in documents.items():
        key = f"{path.strip('_').replace('__', '/')}/zarr.json".lstrip("/")
        store.place(ROOT.join(key), json.dumps(document).encode())
    return store


async def look(store: MemoryStore, within_s: float = 5) -> DatasetOverview:
    """Summarize *store*."""
    opened = reading(store)
    return await summarize(opened.resolver, opened.dataset, within_s)


async def test_arrays_have_their_node_and_group() -> None:
    """A sound array has a node and a group; one with invalid metadata has neither."""
    array = zarr.open_array({"zarr.json": cpu.Buffer.from_bytes(json.dumps(ARRAY).encode())})
    assert np.all(array[...] == 0)
    seen = await look(filled(MemoryStore(), a=ARRAY, b={"zarr_format": 3, "node_type": "array"}))

    assert [(each.path, each.node, each.group) for each in seen.collections] == [
        ("a", "a", GroupSummary("")),
        ("b", None, None),
    ]
    assert (seen.is_all, seen.reason) == (True, "")


async def test_level_has_its_image_group() -> None:
    """An array right below an OME-Zarr group is a level of that image; a root has no group."""
    seen = await look(filled(MemoryStore(), _=IMAGE, s0=ARRAY, sub__a=ARRAY))
    (only,) = (await look(filled(MemoryStore(), _=ARRAY))).collections

    assert [(each.path, each.group) for each in seen.collections] == [
        ("s0", GroupSummary("", is_image=True)),
        ("sub/a", GroupSummary("sub")),
    ]
    assert (only.path, only.node, only.group) == ("", "", None)


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


async def test_scale_of_a_volume_has_no_node() -> None:
    """A scale of a precomputed volume has its container, and no Zarr node."""
    store = MemoryStore()
    store.place(ROOT.join("v/info"), json.dumps(volume_info(None)).encode())
    (only,) = (await look(store)).collections

    assert (only.path, only.container, only.node) == ("v/s0", "v", None)


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (b'{"attributes": {"ome": {"multiscales": [{}]}}}', GroupSummary("g", is_image=True)),
        (b'{"consolidated_metadata": {}}', GroupSummary("g", is_consolidated=True)),
        (b'{"consolidated_metadata": null}', GroupSummary("g")),
        (b'{"attributes": {"ome": {"multiscales": []}}}', GroupSummary("g")),
        (b'{"attributes": {"multiscales": [{}]}}', GroupSummary("g")),
        (b'{"attributes": {"ome": []}}', GroupSummary("g")),
        (b'{"attributes": null}', GroupSummary("g")),
        (b"[]", GroupSummary("g")),
        (b"", GroupSummary("g")),
        (b"{" * 100_000, GroupSummary("g")),
    ],
)
def test_group_document_is_summarized(document: bytes, expected: GroupSummary) -> None:
    """A group is an image by OME-Zarr 0.5 attributes, and consolidated by its metadata.

    Other documents, also invalid ones, are plain groups.
    """
    assert summarize_group("g", document) == expected
