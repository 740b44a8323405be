"""What a virtual reference may read below a folder."""

import os
import threading
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from app.errors import (
    StorageDeniedError,
    StorageError,
    StorageUnavailableError,
    VersionChangedError,
)
from app.model import ByteRange, ObjectRef
from app.settings import LimitSettings
from app.storage.contract import Found
from app.storage.stores import Stores


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a folder ``data`` with a file, beside a secret and ``data-evil``."""
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "data-evil").mkdir()
    (tmp_path / "data-evil" / "secret").write_bytes(b"secret")
    (tmp_path / "data" / "a" / "b").mkdir(parents=True)
    (tmp_path / "data" / "a" / "b" / "file").write_bytes(b"plain")
    return tmp_path / "data"


@pytest.fixture
async def stores() -> AsyncGenerator[Stores]:
    """Open the stores."""
    async with Stores(LimitSettings()) as opened:
        yield opened


async def read(stores: Stores, root: ObjectRef, key: str) -> bytes | None:
    """Read all of an object, in each way."""
    found = await stores.get(root.join(key))
    stat = await stores.stat(root.join(key))
    if found is None:
        assert stat is None
        return None
    assert isinstance(found, Found)
    assert stat is not None
    assert stat.size == found.size
    async with stores.stream(root.join(key), found.byte_range, if_match=found.etag) as pieces:
        assert b"".join([piece async for piece in pieces]) == found.data
    return found.data


async def test_a_file_below_is_read(stores: Stores, folder: Path) -> None:
    """Files, and their absence, are what they are without a guard."""
    root = stores.open_prefix(folder.as_uri())

    await stores.reach(root)
    assert await read(stores, root, "a/b/file") == b"plain"
    assert await read(stores, root, "a/b/absent") is None
    assert await read(stores, root, "a/b/file/below") is None
    assert await read(stores, root, "a/b") is None
    assert await stores.get(root) is None


async def test_a_dataset_at_the_same_place_is_another_bucket(stores: Stores, folder: Path) -> None:
    """What the operator serves follows links; what references name does not."""
    (folder / "link").symlink_to(folder.parent / "secret")
    served, prefix = stores.open_root(folder.as_uri()), stores.open_prefix(folder.as_uri())

    assert served.bucket != prefix.bucket
    assert await read(stores, served, "link") == b"secret"
    with pytest.raises(StorageDeniedError):
        await read(stores, prefix, "link")


@pytest.mark.parametrize(
    "key",
    [
        "..",
        ".",
        "../secret",
        "a/../../secret",
        "a/../a/b/file",
        "./a/b/file",
        "a/./b/file",
        "..\\secret",
        "a/b/..",
    ],
)
async def test_a_key_that_climbs_is_denied(stores: Stores, folder: Path, key: str) -> None:
    """Dots are refused wherever they would lead, and before any file is looked at."""
    ref = stores.open_prefix(folder.as_uri()).join(key)

    with pytest.raises(StorageDeniedError):
        await stores.get(ref)
    with pytest.raises(StorageDeniedError):
        await stores.stat(ref)
    with pytest.raises(StorageDeniedError):
        async with stores.stream(ref, ByteRange(0, 1), if_match=None):
            pytest.fail("entered")


@pytest.mark.parametrize("key", ["/etc/passwd", "//etc/passwd", "a//b/file", "a\0", "a/b/"])
async def test_a_crooked_key_is_absent(stores: Stores, folder: Path, key: str) -> None:
    """No key is an absolute path."""
    root = stores.open_prefix(folder.as_uri())

    assert await stores.get(ObjectRef(root.bucket, key)) is None


@pytest.mark.parametrize(
    ("link", "target", "key"),
    [
        ("link", "../secret", "link"),
        ("link", "/etc/passwd", "link"),
        ("link", "..", "link/secret"),
        ("link", "../data-evil", "link/secret"),
        ("link", "../data-evil/secret", "link"),
        ("link", "a/../../secret", "link"),
        ("a/link", "../..", "a/link/secret"),
        ("a/b/link", "/", "a/b/link/etc/passwd"),
        ("link", "../absent", "link"),
        ("link", "/proc/self/cwd", "link"),
    ],
)
async def test_a_link_that_leads_out_is_denied(
    stores: Stores, folder: Path, link: str, target: str, key: str
) -> None:
    """A link to a file or to a folder above it; whether there is anything is not told."""
    (folder / link).symlink_to(target)
    root = stores.open_prefix(folder.as_uri())

    with pytest.raises(StorageDeniedError, match="leads out"):
        await stores.get(root.join(key))
    with pytest.raises(StorageDeniedError, match="leads out"):
        await stores.stat(root.join(key))


@pytest.mark.parametrize(
    ("link", "target", "key"),
    [
        ("link", "a/b/file", "link"),
        ("link", "a", "link/b/file"),
        ("a/link", "../a/b", "a/link/file"),
        ("link", "../data/a/b/file", "link"),
    ],
)
async def test_a_link_that_stays_inside_is_followed(
    stores: Stores, folder: Path, link: str, target: str, key: str
) -> None:
    """Where a link ends is what counts."""
    (folder / link).symlink_to(target)

    assert await read(stores, stores.open_prefix(folder.as_uri()), key) == b"plain"


async def test_the_prefix_may_be_a_link(stores: Stores, folder: Path) -> None:
    """The operator named it, so that it is what it leads to that is read."""
    (folder.parent / "link").symlink_to("data")
    (folder.parent / "data" / "out").symlink_to("../secret")
    root = stores.open_prefix((folder.parent / "link").as_uri())

    assert await read(stores, root, "a/b/file") == b"plain"
    with pytest.raises(StorageDeniedError):
        await read(stores, root, "out")


async def test_everything_can_be_allowed(stores: Stores, folder: Path) -> None:
    """The root of all folders is a prefix as others are."""
    root = stores.open_prefix("file:///")

    assert await read(stores, root, f"{folder}/a/b/file".removeprefix("/")) == b"plain"


async def test_a_circle_of_links_is_denied(stores: Stores, folder: Path) -> None:
    """What never ends leads nowhere, and that is not absence."""
    (folder / "one").symlink_to("two")
    (folder / "two").symlink_to("one")

    with pytest.raises(StorageDeniedError):
        await stores.get(stores.open_prefix(folder.as_uri()).join("one"))


async def test_what_is_no_file_is_absent(stores: Stores, folder: Path) -> None:
    """A pipe does not block, and a device is not opened, through links neither."""
    os.mkfifo(folder / "pipe")
    (folder / "link").symlink_to("pipe")
    root = stores.open_prefix(folder.as_uri())

    for key in ("pipe", "link", "pipe/below"):
        assert await stores.get(root.join(key)) is None
    everything = stores.open_prefix("file:///")
    assert await stores.get(everything.join("dev/zero")) is None


async def test_an_unmounted_folder_is_no_absence(stores: Stores, folder: Path) -> None:
    """When the prefix itself is gone nothing is proved absent."""
    root = stores.open_prefix((folder / "gone").as_uri())

    for ask in (stores.get, stores.stat, stores.reach):
        with pytest.raises(StorageUnavailableError):
            await ask(root.join("key"))


async def test_nothing_is_listed(stores: Stores, folder: Path) -> None:
    """References name objects."""
    with pytest.raises(StorageDeniedError):
        await anext(aiter(stores.list(stores.open_prefix(folder.as_uri()))))


async def test_a_pinned_file_is_read_again_and_again(stores: Stores, folder: Path) -> None:
    """Kept files are read too, until they are replaced."""
    ref = stores.open_prefix(folder.as_uri()).join("a/b/file")
    stat = await stores.stat(ref)
    assert stat is not None

    for _ in range(3):
        found = await stores.get(ref, ByteRange(1, 3), if_match=stat.etag)
        assert isinstance(found, Found)
        assert found.data == b"la"
    (folder / "a" / "b" / "file").unlink()
    with pytest.raises(VersionChangedError):
        await stores.get(ref, ByteRange(1, 3), if_match=stat.etag)


@pytest.mark.parametrize("kind", ["file", "folder"])
async def test_a_link_that_is_swapped_never_leads_out(
    stores: Stores, folder: Path, kind: str
) -> None:
    """Whatever a name turns into while it is opened, nothing outside is read."""
    inside = folder / "x" if kind == "folder" else folder / "secret"
    outside = folder.parent if kind == "folder" else folder.parent / "secret"
    key = "x/secret" if kind == "folder" else "secret"
    done = threading.Event()

    def swap() -> None:
        while not done.is_set():
            if kind == "folder":
                (folder / "new").mkdir()
                (folder / "new" / "secret").write_bytes(b"plain")
            else:
                (folder / "new").write_bytes(b"plain")
            (folder / "new").rename(inside)
            inside.rename(folder / "old")
            inside.symlink_to(outside)
            inside.unlink()
            if kind == "folder":
                (folder / "old" / "secret").unlink()
                (folder / "old").rmdir()

    root = stores.open_prefix(folder.as_uri())
    swapper = threading.Thread(target=swap)
    swapper.start()
    seen = set[bytes | None]()
    try:
        for _ in range(1500):
            try:
                found = await stores.get(root.join(key))
            except StorageError:
                continue
            seen.add(found.data if isinstance(found, Found) else None)
    finally:
        done.set()
        swapper.join()

    assert seen <= {b"plain", None}
