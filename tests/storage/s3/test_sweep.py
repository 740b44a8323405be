"""What writers have left behind that were killed is removed once it is old, and no sooner."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any
from uuid import uuid4

import pytest

from app.model import ByteRange, ETag, ObjectRef
from app.storage.s3.store import S3Store
from app.storage.s3.writing import Writing
from tests.seaweedfs import SeaweedFS
from tests.storage.conftest import s3_settings

MIB = 1024**2
OLD = bytes(12 * MIB)
STALE_S = 2.0


class Littered:
    """A prefix of a bucket in which others have left something."""

    def __init__(self, server: SeaweedFS) -> None:
        self.server = server
        self.root = ObjectRef(f"s3://{server.bucket}", f"swept/{uuid4().hex}")
        self.ref = self.root.join("key")
        self.etag = ETag(server.put(self.ref.key, OLD))

    def litter(self, ref: ObjectRef) -> None:
        """Leave an unfinished upload and an object beside *ref*."""
        key = f"{ref.key}.shardgate-{uuid4().hex}"
        self.server.put(key, b"left")
        self.server.client.create_multipart_upload(Bucket=self.server.bucket, Key=key)

    def left(self) -> list[Any]:
        """Name what is beside the object."""
        where = {"Bucket": self.server.bucket, "Prefix": self.root.key}
        objects = self.server.client.list_objects_v2(**where).get("Contents", [])
        uploads = self.server.client.list_multipart_uploads(**where).get("Uploads", [])
        return [*uploads, *(each["Key"] for each in objects if each["Key"] != self.ref.key)]

    def opened(self, stale_s: float) -> Any:
        """Open a store, which has swept nothing yet."""
        writing = Writing(copied_nbytes=MIB, stale_s=stale_s)
        return aclosing(S3Store(s3_settings(self.server), writing=writing))


@pytest.fixture
async def littered(seaweedfs: SeaweedFS) -> AsyncGenerator[Littered]:
    """Make an object."""
    made = Littered(seaweedfs)
    yield made
    seaweedfs.delete(made.ref.key)


async def test_a_rewrite_removes_what_is_old(littered: Littered) -> None:
    """What is beside a large object goes with its next rewrite after a while."""
    littered.litter(littered.ref)
    await asyncio.sleep(STALE_S + 1)

    async with littered.opened(STALE_S) as store:
        await store.put(littered.ref, [ByteRange(0, 11 * MIB), b"new"], expected=littered.etag)

    assert littered.left() == []


async def test_a_rewrite_leaves_what_is_young(littered: Littered) -> None:
    """Others may be about to finish it."""
    littered.litter(littered.ref)

    async with littered.opened(60) as store:
        await store.put(littered.ref, [ByteRange(0, 11 * MIB), b"new"], expected=littered.etag)

    assert len(littered.left()) == 2


async def test_trials_that_were_broken_off_are_removed(littered: Littered) -> None:
    """Who tries a server removes what others have left who did so."""
    littered.litter(littered.root.prefix)
    await asyncio.sleep(STALE_S + 1)

    async with littered.opened(STALE_S) as store:
        await store.demand_safety(littered.root)

    assert littered.left() == []
