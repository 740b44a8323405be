"""Which snapshot a ref is at, in both versions of repositories."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from flatbuffers import flexbuffers

from app.errors import DamagedError
from app.formats.icechunk.config import VirtualContainer
from app.formats.icechunk.keys import Branch, Ref, SnapshotId, Tag
from app.formats.icechunk.repository import (
    FileRefs,
    RefFile,
    Refs,
    RefTarget,
    RepoMarker,
    RepoMarkerDecoder,
    RepoRefs,
    read_ref_file,
)
from app.formats.reading import DecodeError
from app.model import ObjectRef
from app.resolve.listing import list_names
from app.resolve.perform import DirectFetch
from app.storage.local import LocalStore
from app.storage.memory import MemoryStore
from tests.formats.icechunk.building_repo import NOON, U8, U64, Repo, ref, snapshot
from tests.formats.icechunk.repositories import spell
from tests.resolving import ROOT

LIMIT = 2**20
FIRST, SECOND = b"first snapsh", b"second snaps"
CHAIN = (snapshot(FIRST), snapshot(SECOND, 0))
OFFLINE = {0: U8(2), 1: U64(NOON), 2: "moved to a new bucket"}


def _store(objects: Mapping[str, bytes], store: MemoryStore | None = None) -> MemoryStore:
    store = store or MemoryStore()
    for key, data in objects.items():
        store.place(ROOT.join(key), data)
    return store


def _repo(**fields: object) -> MemoryStore:
    return _store({"repo": Repo(**{"snapshots": CHAIN, **fields}).file()})  # type: ignore[arg-type]


async def _resolve(store: MemoryStore, ref: Ref, refs: Refs | None = None) -> str | None:
    found = await (refs or RepoRefs(ROOT, LIMIT)).resolve(ref, DirectFetch(store))
    return found and found.snapshot_id


def _file(snapshot_id: bytes) -> bytes:
    return json.dumps({"snapshot": spell(snapshot_id)}).encode()


FILES = {
    "refs/branch.main/ref.json": _file(FIRST),
    "refs/branch.dev/ref.json": _file(SECOND),
    "refs/tag.v1/ref.json": _file(FIRST),
    "refs/tag.gone/ref.json": _file(FIRST),
    "refs/tag.gone/ref.json.deleted": b"",
}


@pytest.mark.parametrize(
    ("ref", "expected"),
    [
        (Branch("main"), spell(FIRST)),
        (Branch("a/b"), spell(SECOND)),
        (Tag("main"), spell(SECOND)),
        (Tag("a/b"), None),
        (Branch("none"), None),
        (SnapshotId(spell(b"any snapshot")), spell(b"any snapshot")),
    ],
)
async def test_repo_tells_where_a_ref_is(ref: Ref, expected: str | None) -> None:
    """Branches and tags each have names of their own; an id need not be listed."""
    branches, tags = [_ref("a/b", 1), _ref("main", 0)], [_ref("main", 1)]

    assert await _resolve(_repo(branches=branches, tags=tags), ref) == expected


_ref = ref


async def test_a_repository_that_is_read_only_is_read() -> None:
    """Only writers have to wait."""
    store = _repo(status={0: U8(1), 1: U64(NOON)})

    assert await _resolve(store, Branch("main")) == spell(FIRST)


async def test_a_repository_that_was_removed_has_no_refs() -> None:
    """Nothing is nothing, also where an id is asked for."""
    refs, fetch = RepoRefs(ROOT, LIMIT), DirectFetch(MemoryStore())

    assert await refs.resolve(Branch("main"), fetch) is None
    assert await refs.resolve(SnapshotId(spell(FIRST)), fetch) is None
    assert (await refs.branches(fetch), await refs.tags(fetch)) == ({}, {})
    assert await refs.containers(fetch) == ()


async def test_repo_holds_the_containers() -> None:
    """They are read when asked for, and damaged ones hurt nothing else."""
    url = "s3://archive/"
    config = {"virtual_chunk_containers": {url: {"name": "a", "url_prefix": url, "store": "s3"}}}
    fetch = DirectFetch(_repo(more={9: bytes(flexbuffers.Dumps(config))}))
    store = _repo(more={9: b"\xff\xff\xff"})
    damaged = DirectFetch(store)
    refs = RepoRefs(ROOT, LIMIT)

    assert await refs.containers(fetch) == (VirtualContainer("a", url, "s3"),)
    assert await _resolve(store, Branch("main")) == spell(FIRST)
    with pytest.raises(DamagedError, match=f"{ROOT}/repo"):
        await refs.containers(damaged)


@pytest.mark.parametrize("data", [b"# A notebook", b"ICE", b"I am", b"\xff"])
def test_a_file_may_be_called_repo_by_chance(data: bytes) -> None:
    """What does not begin like one is none, but the beginning of one is one that is damaged."""
    decode = RepoMarkerDecoder(LIMIT)
    if b"ICE" in data:
        with pytest.raises(DecodeError):
            decode(data)
    else:
        assert decode(data) == RepoMarker(None)
        assert decode(data).nbytes == 0


@pytest.mark.parametrize(
    ("ref", "expected"),
    [(Branch("main"), spell(FIRST)), (Branch("dev"), spell(SECOND)), (Tag("v1"), spell(FIRST)),
     (Tag("gone"), None), (Tag("dev"), None), (Branch("gone"), None), (Branch(""), spell(FIRST)),
     (Branch(".."), None), (Branch("main/../branch.dev"), None), (Branch("/../../secret"), None),
     (SnapshotId(spell(SECOND)), spell(SECOND))],
)  # fmt: skip
async def test_a_file_tells_where_a_ref_is(ref: Ref, expected: str | None) -> None:
    """In version 1 every ref has one; a deleted tag has another beside it."""
    objects = {**FILES, "refs/branch./ref.json": _file(FIRST)}

    assert await _resolve(_store(objects), ref, FileRefs(ROOT)) == expected


async def test_only_branches_have_the_time_of_their_file() -> None:
    """A branch can be reset to an older snapshot; a tag is as old as its snapshot."""
    store = MemoryStore()
    repo = Repo(snapshots=CHAIN, tags=[ref("v1", 0)]).file()
    for key, data in {**FILES, "repo": repo}.items():
        store.place(ROOT.join(key), data, modified_s=1000)
    fetch = DirectFetch(store)

    for refs in (FileRefs(ROOT), RepoRefs(ROOT, LIMIT)):
        branch = await refs.resolve(Branch("main"), fetch)
        tag = await refs.resolve(Tag("v1"), fetch)
        assert branch == RefTarget(spell(FIRST), 1000)
        assert tag == RefTarget(spell(FIRST), None)


@pytest.mark.parametrize("name", ["\0", "a\0b", "\n", "é", "a" * 300, "\\..\\..", "%2e%2e"])
async def test_any_name_can_be_asked_for(name: str, tmp_path: Path) -> None:
    """Also one that no file can have."""
    store = LocalStore()
    folder = ObjectRef(tmp_path.as_uri(), "")

    assert await FileRefs(folder).resolve(Branch(name), DirectFetch(store)) is None
    assert await FileRefs(folder).resolve(Tag(name), DirectFetch(store)) is None
    await store.aclose()


async def test_refs_in_files_are_listed() -> None:
    """All of them where there is a listing, else only ``main``."""
    store = _store({**FILES, "refs/branch.x/other": b"", "refs/branch.y/z/ref.json": _file(FIRST)})
    refs, fetch = FileRefs(ROOT), DirectFetch(store)

    assert await refs.branches(fetch) == {"main": spell(FIRST)}
    assert await refs.tags(fetch) == {}
    branches = await refs.branches(fetch, lambda prefix: list_names(store, ROOT, prefix))
    tags = await refs.tags(fetch, lambda prefix: list_names(store, ROOT, prefix))
    assert branches == {"main": spell(FIRST), "dev": spell(SECOND)}
    assert tags == {"v1": spell(FIRST)}


@pytest.mark.parametrize(
    "data",
    [b"", b"null", b"[]", b'"1CECHNKREP0F1RSTCMT0"', b"{}", b'{"snapshot": null}',
     b'{"snapshot": 5}', b'{"snapshot": "1cechnkrep0f1rstcmt0"}',
     b'{"snapshot": "../../etc/passwd"}', b'{"snapshot": "1CECHNKREP0F1RSTCMT0"', b"\xff\xfe",
     b"[" * 100_000, b"1" * 5000],
)  # fmt: skip
def test_a_file_that_names_no_snapshot_is_damaged(data: bytes) -> None:
    """Ids in it are spelled as file names are."""
    with pytest.raises(DecodeError):
        read_ref_file(data)


def test_a_file_may_tell_more() -> None:
    """What else is in it does not count."""
    data = b'{"snapshot": "1CECHNKREP0F1RSTCMT0", "by": "me"}'

    assert read_ref_file(data) == RefFile("1CECHNKREP0F1RSTCMT0")


async def test_version_1_has_a_file_of_containers() -> None:
    """It need not be there."""
    text = b"virtual_chunk_containers: {a: {name: a, url_prefix: s3://b/, store: !s3 {}}}"
    fetch = DirectFetch(_store({"config.yaml": text}))

    assert await FileRefs(ROOT).containers(fetch) == (VirtualContainer("a", "s3://b/", "s3"),)
    assert await FileRefs(ROOT).containers(DirectFetch(MemoryStore())) == ()
