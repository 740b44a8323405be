"""What servers cannot do, and what is made of that."""

from collections.abc import AsyncGenerator, Callable, Generator

import pytest

from app.errors import StorageUnavailableError, UnwritableError
from app.model import ByteRange, ObjectRef, Piece
from app.storage.contract import WriteNotice
from app.storage.s3 import S3Store
from tests.seaweedfs import SeaweedFS
from tests.storage.ministack import MiniStack
from tests.storage.proxy import Mishap, Proxy
from tests.storage.s3_objects import Written

MIB = 1024**2
OLD = bytes(12 * MIB)
CHANGES: list[Piece] = [ByteRange(0, 11 * MIB), b"new"]
USUAL = {Mishap.ANSWER_LOST, Mishap.ERROR, Mishap.CONFLICT}


@pytest.fixture
def proxy(ministack: MiniStack) -> Generator[Proxy]:
    """Run a proxy before a server that does not look at signatures."""
    with Proxy(ministack.endpoint_url).running() as running:
        yield running


@pytest.fixture
async def poor(ministack: MiniStack, proxy: Proxy) -> AsyncGenerator[Written]:
    """Open a store behind the proxy, which makes the server do less than it should."""
    written = Written(ministack, proxy.url, deadline_s=5, copied_nbytes=MIB)
    yield written
    await written.store.aclose()


async def rewrite(poor: Written) -> None:
    """Rewrite a large object."""
    written = await poor.store.put(poor.ref, CHANGES, expected=poor.put(OLD))
    assert poor.seen() == (OLD[: 11 * MIB] + b"new", written)


@pytest.mark.parametrize(
    ("header", "named"),
    [("if-match", "ignores If-Match,"), ("if-none-match", "ignores If-None-Match,")],
)
async def test_a_server_that_heeds_no_conditions_is_not_written(
    poor: Written, proxy: Proxy, header: str, named: str
) -> None:
    """What would lose writes is told, each time that it is asked, and nothing is left there."""
    proxy.hides = lambda _, name: name == header
    for _ in range(2):
        with pytest.raises(UnwritableError, match=named):
            await poor.store.verify_conditional_writes(poor.root)

    proxy.hides = lambda *_: False
    await poor.store.verify_conditional_writes(poor.root)
    asked = len(proxy.seen)
    await poor.store.verify_conditional_writes(poor.root)  # which is known now
    assert len(proxy.seen) == asked
    assert poor.left() == []


@pytest.mark.parametrize(
    "mishap", [pytest.param(m, marks=() if m in USUAL else pytest.mark.soak) for m in Mishap]
)
async def test_a_server_is_tried_with_patience(poor: Written, proxy: Proxy, mishap: Mishap) -> None:
    """What goes wrong once at any request says nothing about the server."""
    nth = 0
    while nth <= len(proxy.seen):
        proxy.spoil([nth], mishap)
        await poor.store.verify_conditional_writes(poor.root.join(f"{mishap}{nth}"))
        nth += 1


async def test_a_version_that_cannot_be_told_apart_stays(poor: Written, proxy: Proxy) -> None:
    """Where removals heed no condition, none is sent with one."""
    proxy.hides = lambda method, name: method == "DELETE" and name == "if-match"
    etag = poor.put(b"1")

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
    poor: Written, proxy: Proxy, hides: Callable[[str, str], bool]
) -> None:
    """All is sent where no request could swap a copied object in, or nobody recognise it."""
    proxy.hides = hides

    await rewrite(poor)

    assert poor.notices == [("put", WriteNotice(11 * MIB + 3, 11 * MIB))]


async def test_a_server_without_copies_is_asked_for_one_once(poor: Written, proxy: Proxy) -> None:
    """All is sent, and the server is not asked to copy again."""
    proxy.unknown = "x-amz-copy-source-range"
    for _ in range(2):
        await rewrite(poor)

    assert [way for way, _ in poor.notices] == ["put", "put"]
    assert sum("uploads" in request for request in proxy.seen if "POST" in request) <= 2


@pytest.mark.parametrize("mishap", [Mishap.ANSWER_LOST, Mishap.DONE_AND_500])
async def test_bytes_tell_where_ids_are_not_kept(
    poor: Written, proxy: Proxy, mishap: Mishap
) -> None:
    """Without ids a lost answer is made up for by what is stored."""
    proxy.hides = hides_metadata
    await poor.store.verify_conditional_writes(poor.root)
    etag = poor.put(b"1")
    proxy.spoil([1], mishap)

    written = await poor.store.put(poor.ref, [b"2"], expected=etag)

    assert isinstance(written, str)
    stat = await poor.store.stat(poor.ref)
    assert stat is not None
    assert stat.etag == written


async def test_a_missing_bucket_is_told(seaweedfs: SeaweedFS) -> None:
    """It is not made, though this server would at the first object."""
    store, root = S3Store(seaweedfs.settings), ObjectRef("s3://no-such-bucket", "")

    for _ in range(2):
        with pytest.raises(StorageUnavailableError, match="bucket"):
            await store.verify_conditional_writes(root)
    await store.aclose()
