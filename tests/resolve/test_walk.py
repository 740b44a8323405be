"""What `inspect` and `verify` make of any format, on one that is made up."""

from collections.abc import AsyncIterator

import pytest

from app.errors import BadKeyError, DamagedError, StorageUnavailableError
from app.formats.surveying import Description
from app.model import ObjectRef, VirtualKey
from app.resolve.containers import Containers
from app.resolve.fetch import Memory, ReadCache
from app.resolve.inspect import DamageReport, inspect_key, inspect_root, inspect_shard
from app.resolve.verify import verify
from app.resolve.walk import Root
from app.storage.contract import Listed
from app.storage.memory import MemoryStore
from tests.resolve.boxes import Boxes

ROOT = ObjectRef("memory://t", "data")


class Unlisted(MemoryStore):
    """A store that cannot list, as HTTP cannot."""

    async def list(
        self, prefix: ObjectRef, *, delimiter: str = "", after: str = ""
    ) -> AsyncIterator[Listed]:
        """Raise when iterated."""
        nothing: list[Listed] = []
        for listed in nothing:
            yield listed
        raise StorageUnavailableError(prefix, "cannot be listed", lasting=True)


def root_of(objects: dict[str, bytes], store: MemoryStore | None = None) -> Root:
    """Put *objects* into a store, and open its root."""
    store = store or MemoryStore()
    for key, data in objects.items():
        store.place(ROOT.join(key), data)
    fetch = ReadCache(store, Memory(2**20), ttl_s=60)
    return Root(ROOT, store, Containers([Boxes()]), fetch)


def box(*pebbles: tuple[int, int, int], body: bytes) -> bytes:
    """Fill a box."""
    return f"{len(pebbles)}{''.join(f'{n}{a}{b}' for n, a, b in pebbles)}".encode() + body


async def paths(root: Root) -> list[str]:
    """Give the paths of all that is found."""
    return [report.path for report in await inspect_root(root)]


async def test_a_container_can_have_several_collections_and_containers_below() -> None:
    """Each is described by its path below the root, and tells its own format and kind."""
    root = root_of({"a/boxes": b"x y", "a/m/boxes": b"z", "b/c/boxes": b"x"})

    reports = await inspect_root(root)

    assert [report.path for report in reports] == ["a/x", "a/y", "a/m/z", "b/c/x"]
    assert {(r.format, r.kind) for r in reports if isinstance(r, Description)} == {
        ("boxes", "pebbles")
    }


async def test_what_a_container_encloses_is_not_looked_into() -> None:
    """A directory of chunks is none of containers, even where one seems to be there."""
    assert await paths(root_of({"boxes": b"x", "x/boxes": b"y"})) == ["x"]


async def test_damage_of_one_collection_hides_no_other() -> None:
    """A container of which a part cannot be understood tells the rest."""
    root = root_of({"a/boxes": b"x bad y", "a/x/0.box": box(body=b"")})

    reports = await inspect_root(root)
    report = await verify(root, chunks=False)

    assert [r.path for r in reports if isinstance(r, Description)] == ["a/x", "a/y"]
    assert [r for r in reports if isinstance(r, DamageReport)] == [
        DamageReport("a", f"{ROOT}/a/bad/label", "is smudged")
    ]
    assert [(d.object, d.key) for d in report.damages] == [(f"{ROOT}/a/bad/label", "a/bad/label")]
    assert (report.arrays, report.shards) == (2, 1)


async def test_without_a_listing_the_metadata_leads_on() -> None:
    """Containers below are those that the metadata tells of, and each shard is tried."""
    objects = {
        "boxes": b"x >m",
        "x/1.box": box((9, 0, 0), body=b""),
        "m/boxes": b"y",
        "n/boxes": b"z",
    }
    root = root_of(objects, Unlisted())

    report = await verify(root, chunks=False)

    assert await paths(root) == ["x", "m/y"]
    assert [(d.object, d.key) for d in report.damages] == [(f"{ROOT}/x/1.box", "x/9")]
    assert report.shards == 1


@pytest.mark.parametrize("store", [MemoryStore(), Unlisted()])
async def test_names_that_lead_elsewhere_are_not_followed(store: MemoryStore) -> None:
    """Neither up, nor to the same place again."""
    objects = {"boxes": b"x > >. >.. >a//b >../data", "a//b/boxes": b"y", "/boxes": b"z"}

    assert await paths(root_of(objects, store)) == ["x"]


