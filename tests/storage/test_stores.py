"""The router of buckets to stores."""

from pathlib import Path

import pytest

from shardgate.errors import ConfigurationError, StorageUnusableError, UnwritableError
from shardgate.model import ObjectRef
from shardgate.settings import LimitSettings, StoreSettings
from shardgate.storage.contract import ABSENT, ObjectStore
from shardgate.storage.stores import Stores, parse_root
from shardgate.storage.wrappers import TracedStore
from tests.storage.conftest import denied, found
from tests.storage.faulty import Fault, FaultyServer


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
        ("memory://name/p", ObjectRef("memory://name", "p")),
    ],
)
def test_url_is_parsed_into_bucket_and_key(url: str, root: ObjectRef) -> None:
    """A URL names its bucket and key; those of the web and of files are unquoted."""
    assert parse_root(url) == root


@pytest.mark.parametrize(
    "url",
    [
        *("https://me:hunter2@host/p", "https://host/p?token=hunter2", "https://host/p#hunter2"),
        *("file://relative/hunter", "s3:///key", "ftp://host/p", "nothing"),
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
    """Writes to web servers, clouds and prefixes raise UnwritableError."""
    cloud = StoreSettings(endpoint_url="http://127.0.0.1:1", anonymous=True)
    for root in (
        stores.open_root("http://127.0.0.1:1/p"),
        stores.open_root("gs://bucket/p", cloud),
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
