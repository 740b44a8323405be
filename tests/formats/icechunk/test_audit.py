"""What `verify` finds in repositories: every fault that can be planted."""

from collections.abc import Mapping
from typing import Any

import pytest

from app.formats.icechunk.layout import Icechunk
from app.formats.icechunk.virtual import allow
from app.model import ObjectRef
from app.resolve.containers import Containers
from app.resolve.fetch import Memory, ReadCache
from app.resolve.inspect import DamageReport, RefReport, inspect_refs, inspect_root
from app.resolve.shard_check import Report
from app.resolve.verify import verify
from app.resolve.walk import Root
from app.storage.memory import MemoryStore
from tests.formats.icechunk.building import MANIFEST, SNAPSHOT, Node, Ref, envelope, manifest
from tests.formats.icechunk.building import snapshot as write_snapshot
from tests.formats.icechunk.building_repo import FIRST, U8, U64, ref, update
from tests.formats.icechunk.small import (
    CRC,
    ELSEWHERE,
    SECOND,
    SHARD,
    A,
    C,
    D,
    M,
    N,
    Small,
    array,
    checked,
    group,
    info,
    name,
    repo,
    spell,
)
from tests.resolve.stores import Unlisted
from tests.resolving import known_formats

BUCKET = "memory://t"
OTHER = ObjectRef("memory://elsewhere", "")
AT = f"@{spell(SECOND)}"
ONE = ({"name": "bytes"}, CRC)


async def check(
    objects: Mapping[str, bytes],
    *,
    chunks: bool = False,
    elsewhere: Mapping[str, bytes] | None = None,
    store: MemoryStore | None = None,
) -> Report:
    """Verify a repository; virtual references are followed where there is *elsewhere*."""
    store = store or MemoryStore()
    for key, data in objects.items():
        store.place(ObjectRef(BUCKET, key), data)
    for key, data in (elsewhere or {}).items():
        store.place(OTHER.join(key), data, modified_s=1000)
    allowed = () if elsewhere is None else (allow(ELSEWHERE, OTHER),)
    fetch = ReadCache(store, Memory(2**20), ttl_s=60)
    formats = known_formats()
    formats = (*formats[:-1], Icechunk(2**20, 2**20, allowed))
    containers = Containers(formats)
    return await verify(Root(ObjectRef(BUCKET, ""), store, containers, fetch), chunks=chunks)


def told(report: Report) -> list[tuple[str, str, str]]:
    """Give object, key and reason of all damages."""
    return [
        (d.object.removeprefix(f"{BUCKET}/").removeprefix("memory://"), d.key, d.reason)
        for d in report.damages
    ]


async def test_an_intact_repository_has_no_damage() -> None:
    """Arrays, shards, inner chunks, snapshots, manifests and references are counted."""
    report = await check(Small().objects(), chunks=True, elsewhere={"x": b"...xy"})

    assert told(report) == []
    assert (report.arrays, report.shards, report.chunks, report.nbytes) == (2, 2, 8, 8)
    assert report.counts == {
        "snapshots": 2,
        "manifests": 2,
        "references": 5,
        "unreferenced files": 0,
    }
    assert report.not_checked == {}


async def test_virtual_references_that_are_not_allowed_are_not_checked() -> None:
    """The array is named, and the prefix that would have to be allowed."""
    report = await check(Small().objects())

    assert told(report) == []
    assert report.not_checked == {
        f"{AT}/a": f"1 of its chunks: virtual references below {ELSEWHERE} are not allowed: "
        "virtual_chunk_prefixes lacks it"
    }


async def test_garbage_is_counted_and_no_damage() -> None:
    """Chunks, manifests and snapshots that nothing leads to are files that may go."""
    garbage = {
        name(folder, b"nobody's own"): b"?" for folder in ("chunks", "manifests", "snapshots")
    }

    report = await check({**Small().objects(), **garbage})

    assert told(report) == []
    assert report.counts["unreferenced files"] == 3


def snapshot_with(*nodes: Node, **more: Any) -> bytes:
    """Write the second snapshot with other nodes."""
    return envelope(write_snapshot(SECOND, nodes, **more), SNAPSHOT)


