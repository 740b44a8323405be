"""The router of buckets to stores."""

from pathlib import Path

import pytest

from shardgate.errors import (
    ConfigurationError,
    StorageError,
    StorageRedirectError,
    StorageUnavailableError,
    StorageUnusableError,
    UnwritableError,
)
from shardgate.model import ObjectRef
from shardgate.settings import LimitSettings, StoreSettings
from shardgate.storage.contract import ABSENT, ObjectStore
from shardgate.storage.stores import Stores, parse_root
from shardgate.storage.wrappers import TracedStore
from tests.support.storage.faulty import Fault, FaultyServer
from tests.support.storage.reading import denied, found


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("s3://bucket/a/b.zarr", ObjectRef("s3://bucket", "a/b.zarr")),
        ("s3://bucket/a%20b/", ObjectRef("s3://bucket", "a%20b")),
        ("s3://bucket", ObjectRef("s3://bucket", "")),
        ("gs://bucket/a/b.zarr", ObjectRef("gs://bucket", "a/b.zarr")),
        ("az://container/a%20b/", ObjectRef("az://container", "a%20b")),
        ("file:///data/em.zarr", ObjectRef("file:///data/em.zarr", "")),
        ("file:///data/a%20b/", ObjectRef("file:///data/a%20b", "")),
        ("https://host:1/a%20b/c", ObjectRef("https://host:1", "a b/c")),
        ("https://host:1/a%2fb+c/%2B", ObjectRef("https://host:1", "a%2Fb+c/%2B")),
        ("memory://name/p", ObjectRef("memory://name", "p")),
    ],
)
def test_url_is_parsed_into_bucket_and_key(url: str, root: ObjectRef) -> None:
    """A URL names its bucket and key; those of the web and of files are unquoted.

    Escapes of delimiters in URLs of the web are kept.
    """
    assert parse_root(url) == root


@pytest.mark.parametrize(
    "url",
    [
        *("https://me:hunter2@host/p", "https://host/p?token=hunter2", "https://host/p#hunter2"),
        *("file://relative/hunter", "file:///a%00b", "s3:///key", "ftp://host/p", "nothing"),
    ],
)
def test_invalid_root_url_is_refused(url: str) -> None:
    """A URL with credentials, a query or another scheme is refused without its secrets."""
    with pytest.raises(ConfigurationError) as raised:
        parse_root(url)

    assert "hunter2" not in str(raised.value)


async def test_each_root_is_read_from_its_store(
    stores: Stores, faulty: FaultyServer, tmp_path: Path
) -> None:
    """Roots of all kinds are read and written by their stores.

    A bucket that was not opened raises StorageUnusableError.
    """
    faulty.put("bucket", "p/key", b"remote")
    (tmp_path / "key").write_bytes(b"local")
    settings = StoreSettings(endpoint_url=faulty.url, anonymous=True)

    roots = {
        stores.open_root(tmp_path.as_uri()): b"local",
        stores.open_root(f"{faulty.url}/bucket/p"): b"remote",
        stores.open_root("s3://bucket/p", settings, "one"): b"remote",
        stores.open_root("s3://bucket/p", settings, "two"): b"remote",
        stores.open_root("memory://bucket/p"): b"memory",
    }
    assert {str(root) for root in roots} >= {"s3+one://bucket/p", "s3+two://bucket/p"}
    stores.memory.place(ObjectRef("memory://bucket", "p/key"), b"memory")
    for root, data in roots.items():
        await stores.check_reachable(root)
        assert (await found(stores, root.join("key"))).data == data
    for root in (root for root in roots if root.bucket.startswith(("memory", "file"))):
        ref = root.join("new")
        await stores.verify_conditional_writes(ref)
        etag = await stores.put(ref, [b"data"], expected=ABSENT)
        assert isinstance(etag, str)
        assert stores.keeps_headers(ref) is root.bucket.startswith("memory")
        assert await stores.delete(ref, expected=etag) is True
        assert await stores.get(ref) is None
    with pytest.raises(StorageUnusableError):
        await stores.get(ObjectRef("s3://bucket", "key"))


async def test_the_wrapper_is_called_for_every_attempt(faulty: FaultyServer) -> None:
    """*wrap* is applied below the retries, so a repeated read is recorded twice."""
    heard = []

    def wrap(store: ObjectStore) -> ObjectStore:
        return TracedStore(store, lambda call: heard.append(call.method))

    faulty.put("bucket", "key", b"data")
    faulty.fail(Fault.SLOW_DOWN, nth=[0])
    async with Stores(LimitSettings(), wrap=wrap) as stores:
        root = stores.open_root(f"{faulty.url}/bucket")
        assert await stores.get(root.join("key")) is not None

    assert heard == ["get", "get"]


async def test_key_outside_of_a_prefix_is_denied(
    stores: Stores, faulty: FaultyServer, tmp_path: Path
) -> None:
    """A key with dot segments below a prefix of any kind is denied before it is requested."""
    faulty.put("bucket", "data/key", b"data")
    (tmp_path / "key").write_bytes(b"data")
    settings = StoreSettings(endpoint_url=faulty.url, anonymous=True)
    keys = ("..", ".", "../secret", "..\\secret", "a/../../secret", "a/./b/file", "a/b/..")
    bucket = stores.open_prefix("s3://bucket/data/", settings, "lab")
    assert bucket == ObjectRef("guarded+s3+lab://bucket", "data")
    web = stores.open_prefix(f"{faulty.url}/bucket/data")
    for root in (bucket, web, stores.open_prefix(tmp_path.as_uri())):
        await found(stores, root.join("key"))
        before = len(faulty.seen)
        for key in keys:
            await denied(stores, root.join(key))
        assert len(faulty.seen) == before


