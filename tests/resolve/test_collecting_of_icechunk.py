"""The garbage of a repository is collected as the library does it, and nothing else goes."""

import os
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import icechunk
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import ClockSkewError, DamagedError, LockedError, ReadOnlyError
from tests.clients.icechunk.library import contents_of
from tests.collecting import OLD_S, age, collect, collect_theirs, expire, files_of
from tests.formats.icechunk.histories import (
    STEPS,
    History,
    Step,
    copied,
    info_of,
    opened,
    storage,
    told_of,
)

DAY_S = 24 * 3600
COMMITS = [Step("commit", "main", number) for number in (1, 3, 5, 1, 2)]


@pytest.fixture
def littered(tmp_path: Path) -> Path:
    """Write a repository with snapshots that nothing leads to any more, its files all old."""
    history = History(tmp_path / "repository")
    history.take([*COMMITS, Step("reset", "main", 3), Step("commit", "main", 7)])
    age(history.folder)
    return history.folder


@settings(max_examples=40)
@given(steps=STEPS, old=st.lists(st.booleans(), min_size=1, max_size=7))
def test_what_goes_is_what_the_library_lets_go(steps: Sequence[Step], old: Sequence[bool]) -> None:
    """Whatever was done before, and however old files are; all that refs lead to is still read.

    But for what snapshots need that are young, and not listed.
    """
    with tempfile.TemporaryDirectory() as folder:
        history = History(Path(folder) / "repository")
        history.take(steps)
        names = sorted(files_of(history.folder), key=lambda n: (history.folder / n).stat().st_mtime)
        is_old = {name: old[at % len(old)] for at, name in enumerate(names)}
        age(history.folder, is_old)
        before = contents_of(opened(history.folder))
        ours, others = copied(history.folder, "ours"), copied(history.folder, "theirs")
        listed = {f"snapshots/{each.snapshot_id}" for each in info_of(ours).snapshots()}

        told = collect(ours, execute=False)
        report, summary = collect(ours), collect_theirs(others)

        assert told_of(ours) == told_of(others)
        assert contents_of(opened(ours)) == before
        removed = {name: swept.removed for name, swept in report.folders.items()}
        assert removed == {name: swept.removed for name, swept in told.folders.items()}
        assert removed["snapshots"].count == summary.snapshots_deleted
        assert removed["transactions"].count == summary.transaction_logs_deleted
        assert files_of(ours).keys() >= files_of(others).keys()
        if any(n.startswith("snap") and n not in listed and not is_old[n] for n in names):
            # They may be of commits that are under way: we keep what they need.
            more = files_of(ours).keys() - files_of(others).keys()
            assert all(name.startswith(("manifests/", "chunks/")) for name in more)
            return
        assert files_of(ours) == files_of(others)
        assert removed["manifests"].count == summary.manifests_deleted
        assert removed["chunks"].count == summary.chunks_deleted
        assert sum(each.nbytes for each in removed.values()) == summary.bytes_deleted


def test_nothing_is_changed_unless_it_is_asked_for(littered: Path) -> None:
    """It is only told."""
    before = (littered / "repo").read_bytes(), files_of(littered)

    report = collect(littered, execute=False)

    assert report.snapshots_dropped == report.folders["snapshots"].removed.count == 3
    assert ((littered / "repo").read_bytes(), files_of(littered)) == before


@pytest.mark.parametrize("step", range(6))
def test_what_is_committed_meanwhile_is_kept(littered: Path, step: int) -> None:
    """Whenever a commit comes, and a branch at what nothing led to: as long as it may, it stays."""
    repository, branches = opened(littered), set[str]()
    lost = next(each for each in collectable(littered) if each.startswith("snapshots/"))
    heard: list[str] = []

    def commit(told: str) -> None:
        heard.append(told)
        if len(heard) != step + 1:
            return
        session = repository.writable_session("main")
        zarr.open_array(session.store, path="a1")[:16] = 99
        session.commit("meanwhile")
        try:
            repository.create_branch("again", lost.removeprefix("snapshots/"))
            branches.add("again")
        except icechunk.IcechunkError:
            assert told.startswith("looking through")

    collect(littered, on_progress=commit)

    assert len(heard) > step
    found = opened(littered)
    assert next(iter(found.ancestry(branch="main"))).message == "meanwhile"
    assert found.list_branches() >= branches
    assert contents_of(found)
    assert (lost in files_of(littered)) == bool(branches)


