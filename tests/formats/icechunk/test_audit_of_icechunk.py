"""What `verify` and `inspect` make of repositories that the real library wrote."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import icechunk
import numpy as np
import pytest
import zarr

from app.formats.icechunk.layout import Icechunk
from app.formats.icechunk.virtual import Allowed, allow
from app.model import ObjectRef, VirtualKey
from app.resolve.containers import Containers
from app.resolve.fetch import Memory, ReadCache
from app.resolve.inspect import RefReport, inspect_key, inspect_refs, inspect_root
from app.resolve.shard_check import Report
from app.resolve.verify import verify
from app.resolve.walk import Root
from app.settings import LimitSettings
from app.storage.memory import MemoryStore
from app.storage.stores import Stores
from tests.resolve.stores import Unlisted

FIXTURES = Path("../shared/fixtures")
FIXTURE_NAMES = (
    "icechunk-test-repo-v1",
    "icechunk-test-repo-v2",
    "icechunk-split-repo-v2",
    "icechunk-expire-repo-v2-by-working-copy",
)


def _url(folder: Path) -> str:
    return folder.absolute().as_uri()


@asynccontextmanager
async def opened(folder: Path, beside: Path | None = None) -> AsyncIterator[Root]:
    """Open a folder; virtual references to what is *beside* it may be followed."""
    async with Stores(LimitSettings()) as stores:
        allowed: tuple[Allowed, ...] = ()
        if beside is not None:
            url = f"{beside.as_uri()}/"
            allowed = (allow(url, stores.open_prefix(url)),)
        fetch = ReadCache(stores, Memory(2**24), ttl_s=60)
        containers = Containers([Icechunk(2**24, 2**20, allowed)])
        yield Root(stores.open_root(_url(folder)), stores, containers, fetch)


async def check(folder: Path, beside: Path | None = None) -> Report:
    """Verify all of a repository."""
    async with opened(folder, beside) as root:
        return await verify(root, chunks=True)


class Written:
    """A repository of the library in *folder*, with references to files in *beside*."""

    def __init__(self, folder: Path, beside: Path, **more: Any) -> None:
        self.folder, self.beside = folder, beside
        self.storage = icechunk.local_filesystem_storage(str(folder))
        config = icechunk.RepositoryConfig(inline_chunk_threshold_bytes=12)
        url = f"{beside.as_uri()}/"
        container = icechunk.VirtualChunkContainer(
            url, icechunk.local_filesystem_store(str(beside))
        )
        config.set_virtual_chunk_container(container)
        self.repo = icechunk.Repository.create(self.storage, config=config, **more)
        self.repo.save_config()

    def commit(self, change: Callable[[icechunk.Session, zarr.Group], None]) -> str:
        """Commit a change of `main`."""
        session = self.repo.writable_session("main")
        change(session, zarr.open_group(session.store, mode="a"))
        return session.commit("a change")


def write(written: Written) -> None:
    """Write arrays with references of all kinds, and change some of them."""
    (written.beside / "x.bin").write_bytes(bytes(range(100)))

    def begin(session: icechunk.Session, root: zarr.Group) -> None:
        plain: dict[str, Any] = {"dtype": "u1", "compressors": None, "filters": None}
        root.create_array("native", shape=(40, 30), chunks=(10, 10), **plain)[:] = 1
        root.create_array("inline", shape=(9,), chunks=(2,), **plain)[:] = 2
        root.create_array("scalar", shape=(), chunks=(), **plain)[...] = 5
        root.create_array("empty", shape=(0, 5), chunks=(1, 1), **plain)
        big: Any = {**plain, "shards": (16,)}
        root.create_array("sharded", shape=(40,), chunks=(4,), **big)[:] = 3
        below = root.create_group("group")
        checksum: Any = {"name": "crc32c"}
        more: Any = {**plain, "compressors": [checksum]}
        below.create_array("checked", shape=(40,), chunks=(20,), **more)[:] = 4
        root.create_array("virtual", shape=(4,), chunks=(1,), **plain)
        url = (written.beside / "x.bin").as_uri()
        for at in range(3):
            session.store.set_virtual_ref(f"virtual/c/{at}", url, offset=9 * at, length=1)
        session.store.set_virtual_ref(
            "virtual/c/3", url, offset=1, length=1, checksum=datetime.now(UTC) + timedelta(days=1)
        )

    written.commit(begin)
    written.repo.create_tag("v 1", written.repo.lookup_branch("main"))

    def change(_: icechunk.Session, root: zarr.Group) -> None:
        array: Any = root["native"]
        array[5] = 9
        array.resize((20, 30))
        del root["scalar"]

    written.commit(change)
    written.repo.create_branch("dev", written.repo.lookup_tag("v 1"))


def _as_it_is(_: Written) -> None: ...


def _amended(written: Written) -> None:
    session = written.repo.writable_session("main")
    zarr.open_group(session.store).attrs["n"] = 1
    session.amend("amended")


def _expired(written: Written) -> None:
    for n in range(3):
        written.commit(lambda _, root, n=n: root.attrs.update(n=n))  # type: ignore[misc]
    written.repo.expire_snapshots(datetime.now(UTC))


def _collected(written: Written) -> None:
    written.repo.delete_branch("dev")
    written.repo.delete_tag("v 1")
    _expired(written)
    written.repo.garbage_collect(datetime.now(UTC))


def _moved(written: Written) -> None:
    session = written.repo.rearrange_session("main")
    session.move("/group/checked", "/moved")
    session.commit("moved")


def _split(written: Written) -> None:
    """Split an array one way, then another, with a change after each."""
    for size in (3, 2):
        dimension = icechunk.ManifestSplitDimCondition.Axis(0)
        condition = icechunk.ManifestSplitCondition.AnyArray()
        splitting = icechunk.ManifestSplittingConfig.from_dict({condition: {dimension: size}})
        config = icechunk.RepositoryConfig(manifest=icechunk.ManifestConfig(splitting=splitting))
        written.repo = icechunk.Repository.open(written.storage, config=config)

        def change(_: icechunk.Session, root: zarr.Group, size: int = size) -> None:
            array: Any = root.require_array(
                "split", shape=(12, 2), chunks=(1, 1), dtype="u1", compressors=None
            )
            array[:size] = np.full((size, 2), size)
            if size == 3:
                array[:] = 1
            else:
                array[7:9] = 3
                array.resize((10, 2))

        written.commit(change)


def _reset(written: Written) -> None:
    written.commit(lambda _, root: root.attrs.update(n=1))
    written.repo.reset_branch("main", written.repo.lookup_tag("v 1"))


def _migrated(written: Written) -> None:
    icechunk.upgrade_icechunk_repository(written.repo, dry_run=False)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    "change", [_as_it_is, _amended, _expired, _collected, _moved, _split, _reset, _migrated]
)
async def test_what_the_library_wrote_is_intact(
    tmp_path: Path, version: int, change: Callable[[Written], None]
) -> None:
    """Whatever was done to a repository, nothing of it is damaged, and all of it is seen."""
    only_in: dict[Any, int] = {_amended: 2, _moved: 2, _migrated: 1}
    if only_in.get(change, version) != version:
        pytest.skip("the library does this to repositories of the other version")
    beside = tmp_path / "beside"
    beside.mkdir()
    written = Written(tmp_path / "repo", beside, spec_version=version)
    write(written)
    change(written)

    report = await check(written.folder, beside)

    assert report.damages == []
    assert report.not_checked == {}
    assert report.shards >= 3
    assert report.counts["snapshots"] >= 2
    assert report.counts["references"] >= 16


@pytest.mark.parametrize("name", FIXTURE_NAMES)
async def test_what_older_libraries_wrote_is_intact(name: str) -> None:
    """Nothing is damaged, and nothing is left over."""
    folder = FIXTURES / name
    if not folder.is_dir():
        pytest.skip(f"there are no fixtures in {FIXTURES}")

    report = await check(folder)

    assert report.damages == []
    assert report.counts["unreferenced files"] == 0
    assert all("s3://testbucket" in why for why in report.not_checked.values())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Let the library write a repository once."""
    beside = tmp_path_factory.mktemp("beside")
    written = Written(tmp_path_factory.mktemp("made") / "repo", beside)
    write(written)
    return written


