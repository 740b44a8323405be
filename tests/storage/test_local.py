"""Files as objects, and files that virtual references lead to."""

import asyncio
import errno
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.store import LocalStore as ObstoreLocalStore

from shardgate.errors import (
    RangeNotSatisfiedError,
    StorageDeniedError,
    StorageError,
    StorageUnavailableError,
    VersionChangedError,
)
from shardgate.model import ByteRange, ETag, ObjectRef, UnmodifiedSince
from shardgate.storage.contract import TEMPORARY, Found, Listed
from shardgate.storage.local import LocalStore, _listed
from shardgate.storage.stores import Stores
from tests.support.storage.reading import denied, found, stat_of

CROOKED = [
    *("../secret", "a/../../secret", "/secret", "./a/b", "a//b", "a/", "a\0", "..", ".", "\udc80"),
]


async def test_key_that_names_no_file_is_absent(store: LocalStore, folder: Path) -> None:
    """A key of a folder, a pipe or an irregular path is absent, and no read blocks."""
    (folder / "a").mkdir()
    (folder / "a" / "b").write_bytes(b"1")
    os.mkfifo(folder / "pipe")

    for key in ("", "a", "pipe", *CROOKED, *(f"{folder}/{key}" for key in CROOKED)):
        assert await store.get(ObjectRef(folder.as_uri(), key)) is None
        assert await store.stat(ObjectRef(folder.as_uri(), key)) is None


async def listed(store: LocalStore, folder: Path, prefix: str = "", **options: str) -> list[str]:
    """Return the names in a listing of *folder*."""
    listing = store.list(ObjectRef(folder.as_uri(), prefix), **options)
    return [each.ref.key async for each in listing]


async def test_listing_has_files_only(store: LocalStore, folder: Path) -> None:
    """Temporary files, pipes, broken links and circles are not listed; links to files are."""
    (folder / "a").mkdir()
    (folder / "a" / "0").write_bytes(b"12")
    (folder / f"{TEMPORARY}1").write_bytes(b"")
    (folder / ".hidden").write_bytes(b"")
    os.mkfifo(folder / "pipe")
    (folder / "broken").symlink_to("nowhere")
    (folder / "circle").symlink_to(".")
    (folder / "link").symlink_to("a")
    (folder / os.fsdecode(b"no-utf8-\xff")).write_bytes(b"")

    assert await listed(store, folder) == [".hidden", "a/0", "link/0"]


async def test_a_folder_without_files_is_not_listed(store: LocalStore, folder: Path) -> None:
    """A folder without files below it is not listed, and one with a file far below is."""
    for name in ("empty", "folders/a/b", "temporary", "odd", "far/a/b", "far/c"):
        (folder / name).mkdir(parents=True)
    (folder / "temporary" / f"{TEMPORARY}1").write_bytes(b"")
    os.mkfifo(folder / "odd" / "pipe")
    (folder / "odd" / "broken").symlink_to("nowhere")
    (folder / "odd" / "circle").symlink_to(folder)
    (folder / "far/a/b/0").write_bytes(b"")

    assert await listed(store, folder, delimiter="/") == ["far/"]


