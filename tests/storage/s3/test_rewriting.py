"""Large objects of S3, of which the server copies what stays."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any
from uuid import uuid4

import pytest

from app.model import ByteRange, ETag, ObjectRef, Piece
from app.storage.contract import ABSENT, CONFLICT, Conflict, Found, ObjectHeaders
from app.storage.moved import Moved, Way
from app.storage.s3.store import S3Store
from app.storage.s3.writing import Writing
from tests.seaweedfs import SeaweedFS
from tests.storage.conftest import s3_settings

MIB = 1024**2
OLD = b"".join(bytes([n]) * MIB for n in range(17))
CHANGES: list[Piece] = [ByteRange(0, 6 * MIB), b"new", ByteRange(6 * MIB + 9, 17 * MIB), b"index"]
NEW = OLD[: 6 * MIB] + b"new" + OLD[6 * MIB + 9 :] + b"index"


class Large:
    """A store that hears how it writes, and an object in it."""

    def __init__(self, server: SeaweedFS, **sizes: int) -> None:
        self.server = server
        self.heard: list[tuple[Way, Moved]] = []
        self.store = S3Store(
            s3_settings(server),
            writing=Writing(
                on_write=lambda way, _, moved: self.heard.append((way, moved)), **sizes
            ),
        )
        self.ref = ObjectRef(f"s3://{server.bucket}", f"rewriting/{uuid4().hex}/key")
        self.etag = ETag(server.put(self.ref.key, OLD))

    async def read(self) -> tuple[bytes, ETag]:
        """Read the object."""
        found = await self.store.get(self.ref)
        assert isinstance(found, Found)
        return found.data, found.etag

    def left(self) -> list[Any]:
        """Name what is beside the object: other objects, and uploads."""
        where = {"Bucket": self.server.bucket, "Prefix": self.ref.key}
        objects = self.server.client.list_objects_v2(**where).get("Contents", [])
        uploads = self.server.client.list_multipart_uploads(**where).get("Uploads", [])
        return [each["Key"] for each in objects + uploads if each["Key"] != self.ref.key] + [
            each["UploadId"] for each in uploads
        ]


@pytest.fixture(params=["seaweedfs", "ministack"])
async def large(request: pytest.FixtureRequest) -> AsyncGenerator[Large]:
    """Make a large object on each server."""
    made = Large(request.getfixturevalue(request.param))
    yield made
    await made.store.aclose()


async def test_the_server_copies_what_stays(large: Large) -> None:
    """Of a large object little is moved, and the new one is right, under the version told."""
    etag = await large.store.put(large.ref, CHANGES, expected=large.etag)

    assert await large.read() == (NEW, etag)
    ((way, moved),) = large.heard
    assert way == "copy"
    assert moved.sent <= 5 * MIB + len(b"newindex")
    assert moved.fetched <= 5 * MIB
    assert moved.sent + moved.copied == len(NEW)
    assert large.left() == []


async def test_a_rewritten_object_is_rewritten(large: Large) -> None:
    """The version that was told is one to be expected."""
    first = await large.store.put(large.ref, CHANGES, expected=large.etag)
    assert not isinstance(first, Conflict)

    second = await large.store.put(large.ref, [ByteRange(0, len(NEW)), b"2"], expected=first)

    assert await large.read() == (NEW + b"2", second)
    assert [way for way, _ in large.heard] == ["copy", "copy"]


async def test_what_is_coded_stays_so(large: Large) -> None:
    """The content coding is told anew with each rewrite."""
    await large.store.put(
        large.ref, CHANGES, expected=large.etag, headers=ObjectHeaders(is_gzip=True)
    )

    stat = await large.store.stat(large.ref)
    assert stat is not None
    assert stat.is_gzip


async def test_a_lost_race_leaves_nothing(large: Large) -> None:
    """A large object that was replaced is a conflict, whenever that is noticed."""
    large.server.put(large.ref.key, b"other")

    assert await large.store.put(large.ref, CHANGES, expected=large.etag) is CONFLICT
    assert (await large.read())[0] == b"other"
    assert large.left() == []


async def test_one_of_many_rewrites_wins(large: Large) -> None:
    """Writers that copy the same object at once are told apart."""
    written = await asyncio.gather(
        *(
            large.store.put(large.ref, [*CHANGES, b"%d" % writer], expected=large.etag)
            for writer in range(4)
        )
    )

    ((winner, etag),) = [each for each in enumerate(written) if each[1] is not CONFLICT]
    assert await large.read() == (NEW + b"%d" % winner, etag)
    assert large.left() == []


async def test_who_is_cancelled_leaves_nothing(large: Large) -> None:
    """An upload ends with the request, however far it was."""
    for pause_s in (0.005, 0.02, 0.05, 0.1, 0.2):
        task = asyncio.create_task(large.store.put(large.ref, CHANGES, expected=large.etag))
        await asyncio.sleep(pause_s)
        if not task.done():
            task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            break

    if cleaning := asyncio.all_tasks() - {asyncio.current_task()}:  # who left does not wait for it
        await asyncio.wait(cleaning)
    assert (await large.read())[0] in (OLD, NEW)
    assert large.left() == []


@pytest.mark.parametrize("server", ["seaweedfs", "ministack"])
async def test_what_is_long_and_new_is_sent_in_parts(
    request: pytest.FixtureRequest, server: str
) -> None:
    """No copying is needed to send an object in parts, for the first time too."""
    large = Large(request.getfixturevalue(server), copied_nbytes=2**40, whole_nbytes=16 * MIB)
    first = await large.store.put(large.ref, CHANGES, expected=large.etag)
    assert await large.read() == (NEW, first)

    assert await large.store.put(large.ref, [OLD, OLD], expected=ABSENT) is CONFLICT
    assert await large.store.delete(large.ref, expected=None)
    second = await large.store.put(large.ref, [OLD, OLD], expected=ABSENT)

    assert await large.read() == (OLD + OLD, second)
    assert {way for way, _ in large.heard} == {"put"}
    assert large.left() == []
    await large.store.aclose()


async def test_short_ranges_are_sent(large: Large) -> None:
    """What is small is put whole, and tells so."""
    await large.store.put(large.ref, [ByteRange(0, 10), b"new"], expected=large.etag)

    assert large.heard == [("put", Moved(13, 10))]
