"""Refs of both versions of repositories, their containers, and virtual references."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from flatbuffers import flexbuffers

from shardgate.errors import DamagedError, NotAllowedError
from shardgate.formats.icechunk.keys import Branch, SnapshotId, Tag
from shardgate.formats.icechunk.keys import Ref as AnyRef
from shardgate.formats.icechunk.repository_files import (
    FileRefs,
    RefFile,
    RefTarget,
    RepoRefs,
    read_ref_file,
)
from shardgate.formats.reading import DecodeError
from shardgate.model import (
    ByteRange,
    ETag,
    Fixed,
    ObjectRef,
    Part,
    Stored,
    UnmodifiedSince,
)
from shardgate.read.listing import list_names
from shardgate.read.metadata_cache import uncached_reads
from shardgate.storage.local import LocalStore
from shardgate.storage.memory import MemoryStore
from tests.support.formats.case import filled
from tests.support.formats.icechunk.building import Ref
from tests.support.formats.icechunk.building_repo import NOON, U8, U64, Repo, ref, snapshot
from tests.support.formats.icechunk.repositories import Builder, node_id, spell
from tests.support.formats.icechunk.served import ARCHIVE, Served
from tests.support.formats.zarr.building import LITTLE, array_metadata
from tests.support.resolving import ROOT

ERA = {"name": "era", "url_prefix": "s3://archive/era5/", "store": "s3"}
SECRET = {"name": "secret", "url_prefix": "s3://secret/", "store": "s3"}


def _served(*refs: Ref, config: bytes | None = None, version: int = 2) -> Served:
    """Serve an array ``a`` of references; *config* is in ``repo``, or in version 1 a file."""
    builder = Builder(version)
    builder.group("/")
    manifest_id = builder.manifest([(node_id("/a"), refs)])
    line = array_metadata([16], [2], [LITTLE])
    builder.array("/a", line, [8], manifests=[(manifest_id, [(0, 8)])])
    if config is None:
        return Served(builder.build())
    if version == 1:
        return Served({**builder.build(), "config.yaml": config})
    return Served(builder.build(more={9: config}))


def _virtual(at: int = 0, location: str = "s3://archive/era5/a.nc", **fields: Any) -> Ref:
    return Ref(index=[at], location=location, **{"offset": 2, "length": 3, **fields})


def _config(*containers: Mapping[str, Any]) -> bytes:
    by_prefix = {each["url_prefix"]: each for each in containers}
    return bytes(flexbuffers.Dumps({"virtual_chunk_containers": by_prefix}))


@pytest.mark.parametrize(
    ("fields", "condition"),
    [
        ({}, None),
        ({"checksum_last_modified": 1000}, UnmodifiedSince(1000)),
        ({"checksum_etag": "abc", "checksum_last_modified": 1000}, ETag('"abc"')),
    ],
)
async def test_checksum_of_a_reference_is_a_condition(
    fields: dict[str, Any], condition: ETag | UnmodifiedSince | None
) -> None:
    """An ETag of a reference is a fixed version, a time a condition; the ETag has precedence."""
    place, by, is_immutable, _ = await _served(_virtual(**fields)).locate("a/c/0")
    ref, byte_range = ARCHIVE.join("a.nc"), ByteRange(2, 5)

    if isinstance(condition, str):
        assert place == Stored(ref, byte_range, Fixed(condition, condition))
    else:
        assert place == Part(ref, byte_range, condition)
        assert (len(by), is_immutable) == (16, False)


async def test_references_to_different_objects_have_distinct_ids() -> None:
    """References to different objects have distinct ids; those to one object the same."""
    refs = [
        _virtual(0, checksum_last_modified=7),
        _virtual(1, "s3://archive/era5/b.nc", checksum_last_modified=7),
        _virtual(2, "s3://archive/era5/%61.nc", checksum_last_modified=7),
    ]
    case = _served(*refs)
    one, two, three = [(await case.locate(f"a/c/{at}")).reference_id for at in range(3)]

    assert one != two
    assert one == three


async def test_container_is_found_in_repo_without_another_read() -> None:
    """In version 2, a container is found in ``repo``, which is read once."""
    case = _served(_virtual(0, "vcc://era/a.nc"), config=_config(ERA))
    assert await case.read("a/c/0") == b"234"

    keys = [call.ref.key.removeprefix(f"{ROOT.key}/") for call in case.store.calls]
    assert [key.partition("/")[0] for key in keys][:1] == ["repo"]
    assert len([key for key in keys if key in ("repo", "config.yaml")]) == 1


async def test_container_of_version_1_is_found_in_config_yaml() -> None:
    """In version 1, ``config.yaml`` is read once, for the first reference by a container."""
    config = json.dumps({"virtual_chunk_containers": {"era": ERA}}).encode()
    refs = [_virtual(0), *(_virtual(at, "vcc://era/a.nc") for at in (1, 2))]
    case = _served(*refs, config=config, version=1)
    counts = []
    for at in range(3):
        assert await case.read(f"a/c/{at}") == b"234"
        counts.append([call.ref.key for call in case.store.calls].count("data/config.yaml"))

    assert counts == [0, 1, 1]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        *((config, r"manifests/.*unknown container 'nobody'")
          for config in (None, _config(), _config(ERA, {**SECRET, "name": None}))),
        (b"\xff\xff", f"{ROOT}/repo: "),
    ],
)  # fmt: skip
async def test_unknown_container_is_damage(config: bytes | None, reason: str) -> None:
    """A reference by an unknown container raises DamagedError; other chunks are read."""
    case = _served(_virtual(0, "vcc://nobody/a.nc"), _virtual(1), config=config)
    with pytest.raises(DamagedError, match=reason):
        await case.read("a/c/0")
    assert await case.read("a/c/1") == b"234"


@pytest.mark.parametrize("location", ["vcc://secret/x/a.nc", "s3://secret/x/a.nc"])
async def test_refusal_names_the_prefix_of_the_container(location: str) -> None:
    """A reference into a container that is not allowed raises NotAllowedError with its prefix.

    Other chunks are read.
    """
    case = _served(_virtual(0, location), _virtual(1), config=_config(ERA, SECRET))
    with pytest.raises(NotAllowedError, match="below s3://secret/ are not allowed"):
        await case.read("a/c/0")
    assert await case.read("a/c/1") == b"234"


LIMIT = 2**20
FIRST, SECOND = b"first snapsh", b"second snaps"
CHAIN = (snapshot(FIRST), snapshot(SECOND, 0))


def _repo(**fields: object) -> MemoryStore:
    return filled({"repo": Repo(**{"snapshots": CHAIN, **fields}).file()})  # type: ignore[arg-type]


async def _resolve(store: MemoryStore, ref: AnyRef, refs: FileRefs | None = None) -> str | None:
    found = await (refs or RepoRefs(ROOT, LIMIT)).resolve(ref, uncached_reads(store))
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
async def test_ref_is_resolved_by_repo(ref: AnyRef, expected: str | None) -> None:
    """In version 2, branches and tags are resolved by ``repo``, and ids to themselves."""
    branches, tags = [_ref("a/b", 1), _ref("main", 0)], [_ref("main", 1)]
    for availability in (0, 1):  # only writers have to wait where it is read-only
        store = _repo(branches=branches, tags=tags, status={0: U8(availability), 1: U64(NOON)})
        assert await _resolve(store, ref) == expected


_ref = ref


async def test_deleted_repository_has_no_refs() -> None:
    """A repository whose ``repo`` is absent has no branches, tags, snapshots or containers."""
    refs, fetch = RepoRefs(ROOT, LIMIT), uncached_reads(MemoryStore())

    assert await refs.resolve(Branch("main"), fetch) is None
    assert await refs.resolve(SnapshotId(spell(FIRST)), fetch) is None
    assert not await refs.named(Branch, fetch)
    assert not await refs.named(Tag, fetch)
    assert await refs.containers(fetch) == ()


@pytest.mark.parametrize(
    ("ref", "expected"),
    [(Branch("main"), spell(FIRST)), (Branch("dev"), spell(SECOND)), (Tag("v1"), spell(FIRST)),
     (Tag("gone"), None), (Tag("dev"), None), (Branch("gone"), None), (Branch(""), spell(FIRST)),
     (Branch(".."), None), (Branch("main/../branch.dev"), None), (Branch("/../../secret"), None),
     (SnapshotId(spell(SECOND)), spell(SECOND))],
)  # fmt: skip
async def test_ref_of_version_1_is_resolved_by_its_file(ref: AnyRef, expected: str | None) -> None:
    """In version 1, a ref is resolved by its file; a tag with a ``.deleted`` file is absent."""
    objects = {**FILES, "refs/branch./ref.json": _file(FIRST)}

    assert await _resolve(filled(objects), ref, FileRefs(ROOT)) == expected


async def test_only_branches_have_a_time_of_their_own() -> None:
    """A branch has the time of its file or of ``repo``, a tag none."""
    store = MemoryStore()
    repo = Repo(snapshots=CHAIN, tags=[ref("v1", 0)]).file()
    for key, data in {**FILES, "repo": repo}.items():
        store.place(ROOT.join(key), data, modified_s=1000)
    fetch = uncached_reads(store)

    for refs in (FileRefs(ROOT), RepoRefs(ROOT, LIMIT)):
        branch = await refs.resolve(Branch("main"), fetch)
        tag = await refs.resolve(Tag("v1"), fetch)
        assert branch == RefTarget(spell(FIRST), 1000)
        assert tag == RefTarget(spell(FIRST), None)


@pytest.mark.parametrize("name", ["\0", "a\0b", "\n", "é", "a" * 300, "\\..\\..", "%2e%2e"])
async def test_ref_with_an_impossible_file_name_is_absent(name: str, tmp_path: Path) -> None:
    """A ref with a name that no file can have is absent."""
    store = LocalStore()
    folder = ObjectRef(tmp_path.as_uri(), "")

    assert await FileRefs(folder).resolve(Branch(name), uncached_reads(store)) is None
    assert await FileRefs(folder).resolve(Tag(name), uncached_reads(store)) is None
    await store.aclose()


async def test_refs_of_version_1_are_listed() -> None:
    """In version 1, refs are listed if the store can list; otherwise only ``main``."""
    store = filled({**FILES, "refs/branch.x/other": b"", "refs/branch.y/z/ref.json": _file(FIRST)})
    refs, fetch = FileRefs(ROOT), uncached_reads(store)

    assert await refs.named(Branch, fetch) == {"main": spell(FIRST)}
    assert await refs.named(Tag, fetch) == {}
    branches = await refs.named(Branch, fetch, lambda prefix: list_names(store, ROOT, prefix))
    tags = await refs.named(Tag, fetch, lambda prefix: list_names(store, ROOT, prefix))
    assert branches == {"main": spell(FIRST), "dev": spell(SECOND)}
    assert tags == {"v1": spell(FIRST)}


@pytest.mark.parametrize(
    "data",
    [b"", b"null", b"[]", b'"1CECHNKREP0F1RSTCMT0"', b"{}", b'{"snapshot": null}',
     b'{"snapshot": 5}', b'{"snapshot": "1cechnkrep0f1rstcmt0"}',
     b'{"snapshot": "../../etc/passwd"}', b'{"snapshot": "1CECHNKREP0F1RSTCMT0"', b"\xff\xfe",
     b"[" * 100_000, b"1" * 5000],
)  # fmt: skip
def test_ref_file_without_a_snapshot_is_refused(data: bytes) -> None:
    """A ref file without a valid snapshot id raises DecodeError; other members are ignored."""
    with pytest.raises(DecodeError):
        read_ref_file(data)
    more = b'{"snapshot": "1CECHNKREP0F1RSTCMT0", "by": "me"}'
    assert read_ref_file(more) == RefFile("1CECHNKREP0F1RSTCMT0")
