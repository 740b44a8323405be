"""``repo`` as written here and read by the library; ids of writes."""

import sys
import time
from functools import reduce
from itertools import count
from pathlib import Path
from typing import Any

import icechunk
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardgate.errors import BadBodyError, ClockSkewError
from shardgate.formats.icechunk.flexbuffers import encode_flexbuffer
from shardgate.formats.icechunk.ids import decode_id, encode_id
from shardgate.formats.icechunk.metadata_items import encode_metadata
from shardgate.formats.icechunk.repo_info import REPO, RepoInfo, RepoInfoDecoder, SnapshotInfo
from shardgate.formats.icechunk.repo_writer import (
    NewSnapshot,
    RefUpdate,
    RepoUpdate,
    WriteId,
    check_metadata,
    create_repo,
    find_write,
    marked,
    rewrite_repo,
    seal_repo,
)
from shardgate.formats.reading import DecodeError
from tests.support.attacks.mutating import Change, at_random, changes
from tests.support.formats.icechunk.building import REPO_INFO, Numbers, Struct, Structs, envelope
from tests.support.formats.icechunk.building_repo import (
    FIRST,
    NOON,
    U8,
    U16,
    U64,
    Repo,
    U16s,
    item,
    ref,
    snapshot,
    update,
)
from tests.support.records import replaced
from tests.support.repositories import BUILDERS, METADATA, ROOT_ID

_numbers = count(1)
NEW_BRANCH = RefUpdate("branch_created", "b", FIRST)


def root_id() -> bytes:
    """Return the id of the first snapshot of every repository."""
    found = decode_id(ROOT_ID)
    assert found is not None
    return found


def decode(data: bytes) -> RepoInfo:
    """Decode a file ``repo``."""
    return RepoInfoDecoder(2**24)(data)


def root_of(info: RepoInfo) -> list[Any]:
    """Return the fields of the root table."""
    return info.reader().root(REPO)


