"""Listings of random trees of all formats, compared with their keys."""

import asyncio
import json
from collections.abc import Callable, Sequence
from itertools import cycle, product
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardgate.formats.listing import Window
from shardgate.model import VirtualKey
from shardgate.read import listing
from tests.support.formats.icechunk import case as icechunk_case
from tests.support.formats.icechunk.building import Ref
from tests.support.formats.icechunk.repositories import Builder
from tests.support.formats.neuroglancer_precomputed import case as precomputed_case
from tests.support.formats.neuroglancer_precomputed.shards import build_shards, morton, shardings
from tests.support.formats.zarr import case as zarr_case
from tests.support.formats.zarr.building import (
    LITTLE,
    array_metadata,
    encode_shard,
    rectilinear,
    regular,
    sharding,
)
from tests.support.read.listing import BUCKET, pages_of, store_of
from tests.support.resolving import NOTHING, reading

NAMES = st.sampled_from(["a", "a-b", "a.b", "a0", "c", "0", "10", "2", "é", "info.d"])
_CASES = [*precomputed_case.CASES, *zarr_case.CASES]

type Tree = tuple[dict[str, bytes], set[str]]
"""Stored objects, and the virtual keys."""


@st.composite
def cases(draw: st.DrawFn) -> Tree:
    """Draw a container of the conformance suite with some of its chunks."""
    case = draw(st.sampled_from(_CASES))
    chosen = draw(st.sets(st.sampled_from(sorted(case.chunks))))
    chunks = {key: case.chunks[key] for key in chosen}
    objects = case.build(chunks)
    keys = {name for name in objects if case.is_metadata(name)} | chosen
    if case.entry_suffix:
        keys |= {f"{key}{case.entry_suffix}" for key in chosen}
    return objects, keys


type Cell = tuple[int, ...]


class Drawn(NamedTuple):
    """A sharded array of bytes, one element a chunk."""

    metadata: dict[str, Any]
    counts: list[int]
    """Number of shards along each dimension."""
    shards: dict[Cell, bytes]
    cells: set[Cell]
    """Elements that are stored."""
    spell: Callable[[Sequence[int]], str]
    """Returns the key of a chunk or shard."""


@st.composite
def drawn_arrays(draw: st.DrawFn) -> Drawn:
    """Draw an array, sparse or full."""
    ndim = draw(st.integers(0, 3))
    size = st.integers(1, 25 if ndim == 1 else 12 if ndim == 2 else 5)
    shape = [draw(size) for _ in range(ndim)]
    sizes = [draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)) for _ in range(ndim)]
    edges = [_cover(n, lengths) for n, lengths in zip(shape, sizes, strict=True)]
    is_regular = all(len(lengths) == 1 for lengths in sizes)
    grid = regular(*(lengths[0] for lengths in sizes)) if is_regular else rectilinear(*edges)
    name, separator = draw(st.sampled_from(["default", "v2"])), draw(st.sampled_from("/."))
    encoding = {"name": name, "configuration": {"separator": separator}}
    head = ["c"] if name == "default" else []
    cells = _cells(shape)
    chosen = set(cells if draw(st.booleans()) else draw(st.lists(st.sampled_from(cells))))
    members = {"chunk_grid": grid, "chunk_key_encoding": encoding}
    metadata = array_metadata(shape, [], [sharding([1] * ndim)], **members)
    shards = {}
    for at in _cells([len(lengths) for lengths in edges]):
        corner = [sum(lengths[:i]) for i, lengths in zip(at, edges, strict=True)]
        shard = [lengths[i] for i, lengths in zip(at, edges, strict=True)]
        inner = [tuple(map(sum, zip(corner, i, strict=True))) for i in _cells(shard)]
        if not chosen.isdisjoint(inner):
            shards[at] = encode_shard([b"x" if cell in chosen else None for cell in inner])
    counts = [len(lengths) for lengths in edges]
    return Drawn(
        metadata, counts, shards, chosen, lambda at: separator.join([*head, *map(str, at)]) or "0"
    )


def _cover(size: int, lengths: Sequence[int]) -> list[int]:
    """Repeat *lengths* until they cover *size*."""
    found: list[int] = []
    for length in cycle(lengths):
        if sum(found) >= size:
            break
        found.append(length)
    return found