def collectable(folder: Path) -> list[str]:
    """Name the files that the library would remove."""
    other = copied(folder, "other")
    collect_theirs(other)
    return sorted(files_of(folder).keys() - files_of(other).keys())


@pytest.mark.parametrize("kind", ["snapshots", "manifests"])
@pytest.mark.parametrize("damage", [None, b"", b"ICE"])
def test_where_it_is_not_known_what_is_needed_nothing_goes(
    littered: Path, kind: str, damage: bytes | None
) -> None:
    """A file that is damaged or missing may have led to anything."""
    gone = set(collectable(littered))
    name = next(each for each in sorted(files_of(littered).keys() - gone) if each.startswith(kind))
    (littered / name).unlink()
    if damage is not None:
        (littered / name).write_bytes(damage)
    before = (littered / "repo").read_bytes(), files_of(littered)

    with pytest.raises(DamagedError, match=name):
        collect(littered)

    assert ((littered / "repo").read_bytes(), files_of(littered)) == before


def test_a_missing_file_that_nothing_needs_is_no_matter(littered: Path) -> None:
    """The library gives up there."""
    gone = collectable(littered)
    missing = next(name for name in gone if name.startswith("snapshots"))
    (littered / missing).unlink()

    collect(littered)

    assert not files_of(littered).keys() & set(gone)


def test_a_commit_that_is_under_way_keeps_what_it_needs(littered: Path) -> None:
    """A young snapshot that is not listed yet may have old manifests; the library takes those."""
    gone = collectable(littered)
    before = copied(littered, "before")
    collect(littered)
    for name in gone:
        (littered / name).write_bytes((before / name).read_bytes())
    age(littered, {name: not name.startswith("snapshots") for name in files_of(littered)})

    collect(littered)

    assert not {name for name in gone if name.startswith("transactions")} & set(files_of(littered))
    kept = {name for name in gone if not name.startswith("transactions")}
    assert kept <= set(files_of(littered))


def test_files_of_others_stay(littered: Path) -> None:
    """What has no id for a name is none of a repository's."""
    names = ["chunks/readme", "chunks/0/1", "snapshots/lower", "attributes/0123456789ABCDEFGHJ0"]
    for name in names:
        (littered / name).parent.mkdir(exist_ok=True, parents=True)
        (littered / name).write_bytes(b"x")
        os.utime(littered / name, (OLD_S, OLD_S))

    collect(littered)

    assert all((littered / name).exists() for name in names)


def test_a_repository_that_is_read_only_is_left_alone(littered: Path) -> None:
    """Whoever owns it said so; not even a dry run goes on."""
    repository = opened(littered)
    repository.set_status(
        icechunk.RepoStatus(icechunk.RepoAvailability.read_only, limited_availability_reason="x")
    )
    for execute in (False, True):
        with pytest.raises(LockedError):
            collect(littered, execute=execute)
        with pytest.raises(LockedError):
            expire(littered, execute=execute)


@pytest.mark.parametrize("ahead_s", [-DAY_S, DAY_S])
def test_who_has_a_wrong_clock_collects_nothing(littered: Path, ahead_s: float) -> None:
    """He cannot know what is old, or which sessions have expired."""
    before = files_of(littered)

    with pytest.raises(ClockSkewError):
        collect(littered, clock=lambda: time.time() + ahead_s)

    assert files_of(littered) == before
    assert not list((littered / "sessions").glob("*"))


def test_version_1_of_the_format_is_left_alone(tmp_path: Path) -> None:
    """We do not write it."""
    icechunk.Repository.create(storage(tmp_path / "old"), spec_version=1)
    for call in (collect, expire):
        with pytest.raises(ReadOnlyError):
            call(tmp_path / "old", execute=False)


def test_expiration_is_logged_though_nothing_expires(littered: Path) -> None:
    """As the library does, and once for each time."""
    theirs = copied(littered, "theirs")

    for _ in range(2):
        assert not expire(littered, OLD_S).snapshots
        opened(theirs).expire_snapshots(datetime.fromtimestamp(OLD_S, UTC))

    assert told_of(littered) == told_of(theirs)


def test_what_expired_is_collected(littered: Path) -> None:
    """But for the logs that rebases ask for."""
    before = contents_of(opened(littered))

    expired = expire(littered)
    age(littered)
    collect(littered)

    found = contents_of(opened(littered))
    names = files_of(littered)
    assert len(found) == 2
    assert found.items() <= before.items()
    assert sum(name.startswith("snapshots") for name in names) == 2
    assert {f"transactions/{each}" for each in expired.snapshots} & names.keys()