def do(folder: Path, *changes: RepoUpdate) -> icechunk.Repository:
    """Rewrite ``repo`` in *folder* as the service does, and open the repository."""
    file, backup = folder / "repo", f"repo.{next(_numbers):014d}.AAAAAAAAAAAAAAAAAAAA"
    before = file.read_bytes()
    (folder / "overwritten").mkdir(exist_ok=True)
    (folder / "overwritten" / backup).write_bytes(before)
    after = rewrite_repo(decode(before), changes, time.time_ns() // 1000, backup)
    file.write_bytes(seal_repo(after))
    return icechunk.Repository.open(icechunk.local_filesystem_storage(str(folder)))


def told(repo: icechunk.Repository) -> dict[str, Any]:
    """Return what the library reads from ``repo``, without header and operations."""
    info: dict[str, Any] = repo.inspect_repo_info()
    return {
        name: value
        for name, value in info.items()
        if name not in ("header", "latest_updates", "repo_before_updates")
    }


def pruned_logs(folder: Path) -> list[tuple[bytes, ...]]:
    """Return the logs of expired ancestors for each snapshot."""
    info = decode((folder / "repo").read_bytes())
    return [each.pruned_ancestor_tx_logs for each in info.snapshots()]


def test_rewrite_keeps_everything_else(tmp_path: Path) -> None:
    """A rewrite changes only its ref; the library reads the rest unchanged and writes on."""
    written = BUILDERS["expired"](tmp_path)
    written.repo.set_status(icechunk.RepoStatus(icechunk.RepoAvailability.online))
    before = told(written.repo)
    logs = pruned_logs(tmp_path)
    assert any(logs)

    repo = do(tmp_path, RefUpdate("tag_created", "ours", root_id()))

    before["tags"]["ours"] = ROOT_ID
    assert told(repo) == before
    assert pruned_logs(tmp_path) == logs
    repo.create_tag("theirs", ROOT_ID)
    assert repo.lookup_tag("theirs") == ROOT_ID


def test_operations_are_logged_as_by_the_library(tmp_path: Path) -> None:
    """Each change of a ref is made and logged with the library's kind of operation."""
    written = BUILDERS["eventful"](tmp_path)
    tip = written.repo.lookup_branch("main")
    tip_id = decode_id(tip)
    assert tip_id is not None
    length = len(list(written.repo.ops_log()))

    for change in (
        RefUpdate("branch_created", "néw", root_id()),
        RefUpdate("branch_reset", "néw", tip_id),
        RefUpdate("branch_created", "gone", root_id()),
        RefUpdate("branch_deleted", "gone"),
        RefUpdate("tag_created", "t", tip_id),
        RefUpdate("tag_deleted", "t"),
    ):
        repo = do(written.folder, change)

    assert repo.lookup_branch("néw") == tip
    assert "gone" not in repo.list_branches()
    assert "t" not in repo.list_tags()
    assert "t" in told(repo)["deleted_tags"]
    log = list(repo.ops_log())
    assert len(log) == length + 6
    assert [type(each.kind).__name__ for each in log[:6]] == [
        "TagDeleted",
        "TagCreated",
        "BranchDeleted",
        "BranchCreated",
        "BranchReset",
        "BranchCreated",
    ]


def test_unknown_content_is_kept() -> None:
    """Reserved bytes, configuration, metadata and flags are kept, and absent fields stay absent."""
    more = {
        6: [item("b", b"\x01\x04\x01"), item("a", b"odd")],
        9: b"no configuration",
        10: U16s([7, 9]),
        11: U16s([]),
        12: b"extra",
    }
    pruned = {4: [item("n", b"v")], 5: Structs([b"a" * 12, b"b" * 12])}
    snapshots = (snapshot(FIRST), snapshot(b"second snaps", 0, "é" * 200, pruned))
    full = decode(Repo(snapshots=snapshots, more=more, branches=(ref("main", 1),)).file())
    bare = decode(Repo().file())

    for info in (full, bare):
        after = decode(seal_repo(rewrite_repo(info, [NEW_BRANCH], NOON + 1, "repo.1.A")))

        for slot in (9, 12):
            assert root_of(after)[slot] == root_of(info)[slot]
        for slot in range(6, 13):
            assert (root_of(after)[slot] is None) == (root_of(info)[slot] is None), slot
        assert list(after.snapshots()) == list(info.snapshots())


def test_rewrite_that_would_lose_fields_is_refused() -> None:
    """A rewrite of a file with unknown fields raises DecodeError."""
    for repo, reason in (
        (Repo(more={13: b"new"}), ""),
        (Repo(updates=(update(17, {}),)), ""),
        (Repo(updates=(update(5, {0: "t", 1: U8(1)}),)), ""),
        (Repo(snapshots=(snapshot(FIRST, more={6: b"new"}),)), ""),
        (Repo(status={0: U8(0), 1: U64(NOON), 3: b"new"}), ""),
        (Repo(snapshots=(snapshot(FIRST, parent=3),)), ""),
        (Repo(version=1), ""),
        (Repo(snapshots=(), branches=()), "not listed"),
        (Repo(updates=()), "no operation"),
    ):
        info = decode(repo.file())
        with pytest.raises(DecodeError, match=reason or None):
            rewrite_repo(info, [NEW_BRANCH], NOON + 1, "repo.1.A")


def test_rewrite_keeps_shared_values_shared() -> None:
    """A rewrite of a file whose snapshots share one long message is no longer for that."""
    message = Numbers("B", b"x" * 100_000)
    shared = [{**snapshot(number.to_bytes(12)), 3: message} for number in range(1, 1000)]
    info = decode(Repo(snapshots=shared).file())
    change = RefUpdate("branch_created", "b", b"\1".rjust(12, b"\0"))

    after = rewrite_repo(info, [change], NOON + 1, "repo.1.A")

    assert len(after.payload) < 1.1 * len(info.payload)


def test_operations_before_a_migration_are_kept(tmp_path: Path) -> None:
    """Operations before a migration stay in the log through several rewrites."""
    written = BUILDERS["migrated"](tmp_path)
    length = len(list(written.repo.ops_log()))

    for number in range(5):
        repo = do(tmp_path, RefUpdate("tag_created", f"ours {number}", root_id()))
        assert len(list(repo.ops_log())) == length + 1 + number


def test_log_is_complete_after_several_changes_at_once(tmp_path: Path) -> None:
    """Several changes in one rewrite stay in the log, each once, while the library writes on."""
    config = icechunk.RepositoryConfig(num_updates_per_repo_info_file=3)
    storage = icechunk.local_filesystem_storage(str(tmp_path))
    icechunk.Repository.create(storage, config=config).create_tag("before", ROOT_ID)
    names = [f"ours {number}" for number in range(5)]

    repo = do(tmp_path, *(RefUpdate("tag_created", name, root_id()) for name in names))

    for number in range(8):
        log = list(repo.ops_log())
        assert [getattr(each.kind, "name", None) for each in log[:-1]] == [*names[::-1], "before"]
        moments = [each.updated_at for each in log]
        assert sorted(set(moments), reverse=True) == moments
        names.append(f"theirs {number}")
        repo.create_tag(names[-1], ROOT_ID)


def test_new_snapshot_is_inserted_among_many() -> None:
    """A new snapshot is inserted in order; all others keep their fields and parents, also in the
    rewrite after that. The file of a rewrite decodes to the version that was returned.
    """
    ids = [number.to_bytes(2) + b"id" * 5 for number in range(1, 1000)]
    snapshots = [
        snapshot(
            each,
            (7 * row) % len(ids) if row else -1,
            "é" * (row % 9),
            {4: [item(f"{number}", b"v" * number) for number in range(row % 5)]} if row % 3 else {},
        )
        for row, each in enumerate(ids)
    ]
    info = decode(Repo(snapshots=snapshots).file())
    metadata, pruned = encode_metadata(METADATA), (ids[7], ids[9])
    new = SnapshotInfo(b"\0\7" + b"new " * 2 + b"!!", ids[500], NOON, "née", metadata, pruned)

    after = decode(seal_repo(rewrite_repo(info, [NewSnapshot("main", new)], NOON + 1, "repo.1.A")))

    found = list(after.snapshots())
    assert sorted(found, key=lambda each: each.snapshot_id) == found
    added = after.snapshot(after.branches["main"])
    assert added is not None
    assert added == new
    assert [each for each in found if each != added] == list(info.snapshots())

    again = rewrite_repo(after, [RefUpdate("branch_created", "b", ids[0])], NOON + 2, "repo.2.A")

    assert again.snapshots() == found
    assert decode(seal_repo(again)) == again


def test_parent_that_is_left_out_moves_with_the_others() -> None:
    """A snapshot without the field of its parent, which is the first in the list, keeps that parent
    when another snapshot becomes the first.
    """
    snapshots = (snapshot(FIRST), snapshot(b"second snaps", parent=None, message="é"))
    info = decode(Repo(snapshots=snapshots).file())
    new = SnapshotInfo(bytes(12), FIRST, NOON, "", encode_metadata(METADATA))

    after = rewrite_repo(info, [NewSnapshot("main", new)], NOON + 1, "repo.1.A")

    assert after.snapshots() == [new, *info.snapshots()]


def test_many_rewrites_do_not_fill_a_file_with_old_operations(tmp_path: Path) -> None:
    """Operations that have left the list leave the file too, before they are most of it; the
    library reads it, and commits.
    """
    config = icechunk.RepositoryConfig(num_updates_per_repo_info_file=2)
    storage = icechunk.local_filesystem_storage(str(tmp_path))
    repo = icechunk.Repository.create(storage, config=config)
    repo.writable_session("main").commit("theirs", allow_empty=True)
    repo = do(tmp_path, RefUpdate("branch_created", "b", root_id()))
    before = told(repo)
    info = decode((tmp_path / "repo").read_bytes())
    snapshots = info.snapshots()

    sizes = []
    for number in range(300):
        name = f"{number:04d}" * 60
        for change in (
            RefUpdate("branch_created", name, root_id()),
            RefUpdate("branch_deleted", name),
        ):
            moment = time.time_ns() // 1000
            info = rewrite_repo(info, [change], moment, f"repo.{number:014d}.AAAAAAAAAAAAAAAAAAAA")
        sizes.append(len(info.payload))

    assert max(sizes) > 64 * 1024
    assert sum(size < 8 * 1024 for size in sizes[100:]) > 0
    assert max(sizes) < 128 * 1024
    assert info.snapshots() == snapshots
    (tmp_path / "repo").write_bytes(seal_repo(info))
    repo = icechunk.Repository.open(storage)
    assert told(repo) == before
    repo.writable_session("main").commit("theirs too", allow_empty=True)
    assert [each.message for each in repo.ancestry(branch="main")][:2] == ["theirs too", "theirs"]


EVERY_KIND = (
    update(2, {0: U8(1), 1: U8(2)}),
    update(6, {0: "t", 1: Struct(FIRST)}),
    update(10, {0: "main", 1: Struct(FIRST)}, "repo.1.B"),
    update(15, {0: U16(3), 1: U8(1), 2: U8(1)}, "repo.1.C"),
    update(16, {0: {0: U8(2), 1: U64(NOON), 2: "moved"}}, "repo.1.D"),
    update(16, {}, "repo.1.E"),
    update(10, {0: "é", 1: Struct(FIRST)}, "repo.1.F"),
    update(1, {}),
)


@pytest.mark.soak
def test_file_of_too_many_tables_to_decode_at_once_is_changed() -> None:
    """A file close to its limit is repeated where its tables are too many to be written anew."""
    limit_nbytes = 2**20
    metadata = encode_metadata({"__shardgate": {"write_id": "once-" + 32 * "0"}})
    info = RepoInfoDecoder(limit_nbytes)(create_repo(1, 1))
    parent = root_id()
    numbers = count(1)
    while len(info.payload) < 0.8 * limit_nbytes:
        made = []
        for _ in range(4):
            object_id = next(numbers).to_bytes(12)
            snapshot = SnapshotInfo(object_id, parent, 1, "a commit", metadata)
            made.append(NewSnapshot("main", snapshot))
            parent = object_id
        info = rewrite_repo(info, made, time.time_ns() // 1000, "repo.00000000000001.AAAAAAAAAAAA")

    assert info.branches["main"] == encode_id(parent)


def test_operations_of_each_kind_are_kept() -> None:
    """A rewrite keeps operations of every kind, and gives the newest one the name of its backup."""
    info = decode(Repo(updates=EVERY_KIND).file())

    after = decode(seal_repo(rewrite_repo(info, [NEW_BRANCH], NOON + 1, "repo.1.A")))

    newest, before, *others = after.updates()
    assert (newest.kind, newest.backup_path) == ("branch_created", None)
    assert [replaced(before, backup_path=None), *others] == info.updates()
    assert before.backup_path == "repo.1.A"


@pytest.mark.parametrize(
    ("most", "kept", "backup"),
    [(0, 1, "repo.1.A"), (1, 1, "repo.1.A"), (2, 3, "repo.1.B"), (4, 4, "repo.1.C"), (8, 9, None)],
)
def test_operations_beyond_the_configured_number_are_in_a_backup(
    most: int, kept: int, backup: str | None
) -> None:
    """Operations beyond the configured number are left out from the first that has a backup on."""
    config = encode_flexbuffer({"num_updates_per_repo_info_file": most})
    info = decode(Repo(updates=EVERY_KIND, more={9: config}).file())

    after = decode(seal_repo(rewrite_repo(info, [NEW_BRANCH], NOON + 1, "repo.1.A")))

    assert len(after.updates()) == kept
    assert after.repo_before_updates == backup


def test_rewrite_calls_no_function_for_each_snapshot() -> None:
    """A rewrite of 5,000 snapshots calls as many functions as one of 50."""

    def count_calls(count: int) -> int:
        ids = [number.to_bytes(12) for number in range(count)]
        items = {4: [item("n", b"v"), item("é", b"w" * 9)]}
        snapshots = [snapshot(each, row - 1, f"{row}", items) for row, each in enumerate(ids)]
        updates = [update(10, {0: "main", 1: Struct(each)}) for each in ids[:40]]
        info = decode(Repo(snapshots=snapshots, updates=updates).file())
        calls = 0

        def note(*_: object) -> None:
            nonlocal calls
            calls += 1

        new = SnapshotInfo(b"new snapshot", ids[-1], NOON, "new", encode_metadata(METADATA))
        sys.setprofile(note)
        try:
            rewrite_repo(info, [NewSnapshot("main", new)], NOON + 1, "repo.1.A")
        finally:
            sys.setprofile(None)
        return calls

    count_calls(50)
    assert count_calls(5000) < 1.1 * count_calls(50)


@at_random(200)
@given(st.lists(changes(), min_size=1, max_size=2))
def test_rewrite_of_a_changed_file_copies_what_is_read(made: list[Change]) -> None:
    """A rewrite of a randomly changed file raises DecodeError, or has the snapshots and operations
    that can be read from that file.
    """
    items = {4: [item("n", b"value"), item("é", b"")], 5: Structs([b"a" * 12])}
    snapshots = [snapshot(FIRST), snapshot(b"second snaps", 0, "é", items)]
    data = Repo(snapshots=snapshots, updates=EVERY_KIND).payload()
    try:
        info = decode(envelope(reduce(lambda data, change: change(data), made, data), REPO_INFO))
        after = decode(seal_repo(rewrite_repo(info, [NEW_BRANCH], 2**57, "repo.1.A")))
        read = info.snapshots()
        updates = info.updates()
    except (DecodeError, ClockSkewError):
        return

    assert sorted(map(repr, after.snapshots())) == sorted(map(repr, read))
    found = [replaced(each, backup_path=None) for each in after.updates()[1:]]
    assert found == [replaced(each, backup_path=None) for each in updates[: len(found)]]


def test_metadata_of_a_snapshot_has_the_id_of_its_write() -> None:
    """A snapshot's metadata has its write's id and rebases; clients cannot set these names."""
    told = marked({"who": "me"}, WriteId("key-1", "f"), 2)

    assert told == {
        "who": "me",
        "__icechunk": {"rebase_attempts": 2},
        "__shardgate": {"write_id": "key-1", "request": "f"},
    }
    assert marked({}, WriteId("s"), 0) == {"__shardgate": {"write_id": "s"}}
    for name in ("__icechunk", "__shardgate"):
        with pytest.raises(BadBodyError, match=name):
            check_metadata({name: 1})


def test_write_is_found_by_its_own_mark_alone() -> None:
    """A write is found by the mark in its metadata, not by the same text in a message."""
    info = decode(Repo(snapshots=(snapshot(FIRST, message="made for key-1"),)).file())
    items = encode_metadata(marked({}, WriteId("key-1"), 0)).items
    fields = {4: [item(name, value) for name, value in items]}
    made = decode(Repo(snapshots=(snapshot(FIRST, more=fields),)).file())

    assert find_write(info, WriteId("key-1")) is None
    assert find_write(made, WriteId("key-1")) == made.snapshots()[0]


def test_long_metadata_of_a_snapshot_are_refused() -> None:
    """A value of a snapshot's metadata of more than 8 MiB is not read."""
    fields = {4: [item("a", bytes(8 * 2**20 + 1))]}
    file = Repo(snapshots=(snapshot(FIRST, more=fields),)).file()
    info = RepoInfoDecoder(2**28)(file)

    with pytest.raises(DecodeError, match="a metadata item has more than 8388608 bytes"):
        info.snapshots()