@st.composite
def repositories(draw: st.DrawFn) -> Tree:
    """Draw a repository of the conformance suite, or of one random array."""
    if draw(st.booleans()):
        case = draw(st.sampled_from(icechunk_case.CASES))
        documents = {"zarr.json", "g/zarr.json", "g/a/zarr.json"}
        return case.build(case.chunks), documents | set(case.chunks)
    metadata, grid, shards, cells, spell = draw(drawn_arrays())
    builder = Builder()
    builder.group("/")
    refs = [Ref(index=at, inline=data) for at, data in shards.items()]
    builder.array("/t", metadata, grid, refs)
    return builder.build(), {"zarr.json", "t/zarr.json", *(f"t/{spell(at)}" for at in cells)}


@st.composite
def arrays(draw: st.DrawFn) -> Tree:
    """Draw a sharded array with unrelated objects beside it."""
    metadata, _, shards, cells, spell = draw(drawn_arrays())
    objects = {"zarr.json": json.dumps(metadata).encode()}
    objects |= {spell(at): data for at, data in shards.items()}
    beside = draw(st.sets(st.sampled_from(["a/b", "c.txt", "notes", "z/c/0/0", "z/c/1"])))
    if metadata["chunk_key_encoding"]["configuration"]["separator"] == ".":
        beside.discard("c.txt")
    objects |= dict.fromkeys(beside, b"beside")
    return objects, {"zarr.json", *beside, *map(spell, cells)}


@st.composite
def unsharded(draw: st.DrawFn) -> Tree:
    """Draw an array that is not sharded, or a group, with unrelated objects."""
    metadata = array_metadata([8, 8], [2, 2], [LITTLE])
    if draw(st.booleans()):
        metadata = {"zarr_format": 3, "node_type": "group"}
    keys = draw(st.sets(st.sampled_from(["c/0/0", "c/0/3", "c/2/1", "c/x", "c.0.1", "0.1"])))
    objects = {"zarr.json": json.dumps(metadata).encode(), **dict.fromkeys(keys, b"12")}
    return objects, set(objects)


@st.composite
def volumes(draw: st.DrawFn) -> Tree:
    """Draw a sharded volume whose chunks are of one voxel."""
    chosen_sharding = draw(shardings())
    shape = tuple(draw(st.integers(1, 12 if axis < 2 else 3)) for axis in range(3))
    offset = [draw(st.integers(-12, 12)) for _ in range(3)]
    step = [draw(st.integers(1, 60)) for _ in range(3)]
    cells = _cells(shape)
    chosen = set(cells if draw(st.booleans()) else draw(st.lists(st.sampled_from(cells))))
    size = [n * each for n, each in zip(shape, step, strict=True)]
    info = precomputed_case.volume_info(
        chosen_sharding, size=size, voxel_offset=offset, chunk_sizes=[step]
    )
    chunks = {morton(cell, shape): b"1" for cell in chosen}
    shards = build_shards(chunks, chosen_sharding)
    objects = {"info": json.dumps(info).encode()}
    keys = {
        "s0/" + "_".join(f"{o + i * n}-{o + i * n + n}" for i, o, n in zip(*at, strict=True))
        for at in ((cell, offset, step) for cell in chosen)
    }
    return {**objects, **{f"s0/{name}": data for name, data in shards.items()}}, keys | {"info"}


def _cells(shape: Sequence[int]) -> list[tuple[int, ...]]:
    return list(product(*map(range, shape)))


