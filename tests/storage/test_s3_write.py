"""Writes to S3 whose requests or responses are lost, and servers that lack features."""

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing

import pytest
import pytest_asyncio

from shardgate.errors import (
    StorageError,
    StorageUnusableError,
    UnwritableError,
    VersionChangedError,
)
from shardgate.model import ByteRange, ObjectRef, Piece
from shardgate.storage.contract import ABSENT, CONFLICT, WriteNotice
from shardgate.storage.s3 import S3Store
from tests.support.seaweedfs import SeaweedFS
from tests.support.storage.ministack import MiniStack
from tests.support.storage.proxy import Fault, Lie, Mishap, Proxy, cancel_probes
from tests.support.storage.reading import stat_of
from tests.support.storage.s3_objects import Written

MIB = 1024**2
LONGEST_S = 60.0
"""Much longer than a write takes on a busy machine."""
OLD = b"".join(bytes([n]) * (MIB // 2) for n in range(21))
"""Two parts, and a short one."""
COPIED: list[Piece] = [ByteRange(0, 5 * MIB), b"new", ByteRange(5 * MIB + 16, len(OLD))]
WITHOUT_ETAG = (Lie.EMPTY_200, Lie.PAGE_200, Lie.XHTML_200, Lie.EMPTY_204)
FAKED = (*WITHOUT_ETAG, Lie.PAGE_404, Lie.EMPTY_404, Lie.PAGE_410)
USUAL = (Lie.PAGE_200, Lie.PAGE_404)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def open_proxy(seaweedfs: SeaweedFS) -> Generator[Proxy]:
    """Run a proxy."""
    with Proxy(seaweedfs.endpoint_url).running() as running:
        yield running


@pytest.fixture
def proxy(open_proxy: Proxy) -> Proxy:
    """Return a proxy without faults."""
    open_proxy.heal()
    return open_proxy


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def open_lossy(seaweedfs: SeaweedFS, open_proxy: Proxy) -> AsyncGenerator[Written]:
    """Open a store behind the proxy that is known to support conditional writes."""
    made = Written(seaweedfs, open_proxy.url, deadline_s=LONGEST_S, copied_nbytes=MIB)
    await made.store.verify_conditional_writes(made.root)
    yield made
    await made.store.aclose()


@pytest.fixture
def lossy(open_lossy: Written) -> Written:
    """Return the store with a prefix of its own."""
    open_lossy.move()
    return open_lossy


async def rewrite_spoilt(
    lossy: Written, proxy: Proxy, mishap: Fault, old: bytes | None, pieces: list[Piece]
) -> int:
    """Rewrite an object once for each request that this takes, spoil that, and count them."""
    kept = old or b""
    new = b"".join(kept[p.start : p.stop] if isinstance(p, ByteRange) else p for p in pieces)
    nth = 0
    while True:
        lossy.ref = lossy.root.join(f"{nth}")
        expected = ABSENT if old is None else lossy.put(old)
        proxy.spoil([nth], mishap)

        written = await lossy.store.put(lossy.ref, pieces, expected=expected)

        assert lossy.seen() == (new, written)
        lossy.server.delete(lossy.ref.key)
        if nth >= (count := len(proxy.seen)):
            assert lossy.left() == []
            return nth
        nth += 1
        if mishap is Mishap.CONFLICT:
            nth = next((n for n in range(nth, count) if proxy.seen[n].endswith(" if")), count)


@pytest.mark.parametrize(
    ("fault", "is_done"),
    [
        *((fault, False) for fault in (*Mishap, *FAKED)),
        *((lie, True) for lie in USUAL),
        *(pytest.param(lie, True, marks=pytest.mark.soak) for lie in FAKED if lie not in USUAL),
    ],
    ids=str,
)
async def test_put_succeeds_despite_lost_messages(
    lossy: Written, proxy: Proxy, fault: Fault, *, is_done: bool
) -> None:
    """A PUT one of whose requests or responses is lost is done once.

    The object is read back before a request is repeated.
    """
    proxy.passes_on = is_done
    old = b"0123456789"

    assert await rewrite_spoilt(lossy, proxy, fault, None, [b"new"]) >= 1
    assert await rewrite_spoilt(lossy, proxy, fault, old, [b"new", ByteRange(0, 9)]) >= 3


@pytest.mark.parametrize("fault", [*Mishap, *(lie for lie in FAKED if lie is not Lie.EMPTY_204)])
async def test_delete_survives_lost_messages(lossy: Written, proxy: Proxy, fault: Fault) -> None:
    """A DELETE whose request or response is lost is done, and not a conflict."""
    for nth in range(2):
        etag = lossy.put(b"1")
        proxy.spoil([nth], fault)

        assert await lossy.store.delete(lossy.ref, expected=etag) is True
        with pytest.raises(lossy.server.client.exceptions.NoSuchKey):
            lossy.seen()


@pytest.mark.parametrize("fault", [Mishap.ANSWER_LOST, Lie.XHTML_200])
async def test_copy_survives_repeated_faults(lossy: Written, proxy: Proxy, fault: Fault) -> None:
    """A multipart copy each fourth of whose requests fails is done, and leaves no upload."""
    for first in range(4):
        etag = lossy.put(OLD)
        proxy.spoil(range(first, 100, 4), fault)

        written = await lossy.store.put(lossy.ref, COPIED, expected=etag)

        assert len(proxy.seen) >= 11
        assert lossy.seen() == (OLD[: 5 * MIB] + b"new" + OLD[5 * MIB + 16 :], written)
        assert lossy.left() == []


@pytest.mark.parametrize("lie", Lie)
async def test_response_of_a_proxy_is_an_error(lossy: Written, proxy: Proxy, lie: Lie) -> None:
    """A proxy's response in place of S3's raises StorageError, and never means absence."""
    lossy.put(b"there")
    proxy.spoil(range(100), lie)

    for read in (lossy.store.get, lossy.store.stat):
        with pytest.raises(StorageError):
            await read(lossy.ref)
    with pytest.raises(StorageError) as raised:
        await anext(lossy.store.list(lossy.root))
    assert ("bucket" in str(raised.value)) is (lie is Lie.BUCKET_404)


@pytest.mark.parametrize(
    "mishap",
    [
        pytest.param(mishap, marks=() if mishap is Mishap.CONFLICT else pytest.mark.soak)
        for mishap in Mishap
        if mishap not in (Mishap.BODY_LOST, Mishap.ERROR)
    ],
)
async def test_copy_survives_lost_messages(lossy: Written, proxy: Proxy, mishap: Mishap) -> None:
    """A multipart copy one of whose requests or responses is lost is done, and leaves no upload."""
    assert await rewrite_spoilt(lossy, proxy, mishap, OLD, COPIED) >= 11


@pytest.mark.parametrize(
    ("pieces", "nth"), [([b"ours"], 1), ([ByteRange(0, 10 * MIB), b"ours"], 7)], ids=["put", "copy"]
)
async def test_lost_write_replaced_since_has_succeeded(
    lossy: Written, proxy: Proxy, pieces: list[Piece], nth: int
) -> None:
    """A write whose response is lost, and that another one replaced since, returns its ETag."""
    etag = lossy.put(OLD)

    async def build_upon() -> None:
        async with aclosing(S3Store(lossy.server.settings)) as other:
            stat = await stat_of(other, lossy.ref)
            assert stat.etag != etag
            assert isinstance(await other.put(lossy.ref, [b"on top"], expected=stat.etag), str)

    proxy.between = lambda: asyncio.run(build_upon())
    proxy.spoil([nth], Mishap.ANSWER_LOST)
    written = await lossy.store.put(lossy.ref, pieces, expected=etag)

    assert lossy.seen()[0] == b"on top"
    assert isinstance(written, str)
    with pytest.raises(VersionChangedError):
        await lossy.store.get(lossy.ref, if_match=written)
    assert await lossy.store.put(lossy.ref, [b"more"], expected=written) is CONFLICT


@pytest.mark.parametrize("mishap", [Mishap.REQUEST_LOST, Mishap.ERROR])
async def test_lost_write_overtaken_by_another_is_a_conflict(
    lossy: Written, proxy: Proxy, mishap: Mishap
) -> None:
    """A write whose request is lost, and whose condition no longer holds, is CONFLICT."""
    etag = lossy.put(b"old")
    proxy.between = lambda: lossy.put(b"theirs")
    proxy.spoil([1], mishap)

    assert await lossy.store.put(lossy.ref, [b"ours"], expected=etag) is CONFLICT
    assert lossy.seen()[0] == b"theirs"


async def test_an_unknown_outcome_is_an_error(seaweedfs: SeaweedFS, proxy: Proxy) -> None:
    """A write to a server that no longer responds raises StorageError, and is no conflict."""
    lossy = Written(seaweedfs, proxy.url, deadline_s=5)
    await lossy.store.verify_conditional_writes(lossy.root)
    etag = lossy.put(b"old")
    proxy.spoil(range(1, 1000), Mishap.ANSWER_LOST)

    with pytest.raises(StorageError):
        await lossy.store.put(lossy.ref, [b"new"], expected=etag)
    await lossy.store.aclose()


ZEROS = bytes(6 * MIB)
CHANGES: list[Piece] = [ByteRange(0, 5 * MIB), b"new"]


@pytest.fixture
def relay(ministack: MiniStack) -> Generator[Proxy]:
    """Run a proxy in front of a server that does not check signatures."""
    with Proxy(ministack.endpoint_url).running() as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def poor(ministack: MiniStack, relay: Proxy) -> AsyncGenerator[Written]:
    """Open a store behind the proxy, which removes features of the server."""
    written = Written(ministack, relay.url, deadline_s=LONGEST_S, copied_nbytes=MIB)
    yield written
    await written.store.aclose()


async def rewrite(poor: Written) -> None:
    """Rewrite a large object."""
    written = await poor.store.put(poor.ref, CHANGES, expected=poor.put(ZEROS))
    assert poor.seen() == (ZEROS[: 5 * MIB] + b"new", written)


@pytest.mark.parametrize(
    ("header", "named"),
    [
        ("if-match", "ignores If-Match,"),
        ("if-none-match", "ignores If-None-Match,"),
        ("x-amz-meta-shardgate-writes", "keeps no metadata,"),
    ],
)
async def test_server_without_conditions_is_refused(
    poor: Written, relay: Proxy, header: str, named: str
) -> None:
    """A server that ignores conditions or metadata raises UnwritableError at each probe.

    A successful probe is not repeated, and none leaves an object.
    """
    relay.hides = lambda _, name: name == header
    for _ in range(2):
        with pytest.raises(UnwritableError, match=named):
            await poor.store.verify_conditional_writes(poor.root)

    relay.hides = lambda *_: False
    await poor.store.verify_conditional_writes(poor.root)
    asked = len(relay.seen)
    await poor.store.verify_conditional_writes(poor.root)  # which is known now
    assert len(relay.seen) == asked
    assert poor.left() == []


@pytest.mark.parametrize("mishap", [Mishap.ANSWER_LOST, Mishap.ERROR, Mishap.CONFLICT])
async def test_probe_succeeds_despite_faults(poor: Written, relay: Proxy, mishap: Mishap) -> None:
    """A probe each fourth of whose requests fails succeeds."""
    for first in range(4):
        relay.spoil(range(first, 1000, 4), mishap)
        await poor.store.verify_conditional_writes(poor.root.join(f"{mishap}{first}"))


@pytest.mark.soak
@pytest.mark.parametrize("mishap", Mishap)
async def test_probe_succeeds_despite_a_fault(poor: Written, relay: Proxy, mishap: Mishap) -> None:
    """A probe one of whose requests fails succeeds."""
    nth = 0
    while nth <= len(relay.seen):
        relay.spoil([nth], mishap)
        await poor.store.verify_conditional_writes(poor.root.join(f"{mishap}{nth}"))
        nth += 1


async def test_probe_of_a_cancelled_caller_leaves_nothing(poor: Written, relay: Proxy) -> None:
    """A probe whose caller is cancelled at any of its requests removes its object and upload."""
    await cancel_probes(poor.store, poor.root, relay)

    assert poor.left() == []


async def test_delete_without_conditions_is_not_done(poor: Written, relay: Proxy) -> None:
    """If the server's DELETE ignores If-Match, a conditional one removes nothing."""
    relay.hides = lambda method, name: method == "DELETE" and name == "if-match"
    etag = poor.put(b"1")

    assert await poor.store.delete(poor.ref, expected=etag) is False
    assert await poor.store.stat(poor.ref) is not None
    assert await poor.store.delete(poor.ref, expected=None) is True
    assert await poor.store.stat(poor.ref) is None


async def test_unsafe_copy_is_not_used(poor: Written, relay: Proxy) -> None:
    """All bytes are sent if the server ignores conditions when an upload is completed."""
    relay.hides = lambda method, header: method == "POST" and header.startswith("if-")

    await rewrite(poor)

    assert poor.notices == [WriteNotice(5 * MIB + 3, 5 * MIB)]


async def test_server_without_copies_is_remembered(poor: Written, relay: Proxy) -> None:
    """A server that does not copy ranges is asked once, and all bytes are sent."""
    relay.unknown = "x-amz-copy-source-range"
    for _ in range(2):
        await rewrite(poor)

    assert [each.copied for each in poor.notices] == [0, 0]
    assert sum("uploads" in request for request in relay.seen if "POST" in request) <= 2


async def test_missing_bucket_is_unusable(seaweedfs: SeaweedFS) -> None:
    """A missing bucket raises StorageUnusableError, and is not created."""
    store, root = S3Store(seaweedfs.settings), ObjectRef("s3://no-such-bucket", "")

    for _ in range(2):
        with pytest.raises(StorageUnusableError, match="bucket"):
            await store.verify_conditional_writes(root)
    await store.aclose()
