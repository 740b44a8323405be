"""HTTP servers that compress what they send though it was not asked for, and stored codings."""

import gzip
import re
from collections.abc import Generator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

import pytest

from shardgate.errors import StorageUnusableError
from shardgate.model import ByteRange, ObjectRef, SuffixRange
from shardgate.storage.http_store import HttpStore
from tests.support.storage.faulty import LONGEST_S
from tests.support.storage.listening import Handler, Listener
from tests.support.storage.reading import found

DATA: Final = bytes(range(256)) * 64
STORED: Final = gzip.compress(DATA)


@dataclass
class Compressor:
    """How a server compresses: ranges or all, with a length or in chunks."""

    ranges: bool = True
    """Whether ranges are cut first, and compressed then; otherwise all is sent."""
    has_length: bool = False
    is_stored: bool = False
    """Whether the object itself is compressed, and so ranges are those of its bytes."""
    headers: dict[str, str] = field(default_factory=dict)


class _Handler(Handler[Compressor]):
    methods = ("GET", "HEAD")

    def answer(self) -> None:
        how = self.server.owner
        data = STORED if how.is_stored else DATA
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        headers = {"ETag": '"e"', "Server": "squeezer", **how.headers}
        status, body = 200, data
        if asked is not None and how.ranges:
            start = int(asked[1]) if asked[1] else len(data) - int(asked[2])
            stop = int(asked[2]) + 1 if asked[1] else len(data)
            status, body = 206, data[start:stop]
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        if how.is_stored or self.command == "GET":
            headers["Content-Encoding"] = "gzip"
            body = body if how.is_stored else gzip.compress(body, 0)
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if how.has_length or how.is_stored or self.command == "HEAD":
            self.send_header("Content-Length", str(len(body)))
        else:
            self.send_header("Transfer-Encoding", "chunked")
            body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Generator[str]:
    """Run a server that compresses as the parameter says."""
    listener = Listener(_Handler, request.param)
    with listener.running():
        yield listener.url


@pytest.mark.parametrize(
    "server",
    [
        Compressor(),
        Compressor(has_length=True),
        Compressor(ranges=False),
        Compressor(ranges=False, has_length=True, headers={"Vary": "Origin, Accept-Encoding"}),
        Compressor(ranges=False, has_length=True, headers={"ETag": 'W/"e"'}),
        Compressor(is_stored=True, headers={"ETag": '"e-gzip"'}),  # of Apache
    ],
    ids=["chunked", "length", "all-chunked", "vary", "weak", "etag"],
    indirect=True,
)
async def test_range_that_the_server_compressed_is_an_error(server: str) -> None:
    """A range that is compressed unasked raises, and the error names server and coding."""
    ref = ObjectRef(server, "object")
    async with aclosing(HttpStore(timeout_s=LONGEST_S)) as store:
        for request in (ByteRange(20, 45), SuffixRange(20)):
            with pytest.raises(StorageUnusableError, match=r"\(squeezer\) .* with gzip"):
                await store.get(ref, request)
        with pytest.raises(StorageUnusableError, match="with gzip"):
            async with store.stream(ref, ByteRange(20, 45), if_match=None):
                pytest.fail("entered")


@pytest.mark.parametrize(
    "server", [Compressor(is_stored=True), Compressor(is_stored=True, ranges=False)], indirect=True
)
async def test_range_of_an_object_that_is_stored_compressed_is_of_its_bytes(server: str) -> None:
    """An object that is stored with a coding has ranges of the stored bytes, and its coding."""
    async with aclosing(HttpStore(timeout_s=LONGEST_S)) as store:
        answer = await found(store, ObjectRef(server, "object"), ByteRange(5, 50))

    assert (answer.data, answer.coding) == (STORED[5:50], "gzip")
