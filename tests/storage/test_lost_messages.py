"""Writes to buckets whose requests or responses are lost, or that something else answers."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final

import pytest
import pytest_asyncio

from shardgate.errors import (
    StorageError,
    StorageUnusableError,
    UnwritableError,
    VersionChangedError,
)
from shardgate.model import ByteRange, ObjectRef, Piece
from shardgate.settings import StoreSettings
from shardgate.storage.contract import ABSENT, CONFLICT
from tests.support.storage.faulty import LONGEST_S
from tests.support.storage.google import ENVIRON
from tests.support.storage.proxy import Fault, Lie, Mishap, Proxy, cancel_probes
from tests.support.storage.reading import az_settings, stat_of
from tests.support.storage.written import CloudWritten, S3Written, Written

MIB: Final = 1024**2
FAKED: Final = (
    Lie.EMPTY_200, Lie.PAGE_200, Lie.XHTML_200, Lie.EMPTY_204,
    Lie.PAGE_404, Lie.EMPTY_404, Lie.PAGE_410,
)  # fmt: skip
USUAL: Final = (Lie.PAGE_200, Lie.PAGE_404)
SERVERS: Final = {"s3": "seaweedfs", "gs": "google_server", "az": "azurite", "mini": "ministack"}
CLOUDS: Final = ("gs", "az")

pytestmark = pytest.mark.asyncio(loop_scope="module")


@asynccontextmanager
async def opened_before(request: pytest.FixtureRequest) -> AsyncGenerator[tuple[Written, Proxy]]:
    """Open a store of the kind that the parameter names, behind a proxy."""
    kind: str = request.param
    server: Any = request.getfixturevalue(SERVERS[kind])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(*next(iter(ENVIRON.items())))
        with Proxy(server.url if kind in CLOUDS else server.endpoint_url).running() as proxy:
            if kind in CLOUDS:
                google = StoreSettings(endpoint_url=server.url)
                settings = az_settings(server) if kind == "az" else google
                made: Written = CloudWritten(kind, settings, proxy)
            else:
                made = S3Written(server, proxy, deadline_s=LONGEST_S, copied_nbytes=MIB)
            async with aclosing(made):
                yield made, proxy


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["s3", *CLOUDS])
async def opened(request: pytest.FixtureRequest) -> AsyncGenerator[tuple[Written, Proxy]]:
    """Open a store of each kind behind a proxy, whose server is known to be safe."""
    async with opened_before(request) as (made, proxy):
        await made.store.verify_conditional_writes(made.root)
        yield made, proxy


@pytest.fixture
def proxy(opened: tuple[Written, Proxy]) -> Proxy:
    """Return the proxy, without faults."""
    opened[1].heal()
    return opened[1]


@pytest.fixture
def written(
    opened: tuple[Written, Proxy], proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> Written:
    """Return the store, with a prefix of its own."""
    monkeypatch.setenv(*next(iter(ENVIRON.items())))
    opened[0].move()
    return opened[0]


async def rewrite_spoilt(
    written: Written, proxy: Proxy, fault: Fault, old: bytes | None, pieces: list[Piece]
) -> int:
    """Rewrite an object once for each request that this takes, spoil that, and count them."""
    kept = old or b""
    new = b"".join(kept[p.start : p.stop] if isinstance(p, ByteRange) else p for p in pieces)
    nth = 0
    while True:
        written.move()
        expected = ABSENT if old is None else await written.put(old)
        proxy.spoil([nth], fault)

        etag = await written.store.put(written.ref, pieces, expected=expected)

        assert await written.seen() == (new, etag)
        assert await written.left() == []
        if nth >= (count := len(proxy.seen)):
            return nth
        nth += 1
        if fault is Mishap.CONFLICT:
            nth = next((n for n in range(nth, count) if proxy.seen[n].endswith(" if")), count)


def is_usual(kind: str, fault: Fault, *, is_done: bool) -> bool:
    """Return whether a PUT meets the fault in every run; in soak runs it meets all."""
    return isinstance(fault, Mishap) or fault in USUAL or (kind == "s3" and not is_done)


CASES: Final = [
    pytest.param(
        *(kind, fault, is_done),
        marks=() if is_usual(kind, fault, is_done=is_done) else pytest.mark.soak,
    )
    for kind in ("s3", *CLOUDS)
    for fault in (*Mishap, *FAKED)
    for is_done in ((False, True) if isinstance(fault, Lie) else (False,))
]
"""Kinds of stores, faults, and whether the server gets the request of a `Lie`."""
in_each_case = pytest.mark.parametrize(
    ("opened", "fault", "is_done"), CASES, ids=str, indirect=["opened"]
)


@in_each_case
async def test_put_succeeds_despite_lost_messages(
    written: Written, proxy: Proxy, fault: Fault, *, is_done: bool
) -> None:
    """A PUT one of whose requests or responses is lost is done once.

    The object is read back before a request is repeated.
    """
    proxy.passes_on = is_done
    pieces: list[Piece] = [b"new", ByteRange(0, 9)]

    assert await rewrite_spoilt(written, proxy, fault, None, [b"new"]) >= 1
    assert await rewrite_spoilt(written, proxy, fault, b"0123456789", pieces) >= 3


@in_each_case
async def test_delete_survives_lost_messages(
    written: Written, proxy: Proxy, fault: Fault, *, is_done: bool
) -> None:
    """A DELETE whose request or response is lost is done, and not a conflict."""
    proxy.passes_on = is_done or fault is Lie.EMPTY_204  # which says that it is done
    for nth in range(2):
        etag = await written.put(b"1")
        proxy.spoil([nth], fault)

        expected = etag if isinstance(written, S3Written) else None
        assert await written.store.delete(written.ref, expected=expected) is True
        assert await written.is_absent()


@pytest.mark.parametrize(
    ("opened", "size"),
    [("s3", 1), pytest.param("s3", 10 * MIB, id="s3-copy"), *((kind, 1) for kind in CLOUDS)],
    indirect=["opened"],
)
async def test_lost_write_replaced_since_has_succeeded(
    written: Written, proxy: Proxy, size: int
) -> None:
    """A write whose response is lost, and that another one replaced since, returns its ETag."""
    etag = await written.put(bytes(size))

    async def build_upon() -> None:
        async with aclosing(written.another()) as other:
            stat = await stat_of(other, written.ref)
            assert stat.etag != etag
            assert isinstance(await other.put(written.ref, [b"on top"], expected=stat.etag), str)

    proxy.between = lambda: asyncio.run(build_upon())
    proxy.spoil([1 if size == 1 else 7], Mishap.ANSWER_LOST)
    pieces: list[Piece] = [b"ours"] if size == 1 else [ByteRange(0, size), b"ours"]
    ours = await written.store.put(written.ref, pieces, expected=etag)

    assert (await written.seen())[0] == b"on top"
    assert isinstance(ours, str)
    with pytest.raises(VersionChangedError):
        await written.store.get(written.ref, if_match=ours)
    assert await written.store.put(written.ref, [b"more"], expected=ours) is CONFLICT


@pytest.mark.parametrize("mishap", [Mishap.REQUEST_LOST, Mishap.ERROR])
async def test_lost_write_overtaken_by_another_is_a_conflict(
    written: Written, proxy: Proxy, mishap: Mishap
) -> None:
    """A write whose request is lost, and whose condition no longer holds, is CONFLICT."""
    etag = await written.put(b"old")

    async def overtake() -> None:
        async with aclosing(written.another()) as other:
            await other.put(written.ref, [b"theirs"], expected=None)

    proxy.between = lambda: asyncio.run(overtake())
    proxy.spoil([1], mishap)

    assert await written.store.put(written.ref, [b"ours"], expected=etag) is CONFLICT
    assert (await written.seen())[0] == b"theirs"


async def test_an_unknown_outcome_is_an_error(written: Written, proxy: Proxy) -> None:
    """A write to a server that no longer responds raises StorageError, and is no conflict."""
    if isinstance(written, S3Written):
        hasty: Written = S3Written(written.server, proxy, deadline_s=5)
    else:
        hasty = CloudWritten(written.scheme, written.settings, proxy, deadline_s=5)
    etag = await hasty.put(b"old")
    proxy.spoil(range(1, 1000), Mishap.ANSWER_LOST)

    with pytest.raises(StorageError):
        await hasty.store.put(hasty.ref, [b"new"], expected=etag)
    await hasty.aclose()


async def test_missing_bucket_is_unusable(written: Written) -> None:
    """A missing bucket raises StorageUnusableError, and is not created."""
    scheme = written.bucket.partition(":")[0]
    root = ObjectRef(f"{scheme}://no-such-bucket", "")

    for _ in range(2):
        with pytest.raises(StorageUnusableError, match="bucket"):
            await written.store.verify_conditional_writes(root)
    if isinstance(written, CloudWritten):  # SeaweedFS creates the bucket
        with pytest.raises(StorageUnusableError, match="bucket"):
            await written.store.put(root.join("key"), [b"1"], expected=ABSENT)


only_s3 = pytest.mark.parametrize("opened", ["s3"], indirect=True)
OLD: Final = b"".join(bytes([n]) * (MIB // 2) for n in range(21))
"""Two parts, and a short one."""
COPIED: Final[list[Piece]] = [
    ByteRange(0, 5 * MIB),
    b"new",
    ByteRange(5 * MIB + 16, len(OLD)),
]


@only_s3
@pytest.mark.parametrize(
    "fault", [Mishap.ANSWER_LOST, pytest.param(Lie.XHTML_200, marks=pytest.mark.soak)]
)
async def test_copy_survives_repeated_faults(written: Written, proxy: Proxy, fault: Fault) -> None:
    """A multipart copy each fourth of whose requests fails is done, and leaves no upload."""
    for first in range(4):
        etag = await written.put(OLD)
        proxy.spoil(range(first, 100, 4), fault)

        copied = await written.store.put(written.ref, COPIED, expected=etag)

        assert len(proxy.seen) >= 11
        new = OLD[: 5 * MIB] + b"new" + OLD[5 * MIB + 16 :]
        assert await written.seen() == (new, copied)
        assert await written.left() == []


@only_s3
@pytest.mark.parametrize(
    "mishap",
    [
        pytest.param(mishap, marks=() if mishap is Mishap.CONFLICT else pytest.mark.soak)
        for mishap in Mishap
        if mishap not in (Mishap.BODY_LOST, Mishap.ERROR)
    ],
)
async def test_copy_survives_lost_messages(written: Written, proxy: Proxy, mishap: Mishap) -> None:
    """A multipart copy one of whose requests or responses is lost is done, and leaves no upload."""
    assert await rewrite_spoilt(written, proxy, mishap, OLD, COPIED) >= 11


@only_s3
@pytest.mark.parametrize("lie", Lie)
async def test_response_of_a_proxy_is_an_error(written: Written, proxy: Proxy, lie: Lie) -> None:
    """A proxy's response in place of S3's raises StorageError, and never means absence."""
    await written.put(b"there")
    proxy.spoil(range(100), lie)

    for read in (written.store.get, written.store.stat):
        with pytest.raises(StorageError):
            await read(written.ref)
    with pytest.raises(StorageError) as raised:
        await anext(written.store.list(written.root))
    assert ("bucket" in str(raised.value)) is (lie is Lie.BUCKET_404)


@pytest_asyncio.fixture(loop_scope="module", params=["mini", *CLOUDS])
async def poor(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[tuple[Written, Proxy]]:
    """Open a store behind a proxy that may remove features of its server.

    The server checks no signatures, and is not known to be safe.
    """
    async with opened_before(request) as made:
        monkeypatch.setenv(*next(iter(ENVIRON.items())))
        yield made


only_mini = pytest.mark.parametrize("poor", ["mini"], indirect=True)
PROBED: Final = {
    ("mini", "if-match"): "ignores If-Match,",
    ("mini", "if-none-match"): "ignores If-None-Match,",
    ("mini", "x-amz-meta-shardgate-writes"): "keeps no metadata,",
    ("gs", "x-goog-if-generation-match"): "ignores x-goog-if-generation-match,",
    ("gs", "x-goog-meta-shardgate-writes"): "keeps no metadata,",
}


@pytest.mark.parametrize(
    ("poor", "header", "named"), [(*key, named) for key, named in PROBED.items()], indirect=["poor"]
)
async def test_server_without_conditions_is_refused(
    poor: tuple[Written, Proxy], header: str, named: str
) -> None:
    """A server that ignores conditions or metadata raises UnwritableError at each probe.

    A successful probe is not repeated, and none leaves an object.
    """
    written, relay = poor
    relay.hides = lambda _, name: name == header
    for _ in range(2):
        with pytest.raises(UnwritableError, match=named):
            await written.store.verify_conditional_writes(written.root)

    relay.hides = lambda *_: False
    await written.store.verify_conditional_writes(written.root)
    asked = len(relay.seen)
    await written.store.verify_conditional_writes(written.root)  # which is known now
    assert len(relay.seen) == asked
    assert await written.left() == []


@pytest.mark.parametrize("mishap", [Mishap.ANSWER_LOST, Mishap.ERROR])
async def test_probe_succeeds_despite_faults(poor: tuple[Written, Proxy], mishap: Mishap) -> None:
    """A probe each fourth of whose requests fails, beginning with any of four, succeeds."""
    written, relay = poor
    for first in range(4):
        relay.spoil(range(first, 1000, 4), mishap)
        await written.store.verify_conditional_writes(written.root.join(f"{first}"))


async def test_probe_of_a_cancelled_caller_leaves_nothing(poor: tuple[Written, Proxy]) -> None:
    """A probe whose caller is cancelled at any of its requests removes its object and upload."""
    written, relay = poor
    await cancel_probes(written.store, written.root, relay)

    assert await written.left() == []


@only_mini
async def test_delete_without_conditions_is_not_done(poor: tuple[Written, Proxy]) -> None:
    """If the server's DELETE ignores If-Match, a conditional one removes nothing."""
    written, relay = poor
    relay.hides = lambda method, name: method == "DELETE" and name == "if-match"
    etag = await written.put(b"1")

    assert await written.store.delete(written.ref, expected=etag) is False
    assert await written.store.stat(written.ref) is not None
    assert await written.store.delete(written.ref, expected=None) is True
    assert await written.store.stat(written.ref) is None


async def rewrite_large(written: Written) -> int:
    """Rewrite a large object, and return the number of bytes that the server copied."""
    etag = await written.put(bytes(6 * MIB))
    made = await written.store.put(written.ref, [ByteRange(0, 5 * MIB), b"new"], expected=etag)
    assert await written.seen() == (bytes(5 * MIB) + b"new", made)
    return written.notices[-1].copied


@only_mini
async def test_unsafe_copy_is_not_used(poor: tuple[Written, Proxy]) -> None:
    """All bytes are sent if the server ignores conditions when an upload is completed."""
    written, relay = poor
    relay.hides = lambda method, header: method == "POST" and header.startswith("if-")

    assert await rewrite_large(written) == 0
    assert written.notices[-1].sent == 5 * MIB + 3


@only_mini
async def test_server_without_copies_is_remembered(poor: tuple[Written, Proxy]) -> None:
    """A server that does not copy ranges is asked once, and all bytes are sent."""
    written, relay = poor
    relay.unknown = "x-amz-copy-source-range"

    assert [await rewrite_large(written) for _ in range(2)] == [0, 0]
    assert sum("uploads" in request for request in relay.seen if "POST" in request) <= 2
