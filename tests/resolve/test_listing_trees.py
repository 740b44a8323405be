"""Listings of trees of all formats, against the keys that they were made of."""

import importlib
import itertools
import json
from collections.abc import Mapping, Sequence

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.formats.listing import Window
from app.model import ObjectRef, VirtualKey
from app.resolve.bodies import Coding, Entity
from app.resolve.listing import ListedKey
from app.storage.memory import MemoryStore
from tests.formats.case import Case
from tests.formats.neuroglancer_precomputed.case import volume_info
from tests.formats.neuroglancer_precomputed.shards import RAW_SHARDING, build_shards, morton
from tests.formats.zarr.building import (
    LITTLE,
    array_metadata,
    encode_shard,
    sharding,
)
from tests.resolving import All, Reading, reading

ROOT = ObjectRef("memory://bucket", "")
NAMES = st.sampled_from(["a", "a-b", "a.b", "a0", "c", "0", "10", "2", "é", "info.d"])
_FOLDERS = ("neuroglancer_precomputed", "zarr")
_CASES: list[Case] = [
    case
    for folder in _FOLDERS
    for case in importlib.import_module(f"tests.formats.{folder}.case").CASES
]
_REPOSITORIES: list[Case] = [
    case
    for case in importlib.import_module("tests.formats.icechunk.case").CASES
    if "sharded" not in case.name
]

type Tree = tuple[dict[str, bytes], set[str]]
"""What is stored, and the keys that can be asked for."""


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


@st.composite
def repositories(draw: st.DrawFn) -> Tree:
    """Draw a repository."""
    case = draw(st.sampled_from(_REPOSITORIES))
    documents = {"zarr.json", "g/zarr.json", "g/a/zarr.json"}
    return case.build(case.chunks), documents | set(case.chunks)


