"""Writes to S3 of which a request or an answer is lost, each in turn."""

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing
from typing import Any
from uuid import uuid4

import pytest

from app.errors import StorageError, VersionChangedError
from app.model import ByteRange, ETag, ObjectRef, Piece
from app.settings import StoreSettings
from app.storage.contract import ABSENT, CONFLICT
from app.storage.s3.store import S3Store
from app.storage.s3.writing import Writing
from tests.seaweedfs import SeaweedFS
from tests.storage.conftest import s3_settings
from tests.storage.proxy import Fault, Lie, Mishap, Proxy

MIB = 1024**2
OLD = b"".join(bytes([n]) * (MIB // 2) for n in range(21))
COPIED: list[Piece] = [ByteRange(0, 5 * MIB), b"new", ByteRange(5 * MIB + 16, len(OLD))]
WRITING = Writing(5, copied_nbytes=MIB)
WITHOUT_ETAG = (Lie.EMPTY_200, Lie.PAGE_200, Lie.XHTML_200, Lie.EMPTY_204)
FAKED = (*WITHOUT_ETAG, Lie.PAGE_404, Lie.EMPTY_404, Lie.PAGE_410)


class Lossy:
    """A store behind a proxy, and the objects that it writes."""

    def __init__(self, server: SeaweedFS, proxy: Proxy) -> None:
        self.server = server
        self.proxy = proxy
        told = s3_settings(server).model_dump() | {"endpoint_url": proxy.url}
        settings = StoreSettings.model_validate(told)
        self.store = S3Store(settings, timeout_s=5, writing=WRITING)
        self.root = ObjectRef(f"s3://{server.bucket}", f"lost/{uuid4().hex}")
        self.ref = self.root.join("key")

    def seen(self) -> tuple[bytes, str]:
        """Look at the object past the proxy."""
        answer = self.server.client.get_object(Bucket=self.server.bucket, Key=self.ref.key)
        return answer["Body"].read(), answer["ETag"]

    def left(self) -> list[Any]:
        """Name what is beside the object."""
        where = {"Bucket": self.server.bucket, "Prefix": self.root.key}
        objects = self.server.client.list_objects_v2(**where).get("Contents", [])
        uploads = self.server.client.list_multipart_uploads(**where).get("Uploads", [])
        return [*uploads, *(each["Key"] for each in objects if each["Key"] != self.ref.key)]


@pytest.fixture
def proxy(seaweedfs: SeaweedFS) -> Generator[Proxy]:
    """Run a proxy."""
    with Proxy(seaweedfs.endpoint_url).running() as running:
        yield running


@pytest.fixture
async def lossy(seaweedfs: SeaweedFS, proxy: Proxy) -> AsyncGenerator[Lossy]:
    """Open a store behind the proxy, which has been tried already."""
    made = Lossy(seaweedfs, proxy)
    await made.store.demand_safety(made.root)
    yield made
    await made.store.aclose()


async def rewrite_spoilt(lossy: Lossy, mishap: Fault, old: bytes, pieces: list[Piece]) -> int:
    """Rewrite an object for every request that this takes, and spoil that; count them."""
    new = b"".join(old[p.start : p.stop] if isinstance(p, ByteRange) else p for p in pieces)
    nth = 0
    while True:
        lossy.ref = lossy.root.join(f"{nth}")
        etag = ETag(lossy.server.put(lossy.ref.key, old))
        lossy.proxy.spoil([nth], mishap)

        written = await lossy.store.put(lossy.ref, pieces, expected=etag)

        assert lossy.seen() == (new, written)
        assert lossy.left() == []
        lossy.server.delete(lossy.ref.key)
        if nth >= (count := len(lossy.proxy.seen)):
            return nth
        nth += 1
        if mishap is Mishap.CONFLICT:
            nth = next((n for n in range(nth, count) if lossy.proxy.seen[n].endswith(" if")), count)


@pytest.mark.parametrize("mishap", Mishap)
async def test_a_put_is_done_whatever_is_lost(lossy: Lossy, mishap: Mishap) -> None:
    """Replacing an object is told as done when it is, under the version that it has."""
    assert await rewrite_spoilt(lossy, mishap, b"0123456789", [b"new", ByteRange(0, 9)]) >= 3


@pytest.mark.parametrize("is_done", [True, False])
@pytest.mark.parametrize("lie", FAKED)
async def test_a_put_is_done_whoever_answers(lossy: Lossy, lie: Lie, is_done: bool) -> None:  # noqa: FBT001  a parameter
    """An answer without an ETag acknowledges nothing: the write is looked for, and sent again."""
    lossy.proxy.passes_on = is_done

    assert await rewrite_spoilt(lossy, lie, b"0123456789", [b"new", ByteRange(0, 9)]) >= 3


async def test_a_copy_is_done_whoever_answers(lossy: Lossy) -> None:
    """The same of the requests of an upload in parts, whose answers lack what S3 sends."""
    etag = ETag(lossy.server.put(lossy.ref.key, OLD))
    lossy.proxy.spoil(range(2, 100, 5), Lie.XHTML_200)

    written = await lossy.store.put(lossy.ref, COPIED, expected=etag)

    assert lossy.seen() == (OLD[: 5 * MIB] + b"new" + OLD[5 * MIB + 16 :], written)


@pytest.mark.parametrize("lie", sorted({*FAKED} - {Lie.EMPTY_204}))
async def test_a_removal_is_done_whoever_answers(lossy: Lossy, lie: Lie) -> None:
    """S3 answers a DELETE with 204; any other answer is no proof that the object is gone."""
    etag = ETag(lossy.server.put(lossy.ref.key, b"1"))
    lossy.proxy.spoil([0], lie)

    assert await lossy.store.delete(lossy.ref, expected=etag) is True
    with pytest.raises(lossy.server.client.exceptions.NoSuchKey):
        lossy.seen()


@pytest.mark.parametrize("lie", Lie)
async def test_only_s3_says_what_is_absent(lossy: Lossy, lie: Lie) -> None:
    """An object that is there is neither absent nor another, whatever a proxy answers for S3."""
    lossy.server.put(lossy.ref.key, b"there")
    lossy.proxy.spoil(range(100), lie)

    for read in (lossy.store.get, lossy.store.stat):
        with pytest.raises(StorageError):
            await read(lossy.ref)
    with pytest.raises(StorageError) as raised:
        await anext(lossy.store.list(lossy.root))
    assert ("bucket" in str(raised.value)) is (lie is Lie.BUCKET_404)


@pytest.mark.parametrize("mishap", [Mishap.ANSWER_LOST, Mishap.CONFLICT])
async def test_a_copy_is_done_whatever_is_lost(lossy: Lossy, mishap: Mishap) -> None:
    """The same of large objects, of which nothing is left behind either."""
    assert await rewrite_spoilt(lossy, mishap, OLD, COPIED) >= 11


@pytest.mark.soak
@pytest.mark.parametrize("mishap", [Mishap.REQUEST_LOST, Mishap.SLOW_DOWN, Mishap.DONE_AND_500])
async def test_a_copy_is_done_whatever_goes_wrong(lossy: Lossy, mishap: Mishap) -> None:
    """So it is where the answer is another than that none comes."""
    assert await rewrite_spoilt(lossy, mishap, OLD, COPIED) >= 11


@pytest.mark.parametrize("mishap", Mishap)
async def test_the_first_put_is_done_whatever_is_lost(lossy: Lossy, mishap: Mishap) -> None:
    """An object that is made, and whose making was not heard of, is no conflict."""
    for nth in range(2):
        lossy.ref = lossy.root.join(f"{nth}")
        lossy.proxy.spoil([nth], mishap)

        etag = await lossy.store.put(lossy.ref, [b"new"], expected=ABSENT)

        assert lossy.seen() == (b"new", etag)


@pytest.mark.parametrize("mishap", Mishap)
async def test_a_removal_is_done_whatever_is_lost(lossy: Lossy, mishap: Mishap) -> None:
    """What is gone because of us is no conflict."""
    for nth in range(2):
        etag = ETag(lossy.server.put(lossy.ref.key, b"1"))
        lossy.proxy.spoil([nth], mishap)

        assert await lossy.store.delete(lossy.ref, expected=etag) is True
        with pytest.raises(lossy.server.client.exceptions.NoSuchKey):
            lossy.seen()


@pytest.mark.parametrize(
    ("pieces", "nth"), [([b"ours"], 1), ([ByteRange(0, 10 * MIB), b"ours"], 7)], ids=["put", "copy"]
)
async def test_who_was_written_on_top_of_has_won(
    lossy: Lossy, pieces: list[Piece], nth: int
) -> None:
    """A write that others have built upon was done, under a version that nothing has any more."""
    etag = ETag(lossy.server.put(lossy.ref.key, OLD))

    async def build_upon() -> None:
        async with aclosing(S3Store(s3_settings(lossy.server))) as other:
            stat = await other.stat(lossy.ref)
            assert stat is not None
            assert stat.etag != etag
            assert isinstance(await other.put(lossy.ref, [b"on top"], expected=stat.etag), str)

    lossy.proxy.between = lambda: asyncio.run(build_upon())
    lossy.proxy.spoil([nth], Mishap.ANSWER_LOST)
    written = await lossy.store.put(lossy.ref, pieces, expected=etag)

    assert lossy.seen()[0] == b"on top"
    assert isinstance(written, str)
    with pytest.raises(VersionChangedError):
        await lossy.store.get(lossy.ref, if_match=written)
    assert await lossy.store.put(lossy.ref, [b"more"], expected=written) is CONFLICT


@pytest.mark.parametrize("mishap", [Mishap.REQUEST_LOST, Mishap.ERROR])
async def test_who_was_overtaken_has_lost(lossy: Lossy, mishap: Mishap) -> None:
    """A write that was not done, and cannot be any more, is a conflict."""
    etag = ETag(lossy.server.put(lossy.ref.key, b"old"))
    lossy.proxy.between = lambda: lossy.server.put(lossy.ref.key, b"theirs")
    lossy.proxy.spoil([1], mishap)

    assert await lossy.store.put(lossy.ref, [b"ours"], expected=etag) is CONFLICT
    assert lossy.seen()[0] == b"theirs"


async def test_what_nobody_knows_is_no_conflict(lossy: Lossy) -> None:
    """When the server cannot be asked any more, that is what is told."""
    etag = ETag(lossy.server.put(lossy.ref.key, b"old"))
    lossy.proxy.spoil(range(1, 1000), Mishap.ANSWER_LOST)

    with pytest.raises(StorageError):
        await lossy.store.put(lossy.ref, [b"new"], expected=etag)
