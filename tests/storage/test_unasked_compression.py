"""HTTP servers that compress what they send though it was not asked for, and stored codings."""

import gzip
from contextlib import aclosing
from typing import Final

import pytest

from shardgate.errors import StorageUnusableError
from shardgate.model import ByteRange, ObjectRef, SuffixRange
from shardgate.storage.http_store import HttpStore
from tests.support.storage.faulty import LONGEST_S, Fault, FaultyServer
from tests.support.storage.reading import found

STORED: Final = gzip.compress(bytes(range(256)) * 64)


def served(faulty: FaultyServer, *faults: Fault) -> ObjectRef:
    """Return an object of a server with all these faults."""
    for fault in faults:
        faulty.fail(fault)
    faulty.put("bucket", "object", STORED)
    return ObjectRef(faulty.url, "bucket/object")


@pytest.mark.parametrize(
    "faults",
    [
        (Fault.SQUEEZE, Fault.CHUNKED),
        (Fault.SQUEEZE,),
        (Fault.SQUEEZE, Fault.IGNORE_RANGE, Fault.CHUNKED),
        (Fault.SQUEEZE, Fault.IGNORE_RANGE, Fault.VARY),
        (Fault.SQUEEZE, Fault.IGNORE_RANGE, Fault.WEAK_ETAG),
        (Fault.CODED, Fault.GZIP_ETAG),
    ],
    ids=["chunked", "length", "all-chunked", "vary", "weak", "etag"],
)
async def test_range_that_the_server_compressed_is_an_error(
    faulty: FaultyServer, faults: tuple[Fault, ...]
) -> None:
    """A range that is compressed unasked raises, and the error names server and coding."""
    ref = served(faulty, *faults)
    async with aclosing(HttpStore(timeout_s=LONGEST_S)) as store:
        for request in (ByteRange(20, 45), SuffixRange(20)):
            with pytest.raises(StorageUnusableError, match=r"\(BaseHTTP.*\) .* with gzip"):
                await store.get(ref, request)
        with pytest.raises(StorageUnusableError, match="with gzip"):
            async with store.stream(ref, ByteRange(20, 45), if_match=None):
                pytest.fail("entered")


@pytest.mark.parametrize("faults", [(Fault.CODED,), (Fault.CODED, Fault.IGNORE_RANGE)])
async def test_range_of_an_object_that_is_stored_compressed_is_of_its_bytes(
    faulty: FaultyServer, faults: tuple[Fault, ...]
) -> None:
    """An object that is stored with a coding has ranges of the stored bytes, and its coding."""
    ref = served(faulty, *faults)
    async with aclosing(HttpStore(timeout_s=LONGEST_S)) as store:
        answer = await found(store, ref, ByteRange(5, 50))

    assert (answer.data, answer.coding) == (STORED[5:50], "gzip")
