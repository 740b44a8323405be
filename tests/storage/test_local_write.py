"""Writes of local files: crashes, races, links, and names with a meaning to file systems."""

import asyncio
import errno
import fcntl
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from shardgate.errors import (
    BadKeyError,
    ConflictError,
    StorageDeniedError,
    StorageTimeoutError,
    StorageUnavailableError,
    UnwritableError,
)
from shardgate.model import ByteRange, ETag, ObjectRef
from shardgate.storage.contract import ABSENT, CONFLICT, TEMPORARY, Absent, Conflict
from shardgate.storage.local import LocalStore
from shardgate.storage.local_files import translated
from shardgate.storage.local_write import Folder, LocalWriter
from tests.support.storage.reading import found, stat_of

SCRIPT = [sys.executable, "-m", "tests.support.storage.local_writers"]
HERE = Path(__file__).parents[2]


def ref_of(folder: Path, key: str = "key") -> ObjectRef:
    """Return the name of an object of *folder*."""
    return ObjectRef(folder.as_uri(), key)


async def put(store: LocalStore, ref: ObjectRef, data: bytes) -> ETag:
    """Write an object unconditionally."""
    etag = await store.put(ref, [data], expected=None)
    assert not isinstance(etag, Conflict)
    return etag


def test_a_killed_writer_leaves_the_old_file_or_the_new(tmp_path: Path) -> None:
    """A writer killed before any system call leaves the old file or the new.

    The next writer removes its temporary files.
    """
    done = subprocess.run(
        [*SCRIPT, "crash", str(tmp_path)], cwd=HERE, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    assert min(map(int, done.stdout.split())) > 6


def run_two(job: str, folder: Path, *arguments: str) -> None:
    """Run *job* in two processes at once, each with its argument, and expect success."""
    with ExitStack() as stack:
        commands = [[*SCRIPT, job, str(folder), argument] for argument in arguments]
        both = [stack.enter_context(subprocess.Popen(each, cwd=HERE)) for each in commands]

    assert [each.returncode for each in both] == [0, 0]


def test_processes_lose_no_update(folder: Path) -> None:
    """Two processes that increment a number by compare-and-swap reach the sum."""
    (folder / "key").write_bytes(b"0")
    run_two("count", folder, "80", "80")

    assert (folder / "key").read_bytes() == b"160"
    assert os.listdir(folder) == ["key"]  # noqa: PTH208  the names are meant


async def test_temporary_files_of_dead_writers_are_removed(store: LocalStore, folder: Path) -> None:
    """A write removes temporary files that no writer has locked, and keeps locked ones."""
    names = [f"{TEMPORARY}{n}" for n in ("dead", "alive")]
    for name in names:
        (folder / name).write_bytes(b"half")
    with (folder / names[1]).open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)

        await put(store, ref_of(folder), b"1")

        assert sorted(os.listdir(folder)) == [names[1], "key"]  # noqa: PTH208


async def test_write_waits_for_the_lock_of_its_folder(store: LocalStore, folder: Path) -> None:
    """A write waits for the lock of its folder; reads do not."""
    await put(store, ref_of(folder), b"old")
    with Folder.opened(os.fsencode(folder)) as directory:
        with directory.locked():
            waiting = asyncio.create_task(put(store, ref_of(folder), b"new"))
            await asyncio.sleep(0.1)
            assert not waiting.done()
            assert (await found(store, ref_of(folder))).data == b"old"
        await waiting


def after_look_up(
    monkeypatch: pytest.MonkeyPatch, nth: int, change: Callable[[], object]
) -> list[os.stat_result | None]:
    """Call *change* after the *nth* look-up of a file (1, 2, …), and return all that they saw."""
    look = Folder.status
    looks = list[os.stat_result | None]()

    def look_and_change(directory: Folder, name: bytes) -> os.stat_result | None:
        looks.append(look(directory, name))
        if len(looks) == nth:
            change()
        return looks[-1]

    monkeypatch.setattr(Folder, "status", look_and_change)
    return looks


@pytest.mark.parametrize("expected", [ABSENT, None])
def test_file_created_without_a_lock_is_detected(
    folder: Path, monkeypatch: pytest.MonkeyPatch, expected: Absent | None
) -> None:
    """A write that expects absence conflicts with a file created after its look-up.

    An unconditional write replaces that file.
    """
    looks = after_look_up(monkeypatch, 2, lambda: (folder / "key").write_bytes(b"theirs"))
    written = LocalWriter().put(ref_of(folder), [b"ours"], expected)

    assert looks == [None, None]
    assert (written is CONFLICT) == (expected is ABSENT)
    assert (folder / "key").read_bytes() == (b"theirs" if expected is ABSENT else b"ours")
    assert os.listdir(folder) == ["key"]  # noqa: PTH208


