"""`shardgate.formats.icechunk.layout`: refs, nodes, chunks and listings by virtual key."""

from collections.abc import Mapping
from typing import Any

import pytest

from shardgate.concurrency import run_in_thread
from shardgate.errors import DamagedError, MetadataMissingError
from shardgate.formats.icechunk.layout import Icechunk, key_blocks, sound_nodes
from shardgate.formats.icechunk.snapshot import SnapshotDecoder
from shardgate.formats.listing import Window
from shardgate.formats.surveying import ChunkCollection
from shardgate.model import ByteRange, ETag, Fixed, Inline, Stored, VirtualKey
from shardgate.read.listing import list_names
from shardgate.read.metadata_cache import uncached_reads
from tests.support.formats.case import filled
from tests.support.formats.icechunk import building_repo
from tests.support.formats.icechunk.building import SNAPSHOT, Node, Ref, envelope, snapshot
from tests.support.formats.icechunk.case import SHARDED
from tests.support.formats.icechunk.repositories import Builder, digest, group, repo, spell
from tests.support.formats.icechunk.served import LINE, TTL_S, Served
from tests.support.formats.zarr.building import encode_shard
from tests.support.resolving import ROOT

LIMIT = 2**20
SHARD = encode_shard([b"one", None, b"three", b"four"])


def _builder(data: bytes = b"native", version: int = 2) -> Builder:
    builder = Builder(version)
    builder.group("/")
    builder.group("/g")
    builder.array("/g/a", LINE, [4], [builder.native([0], data), Ref(index=[1], inline=b"inline")])
    builder.array("/s", SHARDED, [2, 2], [builder.native([0, 1], SHARD, b"before")])
    return builder


class _Case(Served):
    """A builder's repository, and the id of its snapshot."""

    def __init__(self, builder: Builder | None = None, **more: Any) -> None:
        self.builder = builder or _builder()
        super().__init__(self.builder.build(**more))
        self.id = spell(digest(self.builder.nodes))

    async def names(self, prefix: str) -> list[str]:
        """List the names below *prefix*."""
        found = await (await self.open()).names(VirtualKey(prefix), self.fetch, run_in_thread)
        return [each.name for each in found]


async def test_folder_without_a_marker_is_no_repository() -> None:
    """A folder without a marker is no repository; a damaged marker raises DamagedError."""
    for objects in (
        {}, {"repo": b"# notes"}, {"refs/tag.v1/ref.json": b"{}"}, {"repo/x": b""},
        {"snapshots/x": b""},
    ):  # fmt: skip
        fetch = uncached_reads(filled(objects))
        assert await Icechunk(LIMIT, LIMIT).open(ROOT, fetch) is None
    for key in ("repo", "refs/branch.main/ref.json"):
        fetch = uncached_reads(filled({key: b"ICE"}))
        with pytest.raises(DamagedError, match=key):
            await Icechunk(LIMIT, LIMIT).open(ROOT, fetch)


@pytest.mark.parametrize("content", [b"{}", b"[]", b"\0" * 50, b"ICD" + b"x" * 50])
async def test_damaged_repo_of_a_named_format_is_damage(content: bytes) -> None:
    """An unreadable ``repo`` of a named format is damage, and an error page is no absence."""
    icechunk = Icechunk(LIMIT, LIMIT, is_named=True)
    with pytest.raises(DamagedError, match="repo"):
        await icechunk.open(ROOT, uncached_reads(filled({"repo": content})))

    page = uncached_reads(filled({"repo": b"<html></html>"}))
    assert await Icechunk(LIMIT, LIMIT).open(ROOT, page) is None
    with pytest.raises(MetadataMissingError, match="repo: an error page"):
        await icechunk.open(ROOT, page)


async def test_native_chunk_is_a_range_of_its_file() -> None:
    """A native chunk, or an inner one of a shard, is a range of a file with its id as ETag."""
    chunk_id = spell(digest(b"native"))
    place, by, *_ = await _Case().locate("g/a/c/0")
    inner = (await _Case().locate("s/c/1/2")).place

    version = Fixed(ETag(f'"{chunk_id}"'))
    assert place == Stored(ROOT.join(f"chunks/{chunk_id}"), ByteRange(0, 6), version)
    assert by == ""
    assert isinstance(inner, Stored)
    assert inner.ref == ROOT.join(f"chunks/{spell(digest(b'before' + SHARD))}")
    assert (b"before" + SHARD)[slice(*inner.byte_range)] == b"three"


async def test_equal_inline_chunks_and_documents_have_distinct_etags() -> None:
    """Equal inline chunks, and equal documents of two snapshots, have distinct ETags."""
    builder = _builder()
    refs = [Ref(index=[at], inline=b"same") for at in range(3)]
    builder.array("/i", LINE, [4], refs)
    places: list[Any] = [(await _Case(builder).locate(f"i/c/{at}")).place for at in range(3)]
    cases = (_Case(), _Case(_builder(b"other")))
    documents: list[Any] = [(await case.locate("g/zarr.json")).place for case in cases]
    one, other = documents

    assert all(isinstance(place, Inline) and place.data == b"same" for place in places)
    assert len({place.etag for place in places}) == 3
    assert one.data == other.data
    assert one.etag != other.etag