async def test_what_the_metadata_names_need_not_be_there() -> None:
    """Without a listing too, what holds no marker is no container."""
    assert await paths(root_of({"boxes": b"x >gone >m", "m/boxes": b"y"}, Unlisted())) == [
        "x",
        "m/y",
    ]


async def test_shards_that_can_neither_be_listed_nor_tried_are_told() -> None:
    """What was not read is not called sound, and the rest is checked nevertheless."""
    root = root_of({"boxes": b"many x", "x/0.box": box(body=b"")}, Unlisted())

    report = await verify(root, chunks=False)

    assert report.shards == 1
    assert [(d.object, d.key) for d in report.damages] == [(f"{ROOT}/many/", "many")]
    assert "too many" in report.damages[0].reason


async def test_what_is_served_as_it_is_is_not_checked() -> None:
    """Nothing is silently left out."""
    report = await verify(root_of({"a/boxes": b"loose"}), chunks=True)

    assert report.not_checked == {"a/loose": "it is not sharded"}


@pytest.mark.parametrize(
    ("data", "faults"),
    [
        (box((1, 7, 8), (2, 8, 9), body=b"ab"), {}),
        (box((1, 7, 9), (2, 8, 9), body=b"ab"), {"x/2": "overlaps inner chunk 1 at [7, 9)"}),
        (box((2, 7, 8), (1, 7, 9), body=b"ab"), {"x/1": "overlaps inner chunk 2 at [7, 8)"}),
        (box((1, 6, 8), (2, 8, 9), body=b"ab"), {"x/1": "at [6, 8) overlaps the shard index"}),
        (box((1, 0, 2), (2, 8, 9), body=b"ab"), {"x/1": "at [0, 2) overlaps the shard index"}),
        (box((1, 7, 7), (2, 7, 9), body=b"ab"), {}),
        (box((9, 7, 8), (0, 8, 9), body=b"ab"), {"x/9": "no id"}),
    ],
)
async def test_entries_may_share_no_bytes(data: bytes, faults: dict[str, str]) -> None:
    """Neither with one another nor with an index, wherever that lies."""
    report = await verify(root_of({"boxes": b"x", "x/0.box": data}), chunks=False)

    assert [damage.key for damage in report.damages] == list(faults)
    for damage in report.damages:
        assert damage.reason.endswith(faults[damage.key])


async def test_chunks_are_checked_as_their_format_says() -> None:
    """Each chunk gets its own bytes, though neighbours are read together."""
    data = box((3, 7, 8), (1, 8, 9), body=b"a~")
    root = root_of({"boxes": b"x", "x/0.box": data})

    assert (await verify(root, chunks=False)).damages == []
    report = await verify(root, chunks=True)

    assert [(d.key, d.reason) for d in report.damages] == [("x/1", "is wet")]
    assert (report.chunks, report.nbytes) == (2, 2)


async def test_a_shard_is_inspected_by_its_name_and_by_a_chunk() -> None:
    """Entries, bytes and gaps are counted the same for every format."""
    root = root_of({"boxes": b"x", "x/0.box": box((1, 8, 9), (0, 0, 0), body=b"abcd")})

    report = await inspect_shard(root, VirtualKey("x/0.box"))

    assert report is not None
    assert (await inspect_key(root, VirtualKey("x/5"))).shard == report
    assert (report.nbytes, report.index_nbytes, report.index_location) == (11, 7, "start")
    assert (report.entries, report.empty, report.used_nbytes) == (2, 1, 1)
    assert (report.gaps, report.gap_nbytes) == (2, 3)


async def test_only_a_shard_is_inspected_as_one() -> None:
    """Another key is the caller's mistake; a shard that is not there is none; damage is told."""
    root = root_of({"boxes": b"x", "x/0.box": box((9, 8, 9), body=b"")})

    with pytest.raises(BadKeyError):
        await inspect_shard(root, VirtualKey("x/0"))
    assert await inspect_shard(root, VirtualKey("x/1.box")) is None
    with pytest.raises(DamagedError, match="no id"):
        await inspect_shard(root, VirtualKey("x/0.box"))
