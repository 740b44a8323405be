"""Objects of S3 and of servers that speak it.

aiobotocore finds credentials, signs, lists and writes; only the modules of this name know it.
Reads go to presigned URLs, which need not name the range, so that one signature serves many reads
of an object.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager

from app.model import ByteRange, ByteRequest, Condition, ETag, ObjectRef, Piece
from app.settings import StoreSettings
from app.storage.contract import (
    NO_HEADERS,
    Conflict,
    Expected,
    Found,
    Listed,
    NotModified,
    ObjectHeaders,
    Stat,
)
from app.storage.http1.client import Client
from app.storage.range_reader import RangeReader
from app.storage.s3.client import S3Client, bucket_of, translated
from app.storage.s3.listing import S3Listing
from app.storage.s3.signing import Signer
from app.storage.s3.writing import WRITING, S3Writer, Writing
from app.storage.writes import is_ours


class S3Store:
    """Reads and writes what lies in ``s3://bucket``, all buckets with the same credentials."""

    def __init__(
        self,
        settings: StoreSettings | None,
        *,
        connections: int = 64,
        timeout_s: float = 10.0,
        writing: Writing = WRITING,
    ) -> None:
        self._client = S3Client(
            settings or StoreSettings(),
            connections=connections,
            timeout_s=timeout_s,
            write_timeout_s=max(timeout_s, writing.deadline_s),
        )
        self._signer = Signer(self._client)
        client = Client(connections=connections, silence_s=timeout_s, ca_file=self._client.ca_file)
        self._reader = RangeReader(self._signer, client)
        self._writer = S3Writer(self._client, self._reader, writing)
        self._in_order: dict[str, bool] = {}

    async def get(
        self,
        ref: ObjectRef,
        request: ByteRequest | None = None,
        *,
        if_match: Condition | None = None,
        if_none_match: ETag | None = None,
    ) -> Found | NotModified | None:
        """Send one GET."""
        return await self._reader.get(ref, request, if_match, if_none_match)

    def stream(
        self, ref: ObjectRef, byte_range: ByteRange, *, if_match: Condition | None
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Send one GET and pass its body on."""
        return self._reader.stream(ref, byte_range, if_match)

    async def stat(self, ref: ObjectRef) -> Stat | None:
        """Send one HEAD."""
        return await self._reader.stat(ref)

    async def list(
        self, prefix: ObjectRef, *, delimiter: str = "", after: str = ""
    ) -> AsyncIterator[Listed]:
        """Page through ListObjectsV2."""
        with translated(prefix):
            client = await self._client.reader()
            listing = S3Listing(client, bucket_of(prefix), self._in_order)
            found = listing.folder(prefix, after) if delimiter else listing.walk(prefix, after)
            async for each in found:
                if each.ref.key > after and not is_ours(prefix, each.ref):
                    yield each

    async def reach(self, root: ObjectRef) -> None:
        """Ask for the bucket."""
        await self._client.reach(root)

    async def demand_safety(self, root: ObjectRef) -> None:
        """Try the server with an object of ours."""
        await self._writer.demand_safety(root)

    def keeps_headers(self, ref: ObjectRef) -> bool:  # noqa: ARG002  the contract's argument
        """Say yes."""
        return True

    async def put(
        self,
        ref: ObjectRef,
        pieces: Sequence[Piece],
        *,
        expected: Expected,
        headers: ObjectHeaders = NO_HEADERS,
    ) -> ETag | Conflict:
        """Let the server copy long ranges, and send all else."""
        return await self._writer.put(ref, pieces, expected, headers)

    async def delete(self, ref: ObjectRef, *, expected: ETag | None) -> bool | Conflict:
        """Send one DELETE, if the server heeds what is expected."""
        return await self._writer.delete(ref, expected)

    async def aclose(self) -> None:
        """Close both pools."""
        await self._reader.aclose()
        await self._client.aclose()
