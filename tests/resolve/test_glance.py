"""`app.resolve.glance`: what is seen of a dataset in a moment."""

import json
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.storage import LocalStore

from app.errors import StorageUnavailableError
from app.model import ObjectRef
from app.resolve.glance import MOST_COLLECTIONS, Glance, SeenGroup, glance, understand
from app.storage.memory import MemoryStore
from tests.resolve.stores import Unlisted, WatchedStore, settle
from tests.resolving import ROOT, reading

ARRAY: dict[str, Any] = {
    "zarr_format": 3,
    "node_type": "array",
    "shape": [4, 6],
    "data_type": "uint8",
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2, 3]}},
    "chunk_key_encoding": {"name": "default"},
    "fill_value": 0,
    "codecs": [{"name": "bytes"}],
}
IMAGE: dict[str, Any] = {
    "zarr_format": 3,
    "node_type": "group",
    "attributes": {"ome": {"version": "0.5", "multiscales": [{}]}},
}


def filled[S: MemoryStore](store: S, **documents: Any) -> S:
    """Store ``zarr.json`` in folders, and what is no Zarr under its name."""
    for path, document in documents.items():
        key = f"{path.strip('_').replace('__', '/')}/zarr.json".lstrip("/")
        store.place(ROOT.join(key), json.dumps(document).encode())
    return store


async def look(store: MemoryStore, within_s: float = 5) -> Glance:
    """Look at all of *store*."""
    opened = reading(store)
    return await glance(opened.resolver, opened.dataset, within_s)


async def test_arrays_are_seen() -> None:
    """Each is told with the key of its node, and what is not one as damaged."""
    seen = await look(filled(MemoryStore(), a=ARRAY, b={"zarr_format": 3, "node_type": "array"}))

    assert [(each.path, each.node, each.group) for each in seen.collections] == [
        ("a", "a", SeenGroup("")),
        ("b", None, None),
    ]
    assert (seen.is_all, seen.reason) == (True, "")


async def test_levels_know_their_image() -> None:
    """An array right below a group of OME-Zarr is a level of that, at the root too."""
    seen = await look(filled(MemoryStore(), _=IMAGE, s0=ARRAY, sub__a=ARRAY))

    assert [(each.path, each.group) for each in seen.collections] == [
        ("s0", SeenGroup("", is_image=True)),
        ("sub/a", SeenGroup("sub")),
    ]


async def test_an_array_at_the_root_has_no_group() -> None:
    """Nothing is looked for above the root."""
    (only,) = (await look(filled(MemoryStore(), _=ARRAY))).collections

    assert (only.path, only.node, only.group) == ("", "", None)


async def test_a_look_has_an_end() -> None:
    """Of many arrays the first are seen, and that there are more."""
    arrays = {f"a{number}": ARRAY for number in range(MOST_COLLECTIONS + 1)}
    seen = await look(filled(MemoryStore(), **arrays))

    assert len(seen.collections) == MOST_COLLECTIONS
    assert (seen.is_all, seen.reason) == (False, "")


async def test_a_store_that_hangs_is_left() -> None:
    """After the time that a look may take the reason is told, and nobody waits any more."""
    store = filled(WatchedStore(), a=ARRAY)
    store.gate.clear()

    seen = await look(store, within_s=0.02)
    await settle()

    assert (seen.collections, seen.is_all) == ((), False)
    assert seen.reason == "the store has told no more within 0.02 s"
    assert store.cancelled == 1


async def test_a_store_that_fails_tells_why() -> None:
    """What the store says is the reason."""
    store = filled(WatchedStore(), a=ARRAY)
    store.failure = StorageUnavailableError(ObjectRef("memory://bucket", "x"), "is on fire")

    assert "is on fire" in (await look(store)).reason


async def test_what_was_seen_before_a_fault_is_told() -> None:
    """A root without a listing still has the container that its own metadata tell of."""
    consolidated = {"consolidated_metadata": {"kind": "inline", "metadata": {"a": ARRAY}}}
    group = {"zarr_format": 3, "node_type": "group"} | consolidated
    seen = await look(filled(Unlisted(), _=group, a=ARRAY))

    assert [each.path for each in seen.collections] == ["a"]


async def test_of_a_precomputed_volume_only_the_container_counts() -> None:
    """Its scales are no nodes of Zarr."""
    scale = {"key": "8", "size": [4, 4, 4], "chunk_sizes": [[2, 2, 2]], "encoding": "raw"}
    info = {
        "@type": "neuroglancer_multiscale_volume",
        "data_type": "uint8",
        "num_channels": 1,
        "scales": [scale | {"resolution": [8, 8, 8]}],
    }
    store = MemoryStore()
    store.place(ROOT.join("v/info"), json.dumps(info).encode())
    (only,) = (await look(store)).collections

    assert (only.path, only.container, only.node) == ("v/8", "v", None)


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (b'{"attributes": {"ome": {"multiscales": [{}]}}}', SeenGroup("g", is_image=True)),
        (b'{"consolidated_metadata": {}}', SeenGroup("g", is_consolidated=True)),
        (b'{"consolidated_metadata": null}', SeenGroup("g")),
        (b'{"attributes": {"ome": {"multiscales": []}}}', SeenGroup("g")),
        (b'{"attributes": {"multiscales": [{}]}}', SeenGroup("g")),
        (b'{"attributes": {"ome": []}}', SeenGroup("g")),
        (b'{"attributes": null}', SeenGroup("g")),
        (b"[]", SeenGroup("g")),
        (b"", SeenGroup("g")),
        (b"{" * 100_000, SeenGroup("g")),
    ],
)
def test_groups_are_understood(document: bytes, expected: SeenGroup) -> None:
    """Attributes of OME-Zarr are where version 0.5 has them; all else says nothing."""
    assert understand("g", document) == expected


def test_our_documents_are_those_of_zarr(tmp_path: Any) -> None:
    """What the tests take for an array opens as one."""
    (tmp_path / "zarr.json").write_text(json.dumps(ARRAY))

    assert np.all(zarr.open_array(LocalStore(tmp_path), mode="r")[...] == 0)
