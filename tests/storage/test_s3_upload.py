"""Multipart uploads to S3: parts that the server copies, and parts that are sent."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Self
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardgate.model import ByteRange, ETag, ObjectRef, Piece
from shardgate.settings import StoreSettings
from shardgate.storage.contract import (
    ABSENT,
    CONFLICT,
    Conflict,
    Expected,
    ObjectHeaders,
    WriteNotice,
    assemble,
    nbytes_of,
    plan_spans,
)
from shardgate.storage.s3_client import S3Client
from shardgate.storage.s3_upload import MultipartWriter, Part, plan_parts
from tests.support.seaweedfs import SeaweedFS
from tests.support.storage.faulty import LONGEST_S
from tests.support.storage.listening import Handler, Listener
from tests.support.storage.ministack import MiniStack
from tests.support.storage.reading import found, stat_of
from tests.support.storage.written import S3Written

OLD = bytes(range(256)) * 8
MIN = 50
MIB = 1024**2
LARGE = b"".join(bytes([n]) * MIB for n in range(17))
CHANGES: list[Piece] = [ByteRange(0, 6 * MIB), b"new", ByteRange(6 * MIB + 9, 17 * MIB), b"index"]
REWRITTEN = LARGE[: 6 * MIB] + b"new" + LARGE[6 * MIB + 9 :] + b"index"
STALE_S = 2.0

ranges = st.tuples(st.integers(0, len(OLD)), st.integers(0, len(OLD))).map(
    lambda ends: ByteRange(min(ends), max(ends))
)
pieces = st.lists(st.binary(max_size=2 * MIN) | ranges, max_size=12)


def made(parts: Sequence[Part | Piece]) -> bytes:
    """Return the object that *parts* make."""
    data = b""
    for part in parts:
        if isinstance(part, list):
            data += made(part)
        else:
            data += OLD[part.start : part.stop] if isinstance(part, ByteRange) else part
    return data


def nbytes(part: Part) -> int:
    """Return the length of a part."""
    return part.length if isinstance(part, ByteRange) else sum(map(nbytes_of, part))


def sent(parts: Sequence[Part]) -> int:
    """Return the number of bytes that are sent."""
    return sum(nbytes(part) for part in parts if not isinstance(part, ByteRange))


@given(pieces)
def test_parts_make_the_same_bytes(given: list[Piece]) -> None:
    """Planned parts make the bytes of their pieces, and each but the last is long enough.

    Little of what is copied is sent.
    """
    parts = plan_parts(given, min_nbytes=MIN)

    assert made(parts) == made(plan_parts(given, copies=False)) == made([*given])
    assert all(nbytes(part) >= MIN for part in parts[:-1])
    assert all(nbytes(part) > 0 for part in parts)
    new = sum(len(piece) for piece in given if isinstance(piece, bytes))
    assert sent(parts) <= new + MIN * len(given)


@pytest.mark.parametrize("new", [b"", b"index"])
def test_last_part_may_be_short(new: bytes) -> None:
    """The last part, copied or sent, may be short."""
    parts = plan_parts([b"n" * MIN, ByteRange(0, 3 * MIN), ByteRange(9, 10), new], min_nbytes=MIN)

    assert parts[1] == ByteRange(0, 3 * MIN)
    assert nbytes(parts[-1]) == 1 + len(new)


def test_short_range_between_changes_is_sent() -> None:
    """A range between two changes that is too short to be copied is sent with both."""
    given: list[Piece] = [ByteRange(0, 1000), b"1", ByteRange(0, 60), b"2", ByteRange(0, 1000)]

    parts = plan_parts(given, min_nbytes=MIN)

    assert parts == [given[0], given[1:4], given[4]]


@given(pieces)
def test_spans_contain_all_ranges(given: list[Piece]) -> None:
    """Ranges read in one span make the same bytes."""
    spans = plan_spans(piece for piece in given if isinstance(piece, ByteRange))
    read = [OLD[span.start : span.stop] for span in spans]

    assert assemble(given, spans, read) == made([*given])
    assert len(spans) <= 1


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 40)), max_size=20))
def test_spans_are_bounded(given: list[tuple[int, int]]) -> None:
    """Spans join near ranges, and are no longer than 16 MiB or the longest range."""
    ranges = [ByteRange(start * MIB, (start + length) * MIB) for start, length in given]

    spans = plan_spans(ranges)

    assert all(any(s.start <= r.start and r.stop <= s.stop for s in spans) for r in ranges)
    longest = max((each.length for each in ranges), default=0)
    assert all(span.length <= max(16 * MIB, longest) for span in spans)


def test_parts_are_neither_many_nor_long() -> None:
    """Adjacent ranges are copied together, and long ones divided evenly.

    There are at most 10,000 parts, so the least length may grow.
    """
    kept = [ByteRange(at, at + 60) for at in range(0, 61 * 25_000, 61)]
    many = plan_parts([piece for each in kept for piece in (each, b"x")], min_nbytes=MIN)
    adjacent: list[Piece] = [ByteRange(n, n + 1) for n in range(500)]
    new: list[Piece] = [b"x" * (20 * MIB), ByteRange(0, 20 * MIB)]

    assert len(many) <= 10_000
    assert plan_parts(adjacent, min_nbytes=MIN) == [ByteRange(0, 500)]
    assert [nbytes(part) for part in plan_parts([ByteRange(0, 1000 * MIB)])] == [250 * MIB] * 4
    sent_parts = plan_parts(new, copies=False)
    assert max(map(nbytes, sent_parts)) < 32 * MIB
    assert not any(isinstance(part, ByteRange) for part in sent_parts)


class LargeObject(S3Written):
    """A large object whose version is *etag*."""

    etag: ETag

    @classmethod
    async def of(cls, server: SeaweedFS, **options: Any) -> Self:
        """Store the object on *server*."""
        made = cls(server, **options)
        made.etag = await made.put(LARGE)
        return made

    async def rewrite(self, pieces: list[Piece], expected: Expected) -> ETag:
        """Write *pieces*, and assert that the result has the returned ETag."""
        etag = await self.store.put(self.ref, pieces, expected=expected)
        assert not isinstance(etag, Conflict)
        assert (await found(self.store, self.ref)).etag == etag
        assert await self.left() == []
        return etag


@pytest.fixture(params=["seaweedfs", "ministack"])
async def large(request: pytest.FixtureRequest) -> AsyncGenerator[LargeObject]:
    """Make a large object on each server."""
    made = await LargeObject.of(request.getfixturevalue(request.param))
    yield made
    await made.store.aclose()


async def test_unchanged_parts_are_copied_by_the_server(large: LargeObject) -> None:
    """A rewrite of a large object sends few bytes, and the server copies the rest."""
    first = await large.rewrite(CHANGES, large.etag)

    assert await large.seen() == (REWRITTEN, first)
    (moved,) = large.notices
    assert moved.sent <= 5 * MIB + len(b"newindex")
    assert moved.fetched <= 5 * MIB
    assert moved.sent + moved.copied == len(REWRITTEN)
    second = await large.rewrite([ByteRange(0, len(REWRITTEN)), b"2"], first)
    assert await large.seen() == (REWRITTEN + b"2", second)
    assert [each.copied > 0 for each in large.notices] == [True, True]


@pytest.mark.parametrize("large", ["seaweedfs"], indirect=True)
async def test_a_copy_has_the_headers_it_is_given(large: LargeObject) -> None:
    """Content coding and metadata are written with each rewrite."""
    headers = ObjectHeaders("br", metadata=(("a", "b"),))
    await large.store.put(large.ref, CHANGES, expected=large.etag, headers=headers)

    stat = await stat_of(large.store, large.ref)
    assert stat.headers == headers


@pytest.mark.parametrize("large", ["ministack"], indirect=True)
async def test_conflicting_rewrite_leaves_no_upload(large: LargeObject) -> None:
    """A rewrite of a large object that was replaced is CONFLICT, and leaves no upload."""
    await large.put(b"other")

    assert await large.store.put(large.ref, CHANGES, expected=large.etag) is CONFLICT
    assert (await large.seen())[0] == b"other"
    assert await large.left() == []


async def test_one_of_many_rewrites_wins(large: LargeObject) -> None:
    """One of three concurrent rewrites of a large object wins, and no upload is left."""
    written = await asyncio.gather(
        *(
            large.store.put(large.ref, [*CHANGES, b"%d" % writer], expected=large.etag)
            for writer in range(3)
        )
    )

    ((winner, etag),) = [each for each in enumerate(written) if each[1] is not CONFLICT]
    assert await large.seen() == (REWRITTEN + b"%d" % winner, etag)
    assert await large.left() == []


@pytest.mark.parametrize("large", ["seaweedfs"], indirect=True)
async def test_cancelled_rewrite_leaves_no_upload(large: LargeObject) -> None:
    """A rewrite cancelled at any time leaves the old or the new object, and no upload."""
    for pause_s in (0.005, 0.02, 0.05, 0.1, 0.2):
        task = asyncio.create_task(large.store.put(large.ref, CHANGES, expected=large.etag))
        await asyncio.sleep(pause_s)
        if not task.done():
            task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            break

    if cleaning := asyncio.all_tasks() - {asyncio.current_task()}:  # nobody waits for it
        await asyncio.wait(cleaning)
    assert (await large.seen())[0] in (LARGE, REWRITTEN)
    assert await large.left() == []


async def test_large_new_object_is_sent_in_parts(ministack: MiniStack) -> None:
    """A large object is sent in parts without copying, and created in parts."""
    limits = {"copied_nbytes": 2**40, "whole_nbytes": 16 * MIB}
    large = await LargeObject.of(ministack, **limits)
    await large.rewrite(CHANGES, large.etag)
    assert (await large.seen())[0] == REWRITTEN

    assert await large.store.put(large.ref, [LARGE], expected=ABSENT) is CONFLICT
    assert await large.store.delete(large.ref, expected=None)
    await large.rewrite([LARGE, b"more"], ABSENT)

    assert (await large.seen())[0] == LARGE + b"more"
    assert {each.copied for each in large.notices} == {0}
    await large.store.aclose()


@pytest.mark.parametrize("large", ["seaweedfs"], indirect=True)
async def test_small_object_is_sent_whole(large: LargeObject) -> None:
    """A small object is put as a whole, and the notice says so."""
    await large.rewrite([ByteRange(0, 10), b"new"], large.etag)

    assert large.notices == [WriteNotice(13, 10)]


async def place_leftovers(large: LargeObject, beside: ObjectRef) -> None:
    """Store a temporary object, and begin an upload, of a writer that has ended."""
    key = f"{beside.key}.shardgate-{uuid4().hex}"
    large.server.put(key, b"left")
    large.server.client.create_multipart_upload(Bucket=large.server.bucket, Key=key)


@pytest.mark.parametrize("is_old", [True, False])
async def test_stale_temporary_objects_are_removed(seaweedfs: SeaweedFS, *, is_old: bool) -> None:
    """A rewrite, and the probe of a server, remove stale temporary objects and uploads."""
    large = await LargeObject.of(seaweedfs, stale_s=STALE_S if is_old else 60)
    for beside in (large.root.prefix, large.ref):
        await place_leftovers(large, beside)
    await asyncio.sleep(STALE_S + 1 if is_old else 0)

    await large.store.verify_conditional_writes(large.root)
    assert len(await large.left()) == (2 if is_old else 4)
    await large.store.put(large.ref, CHANGES, expected=large.etag)

    assert len(await large.left()) == (0 if is_old else 4)
    await large.store.aclose()


class _Uploads(Handler[str]):
    """Answers each request with a listing of one entry."""

    def answer(self) -> None:
        document = f"<ListMultipartUploadsResult>{self.server.owner}</ListMultipartUploadsResult>"
        self.send_response(200)
        self.send_header("Content-Length", str(len(document)))
        self.end_headers()
        self.wfile.write(document.encode())


@pytest.mark.parametrize("member", ["<Key>a</Key>", "<Initiated>2020-01-01T00:00:00Z</Initiated>"])
async def test_incomplete_entry_in_a_listing_of_uploads_ends_the_sweep(member: str) -> None:
    """An upload that is listed without its key or its time is left, and no error for a write."""
    listener = Listener(_Uploads, f"<Upload>{member}</Upload>")
    settings = StoreSettings(endpoint_url=listener.url, anonymous=True)
    unused: Any = None
    with listener.running():
        async with aclosing(S3Client(settings, timeout_s=LONGEST_S)) as client:
            uploads = MultipartWriter(client, unused, unused, stale_s=60)
            await uploads.sweep(ObjectRef("s3://bucket", "a"))