SNAPSHOT_FILE = name("snapshots", SECOND)
MANIFEST_FILE = name("manifests", M)
SHARDS_FILE = name("manifests", N)
BAD = SHARD[:-1] + b"?"
TINY = Node(node_id=b"tinygrup", path="/g", user_data=group())
ALIEN = Ref(index=[1, 0], inline=b"x")
NO_REFERENCES: Any = ()
CYCLE = [info(b"a snapshot A", 2), info(FIRST), info(SECOND, 0)]


@pytest.mark.parametrize(
    ("small", "damages"),
    [
        # repo
        (
            Small(repo=repo(tags=[ref("v 1", 9)])),
            [("repo", "@tag.v 1", "there is no snapshot 9, only 2 are listed")],
        ),
        (
            Small(repo=repo(branches=[ref("dev", 1)])),
            [("repo", "@branch.main", "there is no such branch")],
        ),
        (
            Small(repo=repo(snapshots=[info(FIRST), info(SECOND, 7)])),
            [("repo", "", "there is no snapshot 7, only 2 are listed")],
        ),
        (
            Small(repo=repo(snapshots=[info(FIRST, 1), info(SECOND, 0)])),
            [("repo", f"@{spell(SECOND)}", "it is its own ancestor")],
        ),
        (
            Small(repo=repo(updates=[update(6, {0: "t"})])),
            [("repo", "", "an update: it has no id")],
        ),
        (
            Small(repo=repo(more={6: [{0: "x", 1: b"\xff"}]})),
            [("repo", "", "metadata: ")],
        ),
        (
            Small(repo=repo(more={9: b"\xff"})),
            [("repo", "", "the configuration: ")],
        ),
        (
            Small(repo=repo(more={8: "old"}), more={"overwritten/old": b"?"}),
            [("overwritten/old", "", "")],
        ),
        (
            Small(
                repo=repo(more={8: "old"}),
                more={"overwritten/old": repo(more={8: "old"}).file()},
            ),
            [("overwritten/old", "", "the operations before it lead back to it")],
        ),
        # snapshots
        (
            Small(more={SNAPSHOT_FILE: None}),
            [(SNAPSHOT_FILE, AT, "does not exist, and @branch.main is at it")],
        ),
        (
            Small(more={name("snapshots", FIRST): None}),
            [(name("snapshots", FIRST), f"@{spell(FIRST)}", "does not exist, and repo lists it")],
        ),
        (Small(more={SNAPSHOT_FILE: b"ICE"}), [(SNAPSHOT_FILE, AT, "")]),
        (
            Small(more={SNAPSHOT_FILE: envelope(write_snapshot(FIRST, [TINY]), SNAPSHOT)}),
            [(SNAPSHOT_FILE, AT, f"it is the snapshot {spell(FIRST)}, not {spell(SECOND)}")],
        ),
        (
            Small(more_nodes=[Node(node_id=b"12345678", path="/b", user_data=b"{")]),
            [(SNAPSHOT_FILE, f"{AT}/b", "its zarr.json is no JSON")],
        ),
        (
            Small(more_nodes=[Node(node_id=b"12345678", path="/../b", user_data=group())]),
            [(SNAPSHOT_FILE, f"{AT}/../b", "no path of a node")],
        ),
        (
            Small(more_nodes=[Node(node_id=b"12345678", path="/a", user_data=group())]),
            [(SNAPSHOT_FILE, f"{AT}/a", "another node has the same path")],
        ),
        (
            Small(more_nodes=[Node(node_id=b"12345678", path="/x/b", user_data=group())]),
            [(SNAPSHOT_FILE, f"{AT}/x/b", "the group it is in does not exist")],
        ),
        (
            Small(more_nodes=[Node(node_id=b"12345678", path="/a/b", user_data=group())]),
            [(SNAPSHOT_FILE, f"{AT}/a/b", "the node it is in is an array")],
        ),
        (
            Small(document=array([6], [2], [{"name": 1}])),
            [(SNAPSHOT_FILE, f"{AT}/a", "")],
        ),
        (
            Small(lists=[N]),
            [(SNAPSHOT_FILE, f"{AT}/a", f"manifest {spell(M)}, which the snapshot does not list")],
        ),
        (
            Small(manifests=[(M, [(0, 3), (0, 1)])]),
            [(SNAPSHOT_FILE, f"{AT}/a", f"the extents of manifest {spell(M)} have 2 dimensions")],
        ),
        (
            Small(manifests=[(M, [(0, 3)]), (N, [(2, 4)])]),
            [(SNAPSHOT_FILE, f"{AT}/a", "overlap")],
        ),
        (
            Small(more={name("transactions", SECOND): None}),
            [(name("transactions", SECOND), AT, "the transaction log does not exist")],
        ),
        (
            Small(more={name("transactions", SECOND): b"?"}),
            [(name("transactions", SECOND), AT, "")],
        ),
        # manifests
        (
            Small(more={MANIFEST_FILE: None}),
            [(MANIFEST_FILE, AT, "does not exist, and a snapshot refers to it")],
        ),
        (
            Small(lists=[M, N, b"some manifes"]),
            [(name("manifests", b"some manifes"), AT, "does not exist")],
        ),
        (Small(more={MANIFEST_FILE: b"?"}), [(MANIFEST_FILE, AT, "")]),
        (
            Small(more={MANIFEST_FILE: envelope(manifest(N, [(A, NO_REFERENCES)]), MANIFEST)}),
            [(MANIFEST_FILE, AT, f"it is the manifest {spell(N)}")],
        ),
        (
            Small(grid=((4, 2),), document=array([4], [2])),
            [(MANIFEST_FILE, f"{AT}/a/c/2", "it is out of the chunk grid")],
        ),
        (
            Small(manifests=[(M, [(1, 3)])]),
            [(MANIFEST_FILE, f"{AT}/a/c/0", "it is out of the extents")],
        ),
        (
            Small(references=[Ref(index=[0], inline=b"x"), Ref(index=[0], inline=b"y")]),
            [(MANIFEST_FILE, f"{AT}/a", "1 references are of chunks that have one already")],
        ),
        (
            Small(references=[Ref(index=[0], inline=b"x"), ALIEN]),
            [(MANIFEST_FILE, f"{AT}/a", "1 references have not 1 coordinates")],
        ),
        (
            Small(references=[Ref(index=[1], inline=b"x"), Ref(index=[0], inline=b"y")]),
            [(MANIFEST_FILE, f"{AT}/a", "the references are not in order")],
        ),
        (
            Small(references=[Ref(index=[1], inline=b"x", chunk_id=C, length=1)]),
            [(MANIFEST_FILE, f"{AT}/a/c/1", "it has both inline and chunk_id")],
        ),
        (
            Small(references=[Ref(index=[1])]),
            [(MANIFEST_FILE, f"{AT}/a/c/1", "it has neither")],
        ),
        (
            Small(references=[Ref(index=[1], chunk_id=C, offset=2**64 - 1, length=2)]),
            [(MANIFEST_FILE, f"{AT}/a/c/1", "it ends past 2^63")],
        ),
        (
            Small(references=[Ref(index=[1], location="nowhere", length=2)]),
            [(MANIFEST_FILE, f"{AT}/a/c/1", "no URL that is known")],
        ),
        (
            Small(references=[Ref(index=[1], location="vcc://lab/x", length=2)]),
            [(MANIFEST_FILE, f"{AT}/a/c/1", "the unknown container 'lab'")],
        ),
        # chunks
        (
            Small(more={name("chunks", C): None}),
            [(name("chunks", C), f"{AT}/a/c/1", "does not exist, and bytes up to 3 are referred")],
        ),
        (
            Small(more={name("chunks", C): b".x"}),
            [(name("chunks", C), f"{AT}/a/c/1", "has 2 bytes, and bytes up to 3 are referred to")],
        ),
        (
            Small(more={name("chunks", D): b".." + BAD}),
            [(name("chunks", D), f"{AT}/s/c/4", "the checksum of the shard index does not match")],
        ),
        (
            Small(more={name("chunks", D): None}),
            [(name("chunks", D), f"{AT}/s/c/4", "does not exist")],
        ),
        (
            Small(shards=[Ref(index=[1], chunk_id=D, offset=2, length=9)]),
            [(name("chunks", D), f"{AT}/s/c/4", "9 bytes are too few for a shard")],
        ),
        (
            Small(shards=[Ref(index=[0], inline=BAD)]),
            [(SHARDS_FILE, f"{AT}/s/c/0", "the checksum of the shard index does not match")],
        ),
        (
            Small(shards=[Ref(index=[0], inline=SHARD[:9])]),
            [(SHARDS_FILE, f"{AT}/s/c/0", "9 bytes are too few for a shard")],
        ),
    ],
)
async def test_faults_are_told_with_object_and_key(
    small: Small, damages: list[tuple[str, str, str]]
) -> None:
    """Nothing else is told than the fault that was planted."""
    found = told(await check(small.objects(), elsewhere={"x": b"...xy"}))

    assert [each[:2] for each in found] == [each[:2] for each in damages]
    for (_, _, reason), (_, _, expected) in zip(found, damages, strict=True):
        assert expected in reason
        assert reason