async def test_read_only_store_is_unwritable(stores: Stores, tmp_path: Path) -> None:
    """Writes to web servers and prefixes raise UnwritableError."""
    cloud = StoreSettings(endpoint_url="http://127.0.0.1:1", anonymous=True)
    for root in (
        stores.open_root("http://127.0.0.1:1/p"),
        stores.open_prefix("gs://bucket/p", cloud),
        stores.open_prefix(tmp_path.as_uri()),
    ):
        for call in (
            stores.verify_conditional_writes(root),
            stores.put(root.join("key"), [b"1"], expected=None),
            stores.delete(root.join("key"), expected=None),
        ):
            with pytest.raises(UnwritableError, match="read-only"):
                await call
        assert not stores.keeps_headers(root)


def roots_of_one_object(stores: Stores, faulty: FaultyServer, folder: Path) -> list[ObjectRef]:
    """Open roots that may be one object, which does not exist."""
    settings = StoreSettings(endpoint_url=faulty.url, anonymous=True)
    return [
        stores.open_root((folder / "lab" / "a.zip").as_uri(), may_be_object=True),
        stores.open_root("memory://bucket/lab/a.zip", may_be_object=True),
        stores.open_root(f"{faulty.url}/bucket/lab/a.zip", may_be_object=True),
        stores.open_root("s3://bucket/lab/a.zip", settings, may_be_object=True),
    ]


async def test_absent_root_object_is_unreachable(
    stores: Stores, faulty: FaultyServer, tmp_path: Path
) -> None:
    """A root that may be one object is unreachable until there is one."""
    (tmp_path / "lab").mkdir()
    faulty.put("bucket", "other", b"")
    roots = roots_of_one_object(stores, faulty, tmp_path)
    for root in roots:
        for ask in (stores.check_reachable, stores.check_absence):
            with pytest.raises(StorageUnavailableError, match=r"a\.zip: there is no such object"):
                await ask(root)

    (tmp_path / "lab" / "a.zip").write_bytes(b"")
    stores.memory.place(ObjectRef("memory://bucket", "lab/a.zip"), b"")
    faulty.put("bucket", "lab/a.zip", b"")
    for root in roots:
        await stores.check_reachable(root)


async def test_folder_in_place_of_a_root_object_is_reachable(
    stores: Stores, faulty: FaultyServer, tmp_path: Path
) -> None:
    """A root that may be one object may be a folder, where folders can be listed."""
    (tmp_path / "lab").mkdir()
    local, memory, _, s3 = roots_of_one_object(stores, faulty, tmp_path)
    (tmp_path / "lab" / "a.zip").mkdir()
    (tmp_path / "lab" / "a.zip" / "key").write_bytes(b"")
    stores.memory.place(memory.join("key"), b"")
    faulty.put("bucket", "lab/a.zip/key", b"")

    for root in (local, memory, s3):
        await stores.check_reachable(root)
        await stores.check_absence(root)


@pytest.mark.parametrize("may_be_object", [True, False])
async def test_root_too_long_for_a_file_name_is_unreachable(
    stores: Stores, tmp_path: Path, *, may_be_object: bool
) -> None:
    """A folder whose name is too long for the file system cannot be reached."""
    url = (tmp_path / ("a" * 300) / "b").as_uri()
    root = stores.open_root(url, may_be_object=may_be_object)

    with pytest.raises(StorageError):
        await stores.check_reachable(root)


async def test_links_in_a_folder_named_like_an_archive_do_not_lead_out(
    stores: Stores, tmp_path: Path
) -> None:
    """A folder that is opened as a root that may be one object is the bucket itself."""
    for name in ("other", "a.zip"):
        (tmp_path / name).mkdir()
    (tmp_path / "other" / "key").write_bytes(b"")
    (tmp_path / "a.zip" / "link").symlink_to("../other")
    root = stores.open_root((tmp_path / "a.zip").as_uri(), may_be_object=True)

    assert "link leads out" in await denied(stores, root.join("link/key"))


async def test_root_object_may_be_a_link(stores: Stores, tmp_path: Path) -> None:
    """A root that is a link to an object elsewhere is read, and one beside it may change."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "a" / "object").write_bytes(b"old")
    (tmp_path / "a" / "another").write_bytes(b"new")
    (tmp_path / "b" / "a.zip").symlink_to("../a/object")
    (tmp_path / "a" / "a.zip").symlink_to("object")
    away, beside = (
        stores.open_root((tmp_path / name / "a.zip").as_uri(), may_be_object=True) for name in "ba"
    )
    for root in (away, beside):
        assert (await found(stores, root)).data == b"old"
    (tmp_path / "a" / "a.zip").unlink()
    (tmp_path / "a" / "a.zip").symlink_to("another")

    assert (await found(stores, beside)).data == b"new"


async def test_root_object_redirects_to_nothing_beside_it(
    stores: Stores, faulty: FaultyServer
) -> None:
    """A root that is one object of a web server may redirect to its own URL only."""
    faulty.put("data", "b.zip", b"")
    faulty.redirects["/data/a.zip"] = "/data/b.zip"
    root = stores.open_root(f"{faulty.url}/data/a.zip", may_be_object=True)

    with pytest.raises(StorageRedirectError, match="the setting redirects does not allow"):
        await stores.get(root)


def test_file_is_no_root_for_folders(stores: Stores, tmp_path: Path) -> None:
    """A file as a root that can only be a folder is a wrong setting."""
    (tmp_path / "a.zip").write_bytes(b"")

    with pytest.raises(ConfigurationError, match=r"a\.zip: is a file"):
        stores.open_root((tmp_path / "a.zip").as_uri())