@pytest.mark.parametrize(
    ("change", "left"), [("replace", [b"theirs"]), ("remove", []), ("touch", [b"old"])]
)
def test_file_changed_before_its_ranges_are_copied_is_a_conflict(
    store: LocalStore,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: str,
    left: list[bytes],
) -> None:
    """A write of ranges conflicts with a file that a program without locks changes meanwhile."""
    (folder / "key").write_bytes(b"old")
    expected = asyncio.run(stat_of(store, ref_of(folder))).etag

    def interfere() -> None:
        if change == "touch":
            os.utime(folder / "key", ns=(0, 1))
            return
        (folder / "key").unlink()
        if change == "replace":
            (folder / "key").write_bytes(b"theirs")

    after_look_up(monkeypatch, 1, interfere)
    written = LocalWriter().put(ref_of(folder), [ByteRange(0, 3), b"new"], expected)

    assert written is CONFLICT
    assert [each.read_bytes() for each in folder.iterdir()] == left


def test_write_over_a_file_of_the_future_is_newer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unconditional write is newer than a file of a later time made since its look-up."""
    future_ns = 2**62

    def make() -> None:
        (folder / "key").write_bytes(b"theirs")
        os.utime(folder / "key", ns=(future_ns, future_ns))

    after_look_up(monkeypatch, 1, make)
    LocalWriter().put(ref_of(folder), [b"ours"], None)

    assert (folder / "key").read_bytes() == b"ours"
    assert (folder / "key").stat().st_mtime_ns == future_ns + 1


async def test_versions_have_distinct_etags(store: LocalStore, folder: Path) -> None:
    """Each version has its own ETag, also if inode numbers repeat or the clock is wrong."""
    seen = {await put(store, ref_of(folder), b"x") for _ in range(50)}
    future_ns = 2**62
    os.utime(folder / "key", ns=(future_ns, future_ns))
    seen |= {await put(store, ref_of(folder), b"x") for _ in range(3)}

    assert len(seen) == 53
    assert (folder / "key").stat().st_mtime_ns == future_ns + 3


async def test_a_link_stays_a_link(store: LocalStore, folder: Path) -> None:
    """Writing or deleting by a link's name changes its target, and the link stays."""
    (folder / "far").mkdir()
    (folder / "far" / "target").write_bytes(b"old")
    (folder / "link").symlink_to("far/target")
    (folder / "folder").symlink_to("far")
    stat = await stat_of(store, ref_of(folder, "link"))

    etag = await store.put(ref_of(folder, "link"), [b"new"], expected=stat.etag)
    assert (folder / "far" / "target").read_bytes() == b"new"
    assert await store.put(ref_of(folder, "folder/target"), [b"2"], expected=stat.etag) is CONFLICT
    assert not isinstance(etag, Conflict)
    assert await store.delete(ref_of(folder, "link"), expected=etag) is True

    assert (folder / "link").is_symlink()
    assert await store.get(ref_of(folder, "link")) is None
    assert isinstance(await store.put(ref_of(folder, "link"), [b"3"], expected=ABSENT), str)
    assert (folder / "far" / "target").read_bytes() == b"3"


@pytest.mark.parametrize(
    ("link", "target", "key"),
    [
        ("link", "../secret", "link"),
        ("link", "../absent", "link"),
        ("link", "../outside", "link/key"),
        ("link", "../outside", "link/old"),
        ("link", "../outside", "link/a/b/key"),
        ("link", "..", "link/outside"),
    ],
)
async def test_write_follows_no_link_out_of_the_folder(
    store: LocalStore, folder: Path, link: str, target: str, key: str
) -> None:
    """A file or folder beyond a link out of the root is not made, replaced or removed."""
    outside = folder.parent / "outside"
    outside.mkdir()
    (outside / "old").write_bytes(b"old")
    (folder / link).symlink_to(target)
    before = sorted(folder.parent.rglob("*"))

    with pytest.raises(StorageDeniedError, match="leads out"):
        await store.put(ref_of(folder, key), [b"1"], expected=None)
    with suppress(StorageDeniedError):
        await store.delete(ref_of(folder, key), expected=None)
    with pytest.raises(StorageDeniedError, match="leads out"):
        await store.verify_conditional_writes(ref_of(folder, "link/"))

    assert sorted(folder.parent.rglob("*")) == before
    assert (outside / "old").read_bytes() == b"old"
    assert (folder.parent / "secret").read_bytes() == b"secret"