async def test_a_folder_that_cannot_be_read_is_listed(
    store: LocalStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that cannot be read is listed, and the listing does not fail."""
    for name in ("a", "lost+found", "z"):
        (folder / name).mkdir()
    (folder / "z" / "0").touch()
    scandir: Any = os.scandir

    def refuse(path: bytes) -> Any:
        if b"lost+found" in path:
            raise PermissionError(errno.EACCES, "denied")
        return scandir(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refuse)

        assert await listed(store, folder, delimiter="/") == ["lost+found/", "z/"]


async def test_one_file_shows_that_a_folder_is_not_empty(
    store: LocalStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file of a folder is looked at, and folders behind the requested page are not searched."""
    for number in range(70):
        (folder / f"{number:03}/deep").mkdir(parents=True)
        for file in range(3):
            (folder / f"{number:03}/deep/{file}").touch()
    looks: list[os.DirEntry[bytes]] = []

    def look(prefix: ObjectRef, entry: os.DirEntry[bytes]) -> Listed | None:
        looks.append(entry)
        return _listed(prefix, entry)

    monkeypatch.setattr("shardgate.storage.local._listed", look)
    listing = store.list(ObjectRef(folder.as_uri(), ""), delimiter="/")

    assert (await anext(listing)).ref.key == "000/"
    assert len(looks) == 70 + 2 * 64


def open_files() -> set[str]:
    """Return the names of the open files of this process."""
    names = set()
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            names.add(str(fd.readlink()))
    return names


async def pinned_twice(store: LocalStore, ref: ObjectRef) -> Found:
    """Read *ref* by its ETag twice, so that its file stays open."""
    stat = await stat_of(store, ref)
    await store.get(ref, ByteRange(1, 3), if_match=stat.etag)
    return await found(store, ref, ByteRange(1, 3), if_match=stat.etag)


@pytest.mark.parametrize("change", ["rename", "unlink", "write", "truncate", "touch", "put"])
async def test_changed_open_file_is_detected(store: LocalStore, folder: Path, change: str) -> None:
    """A file that is kept open and changes raises VersionChangedError, and is closed."""
    file = folder / "key"
    file.write_bytes(b"0123456789")
    ref = ObjectRef(folder.as_uri(), "key")
    first = await pinned_twice(store, ref)
    assert (first.data, first.byte_range, first.size) == (b"12", ByteRange(1, 3), 10)
    assert str(file) in open_files()
    match change:
        case "rename":
            (folder / "new").write_bytes(b"9876543210")
            (folder / "new").rename(file)
        case "unlink":
            file.unlink()
        case "write":
            file.write_bytes(b"987")
        case "touch":
            os.utime(file, ns=(0, 1))
        case "put":  # while the old file lives on under another name
            (folder / "backup").hardlink_to(file)
            await store.put(ref, [b"9876543210"], expected=first.etag)
        case _:
            os.truncate(file, 0)

    with pytest.raises(VersionChangedError):
        await store.get(ref, ByteRange(1, 3), if_match=first.etag)
    assert not any(name.startswith(str(folder)) for name in open_files())


async def test_few_files_are_open_and_none_after_closing(store: LocalStore, folder: Path) -> None:
    """At most 128 files are kept open, and none after the store is closed."""
    for number in range(140):
        (folder / str(number)).write_bytes(b"0123456789")
        await pinned_twice(store, ObjectRef(folder.as_uri(), str(number)))

    held = sum(name.startswith(str(folder)) for name in open_files())
    await store.aclose()

    assert 0 < held <= 128
    assert not any(name.startswith(str(folder)) for name in open_files())


async def test_range_far_beyond_a_file_is_refused(store: LocalStore, folder: Path) -> None:
    """Ranges up to 2^64 beyond the file raise errors, also of a file that is kept open."""
    (folder / "a").write_bytes(b"0123456789")
    ref = ObjectRef(folder.as_uri(), "a")
    etag = (await found(store, ref)).etag
    for start, stop in ((0, 2**64), (2**63 - 1, 2**63), (2**63, 2**63 + 1), (2**64 - 1, 2**64)):
        await store.get(ref, ByteRange(0, 1), if_match=etag)
        if start:
            with pytest.raises(VersionChangedError):
                await store.get(ref, ByteRange(start, stop), if_match=etag)
        with pytest.raises((VersionChangedError, RangeNotSatisfiedError)):
            async with store.stream(ref, ByteRange(start, stop), if_match=None):
                pass


@pytest.mark.parametrize(("ending", "coding"), [("gz", "gzip"), ("br", "br"), ("zstd", "zstd")])
async def test_coded_file_is_read_by_its_plain_name(
    stores: Stores, folder: Path, ending: str, coding: str
) -> None:
    """A file with the ending of a coding is read by its plain name if there is no plain file."""
    (folder / f"0-64.{ending}").write_bytes(b"coded")
    root = stores.open_root(folder.as_uri())
    ref = root.join("0-64")
    stat, answer = await stat_of(stores, ref), await found(stores, ref)

    assert (stat.size, stat.coding, stat.etag) == (5, coding, answer.etag)
    for _ in range(2):  # from a warm file too
        part = await found(stores, ref, ByteRange(1, 3), if_match=answer.etag)
        assert (part.data, part.coding) == (b"od", coding)
    assert (await found(stores, root.join(f"0-64.{ending}"))).coding == ""
    assert await stores.get(stores.open_prefix(folder.as_uri()).join("0-64")) is None
    (folder / "0-64").write_bytes(b"plain")
    assert (await found(stores, ref)).data == b"plain"


async def test_coded_chunks_are_listed_by_plain_names(store: LocalStore, folder: Path) -> None:
    """Coded files are listed by their plain names, unless there is a plain file or another dot."""
    for name in ("1.gz", "1.br", "2", "2.gz", "3.zstd", "brain.nii.gz", ".gz", "4.xz"):
        (folder / name).touch()
    (folder / "out.gz").symlink_to("../secret")

    names = [".gz", "1", "1.br", "2", "2.gz", "3", "4.xz", "brain.nii.gz"]
    assert await listed(store, folder) == names
    assert await listed(store, folder, "1.") == ["1.br"]


DATA = bytes(range(256)) * 4
MTIME_NS = 1_700_000_000_123_456_789


@pytest.fixture
def ref(folder: Path) -> ObjectRef:
    """Return the name of a file with a known modification time."""
    (folder / "key").write_bytes(DATA)
    os.utime(folder / "key", ns=(MTIME_NS, MTIME_NS))
    return ObjectRef(folder.as_uri(), "key")


async def test_modification_times_are_compared_in_whole_seconds(
    store: LocalStore, ref: ObjectRef
) -> None:
    """Conditions by time ignore fractions of a second, as HTTP dates do."""
    assert await store.get(ref, if_match=UnmodifiedSince(MTIME_NS // 10**9))
    with pytest.raises(VersionChangedError):
        await store.get(ref, if_match=UnmodifiedSince(MTIME_NS // 10**9 - 1))


@pytest.mark.parametrize("mtime_ns", [MTIME_NS, 1_700_000_000_000_000_999, 999, -1_500_000_000])
async def test_etag_of_obstore_is_accepted(
    store: LocalStore, ref: ObjectRef, folder: Path, mtime_ns: int
) -> None:
    """The ETag of obstore, which icechunk stores, is valid until the file changes."""
    os.utime(folder / "key", ns=(mtime_ns, mtime_ns))
    etag = ETag(str(obstore.head(ObstoreLocalStore(folder), "key")["e_tag"]))

    for _ in range(3):
        assert (await found(store, ref, ByteRange(1, 3), if_match=etag)).data == DATA[1:3]
    os.utime(folder / "key", ns=(1, 2_000_000_000))
    with pytest.raises(VersionChangedError):
        await store.get(ref, ByteRange(1, 3), if_match=etag)


async def test_a_stream_without_condition_is_of_one_version(
    store: LocalStore, ref: ObjectRef, folder: Path
) -> None:
    """A stream whose file is replaced between two pieces raises VersionChangedError."""
    (folder / "key").write_bytes(bytes(3_000_000))

    async with store.stream(ref, ByteRange(0, 3_000_000), if_match=None) as pieces:
        await anext(pieces)
        (folder / "new").write_bytes(bytes(3_000_000))
        (folder / "new").rename(folder / "key")
        with pytest.raises(VersionChangedError):
            await anext(pieces)


async def test_a_file_without_condition_is_read_anew(
    store: LocalStore, ref: ObjectRef, folder: Path
) -> None:
    """A read without an ETag opens the file by its name, though another one is kept open."""
    stat = await stat_of(store, ref)
    await store.get(ref, ByteRange(0, 3), if_match=stat.etag)
    (folder / "key").rename(folder / "old")
    (folder / "key").write_bytes(b"new")

    answer = await found(store, ref, ByteRange(0, 3), if_match=UnmodifiedSince(2**33))
    assert answer.data == b"new"


@pytest.fixture
def guarded(folder: Path) -> Path:
    """Put a file into the folder, and a secret into ``data-evil`` beside it."""
    (folder.parent / "data-evil").mkdir()
    (folder.parent / "data-evil" / "secret").write_bytes(b"secret")
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "b" / "file").write_bytes(b"plain")
    return folder


async def read_guarded(stores: Stores, root: ObjectRef, key: str) -> bytes | None:
    """Read all of an object in each way."""
    ref = root.join(key)
    if (stat := await stores.stat(ref)) is None:
        assert await stores.get(ref) is None
        return None
    answer = await found(stores, ref)
    assert stat.size == answer.size
    async with stores.stream(ref, answer.byte_range, if_match=answer.etag) as pieces:
        assert b"".join([piece async for piece in pieces]) == answer.data
    return answer.data


_ON_MACOS = """
import asyncio, os, sys
del os.O_PATH, os.RWF_NOWAIT
from shardgate.model import ByteRange
from shardgate.settings import LimitSettings
from shardgate.storage.stores import Stores

async def main(url):
    async with Stores(LimitSettings()) as stores:
        for root in stores.open_root(url), stores.open_prefix(url):
            found = await stores.get(root.join("file"))
            for _ in range(2):
                await stores.get(root.join("file"), ByteRange(0, 2), if_match=found.etag)
            print(found.data, await stores.get(root.join("absent/file")))
asyncio.run(main(sys.argv[1]))
"""


async def test_files_are_read_without_features_of_linux(folder: Path) -> None:
    """Files are read, and absent, where the system lacks O_PATH and RWF_NOWAIT, as macOS does."""
    (folder / "file").write_bytes(b"data")
    command = [sys.executable, "-c", _ON_MACOS, folder.as_uri()]
    output = await asyncio.to_thread(subprocess.check_output, command)

    assert output.decode().split("\n") == ["b'data' None", "b'data' None", ""]


@pytest.mark.parametrize(
    ("link", "target", "key", "leads_out"),
    [
        ("link", "../secret", "link", True),
        ("link", "/etc/passwd", "link", True),
        ("link", "..", "link/secret", True),
        ("link", "../data-evil", "link/secret", True),
        ("link", "../data-evil/secret", "link", True),
        ("link", "a/../../secret", "link", True),
        ("a/link", "../..", "a/link/secret", True),
        ("a/b/link", "/", "a/b/link/etc/passwd", True),
        ("link", "../absent", "link", True),
        ("link", "/proc/self/cwd", "link", True),
        ("link", "/proc/self/fd/0", "link", True),
        ("link", "a/b/file", "link", False),
        ("link", "a", "link/b/file", False),
        ("a/link", "../a/b", "a/link/file", False),
        ("link", "../data/a/b/file", "link", False),
    ],
)
async def test_a_link_that_leads_out_is_denied(
    stores: Stores, guarded: Path, link: str, target: str, key: str, *, leads_out: bool
) -> None:
    """A link is denied if its end, a file, a folder or nothing, lies outside of the root.

    The reason names the setting that follows links from the root of a dataset.
    """
    (guarded / link).symlink_to(target)
    root = stores.open_root(guarded.as_uri())
    prefix = stores.open_prefix(guarded.as_uri())

    if leads_out:
        assert "follow_links = true" in await denied(stores, root.join(key))
        assert "leads out" in await denied(stores, prefix.join(key))
    else:
        assert await read_guarded(stores, root, key) == b"plain"
        assert await read_guarded(stores, prefix, key) == b"plain"


async def test_prefix_may_be_a_link_or_the_file_system(stores: Stores, guarded: Path) -> None:
    """A prefix may be a link or `/`.

    A dataset with `follow_links` may follow links out of its root.
    """
    (guarded.parent / "link").symlink_to("data")
    (guarded / "out").symlink_to("../secret")
    root = stores.open_prefix((guarded.parent / "link").as_uri())
    everything = stores.open_prefix("file:///")
    served = stores.open_root(guarded.as_uri(), follow_links=True)

    assert await read_guarded(stores, root, "a/b/file") == b"plain"
    with pytest.raises(StorageDeniedError):
        await read_guarded(stores, root, "out")
    assert (
        await read_guarded(stores, everything, f"{guarded}/a/b/file".removeprefix("/")) == b"plain"
    )
    assert await read_guarded(stores, served, "out") == b"secret"


async def test_root_may_be_a_link_that_changes(stores: Stores, guarded: Path) -> None:
    """Files are read wherever the link of the root leads at the moment."""
    (guarded.parent / "new").mkdir()
    (guarded.parent / "new" / "file").write_bytes(b"new")
    (guarded / "file").write_bytes(b"old")
    current = guarded.parent / "current"
    root = stores.open_root(current.as_uri())
    for target, data in ((guarded, b"old"), (guarded.parent / "new", b"new")):
        current.unlink(missing_ok=True)
        current.symlink_to(target)

        assert await read_guarded(stores, root, "file") == data


@pytest.mark.parametrize("follow_links", [False, True])
async def test_links_that_lead_out_are_listed_where_they_are_followed(
    stores: Stores, guarded: Path, *, follow_links: bool
) -> None:
    """Links out of the root are listed with `follow_links`, and left out without it."""
    (guarded / "file").symlink_to("../secret")
    (guarded / "near").symlink_to("a")
    (guarded / "out").symlink_to("../data-evil")
    root = stores.open_root(guarded.as_uri(), follow_links=follow_links)
    names = ["a/b/file", "near/b/file", *(("file", "out/secret") if follow_links else ())]

    assert [each.ref.key async for each in stores.list(root)] == sorted(names)
    below = stores.list(root.join("out/"))
    if follow_links:
        assert (await anext(aiter(below))).ref.key == "out/secret"
    else:
        with pytest.raises(StorageDeniedError):
            await anext(aiter(below))


async def test_a_circle_of_links_is_denied(stores: Stores, guarded: Path) -> None:
    """A circle of links is denied, and not absent."""
    (guarded / "one").symlink_to("two")
    (guarded / "two").symlink_to("one")

    await denied(stores, stores.open_prefix(guarded.as_uri()).join("one"))


async def test_a_reference_to_no_file_is_absent(stores: Stores, guarded: Path) -> None:
    """A reference to a folder, pipe or device, directly or by a link, is absent; none blocks."""
    os.mkfifo(guarded / "pipe")
    (guarded / "link").symlink_to("pipe")
    root = stores.open_prefix(guarded.as_uri())

    await stores.check_reachable(root)
    for key in ("pipe", "link", "pipe/below", "a/b", "a/b/absent", "a/b/file/below"):
        assert await read_guarded(stores, root, key) is None
    assert await stores.get(root) is None
    everything = stores.open_prefix("file:///")
    assert await stores.get(everything.join("dev/zero")) is None


async def test_missing_prefix_is_unavailable(stores: Stores, guarded: Path) -> None:
    """A missing prefix raises StorageUnavailableError; listing a prefix is denied."""
    root = stores.open_prefix((guarded / "gone").as_uri())

    for ask in (stores.get, stores.stat, stores.check_reachable):
        with pytest.raises(StorageUnavailableError):
            await ask(root.join("key"))
    with pytest.raises(StorageDeniedError):
        await anext(aiter(stores.list(stores.open_prefix(guarded.as_uri()))))


@pytest.mark.parametrize("is_guarded", [False, True])
@pytest.mark.parametrize("kind", ["file", "folder"])
async def test_a_link_that_is_swapped_never_leads_out(
    stores: Stores, guarded: Path, kind: str, *, is_guarded: bool
) -> None:
    """A name that becomes a link while it is opened leads to nothing outside."""
    name, key = ("x", "x/secret") if kind == "folder" else ("secret", "secret")
    inside, outside = guarded / name, guarded.parent / name.replace("x", "")
    new, done = guarded / "new", threading.Event()
    if kind == "folder":
        new.mkdir()
    (new / "secret" if kind == "folder" else new).write_bytes(b"plain")

    def swap() -> None:
        while not done.is_set():
            new.rename(inside)
            inside.rename(new)
            inside.symlink_to(outside)
            inside.unlink()

    root = (stores.open_prefix if is_guarded else stores.open_root)(guarded.as_uri())
    swapper = threading.Thread(target=swap)
    swapper.start()
    seen = set[bytes | None]()
    try:
        for _ in range(500):
            try:
                answer = await stores.get(root.join(key))
            except StorageError:
                continue
            seen.add(answer.data if isinstance(answer, Found) else None)
    finally:
        done.set()
        swapper.join()

    assert seen <= {b"plain", None}
