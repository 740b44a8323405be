"""Commits in one process: expiration, a missing log, and a store of very many chunk files."""

import secrets
from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import icechunk
import numpy as np
import pytest
import zarr

from shardgate.concurrency import yield_to_loop
from shardgate.errors import CommitConflictError, DamagedError
from shardgate.formats.icechunk.changes import ChangeSet, NodeDocument, SetChunks
from shardgate.formats.icechunk.ids import encode_id
from shardgate.formats.icechunk.manifest import Native
from shardgate.formats.icechunk.payloads import Payloads
from shardgate.formats.icechunk.repo_writer import WriteId
from shardgate.icechunk.chunk_files import chunk_lengths, put_chunk
from shardgate.icechunk.commit import CommitRequest, CommitResult
from shardgate.icechunk.repository import read_snapshot
from shardgate.model import ByteRange, ObjectRef
from shardgate.storage.contract import Listed
from shardgate.storage.local import LocalStore
from shardgate.storage.wrappers import Call, TracedStore
from tests.support.formats.icechunk.building_repo import Repo, ref, snapshot
from tests.support.icechunk.sessions.replicas import Late, Replica
from tests.support.writable_repositories import Place, new_place

ROOT: Final = "1CECHNKREP0F1RSTCMT0"
GROUP: Final = b'{"zarr_format":3,"node_type":"group"}'


class Committing:
    """A repository of the icechunk library, and a committer."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.store = Late(LocalStore())
        place.create()

    async def add(self, name: str, parent_id: str = ROOT, *, amend: bool = False) -> CommitResult:
        """Commit a group."""
        path = "/" if name == "root" else f"/{name}"
        changes = ChangeSet(new={name.encode().ljust(8): NodeDocument(path, GROUP)})
        write_id = WriteId(f"id-{name}")
        request = CommitRequest("main", parent_id, name, write_id, amend=amend)
        directory = ObjectRef(self.place.folder.as_uri(), "")
        replica = await Replica.of(self.store, directory=directory)
        return await replica.committer.commit(replica.opened, changes, request)

    @property
    def tip(self) -> str:
        """The snapshot of ``main``."""
        return self.place.open().lookup_branch("main")

    def messages(self) -> list[str]:
        """Return the messages, newest first, without the initial commit."""
        repo: icechunk.Repository = self.place.open()
        return [each.message for each in repo.ancestry(branch="main")][:-1]


@pytest.fixture
def committing(tmp_path: Path) -> Committing:
    """Make a repository."""
    return Committing(new_place(tmp_path))


async def test_ancestors_may_expire_during_an_amend(committing: Committing) -> None:
    """An amend during which older snapshots expire has the new parent, and keeps all changes."""
    for name in ("root", "a", "b"):
        last = (await committing.add(name, committing.tip)).snapshot_id

    async def expire() -> None:
        committing.place.open().expire_snapshots(datetime.now(UTC))

    committing.store.before("put", "transactions/", expire)
    await committing.add("c", last, amend=True)

    assert committing.messages() == ["c"]
    changed = committing.place.open().diff(from_snapshot_id=ROOT, to_branch="main")
    assert changed.new_groups == {"/", "/a", "/b", "/c"}


async def test_commit_over_a_missing_log_is_refused(committing: Committing) -> None:
    """A commit whose missing transaction log hides another's changes raises CommitConflictError."""
    parent = (await committing.add("root")).snapshot_id
    repo = committing.place.open()
    session = repo.writable_session("main")
    theirs = session.commit("theirs", allow_empty=True)
    (committing.place.folder / "transactions" / theirs).unlink()

    with pytest.raises(CommitConflictError) as raised:
        await committing.add("g", parent)

    assert [each["kind"] for each in raised.value.conflicts] == ["missing_transaction_log"]
    assert raised.value.actual_parent == theirs


async def test_amend_of_a_commit_whose_log_is_missing_is_damage(committing: Committing) -> None:
    """An amend of a commit whose log is missing raises DamagedError, as its changes would get lost
    from the log.
    """
    await committing.add("root")
    tip = (await committing.add("a", committing.tip)).snapshot_id
    (committing.place.folder / "transactions" / tip).unlink()

    with pytest.raises(DamagedError, match=f"transactions/{tip}.*changes .* are unknown"):
        await committing.add("b", tip, amend=True)
    assert committing.tip == tip


@pytest.mark.parametrize(
    ("folder", "is_of_tip", "reason"),
    [
        ("transactions", True, "not a file of Icechunk"),
        ("snapshots", True, "the repository lists it"),
        ("snapshots", False, "the repository lists it"),
    ],
    ids=["log of the tip", "snapshot of the tip", "snapshot of the parent"],
)
async def test_commit_over_a_damaged_file_is_damage(
    committing: Committing, folder: str, reason: str, *, is_of_tip: bool
) -> None:
    """A commit raises DamagedError that names the file, if the log of the tip is damaged, or the
    snapshot of the tip or of the parent is missing.
    """
    parent = (await committing.add("root")).snapshot_id
    theirs = (await committing.add("theirs", parent)).snapshot_id
    name = f"{folder}/{theirs if is_of_tip else parent}"
    file = committing.place.folder / name
    file.unlink()
    if folder == "transactions":
        file.write_bytes(b"no log")

    with pytest.raises(DamagedError, match=f"{name}.*{reason}"):
        await committing.add("g", parent)