async def test_coded_file_is_not_replaced(store: LocalStore, folder: Path) -> None:
    """A PUT or DELETE of the plain name of a coded file is a conflict."""
    (folder / "0-64.gz").write_bytes(b"coded")
    stat = await stat_of(store, ref_of(folder, "0-64"))
    for expected in (None, ABSENT, stat.etag):
        with pytest.raises(ConflictError, match=r"\.gz"):
            await store.put(ref_of(folder, "0-64"), [b"1"], expected=expected)
    with pytest.raises(ConflictError, match=r"\.gz"):
        await store.delete(ref_of(folder, "0-64"), expected=stat.etag)
    await put(store, ref_of(folder, "0-64.gz"), b"new")

    assert os.listdir(folder) == ["0-64.gz"]  # noqa: PTH208


async def test_a_key_that_names_no_file_is_refused(store: LocalStore, folder: Path) -> None:
    """Writing a key that can be no file raises BadKeyError."""
    long = "n" * 256
    for key in ("", "a/", "../a", "a//b", "/a", ".", "a/..", "a\0", "\udc80", long, f"{long}/a"):
        with pytest.raises(BadKeyError):
            await store.put(ref_of(folder, key), [b"1"], expected=None)
    assert os.listdir(folder) == []  # noqa: PTH208


async def test_a_file_and_a_folder_of_one_name_conflict(store: LocalStore, folder: Path) -> None:
    """Writing a file over a folder, or below a file, raises ConflictError."""
    await put(store, ref_of(folder, "a/b"), b"1")

    for key in ("a", "a/b/c", "a/b/c/d"):
        with pytest.raises(ConflictError):
            await store.put(ref_of(folder, key), [b"1"], expected=None)
    for key in ("a/b/c", "a"):
        assert await store.delete(ref_of(folder, key), expected=None) is True
    assert [os.listdir(folder), os.listdir(folder / "a")] == [["a"], ["b"]]  # noqa: PTH208


@pytest.mark.parametrize("expected", [ABSENT, None])
async def test_empty_folder_is_replaced_by_a_file(
    store: LocalStore, folder: Path, expected: Absent | None
) -> None:
    """A folder of empty folders and temporary files of dead writers is replaced by a file."""
    (folder / "a/b/c").mkdir(parents=True)
    (folder / f"a/b/{TEMPORARY}dead").write_bytes(b"half")

    assert await store.delete(ref_of(folder, "a"), expected=None) is True
    assert isinstance(await store.put(ref_of(folder, "a"), [b"1"], expected=expected), str)

    assert (folder / "a").read_bytes() == b"1"


async def test_emptied_folders_are_removed(store: LocalStore, folder: Path) -> None:
    """Deleting the last file removes its folders, but not the root, links or other folders."""
    (folder / "far").mkdir()
    (folder / "link").symlink_to("far")
    (folder / "made/by/others").mkdir(parents=True)
    keys = ["a/b/c", "link/d/e", "f"]
    for key in keys:
        await put(store, ref_of(folder, key), b"1")

    for key in [*keys, "made/by/nobody", "made/by/others/0", "made/by/others/0/1"]:
        assert await store.delete(ref_of(folder, key), expected=None) is True

    assert sorted(os.listdir(folder)) == ["far", "link", "made"]  # noqa: PTH208
    assert os.listdir(folder / "far") == []  # noqa: PTH208
    assert (folder / "made/by/others").is_dir()


