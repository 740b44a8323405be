"""What servers cannot do, and what is made of that."""

from collections.abc import AsyncGenerator, Callable, Generator
from uuid import uuid4

import pytest

from app.errors import StorageDeniedError, StorageUnavailableError, UnwritableError
from app.model import ByteRange, ETag, ObjectRef, Piece
from app.settings import StoreSettings
from app.storage.moved import Moved, Way
from app.storage.s3.store import S3Store
from app.storage.s3.writing import Writing
from tests.seaweedfs import SeaweedFS
from tests.storage.conftest import s3_settings
from tests.storage.ministack import MiniStack
from tests.storage.proxy import Mishap, Proxy

MIB = 1024**2
OLD = bytes(12 * MIB)
CHANGES: list[Piece] = [ByteRange(0, 11 * MIB), b"new"]
USUAL = {Mishap.ANSWER_LOST, Mishap.ERROR, Mishap.CONFLICT}
ROOT = ObjectRef("s3://test", f"probe-{uuid4().hex}")


@pytest.fixture
def proxy(ministack: MiniStack) -> Generator[Proxy]:
    """Run a proxy before a server that does not look at signatures."""
    with Proxy(ministack.endpoint_url).running() as running:
        yield running


class Poor:
    """A store of a server that can do less than it should."""

    def __init__(self, server: MiniStack, proxy: Proxy) -> None:
        self.server = server
        self.proxy = proxy
        self.heard: list[tuple[Way, Moved]] = []
        told = s3_settings(server).model_dump() | {"endpoint_url": proxy.url}
        self.store = S3Store(
            StoreSettings.model_validate(told),
            timeout_s=5,
            writing=Writing(
                5,
                copied_nbytes=MIB,
                on_write=lambda way, _, moved: self.heard.append((way, moved)),
            ),
        )
        self.ref = ROOT.join(uuid4().hex)

    async def rewrite(self, old: bytes = OLD) -> None:
        """Rewrite a large object."""
        etag = ETag(self.server.put(self.ref.key, old))
        written = await self.store.put(self.ref, CHANGES, expected=etag)
        answer = self.server.client.get_object(Bucket=self.server.bucket, Key=self.ref.key)
        assert (answer["Body"].read(), answer["ETag"]) == (old[: 11 * MIB] + b"new", written)


@pytest.fixture
async def poor(ministack: MiniStack, proxy: Proxy) -> AsyncGenerator[Poor]:
    """Open a store behind the proxy."""
    made = Poor(ministack, proxy)
    yield made
    await made.store.aclose()


@pytest.mark.parametrize(
    ("header", "named"), [("if-match", "heed If-Match,"), ("if-none-match", "heed If-None-Match,")]
)
async def test_a_server_that_heeds_no_conditions_is_not_written(
    poor: Poor, header: str, named: str
) -> None:
    """What would lose writes is told, each time that it is asked, and nothing is left there."""
    poor.proxy.hides = lambda _, name: name == header
    for _ in range(2):
        with pytest.raises(UnwritableError, match=named):
            await poor.store.demand_safety(ROOT)

    poor.proxy.hides = lambda *_: False
    await poor.store.demand_safety(ROOT)
    answer = poor.server.client.list_objects_v2(Bucket="test", Prefix=ROOT.key)
    assert not [each for each in answer.get("Contents", []) if ".shardgate-" in each["Key"]]


async def test_a_server_is_tried_once(poor: Poor) -> None:
    """What was seen to be safe is not tried again."""
    await poor.store.demand_safety(ROOT)
    seen = len(poor.proxy.seen)

    await poor.store.demand_safety(ROOT)

    assert len(poor.proxy.seen) == seen


@pytest.mark.parametrize(
    "mishap", [pytest.param(m, marks=() if m in USUAL else pytest.mark.soak) for m in Mishap]
)
async def test_a_server_is_tried_with_patience(poor: Poor, mishap: Mishap) -> None:
    """What goes wrong once at any request says nothing about the server."""
    nth = 0
    while nth <= len(poor.proxy.seen):
        poor.proxy.spoil([nth], mishap)
        await poor.store.demand_safety(ROOT.join(f"{mishap}{nth}"))
        nth += 1


async def test_a_version_that_cannot_be_told_apart_stays(poor: Poor) -> None:
    """Where removals heed no condition, none is sent with one."""
    poor.proxy.hides = lambda method, name: method == "DELETE" and name == "if-match"
    etag = ETag(poor.server.put(poor.ref.key, b"1"))

    assert await poor.store.delete(poor.ref, expected=etag) is False
    assert await poor.store.stat(poor.ref) is not None
    assert await poor.store.delete(poor.ref, expected=None) is True
    assert await poor.store.stat(poor.ref) is None


def hides_completion(method: str, header: str) -> bool:
    """Let completions be without conditions; copies are anyway."""
    return method == "POST" and header.startswith("if-")


def hides_metadata(_: str, header: str) -> bool:
    """Let objects carry no ids."""
    return header.startswith("x-amz-meta-")


@pytest.mark.parametrize("hides", [hides_completion, hides_metadata])
async def test_nothing_is_copied_where_that_is_not_safe(
    poor: Poor, hides: Callable[[str, str], bool]
) -> None:
    """All is sent where no request could swap a copied object in, or nobody recognise it."""
    poor.proxy.hides = hides

    await poor.rewrite()

    assert poor.heard == [("put", Moved(11 * MIB + 3, 11 * MIB))]


async def test_a_server_without_copies_is_asked_for_one_once(poor: Poor) -> None:
    """All is sent, and the server is not asked to copy again."""
    poor.proxy.unknown = "x-amz-copy-source-range"
    for _ in range(2):
        await poor.rewrite()

    assert [way for way, _ in poor.heard] == ["put", "put"]
    assert sum("uploads" in request for request in poor.proxy.seen if "POST" in request) <= 2


@pytest.mark.parametrize("mishap", [Mishap.ANSWER_LOST, Mishap.DONE_AND_500])
async def test_bytes_tell_where_ids_are_not_kept(poor: Poor, mishap: Mishap) -> None:
    """Without ids a lost answer is made up for by what is stored."""
    poor.proxy.hides = hides_metadata
    await poor.store.demand_safety(ROOT)
    etag = ETag(poor.server.put(poor.ref.key, b"1"))
    poor.proxy.spoil([1], mishap)

    written = await poor.store.put(poor.ref, [b"2"], expected=etag)

    assert isinstance(written, str)
    stat = await poor.store.stat(poor.ref)
    assert stat is not None
    assert stat.etag == written


async def test_who_may_not_write_is_denied(seaweedfs: SeaweedFS) -> None:
    """Wrong keys are no reason to call the server unsafe."""
    settings = s3_settings(seaweedfs).model_dump() | {"secret_access_key": "wrong"}
    store = S3Store(StoreSettings.model_validate(settings))

    with pytest.raises(StorageDeniedError):
        await store.demand_safety(ObjectRef(f"s3://{seaweedfs.bucket}", ""))
    await store.aclose()


async def test_a_missing_bucket_is_told(seaweedfs: SeaweedFS) -> None:
    """It is not made, though this server would at the first object."""
    store, root = S3Store(s3_settings(seaweedfs)), ObjectRef("s3://no-such-bucket", "")

    for _ in range(2):
        with pytest.raises(StorageUnavailableError, match="bucket"):
            await store.demand_safety(root)
    await store.aclose()
