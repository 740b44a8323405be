"""Which container a key belongs to."""

import json
import re

import pytest

from app.errors import DamagedError, StorageDeniedError
from app.formats.zarr_sharding_indexed.layout import ZarrLayout
from app.model import ObjectRef, VirtualKey, Whole
from app.resolve.containers import Containers, PassThrough
from app.resolve.fetch import Memory, ReadCache
from tests.formats.zarr_sharding_indexed.case import array_metadata, sharding
from tests.resolve.stores import WatchedStore
from tests.resolving import ROOT, known_formats

_MARKER = r"(^|/)(zarr\.json|info|repo|refs/branch\.main/ref\.json)$"
_GROUP = {"zarr_format": 3, "node_type": "group", "attributes": {}}
_ARRAY = array_metadata([4, 4], [4, 4], [sharding([2, 2])])


class _Case:
    """Nodes below a root."""

    def __init__(self, **nodes: object) -> None:
        self.store = WatchedStore()
        for directory, document in nodes.items():
            marker = ROOT.join(directory.replace("_", "/")).join("zarr.json")
            self.store.place(marker, json.dumps(document).encode())
        self.containers = Containers(known_formats())
        self.fetch = ReadCache(self.store, Memory(2**20), ttl_s=60)

    async def find(self, key: str) -> tuple[ObjectRef, str]:
        """Tell the directory of the container of *key*, and the rest of *key* in it."""
        layout, rest = await self.containers.find(ROOT, VirtualKey(key), self.fetch)
        assert isinstance(layout, ZarrLayout | PassThrough)
        return layout.directory if isinstance(layout, ZarrLayout) else layout.root, rest

    @property
    def looked_at(self) -> list[str]:
        """Directories whose markers were asked for, in order, each marker once."""
        asked = [call.ref.key.removeprefix(f"{ROOT.key}/") for call in self.store.calls]
        assert len(set(asked)) == len(asked)
        directories = [re.sub(_MARKER, "", key) for key in asked]
        assert not {key for key in asked if re.search(_MARKER, key) is None}
        return list(dict.fromkeys(directories))


@pytest.mark.parametrize(
    ("key", "directory", "rest"),
    [
        ("lab1/vol/c/0/0", "lab1/vol", "c/0/0"),
        ("lab1/vol/zarr.json", "lab1/vol", "zarr.json"),
        ("lab1/zarr.json", "lab1", "zarr.json"),
        ("lab1/notes/a.txt", "lab1", "notes/a.txt"),
        ("lab1/vol", "lab1", "vol"),
        ("lab1/vol/", "lab1/vol", ""),
        ("lab2/plain/a.bin", "", "lab2/plain/a.bin"),
        ("a.bin", "", "a.bin"),
        ("zarr.json", "", "zarr.json"),
        ("", "", ""),
    ],
)
async def test_the_nearest_ancestor_with_a_marker(key: str, directory: str, rest: str) -> None:
    """In a bucket of many containers each key belongs to the nearest, or to none."""
    case = _Case(lab1=_GROUP, lab1_vol=_ARRAY, lab3_sub_vol=_ARRAY)

    assert await case.find(key) == (ROOT.join(directory), rest)


async def test_a_container_may_lie_below_what_is_none() -> None:
    """Directories without a marker are walked through."""
    case = _Case(lab3_sub_vol=_ARRAY)

    assert await case.find("lab3/sub/vol/c/0/0") == (ROOT.join("lab3/sub/vol"), "c/0/0")


async def test_the_root_may_be_a_container() -> None:
    """A marker at the root itself makes one container of everything."""
    store = WatchedStore()
    store.place(ROOT.join("zarr.json"), json.dumps(_ARRAY).encode())
    fetch = ReadCache(store, Memory(2**20), ttl_s=60)
    containers = Containers(known_formats())
    layout, rest = await containers.find(ROOT, VirtualKey("c/0/0"), fetch)

    assert isinstance(layout, ZarrLayout)
    assert (layout.directory, rest) == (ROOT, "c/0/0")


async def test_the_root_may_be_a_whole_bucket() -> None:
    """A root without a key has containers below it like any other."""
    root = ObjectRef("memory://bucket", "")
    store = WatchedStore()
    store.place(root.join("vol/zarr.json"), json.dumps(_ARRAY).encode())
    fetch = ReadCache(store, Memory(2**20), ttl_s=60)
    containers = Containers(known_formats())
    layout, rest = await containers.find(root, VirtualKey("vol/c/0/0"), fetch)

    assert isinstance(layout, ZarrLayout)
    assert (layout.directory, rest) == (ObjectRef("memory://bucket", "vol"), "c/0/0")


async def test_the_search_goes_down_from_the_root() -> None:
    """Each ancestor is asked for its marker once."""
    case = _Case(lab1=_GROUP, lab1_vol=_ARRAY)
    await case.find("lab1/vol/c/0/0")

    assert case.looked_at == ["", "lab1", "lab1/vol"]


async def test_chunk_keys_cost_no_look_ups_of_their_own() -> None:
    """An array encloses what is below it, however deep the key."""
    case = _Case(lab1=_GROUP, lab1_vol=_ARRAY)
    await case.find("lab1/vol/c/0/0")
    case.store.calls.clear()
    for key in ("lab1/vol/c/1/1", "lab1/vol/c/0/0/0/0", "lab1/vol/a/b/c/d"):
        await case.find(key)

    assert case.looked_at == []


async def test_an_array_that_is_not_sharded_encloses_too() -> None:
    """Nothing below any array is a node."""
    plain = array_metadata([4], [2], [])
    case = _Case(vol=plain, vol_sub=_GROUP)

    assert await case.find("vol/sub/zarr.json") == (ROOT.join("vol"), "sub/zarr.json")
    assert case.looked_at == ["", "vol"]


async def test_absence_of_a_marker_is_remembered() -> None:
    """What is no container is not asked again for other keys below it."""
    case = _Case()
    await case.find("a/b/x")
    await case.find("a/b/y")
    await case.find("a/z")

    assert case.looked_at == ["", "a", "a/b"]


async def test_a_damaged_marker_is_never_absence() -> None:
    """A container that cannot be understood is not passed through."""
    case = _Case(vol={"zarr_format": 4})
    with pytest.raises(DamagedError, match=r"vol/zarr\.json"):
        await case.find("vol/c/0/0")


async def test_a_marker_that_is_denied_is_never_absence() -> None:
    """When the store refuses the marker the look-up fails."""
    case = _Case(vol=_ARRAY)
    case.store.failure = StorageDeniedError(ROOT, "for the test")
    with pytest.raises(StorageDeniedError):
        await case.find("vol/c/0/0")


async def test_what_is_in_no_container_is_the_object_of_that_name() -> None:
    """A key that passes through names its object below the root, and hides nothing."""
    case = _Case()
    layout, rest = await case.containers.find(ROOT, VirtualKey("a/b.bin"), case.fetch)

    assert await layout.locate(rest, case.fetch) == Whole(ROOT.join("a/b.bin"))
    shelf = await layout.shelf(VirtualKey("c/"), case.fetch)
    assert shelf.shows is not None
    assert shelf.shows("0/")


async def test_no_container_is_looked_for_very_deep() -> None:
    """A key of many segments costs no more reads than any other."""
    case = _Case()
    await case.find("a/" * 500 + "x")

    assert len(case.looked_at) == 32