def test_removed_folder_is_made_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that other processes remove repeatedly during a write is made again."""
    removed: list[bytes] = []

    def remove(_: LocalWriter, directory: Folder) -> None:
        if len(removed) < 9:
            os.rmdir(directory.path)  # noqa: PTH106  paths are bytes
            removed.append(directory.path)

    monkeypatch.setattr(LocalWriter, "_sweep", remove)

    assert isinstance(LocalWriter().put(ref_of(folder, "a/b"), [b"1"], ABSENT), str)
    assert len(removed) == 9
    assert (folder / "a/b").read_bytes() == b"1"


def test_concurrent_writers_share_folders(folder: Path) -> None:
    """Two processes that write and remove keys in the same folders do not disturb each other."""
    run_two("come-and-go", folder, "0", "1")

    assert os.listdir(folder) == []  # noqa: PTH208


@pytest.mark.skipif(os.geteuid() == 0, reason="root may do everything")
async def test_a_folder_of_others_is_denied(store: LocalStore, folder: Path) -> None:
    """A folder without write permission raises StorageDeniedError, before the first write."""
    os.chmod(folder, 0o500)  # noqa: PTH101  of an async function

    with pytest.raises(StorageDeniedError):
        await store.verify_conditional_writes(ref_of(folder))
    with pytest.raises(StorageDeniedError):
        await store.put(ref_of(folder), [b"1"], expected=None)


async def test_a_missing_root_is_not_made(store: LocalStore, folder: Path) -> None:
    """A missing root raises StorageUnavailableError, and is not created by a write."""
    ref = ref_of(folder / "missing", "a/b")

    for call in (
        store.verify_conditional_writes(ref),
        store.put(ref, [b"1"], expected=None),
        store.delete(ref, expected=None),
        store.get(ref),
    ):
        with pytest.raises(StorageUnavailableError):
            await call
    assert not (folder / "missing").exists()


async def test_large_ranges_are_copied(store: LocalStore, folder: Path) -> None:
    """Large ranges are copied in any order, and the mode of the file is kept."""
    old = os.urandom(5_000_000)
    etag = await put(store, ref_of(folder), old)
    (folder / "key").chmod(0o640)

    written = await store.put(
        ref_of(folder), [ByteRange(1, 4_999_999), b"new", ByteRange(0, 3_000_000)], expected=etag
    )

    assert not isinstance(written, Conflict)
    assert (folder / "key").read_bytes() == old[1:-1] + b"new" + old[:3_000_000]
    assert (folder / "key").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("expected", [ABSENT, None])
def test_data_is_synced_before_its_name(folder: Path, expected: Absent | None) -> None:
    """All bytes are synced before the file is named, and the folder afterwards."""
    pieces = [bytes([number % 251]) * (number % 700) for number in range(5000)]
    calls: list[str] = []

    def note(_: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and function in (os.open, os.fsync, os.link, os.rename):
            calls.append(function.__name__)

    sys.setprofile(note)
    try:
        LocalWriter().put(ref_of(folder), pieces, expected)
    finally:
        sys.setprofile(None)

    named = "rename" if expected is None else "link"
    assert calls == ["open", "open", "fsync", named, "fsync"]
    assert (folder / "key").read_bytes() == b"".join(pieces)
    assert os.listdir(folder) == ["key"]  # noqa: PTH208


async def test_failed_sync_of_the_folder_fails_the_write(
    store: LocalStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write whose folder cannot be synced raises StorageUnavailableError."""
    fsync = os.fsync

    def fail(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EIO, "lost")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StorageUnavailableError, match="lost"):
        await put(store, ref_of(folder), b"1")


@pytest.mark.parametrize("error", [errno.EPERM, errno.EMLINK])
async def test_file_is_created_without_hard_links(
    store: LocalStore, folder: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """On a file system without hard links a new file is renamed, and conflicts are detected."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(error, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    assert isinstance(await store.put(ref_of(folder), [b"1"], expected=ABSENT), str)
    assert await store.put(ref_of(folder), [b"2"], expected=ABSENT) is CONFLICT
    assert (folder / "key").read_bytes() == b"1"
    assert os.listdir(folder) == ["key"]  # noqa: PTH208


@pytest.mark.parametrize(
    ("raised", "error"),
    [
        (TimeoutError("the folder was locked for 30 s"), StorageTimeoutError),
        (OSError(errno.EROFS, "Read-only file system"), UnwritableError),
        (OSError(errno.ENAMETOOLONG, "File name too long"), BadKeyError),
        (OSError(errno.EACCES, "Permission denied"), StorageDeniedError),
        (OSError(errno.EIO, "Input/output error"), StorageUnavailableError),
    ],
)
def test_error_of_the_system_is_that_of_a_write(
    folder: Path, raised: OSError, error: type[Exception]
) -> None:
    """An error of the system in a write is raised as the error that says what helps."""
    with pytest.raises(error), translated(ref_of(folder), is_write=True):
        raise raised