@pytest.mark.parametrize(
    ("more", "elsewhere", "reason"),
    [
        ({}, {}, "does not exist, though it is referred to"),
        ({}, {"x": b"...x"}, "has 4 bytes, and bytes up to 5 are referred to"),
        ({"checksum_etag": "other"}, {"x": b"...xy"}, "not as it was when it was referred to"),
        ({"checksum_etag": "other"}, {}, "is missing"),
        ({"checksum_last_modified": 999}, {"x": b"...xy"}, "not as it was"),
        ({"checksum_last_modified": 1000}, {"x": b"...x"}, "has 4 bytes"),
    ],
)
async def test_objects_of_virtual_references_are_asked_for(
    more: dict[str, Any], elsewhere: dict[str, bytes], reason: str
) -> None:
    """They have to exist, to be long enough, and to be as they were."""
    reference = Ref(index=[0], location=f"{ELSEWHERE}x", offset=3, length=2, **more)

    report = await check(Small(references=[reference]).objects(), elsewhere=elsewhere)

    (damage,) = told(report)
    assert damage[:2] == ("elsewhere/x", f"{AT}/a/c/0")
    assert reason in damage[2]


@pytest.mark.parametrize("more", [{}, {"checksum_last_modified": 1000}])
async def test_shards_behind_virtual_references_are_checked(more: dict[str, Any]) -> None:
    """Their indexes are read, wherever they are."""
    shard = Ref(index=[0], location=f"{ELSEWHERE}y", offset=1, length=len(SHARD), **more)
    small = Small(shards=[shard])

    sound = await check(small.objects(), elsewhere={"x": b"...xy", "y": b"." + SHARD})
    bad = await check(small.objects(), elsewhere={"x": b"...xy", "y": b"." + BAD})
    short = await check(small.objects(), elsewhere={"x": b"...xy", "y": SHARD})
    absent = await check(small.objects(), elsewhere={"x": b"...xy"})

    assert (told(sound), sound.shards, sound.chunks) == ([], 1, 4)
    for report in (bad, short, absent):
        assert [each[:2] for each in told(report)] == [("elsewhere/y", f"{AT}/s/c/0")]