CONTAINERS = st.one_of(cases(), arrays(), volumes(), unsharded(), repositories())


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Draw containers side by side, below plain directories and groups, and plain objects."""
    objects: dict[str, bytes] = {}
    keys: set[str] = set()
    taken: list[str] = []
    for _ in range(draw(st.integers(1, 3))):
        path = "/".join(draw(st.lists(NAMES, min_size=0, max_size=3)))
        lead = f"{path}/" if path else ""
        if any(lead.startswith(other) or other.startswith(lead) for other in taken):
            continue
        taken.append(lead)
        stored, named = draw(CONTAINERS)
        objects |= {lead + name: data for name, data in stored.items()}
        keys |= {lead + name for name in named}
    names = st.lists(NAMES, min_size=1, max_size=3)
    for parts in draw(st.lists(names)) if "" not in taken else ():
        key = "/".join(["plain", *parts])
        if not any(f"{other}/".startswith(f"{key}/") for other in objects) and not any(
            f"{key}/".startswith(f"{other}/") for other in objects
        ):
            objects[key] = b"plain"
            keys.add(key)
    return objects, keys


def _expected(keys: set[str], window: Window) -> list[str]:
    wanted = sorted(key for key in keys if window.admits(key))
    folded = [window.fold(key) for key in wanted]
    found = [key if fold is None else fold for key, fold in zip(wanted, folded, strict=True)]
    return [key for key in dict.fromkeys(found) if key != window.after]


@st.composite
def windows(draw: st.DrawFn, keys: set[str]) -> Window:
    """Draw a window that begins and ends in, before or after *keys*."""

    def text() -> str:
        key = draw(st.sampled_from(sorted(keys) or [""]))
        cut = key[: draw(st.integers(0, len(key)))]
        return cut + draw(st.sampled_from(["", "", "/", "0", "-", "z"]))

    prefix = draw(st.one_of(st.just(""), st.builds(text)))
    while "//" in prefix or prefix.startswith("/"):
        prefix = prefix.replace("//", "/").removeprefix("/")
    after = draw(st.one_of(st.just(""), st.builds(text)))
    return Window(prefix, after, draw(st.sampled_from(["", "/"])))


@pytest.mark.parametrize("examples", [30, pytest.param(1000, marks=pytest.mark.soak)])
def test_listing_has_each_key_once(examples: int) -> None:
    """Pages of any size, from any start, contain each key once."""

    @settings(max_examples=examples, suppress_health_check=[HealthCheck.data_too_large])
    @given(trees(), st.data())
    def check(tree: Tree, data: st.DataObject) -> None:
        objects, keys = tree
        served = reading(store_of(objects), root=BUCKET)
        window = data.draw(windows(keys))
        least = max(1, len(keys) // 30)  # each page costs a search of its own
        limit = data.draw(st.sampled_from([least, least + 1, least + 6, 1000]))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(listing, "_SPARSE", data.draw(st.sampled_from([0, 1, 64])))
            pages = asyncio.run(pages_of(served, window, limit))
        found = [entry.key for page in pages for entry in page]

        assert found == _expected(keys, window)
        assert max(map(len, pages)) <= limit

    check()


@settings(max_examples=20)
@given(trees())
async def test_listed_metadata_equal_those_of_the_entity(tree: Tree) -> None:
    """Size, ETag and time of each listed key are those of its entity."""
    objects, _ = tree
    served = reading(store_of(objects), root=BUCKET)
    for page in await pages_of(served, Window(""), 1000):
        for key, nbytes, etag, modified_s in page:
            opening = served.resolver.open(served.dataset, VirtualKey(key), lambda _: NOTHING)
            async with opening as opened:
                assert opened is not None, key
                entity = opened.entity
            assert not entity.is_inflated
            found = (entity.length, entity.etag, entity.modified_s)
            assert found == (nbytes, etag, modified_s), key


@settings(max_examples=10)
@given(trees(), st.data())
async def test_concurrent_changes_disturb_no_other_key(tree: Tree, data: st.DataObject) -> None:
    """Keys that do not change are listed once while others change between pages."""
    objects, keys = tree
    store = store_of(objects)
    served = reading(store, root=BUCKET, ttl_s=0)
    limit = data.draw(st.integers(1, 5))
    plain = [f"plain/{name}" for name in ("a", "b/c", "zz/1")]
    found: list[str] = []
    after: str | None = ""
    while after is not None:
        page = await served.page(Window("", after), limit)
        found += [entry.key for entry in page.entries]
        after = page.after
        name = BUCKET.join(data.draw(st.sampled_from(plain)))
        if name.key not in objects:
            store.place(name, b"new") if data.draw(st.booleans()) else store.remove(name)

    assert len(found) == len(set(found))
    assert set(found) - set(plain) == keys - set(plain)