@pytest.mark.parametrize(
    ("limit", "most", "kind"),
    [("_MAX_LOGS", 1, "too_many_commits"), ("_MAX_LOG_NBYTES", 200, "too_many_changes")],
)
async def test_commit_over_too_much_is_refused(
    committing: Committing, monkeypatch: pytest.MonkeyPatch, limit: str, most: int, kind: str
) -> None:
    """A commit over more commits, or larger changes, than can be compared is a conflict; one over
    as much as the limit is made.
    """
    monkeypatch.setattr(f"shardgate.icechunk.commit.{limit}", most)
    await committing.add("root")
    parent = (await committing.add("a", committing.tip)).snapshot_id

    await committing.add("b", committing.tip)
    await committing.add("c", parent)
    with pytest.raises(CommitConflictError) as raised:
        await committing.add("d", parent)

    assert [each["kind"] for each in raised.value.conflicts] == [kind]
    assert committing.messages() == ["c", "b", "a", "root"]


async def test_commit_to_an_unsorted_repository_is_damage(committing: Committing) -> None:
    """A commit raises DamagedError where the tip of its branch is not listed in order of ids."""
    listed = snapshot(b"z" * 12), snapshot(b"a" * 12)
    repo = Repo(branches=[ref("main", 1)], snapshots=listed)
    (committing.place.folder / "repo").write_bytes(repo.file())

    with pytest.raises(DamagedError, match="the tip of a branch, not in order of ids"):
        await committing.add("g")


async def test_commit_of_one_chunk_takes_two_reads_and_five_writes(tmp_path: Path) -> None:
    """A commit of one chunk reads `repo`, and asks for the chunk's length; what the commit before
    has written is known. It writes manifest, snapshot, log and backup, then `repo`.
    """
    place, calls = new_place(tmp_path), list[Call]()
    session = place.create().writable_session("main")
    zarr.create_group(session.store).create_array("a", shape=(6,), chunks=(2,), dtype="u1")
    session.commit("first")
    store = TracedStore(LocalStore(), calls.append)
    replica = await Replica.of(store, directory=ObjectRef(place.folder.as_uri(), ""))

    for number in range(3):
        chunk_id = await put_chunk(store, replica.opened, b"12")
        request = CommitRequest("main", "", f"{number}", WriteId(f"id-{number}"))
        payload = Payloads.of([Native(chunk_id, ByteRange(0, 2))])
        edit = SetChunks("/a", np.array([[number]], np.uint32), payload)
        calls.clear()
        await replica.committer.commit_edits(replica.opened, [edit], request)

    made = [
        (each.method, each.ref.key.partition("/")[0]) for each in calls if each.method != "safety"
    ]
    assert made[:2] == [("get", "repo"), ("stat", "chunks")]
    assert set(made[2:-1]) == {
        ("put", folder) for folder in ("manifests", "snapshots", "transactions", "overwritten")
    }
    assert made[-1] == ("put", "repo")
    assert len(made) == 7


async def test_written_files_are_known_as_they_are_read(tmp_path: Path) -> None:
    """A snapshot that was just written is cached as its file is decoded."""
    place = new_place(tmp_path)
    session = place.create().writable_session("main")
    root = zarr.create_group(session.store, attributes={"x": 1})
    root.create_array("z/b", shape=(6,), chunks=(2,), dtype="u1", dimension_names=["t"])[:] = 1
    root.create_array("é", shape=(), dtype="u1")
    session.commit("first")
    directory = ObjectRef(place.folder.as_uri(), "")
    writer, reader = [await Replica.of(LocalStore(), directory=directory) for _ in range(2)]
    changes = ChangeSet(new={b"new node": NodeDocument("/a", GROUP)})
    request = CommitRequest("main", place.open().lookup_branch("main"), "a", WriteId("id"))

    made = await writer.committer.commit(writer.opened, changes, request)

    known, read = [
        await read_snapshot(each.opened.repository, made.snapshot_id, each.opened.fetch)
        for each in (writer, reader)
    ]
    assert known is not None
    assert read is not None
    assert known == read
    assert list(known.nodes) == list(read.nodes)


OTHERS = [encode_id(secrets.token_bytes(12))[1:] for _ in range(100)]
MOST_LISTED = 100_000
"""Number of names after which a listing should have been given up."""


class CrowdedStore(LocalStore):
    """Lists other chunk files first, without end if *crowd* is `None`."""

    def __init__(self, crowd: int | None) -> None:
        super().__init__()
        self.crowd = crowd

    async def list(
        self, prefix: ObjectRef, *, delimiter: str = "", after: str = ""
    ) -> AsyncGenerator[Listed]:
        """Yield made-up names first."""
        others = 0
        while self.crowd is None or others < self.crowd:
            others += 1
            assert others <= MOST_LISTED
            name = prefix.key + OTHERS[others % len(OTHERS)]
            yield Listed(ObjectRef(prefix.bucket, name), 1)
            await yield_to_loop(others)
        async for each in super().list(prefix, delimiter=delimiter, after=after):
            yield each


@pytest.mark.parametrize(("crowd", "count"), [(None, 3), (0, 300), (2000, 300), (None, 300)])
async def test_chunk_lengths_are_found_among_many_files(
    tmp_path: Path, crowd: int | None, count: int
) -> None:
    """Lengths of chunk files are found among any number of others; missing files are left out.

    A listing without end is given up. The names of the files begin with two letters.
    """
    store = CrowdedStore(crowd)
    place = new_place(tmp_path)
    place.create()
    directory = ObjectRef(place.folder.as_uri(), "")
    opened = (await Replica.of(store, directory=directory)).opened
    ids = [bytes([8 * (number % 2)]) + secrets.token_bytes(11) for number in range(count)]
    (place.folder / "chunks").mkdir()
    for number, chunk_id in enumerate(ids[1:], 1):
        (place.folder / "chunks" / encode_id(chunk_id)).write_bytes(bytes(number))

    found = await chunk_lengths(store, opened.repository, ids)

    assert found == {chunk_id: number for number, chunk_id in enumerate(ids[1:], 1)}