@pytest.mark.parametrize("kind", ["inline", "native", "virtual"])
async def test_checksums_of_chunks_are_checked_where_all_is_read(kind: str) -> None:
    """A chunk that ends in a checksum is read only if that is asked for."""

    def small(chunk: bytes) -> tuple[Small, dict[str, bytes]]:
        reference = {
            "inline": Ref(index=[0], inline=chunk),
            "native": Ref(index=[0], chunk_id=C, offset=1, length=len(chunk)),
            "virtual": Ref(index=[0], location=f"{ELSEWHERE}x", offset=1, length=len(chunk)),
        }[kind]
        more = {name("chunks", C): b"." + chunk}
        return Small(document=array([6], [2], ONE), references=[reference], more=more), {
            "x": b"." + chunk
        }

    sound, beside = small(checked(b"xy"))
    bad, bad_beside = small(checked(b"xy")[:-1] + b"?")

    assert told(await check(sound.objects(), elsewhere=beside, chunks=True)) == []
    assert told(await check(bad.objects(), elsewhere=bad_beside)) == []
    (damage,) = told(await check(bad.objects(), elsewhere=bad_beside, chunks=True))
    assert damage[1:] == (f"{AT}/a/c/0", "the checksum of the chunk does not match")


async def test_missing_backups_are_told_and_no_damage() -> None:
    """No data depend on what the repository was before."""
    report = await check(Small(repo=repo(more={8: "old"})).objects(), elsewhere={"x": b"...xy"})

    assert told(report) == []
    assert list(report.not_checked) == ["overwritten"]


