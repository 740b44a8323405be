"""What a virtual reference may read below a folder."""

import os
import threading
from pathlib import Path

import pytest

from app.errors import StorageDeniedError, StorageError, StorageUnavailableError
from app.model import ByteRange, ObjectRef
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

    await stores.check_reachable(root)
    assert await read(stores, root, "a/b/file") == b"plain"
    assert await read(stores, root, "a/b/absent") is None
    assert await read(stores, root, "a/b/file/below") is None
    assert await read(stores, root, "a/b") is None
    assert await stores.get(root) is None


@pytest.mark.parametrize(
    "key",
    ["..", ".", "../secret", "a/../../secret", "./a/b/file", "a/./b/file", "..\\secret", "a/b/.."],
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


async def test_the_operator_may_name_any_folder(stores: Stores, folder: Path) -> None:
    """A prefix may be a link or the root; a dataset at the same place is read without a guard."""
    (folder.parent / "link").symlink_to("data")
    (folder / "out").symlink_to("../secret")
    root = stores.open_prefix((folder.parent / "link").as_uri())
    everything, served = stores.open_prefix("file:///"), stores.open_root(folder.as_uri())

    assert await read(stores, root, "a/b/file") == b"plain"
    with pytest.raises(StorageDeniedError):
        await read(stores, root, "out")
    assert await read(stores, everything, f"{folder}/a/b/file".removeprefix("/")) == b"plain"
    assert await read(stores, served, "out") == b"secret"


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
    """When the prefix itself is gone nothing is proved absent; nothing is listed anyway."""
    root = stores.open_prefix((folder / "gone").as_uri())

    for ask in (stores.get, stores.stat, stores.check_reachable):
        with pytest.raises(StorageUnavailableError):
            await ask(root.join("key"))
    with pytest.raises(StorageDeniedError):
        await anext(aiter(stores.list(stores.open_prefix(folder.as_uri()))))


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