@pytest.fixture(scope="module")
def made_v1(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Let the library write a repository of version 1."""
    beside = tmp_path_factory.mktemp("beside1")
    written = Written(tmp_path_factory.mktemp("made1") / "repo", beside, spec_version=1)
    write(written)
    return written


async def test_arrays_and_refs_are_inspected(made: Written) -> None:
    """The arrays are those of `main`; each ref tells its snapshot."""
    async with opened(made.folder) as root:
        found = [report.path for report in await inspect_root(root)]
        refs = [(each.ref, each.snapshot_id) for each in await inspect_refs(root)]  # type: ignore[union-attr]

    assert found == ["empty", "group/checked", "inline", "native", "sharded", "virtual"]
    assert refs == [
        ("@branch.dev", made.repo.lookup_branch("dev")),
        ("@branch.main", made.repo.lookup_branch("main")),
        ("@tag.v 1", made.repo.lookup_tag("v 1")),
    ]


async def test_refs_of_version_1_are_inspected(made_v1: Written) -> None:
    """They are files, which are listed."""
    async with opened(made_v1.folder) as root:
        refs = {each.ref for each in await inspect_refs(root)}  # type: ignore[union-attr]

    assert refs == {"@branch.dev", "@branch.main", "@tag.v 1"}


@pytest.mark.parametrize(
    ("key", "state", "reference"),
    [
        ("native/c/0/1", "stored", "native"),
        ("@tag.v 1/native/c/3/1", "stored", "native"),
        ("inline/c/0", "inline", "inline"),
        ("@tag.v 1/scalar/c", "inline", "inline"),
        ("virtual/c/1", "stored", "virtual"),
        ("sharded/c/5", "stored", "native"),
        ("native/c/3/1", "absent", None),
        ("@tag.v 2/native/c/0/1", "absent", None),
        ("native/zarr.json", "inline", None),
    ],
)
async def test_where_the_bytes_of_a_key_are(
    made: Written, key: str, state: str, reference: str | None
) -> None:
    """What leads to them is told: the kind of reference, and the manifest that holds it."""
    async with opened(made.folder, made.beside) as root:
        report = await inspect_key(root, VirtualKey(key))

    assert (report.state, report.reference) == (state, reference)
    assert (report.manifest is not None) == (reference is not None)
    if reference is not None:
        manifests = made.folder / "manifests"
        assert Path(str(report.manifest).removeprefix("file://")).parent == manifests
    if reference == "virtual":
        assert report.location == (made.beside / "x.bin").as_uri()
        assert (report.start, report.stop) == (9, 10)


async def test_a_shard_behind_a_reference_is_described(made: Written) -> None:
    """Its index says what is in it."""
    async with opened(made.folder) as root:
        report = await inspect_key(root, VirtualKey("sharded/c/5"))

    assert report.shard is not None
    assert (report.shard.entries, report.shard.empty, report.shard.used_nbytes) == (4, 0, 16)
    assert (report.stop or 0) - (report.start or 0) == 4


async def test_a_reference_that_may_not_be_followed_is_refused(made: Written) -> None:
    """It is told where it leads to, and which prefix would have to be allowed."""
    async with opened(made.folder) as root:
        report = await inspect_key(root, VirtualKey("virtual/c/1"))

    assert (report.state, report.reference) == ("refused", "virtual")
    assert report.location == (made.beside / "x.bin").as_uri()
    assert f"{made.beside.as_uri()}/" in str(report.reason)


def _in_memory[T: MemoryStore](written: Written, store: T) -> T:
    for path in written.folder.rglob("*"):
        if path.is_file():
            name = str(path.relative_to(written.folder))
            store.place(ObjectRef("memory://t", name), path.read_bytes())
    return store


def _root(store: MemoryStore) -> Root:
    fetch = ReadCache(store, Memory(2**24), ttl_s=60)
    return Root(ObjectRef("memory://t", ""), store, Containers([Icechunk(2**24, 2**20)]), fetch)


async def test_without_a_listing_version_1_has_but_main(made_v1: Written) -> None:
    """Its snapshots are checked, and their chunks, one by one; that other refs are not is told."""
    root = _root(_in_memory(made_v1, Unlisted()))

    report = await verify(root, chunks=True)
    refs = await inspect_refs(root)

    assert report.damages == []
    assert "refs other than main: the store cannot list" in report.not_checked[""]
    assert report.counts["snapshots"] == 3
    assert refs == [RefReport("", "@branch.main", made_v1.repo.lookup_branch("main"))]


@pytest.mark.parametrize(
    ("lost", "key", "reason"),
    [
        ("refs/branch.dev/ref.json", "@branch.dev", "no JSON"),
        ("snapshots/{first}", "@{first}", "another snapshot has it for its parent"),
        ("snapshots/{main}", "@{main}", "@branch.main is at it"),
        ("transactions/{main}", "@{main}", "the transaction log does not exist"),
        ("config.yaml", "", "the configuration: "),
    ],
)
async def test_faults_of_version_1_are_told(
    made_v1: Written, lost: str, key: str, reason: str
) -> None:
    """Refs are files, and snapshots are found from parent to parent."""
    chain = [each.id for each in made_v1.repo.ancestry(branch="main")]
    ids = {"main": chain[0], "first": chain[-1]}
    store = _in_memory(made_v1, MemoryStore())
    gone = ObjectRef("memory://t", lost.format(**ids))
    if lost.startswith(("refs", "config")):
        store.place(gone, b"{")
    else:
        store.remove(gone)

    report = await verify(_root(store), chunks=True)

    wanted = (str(gone), key.format(**ids))
    assert any((d.object, d.key) == wanted and reason in d.reason for d in report.damages), (
        report.damages
    )
