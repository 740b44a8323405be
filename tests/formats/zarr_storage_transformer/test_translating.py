"""Metadata as clients see them, and what is stored for them."""

import json
from typing import Any

import pytest

from app.errors import BadBodyError, ConflictError
from app.formats.zarr_storage_transformer.keys import CONSOLIDATED, MetadataKeys
from app.formats.zarr_storage_transformer.metadata import parse_array_document
from app.formats.zarr_storage_transformer.translating import ArrayTranslator, ConsolidatedTranslator
from app.resolve.perform import DirectFetch
from app.storage.memory import MemoryStore
from tests.formats.zarr_storage_transformer.case import (
    BY_ZARR_PYTHON,
    array_metadata,
    encode,
    sharding,
)
from tests.resolving import ROOT

type Json = dict[str, Any]

SHARDED = array_metadata([8, 6], [2, 2], [sharding([2, 3])])
PLAIN = array_metadata([8, 6], [2, 2])


def served(stored: Json) -> Json:
    """Give what clients see of *stored*."""
    document: Json = json.loads(parse_array_document(stored, encode(stored)).served)
    return document


async def translated(given: Json, stored: Json | None) -> Json:
    """Translate the metadata of an array."""
    old = None if stored is None else encode(stored)
    made = await ArrayTranslator().translate(encode(given), old, DirectFetch(MemoryStore()))
    document: Json = json.loads(made)
    return document


@pytest.mark.parametrize("stored", [SHARDED, BY_ZARR_PYTHON])
async def test_an_array_keeps_its_transformer(stored: Json) -> None:
    """Shape and attributes may change."""
    changes = {"shape": [80, 60], "attributes": {"units": "nm"}}

    assert await translated({**served(stored), **changes}, stored) == {**stored, **changes}
    assert await translated({**stored, **changes}, stored) == {**stored, **changes}


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("chunk_grid", {"type": "regular", "chunk_shape": [2, 3], "separator": "/"}),
        ("chunk_grid", {"type": "regular", "chunk_shape": [2, 2], "separator": "."}),
        ("chunk_memory_layout", "F"),
        ("compressor", {"codec": "https://purl.org/zarr/spec/codec/gzip/1.0"}),
        ("data_type", "i1"),
        ("fill_value", 1),
        ("shape", [8]),
        ("shape", 8),
    ],
)
async def test_what_would_let_shards_be_misread_is_refused(member: str, value: object) -> None:
    """The reason says what cannot change, and what to do."""
    named = "the number of dimensions" if member == "shape" else member

    with pytest.raises(ConflictError, match=rf"^{named} cannot change: .* delete this one"):
        await translated({**served(SHARDED), member: value}, SHARDED)


async def test_what_a_grid_says_by_saying_nothing_may_be_said() -> None:
    """The separator is a slash."""
    grid = {"type": "regular", "chunk_shape": [2, 2]}

    assert await translated({**PLAIN, "chunk_grid": grid}, SHARDED) == {
        **SHARDED,
        "chunk_grid": grid,
    }


@pytest.mark.parametrize("stored", [None, PLAIN])
async def test_no_array_becomes_sharded_here(stored: Json | None) -> None:
    """Nor do the shards of one change."""
    with pytest.raises(ConflictError, match="here an array has no shards"):
        await translated(SHARDED, stored)
    with pytest.raises(ConflictError, match="here an array has no shards"):
        await translated({**SHARDED, "storage_transformers": [sharding([2, 2])]}, SHARDED)


@pytest.mark.parametrize("stored", [None, PLAIN])
async def test_what_has_no_transformer_is_stored_as_it_is(stored: Json | None) -> None:
    """Whatever was there before."""
    assert await translated({**PLAIN, "data_type": "i1"}, stored) == {**PLAIN, "data_type": "i1"}


async def test_an_array_that_is_served_as_it_is_may_be_replaced() -> None:
    """Its transformer is not known."""
    stored = {**SHARDED, "storage_transformers": [{"extension": "other"}]}

    assert await translated(PLAIN, stored) == PLAIN
    assert await translated({**stored, "data_type": "i1"}, stored) == {**stored, "data_type": "i1"}


@pytest.mark.parametrize("given", [b"", b"7", b"{", b"[" * 100_000], ids=lambda data: data[:9])
async def test_what_is_no_object_is_refused(given: bytes) -> None:
    """Before it takes the place of metadata."""
    fetch = DirectFetch(MemoryStore())
    with pytest.raises(BadBodyError):
        await ArrayTranslator().translate(given, None, fetch)
    with pytest.raises(BadBodyError):
        await ConsolidatedTranslator(ROOT, MetadataKeys(".json"), 99).translate(given, None, fetch)


async def _consolidated(nodes: Any, stored: Json) -> Any:
    store = MemoryStore()
    store.place(ROOT.join("meta/root/a.array.json"), encode(stored))
    translator = ConsolidatedTranslator(ROOT, MetadataKeys(".json"), 2**20)
    assert CONSOLIDATED.startswith("meta/root/")
    made = await translator.translate(encode({"metadata": nodes}), None, DirectFetch(store))
    return json.loads(made)["metadata"]


async def test_consolidated_metadata_keep_transformers() -> None:
    """Of the arrays that are stored with one."""
    nodes = {
        "meta/root/a.array.json": served(SHARDED),
        "meta/root/b.array.json": PLAIN,
        "meta/root/a.group.json": {"attributes": {}},
        "zarr.json": 7,
    }

    assert await _consolidated(nodes, SHARDED) == {**nodes, "meta/root/a.array.json": SHARDED}
    assert await _consolidated(nodes, PLAIN) == nodes
    assert await _consolidated([], PLAIN) == []


async def test_consolidated_metadata_agree_with_what_is_stored() -> None:
    """What is wrong is named by its key."""
    nodes = {"meta/root/a.array.json": {**PLAIN, "data_type": "i1"}}

    with pytest.raises(ConflictError, match=r"^meta/root/a\.array\.json: data_type cannot"):
        await _consolidated(nodes, SHARDED)