@st.composite
def arrays(draw: st.DrawFn) -> Tree:
    """Draw a sharded array of bytes, sparse or full, one element a chunk."""
    ndim = draw(st.integers(0, 3))
    size = st.integers(1, 25 if ndim == 1 else 12 if ndim == 2 else 5)
    shape, shard = [draw(size) for _ in range(ndim)], [draw(st.integers(1, 4)) for _ in range(ndim)]
    name, separator = draw(st.sampled_from(["default", "v2"])), draw(st.sampled_from("/."))
    encoding = {"name": name, "configuration": {"separator": separator}}
    head = ["c"] if name == "default" else []

    def spell(coords: Sequence[int]) -> str:
        return separator.join([*head, *map(str, coords)]) or "0"

    cells = list(itertools.product(*map(range, shape)))
    chosen = set(cells if draw(st.booleans()) else draw(st.lists(st.sampled_from(cells))))
    codec = sharding([1] * ndim)
    metadata = array_metadata(shape, shard, [codec], chunk_key_encoding=encoding)
    objects = {"zarr.json": json.dumps(metadata).encode()}
    for at in {tuple(i // n for i, n in zip(cell, shard, strict=True)) for cell in chosen}:
        corner = [i * n for i, n in zip(at, shard, strict=True)]
        inner = [tuple(map(sum, zip(corner, i, strict=True))) for i in _cells(shard)]
        objects[spell(at)] = encode_shard([b"x" if cell in chosen else None for cell in inner])
    beside = draw(st.sets(st.sampled_from(["a/b", "c.txt", "notes", "z/c/0/0", "z/c/1"])))
    beside = {key for key in beside if separator == "/" or not key.startswith("c.")}
    objects |= dict.fromkeys(beside, b"beside")
    return objects, {"zarr.json", *beside, *map(spell, chosen)}


@st.composite
def unsharded(draw: st.DrawFn) -> Tree:
    """Draw an array that is not sharded, or a group with odd objects."""
    metadata = array_metadata([8, 8], [2, 2], [LITTLE])
    if draw(st.booleans()):
        metadata = {"zarr_format": 3, "node_type": "group"}
    keys = draw(st.sets(st.sampled_from(["c/0/0", "c/0/3", "c/2/1", "c/x", "c.0.1", "0.1"])))
    objects = {"zarr.json": json.dumps(metadata).encode(), **dict.fromkeys(keys, b"12")}
    return objects, set(objects)


@st.composite
def volumes(draw: st.DrawFn) -> Tree:
    """Draw a sharded volume of voxels, of which each is a chunk."""
    bits = st.integers(0, 3)
    chosen_sharding = {
        **RAW_SHARDING,
        "preshift_bits": draw(bits),
        "minishard_bits": draw(bits),
        "shard_bits": draw(bits),
        "hash": draw(st.sampled_from(["identity", "murmurhash3_x86_128"])),
    }
    shape = tuple(draw(st.integers(1, 12 if axis < 2 else 3)) for axis in range(3))
    offset = [draw(st.integers(-12, 12)) for _ in range(3)]
    step = [draw(st.integers(1, 60)) for _ in range(3)]
    cells = list(itertools.product(*map(range, shape)))
    chosen = set(cells if draw(st.booleans()) else draw(st.lists(st.sampled_from(cells))))
    size = [n * each for n, each in zip(shape, step, strict=True)]
    info = volume_info(chosen_sharding, size=size, voxel_offset=offset, chunk_sizes=[step])
    chunks = {morton(cell, shape): b"1" for cell in chosen}
    shards = build_shards(chunks, chosen_sharding)
    objects = {"info": json.dumps(info).encode()}
    keys = {
        "s0/" + "_".join(f"{o + i * n}-{o + i * n + n}" for i, o, n in zip(*at, strict=True))
        for at in ((cell, offset, step) for cell in chosen)
    }
    return {**objects, **{f"s0/{name}": data for name, data in shards.items()}}, keys | {"info"}


def _cells(shape: Sequence[int]) -> list[tuple[int, ...]]:
    return list(itertools.product(*map(range, shape)))


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


def _store(objects: Mapping[str, bytes]) -> MemoryStore:
    store = MemoryStore()
    for key, data in objects.items():
        store.place(ROOT.join(key), data)
    return store


async def _pages(data: Reading, window: Window, limit: int) -> list[list[ListedKey]]:
    pages = []
    after: str | None = window.after
    while after is not None:
        page = await data.resolver.page(data.dataset, window._replace(after=after), limit)
        pages.append(page.entries)
        after = page.after
    return pages


def _expected(keys: set[str], window: Window) -> list[str]:
    wanted = sorted(key for key in keys if window.admits(key))
    folded = [window.fold(key) for key in wanted]
    found = [key if fold is None else fold for key, fold in zip(wanted, folded, strict=True)]
    return [key for key in dict.fromkeys(found) if key != window.after]


@st.composite
def windows(draw: st.DrawFn, keys: set[str]) -> Window:
    """Draw a window that begins and ends somewhere in, before or behind *keys*."""

    def text() -> str:
        key = draw(st.sampled_from(sorted(keys) or [""]))
        cut = key[: draw(st.integers(0, len(key)))]
        return cut + draw(st.sampled_from(["", "", "/", "0", "-", "z"]))

    prefix = draw(st.one_of(st.just(""), st.builds(text)))
    while "//" in prefix or prefix.startswith("/"):
        prefix = prefix.replace("//", "/").removeprefix("/")
    after = draw(st.one_of(st.just(""), st.builds(text)))
    return Window(prefix, after, draw(st.sampled_from(["", "/"])))


@settings(max_examples=150, suppress_health_check=[HealthCheck.data_too_large])
@given(trees(), st.data())
async def test_any_tree_is_listed_as_it_was_made(tree: Tree, data: st.DataObject) -> None:
    """Pages of any size, from any start, have each key once."""
    objects, keys = tree
    served = reading(_store(objects), root=ROOT)
    window = data.draw(windows(keys))
    limit = data.draw(st.sampled_from([1, 2, 3, 7, 1000]))
    pages = await _pages(served, window, limit)
    found = [entry.key for page in pages for entry in page]

    assert found == _expected(keys, window)
    assert max(map(len, pages)) <= limit


@settings(max_examples=40)
@given(trees())
async def test_what_is_listed_is_what_can_be_read(tree: Tree) -> None:
    """Size and version of each key are those of the entity."""
    objects, _ = tree
    served = reading(_store(objects), root=ROOT)
    for page in await _pages(served, Window(""), 1000):
        for key, nbytes, etag, _ in page:
            entity = await _entity(served, key)
            assert (entity.length, entity.etag) == (nbytes, etag), key


async def _entity(served: Reading, key: str) -> Entity:
    def choose(entity: Entity) -> All:
        return All(None)

    async with served.resolver.open(served.dataset, VirtualKey(key), choose) as opened:
        assert opened is not None, key
        assert opened.entity.coding in (Coding.PLAIN, Coding.GZIP)
        return opened.entity


@settings(max_examples=40)
@given(trees(), st.data())
async def test_what_stays_is_listed_once_whatever_comes_and_goes(
    tree: Tree, data: st.DataObject
) -> None:
    """Changes of other objects between pages disturb no key."""
    objects, keys = tree
    store = _store(objects)
    served = reading(store, root=ROOT, ttl_s=0)
    limit = data.draw(st.integers(1, 5))
    plain = [f"plain/{name}" for name in ("a", "b/c", "zz/1")]
    found: list[str] = []
    after: str | None = ""
    while after is not None:
        page = await served.resolver.page(served.dataset, Window("", after), limit)
        found += [entry.key for entry in page.entries]
        after = page.after
        name = ROOT.join(data.draw(st.sampled_from(plain)))
        if name.key not in objects:
            store.place(name, b"new") if data.draw(st.booleans()) else store.remove(name)

    assert len(found) == len(set(found))
    assert set(found) - set(plain) == keys - set(plain)
