"""`shardgate.survey.inspect`: summary of a dataset in a moment."""

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
from tests.formats.zarr.building import LITTLE, array_metadata
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


async def test_arrays_are_seen() -> None:
    """Arrays have the key of their node, zarr-python opens them; invalid metadata are damage."""
    array = zarr.open_array({"zarr.json": cpu.Buffer.from_bytes(json.dumps(ARRAY).encode())})
    assert np.all(array[...] == 0)
    seen = await look(filled(MemoryStore(), a=ARRAY, b={"zarr_format": 3, "node_type": "array"}))

    assert [(each.path, each.node, each.group) for each in seen.collections] == [
        ("a", "a", GroupSummary("")),
        ("b", None, None),
    ]
    assert (seen.is_all, seen.reason) == (True, "")


async def test_levels_know_their_image() -> None:
    """An array right below a group of OME-Zarr is a level of it; above the root nothing is."""
    seen = await look(filled(MemoryStore(), _=IMAGE, s0=ARRAY, sub__a=ARRAY))
    (only,) = (await look(filled(MemoryStore(), _=ARRAY))).collections

    assert [(each.path, each.group) for each in seen.collections] == [
        ("s0", GroupSummary("", is_image=True)),
        ("sub/a", GroupSummary("sub")),
    ]
    assert (only.path, only.node, only.group) == ("", "", None)


async def test_a_look_has_an_end() -> None:
    """Of many arrays the first are described; of a root without a listing those that it names."""
    arrays = {f"a{number}": ARRAY for number in range(MAX_COLLECTIONS + 1)}
    seen = await look(filled(MemoryStore(), **arrays))

    assert len(seen.collections) == MAX_COLLECTIONS
    assert (seen.is_all, seen.reason) == (False, "")

    consolidated = {"consolidated_metadata": {"kind": "inline", "metadata": {"a": ARRAY}}}
    group = {"zarr_format": 3, "node_type": "group"} | consolidated
    seen = await look(filled(Unlisted(), _=group, a=ARRAY))
    assert [each.path for each in seen.collections] == ["a"]


async def test_a_store_that_hangs_is_left() -> None:
    """After the time limit the read is cancelled; the reason is given, as of one that fails."""
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


async def test_of_a_precomputed_volume_only_the_container_counts() -> None:
    """Its scales are not Zarr nodes."""
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
def test_groups_are_understood(document: bytes, expected: GroupSummary) -> None:
    """Attributes of OME-Zarr are where version 0.5 has them; other documents say nothing."""
    assert summarize_group("g", document) == expected