async def test_the_first_snapshot_needs_no_transaction_log() -> None:
    """Version 1 wrote none for it."""
    small = Small(more={name("transactions", FIRST): None})

    assert told(await check(small.objects(), elsewhere={"x": b"...xy"})) == []


async def test_a_repository_that_is_offline_is_not_checked() -> None:
    """It is not to be read, and says why."""
    status = {0: U8(2), 1: U64(0), 2: "moving house"}
    report = await check(Small(repo=repo(status=status)).objects())

    assert told(report) == []
    assert "moving house" in report.not_checked[""]


async def test_what_many_references_have_in_common_is_told_a_hundred_times() -> None:
    """After that the rest is counted."""
    references = [Ref(index=[i], inline=b"x") for i in range(150)]
    small = Small(references=references, manifests=[(M, [(0, 150)])])

    found = told(await check(small.objects()))

    assert len(found) == 101
    assert (f"{MANIFEST_FILE}", f"{AT}/a") in {each[:2] for each in found}
    assert sum("47 chunks more like this" in reason for _, _, reason in found) == 1


async def test_without_a_listing_each_file_is_asked_for() -> None:
    """What is missing is still found; what nothing refers to is not known."""
    small = Small(more={name("chunks", C): b".x"})

    report = await check(small.objects(), store=Unlisted(), elsewhere={"x": b"...xy"})

    assert [each[:2] for each in told(report)] == [(name("chunks", C), f"{AT}/a/c/1")]
    assert "which files nothing refers to" in report.not_checked[""]
    assert "unreferenced files" not in report.counts


async def test_repositories_are_found_below_a_root() -> None:
    """Beside other data; keys are those of the root."""
    lost = Small(more={MANIFEST_FILE: None}).objects()
    objects = {f"lab/one/{key}": data for key, data in lost.items()}
    objects |= {f"two/{key}": data for key, data in Small().objects().items()}
    objects |= {"z/zarr.json": array([6], [2])}

    report = await check(objects, elsewhere={"x": b"...xy"})

    assert told(report) == [
        (f"lab/one/{MANIFEST_FILE}", f"lab/one/{AT}", "does not exist, and a snapshot refers to it")
    ]
    assert (report.arrays, report.counts["snapshots"]) == (5, 4)
    assert report.not_checked == {"z": "it is not sharded"}


async def test_a_repository_whose_file_repo_is_damaged_is_damaged() -> None:
    """Nothing else of it can be found."""
    report = await check({**Small().objects(), "repo": Small().repo.file()[:99]})

    assert [each[:2] for each in told(report)] == [("repo", "repo")]


async def test_inspect_tells_what_is_damaged() -> None:
    """The snapshot that main is at, where that cannot be read; the refs are told all the same."""
    store = MemoryStore()
    for key, data in Small(more={SNAPSHOT_FILE: b"?"}).objects().items():
        store.place(ObjectRef(BUCKET, key), data)
    fetch = ReadCache(store, Memory(2**20), ttl_s=60)
    root = Root(ObjectRef(BUCKET, ""), store, Containers([Icechunk(2**20, 2**20)]), fetch)

    (report,) = await inspect_root(root)
    refs = await inspect_refs(root)

    assert isinstance(report, DamageReport)
    assert report.object == f"{BUCKET}/{SNAPSHOT_FILE}"
    assert refs == [
        RefReport("", "@branch.main", spell(SECOND)),
        RefReport("", "@tag.v 1", spell(SECOND)),
    ]