@pytest.mark.parametrize("is_committed", [True, False])
async def test_deleted_chunk_revalidates_its_branch(*, is_committed: bool) -> None:
    """A deleted chunk file revalidates the branch: a new commit is read, or DamagedError raised."""
    case = _Case()
    await case.read("g/a/c/0")
    for key in case.builder.build():
        if key.startswith("chunks/"):
            case.store.remove(ROOT.join(key))
    case.clock.now += 2
    if is_committed:
        filled(_builder(b"newer").build(), case.store)
        assert await case.read("g/a/c/0") == b"newer"
        return
    for _ in range(2):
        with pytest.raises(DamagedError):
            await case.read("g/a/c/0")


@pytest.mark.parametrize("before", [{}, {"repo": b"# A notebook"}])
async def test_new_repository_is_found_after_the_ttl(before: Mapping[str, bytes]) -> None:
    """A repository that is created after a lookup is found after the TTL."""
    case = _Case()
    objects = case.builder.build()
    for key in objects:
        case.store.remove(ROOT.join(key))
    filled(before, case.store)
    assert await case.read("g/a/c/0") is None
    filled(objects, case.store)
    case.clock.now += TTL_S

    assert await case.read("g/a/c/0") == b"native"


@pytest.mark.parametrize("later_s", [TTL_S, 2])
async def test_upgraded_repository_is_read(later_s: float) -> None:
    """A repository that is upgraded to version 2 is read, before and after the TTL."""
    builder = _builder(version=1)
    case = _Case(builder)
    assert await case.read("g/a/c/0") == b"native"
    case.clock.now += later_s
    case.store.place(ROOT.join("repo"), repo(digest(builder.nodes)))
    for ref in ("branch.main", "tag.v1"):
        case.store.remove(ROOT.join(f"refs/{ref}/ref.json"))

    assert await case.read("@tag.v1/g/a/c/1") == b"inline"
    assert await case.read("g/a/c/0") == b"native"


async def test_root_listing_has_refs_and_nodes() -> None:
    """The listing of the root has refs, with escaped names, and the nodes of ``main``."""
    names = [building_repo.ref(name, 0) for name in ("a/b", "main", "100%")]
    case = _Case(branches=names)

    assert await case.names("") == [
        "@branch.a%2Fb/",
        "@branch.main/",
        "@branch.100%25/",
        "@tag.v1/",
        "g/",
        "s/",
        "zarr.json",
    ]
    assert await case.read("@branch.a%2Fb/g/a/c/0") == b"native"


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [("@tag.v1/", ["g/", "s/", "zarr.json"]), ("g/", ["a/", "zarr.json"]),
     ("@branch.main/g/", ["a/", "zarr.json"]), ("g/a/", ["zarr.json"]), ("g/a/c/0/", []),
     ("none/", []), ("@tag.none/", []), ("@session.x/", [])],
)  # fmt: skip
async def test_listing_of_a_group_has_its_members(prefix: str, expected: list[str]) -> None:
    """The listing of a group has its members and document, and no chunks."""
    assert await _Case().names(prefix) == expected


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("@v1/g/a/c/0", "there is no ref @v1: write @tag.v1"),
        ("@main/g/a/c/0", "there is no ref @main: write @branch.main"),
        ("@branch.v1/zarr.json", "there is no ref @branch.v1: write @tag.v1"),
        (
            "@tag.v2/zarr.json",
            "there is no ref @tag.v2: refs are spelled @branch.NAME, @tag.NAME or @SNAPSHOTID",
        ),
        ("@tag.v1/none", ""),
        ("@session.x/zarr.json", ""),
        ("g/a/c/9", "g/a has 4 chunks, c/0 to c/3"),
        ("@tag.v1/g/a/c/00", "g/a has 4 chunks, c/0 to c/3"),
        ("g/a/c/3", ""),
        ("s/c/9/9", "s has 3×4 chunks, c/0/0 to c/2/3"),
        ("g/none", ""),
    ],
)
async def test_absence_is_explained_by_refs_and_grids(key: str, reason: str) -> None:
    """An absent key is explained by the right spelling of its ref, or by the array's grid."""
    case = _Case()
    layout = await case.open()

    assert await layout.explain_absence(VirtualKey(key), case.fetch) == reason


async def test_arrays_of_main_are_described() -> None:
    """The arrays of ``main`` are described with their paths; a damaged one is DamagedError."""
    builder = _builder()
    builder.array("/bad", b"{", [4])
    case = _Case(builder)
    layout = await case.open()
    found = await layout.collections(
        case.fetch, lambda prefix: list_names(case.store, ROOT, prefix), run_in_thread
    )
    described = [each.description for each in found if isinstance(each, ChunkCollection)]

    assert [(each.path, each.format, each.shape) for each in described] == [
        ("g/a", "icechunk", (8,)),
        ("s", "icechunk", (5, 7)),
    ]
    (damage,) = [each for each in found if isinstance(each, DamagedError)]
    assert damage.ref == ROOT.join(f"snapshots/{case.id}")
    assert damage.reason.startswith("/bad: ")


def test_orphaned_nodes_are_not_listed() -> None:
    """Nodes without a group are not listed; of two nodes with one path, the first is."""
    paths = ["/", "/a", "/a", "/a/b", "/lone/g", "/lone/g/x"]
    nodes = [Node(node_id=b"thegroup", path=path, user_data=group()) for path in paths]
    data = envelope(snapshot(b"the snapshot", nodes), SNAPSHOT)
    decoded = SnapshotDecoder(b"the snapshot", 2**20)(data)

    found = [block.start for block in key_blocks(sound_nodes(decoded), Window("", ""))]
    assert found == ["a/b/zarr.json", "a/zarr.json", "zarr.json"]
