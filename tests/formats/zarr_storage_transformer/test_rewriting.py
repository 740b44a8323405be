"""Shards of the draft, planned anew and taken apart by hand."""

import asyncio
import json
import struct
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import BadBodyError, BadKeyError, DamagedError, UnknownCodingError
from app.formats.writing import Document, Slot, Target
from app.model import VirtualKey, Whole
from app.resolve.perform import DirectFetch
from app.storage.memory import MemoryStore
from tests.formats.rendering import render
from tests.formats.zarr_storage_transformer.case import (
    EMPTY,
    array_metadata,
    build,
    encode,
    encode_index,
    sharding,
)
from tests.resolving import ROOT, known_formats


def _fetch(objects: Mapping[str, bytes]) -> DirectFetch:
    store = MemoryStore()
    for key, data in objects.items():
        store.place(ROOT.join(key), data)
    return DirectFetch(store)


async def _target(objects: Mapping[str, bytes], key: str) -> Target:
    fetch = _fetch(objects)
    layout = await known_formats()[0].open(ROOT, fetch)
    assert layout is not None
    return await layout.target(VirtualKey(key), fetch)


async def _slot(objects: Mapping[str, bytes], key: str) -> Slot:
    slot = await _target(objects, key)
    assert isinstance(slot, Slot)
    return slot


async def _write(objects: dict[str, bytes], changes: Mapping[str, bytes | None]) -> None:
    """Write chunks, one shard after the other."""
    shards: dict[Any, dict[Any, bytes | None]] = {}
    for key, body in changes.items():
        shard, entry = await _slot(objects, key)
        shards.setdefault(shard, {})[entry] = body
    for shard, entries in shards.items():
        key = shard.ref.key.removeprefix(f"{ROOT.key}/")
        plan = shard.plan(await shard.open(entries, _fetch(objects)), entries)
        if plan is None:
            objects.pop(key, None)
        else:
            objects[key] = render(plan.pieces, objects.get(key, b""))


def _chunks(objects: Mapping[str, bytes], counts: tuple[int, int]) -> dict[str, bytes]:
    """Read all chunks of an array of two dimensions with *counts* chunks in a shard."""
    found = {}
    rows, columns = counts
    for key, data in objects.items():
        if not key.startswith("data/root/c"):
            continue
        row, column = map(int, key.removeprefix("data/root/c").split("/"))
        size = 16 * rows * columns
        numbers = struct.unpack(f"<{2 * rows * columns}Q", data[-size:])
        for n, place in enumerate(zip(numbers[::2], numbers[1::2], strict=True)):
            if place != EMPTY:
                name = f"data/root/c{row * rows + n // columns}/{column * columns + n % columns}"
                found[name] = data[place[0] : place[0] + place[1]]
    return found


KEYS = [f"data/root/c{row}/{column}" for row in range(3) for column in range(4)]
BODIES = st.one_of(st.none(), st.binary(min_size=1, max_size=9))


@settings(max_examples=60)
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 4)),
    st.dictionaries(st.sampled_from(KEYS), st.binary(min_size=1)),
    st.lists(st.dictionaries(st.sampled_from(KEYS), BODIES), max_size=4),
)
def test_a_history_of_changes_leaves_what_a_dictionary_would_hold(
    counts: tuple[int, int],
    first: dict[str, bytes],
    history: list[dict[str, bytes | None]],
) -> None:
    """Whatever is in a shard, its index is at the end, little-endian and bare."""
    objects = build(first, per_shard=counts)
    model: dict[str, bytes | None] = dict(first)
    for changes in history:
        asyncio.run(_write(objects, changes))
        model |= changes

    assert _chunks(objects, counts) == {k: body for k, body in model.items() if body is not None}


async def test_a_scalar_is_written() -> None:
    """The only chunk of an array without dimensions."""
    metadata = array_metadata([], [], [sharding([])])
    objects = {**build({}), "meta/root/scalar.array.json": encode(metadata)}

    await _write(objects, {"data/root/scalar/c": b"x"})

    assert objects["data/root/scalar/c"] == b"x" + encode_index([(0, 1)])


async def test_a_damaged_shard_is_not_written() -> None:
    """One entry that leads past its end is enough."""
    objects = build({})
    objects["data/root/c0/0"] = b"abc" + encode_index([(0, 3), (1, 3), EMPTY, EMPTY])

    with pytest.raises(DamagedError, match="data/root/c0/0: inner chunk 1"):
        await _write(objects, {"data/root/c1/1": b"new"})


@pytest.mark.parametrize(
    "key", ["data/root/c3/0", "data/root/c0/4", "data/root/c0", "data/root/c0.0", "data/root/c00/0"]
)
async def test_what_is_no_chunk_of_the_grid_is_refused(key: str) -> None:
    """It would be an object that nobody finds."""
    with pytest.raises(BadKeyError, match=rf"{key} is no chunk of an array of \[3, 4\] chunks"):
        await _slot(build({}), key)


@pytest.mark.parametrize(
    "key", ["zarr.json", "meta/root/x.group.json", "meta/root.group.json", "data/root/x/c0/0"]
)
async def test_other_keys_are_objects(key: str) -> None:
    """So are the chunks of arrays without the transformer."""
    assert await _target(build({}), key) == Whole(ROOT.join(key))


@pytest.mark.parametrize(
    "key", ["meta/root.array.json", "meta/root/new.array.json", "meta/root/consolidated/.zmetadata"]
)
async def test_metadata_of_arrays_are_documents(key: str) -> None:
    """Be they there or not."""
    target = await _target(build({}), key)

    assert isinstance(target, Document)
    assert target.ref == ROOT.join(key)


async def test_nothing_is_known_of_a_hierarchy_that_is_not_understood() -> None:
    """All its objects are written as they are."""
    entry_point = {**json.loads(build({})["zarr.json"]), "metadata_encoding": "other"}
    objects = {**build({}), "zarr.json": encode(entry_point)}

    for key in ("data/root/c0/0", "meta/root.array.json"):
        assert await _target(objects, key) == Whole(ROOT.join(key))


@pytest.mark.parametrize(
    ("members", "nbytes"),
    [
        ({"data_type": "<i4"}, 8),
        ({"data_type": "|u1"}, 2),
        ({"data_type": "i1"}, 2),
        ({"data_type": "bool"}, 2),
        ({"data_type": ">c16"}, 32),
        ({"data_type": "r24"}, 6),
        ({"data_type": "<i4", "compressor": None}, 8),
        ({"data_type": "<i4", "attributes": {"filters": []}}, 8),
        ({"data_type": "r7"}, None),
        ({"data_type": "<U3"}, None),
        ({"data_type": {"type": "<i4"}}, None),
        ({"data_type": "<i4", "compressor": {"codec": "x"}}, None),
        ({"data_type": "<i4", "attributes": {"filters": [{"id": "delta"}]}}, None),
    ],
)
async def test_the_length_of_a_chunk_is_demanded_where_it_is_known(
    members: dict[str, Any], nbytes: int | None
) -> None:
    """Of core data types, where nothing compresses."""
    metadata = array_metadata([8], [2], [sharding([2])], **members)
    objects = {**build({}), "meta/root.array.json": encode(metadata)}
    shard, entry = await _slot(objects, "data/root/c3")

    assert shard.encode(entry, bytes(nbytes or 5), is_gzip=False) == bytes(nbytes or 5)
    with pytest.raises(BadBodyError):
        shard.encode(entry, bytes(nbytes + 1 if nbytes else 0), is_gzip=False)
    with pytest.raises(UnknownCodingError):
        shard.encode(entry, bytes(nbytes or 5), is_gzip=True)
