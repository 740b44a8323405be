"""Writes of objects in S3 by compare-and-swap, in the way that sends the fewest bytes.

A server is tried first, since many accept preconditions and ignore them.
"""

import asyncio
import secrets
from base64 import b64encode
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from typing import Any, Final, NamedTuple

from crc32c import crc32c

from shardgate.concurrency import is_large, run_in_thread
from shardgate.errors import StorageDeniedError, StorageError, UnwritableError
from shardgate.model import ByteRange, ETag, ObjectRef, Piece
from shardgate.storage.contract import (
    CONFLICT,
    NO_HEADERS,
    TEMPORARY,
    Absent,
    Conflict,
    Expected,
    ObjectHeaders,
    OnWrite,
    check_write,
    nbytes_of,
)
from shardgate.storage.http1_client import HttpClient
from shardgate.storage.http_headers import is_derived, skew_of
from shardgate.storage.http_reader import HttpReader
from shardgate.storage.refusals import FAILURES, Refusal, no_bucket, read_refusal, storage_error
from shardgate.storage.s3_client import (
    NO_BUCKET,
    S3Answer,
    S3Client,
    S3Swapper,
    S3Write,
    bucket_of,
    etag_of,
)
from shardgate.storage.s3_signing import S3Signer
from shardgate.storage.s3_upload import (
    CannotCopyError,
    MultipartWriter,
    Part,
    SwapRequest,
    plan_parts,
)
from shardgate.storage.swapping import (
    BodyFetcher,
    ObjectState,
    Probes,
    ids_metadata,
    is_refused,
    next_ids,
)
from shardgate.storage.wrappers import RetryPolicy

_MAX_KEY_NBYTES: Final = 990  # of 1,024: a temporary object has a suffix
_WRONG: Final = '"00000000000000000000000000000000"'
_WRONGS: Final = ({"IfMatch": _WRONG}, {"IfNoneMatch": "*"})  # of an object that exists
_HEADERS: Final = {
    "IfMatch": "If-Match",
    "IfNoneMatch": "If-None-Match",
    "ChecksumCRC32C": "x-amz-checksum-crc32c",
    "ContentEncoding": "Content-Encoding",
    "ContentType": "Content-Type",
}
"""Names in HTTP of parameters of botocore."""


class S3WriteOptions(NamedTuple):
    """Limits of writes to S3."""

    deadline_s: float = 30.0
    """Longest silence of the server, and half of the longest time for one request with retries."""
    copied_nbytes: int = 16 * 1024**2
    """An object that keeps fewer bytes of the old one is sent as a whole.

    Measured with SeaweedFS on the same machine, which copies twice: 16 MiB take 0.16 s either way,
    256 MiB 2.4 s; bytes that are sent go over the network too.
    """
    whole_nbytes: int = 64 * 1024**2
    """Larger objects are sent in parts, and not assembled in memory."""
    stale_s: float = 3600.0
    on_write: OnWrite = lambda _: None


class S3Writer:
    """Writing side of `S3Store`."""

    def __init__(
        self, client: S3Client, reader: HttpReader, puts: "PutSender", options: S3WriteOptions
    ) -> None:
        self._options = options
        self._puts = puts
        self._client = client
        self._swapper = S3Swapper(client, reader)
        self._fetcher = BodyFetcher(reader, RetryPolicy(options.deadline_s), options.on_write)
        self._multipart = MultipartWriter(client, self._swapper, self._fetcher, options.stale_s)
        self._features: dict[str, ServerFeatures] = {}
        self._probes = Probes(self._probe, 2 * options.deadline_s)
        self._without_copy: set[str] = set()

    async def verify_conditional_writes(self, root: ObjectRef) -> None:
        if await self._probes.run(root):
            await self._multipart.sweep(root.prefix)  # of what a process left that was killed

    async def _probe(self, root: ObjectRef) -> None:
        probe = ServerProbe(self._client, self._swapper, root)
        self._features[root.bucket] = await probe.run()

    async def put(
        self,
        ref: ObjectRef,
        pieces: Sequence[Piece],
        *,
        expected: Expected,
        headers: ObjectHeaders = NO_HEADERS,
    ) -> ETag | Conflict:
        check_write(ref, pieces, expected)
        before = await self._swapper.before(ref, expected)
        if isinstance(before, Conflict):
            return CONFLICT
        write = S3Write(ref, expected, next_ids(before.ids), headers)
        etag = await self._put(write, pieces)
        if not isinstance(etag, Conflict):
            self._swapper.note(ref, ObjectState(etag, write.ids))
        return etag

    async def delete(self, ref: ObjectRef, *, expected: Expected) -> bool | Conflict:
        check_write(ref, (), expected)
        if isinstance(expected, Absent):
            return True
        if expected is not None and is_derived(expected):
            return CONFLICT
        if expected is not None and not (await self._features_of(ref)).conditional_delete:
            return False
        return await self._swapper.delete(ref, expected)

    async def _put(self, write: S3Write, pieces: Sequence[Piece]) -> ETag | Conflict:
        total = sum(map(nbytes_of, pieces))
        kept = sum(piece.length for piece in pieces if isinstance(piece, ByteRange))
        bucket = write.ref.bucket
        etag: ETag | Conflict | None = None  # not uploaded in parts
        if kept >= self._options.copied_nbytes and bucket not in self._without_copy:
            try:
                etag = await self._upload(write, await asyncio.to_thread(plan_parts, pieces))
            except CannotCopyError:
                self._without_copy.add(bucket)
        if etag is None and total > self._options.whole_nbytes:
            parts = await asyncio.to_thread(plan_parts, pieces, copies=False)
            etag = await self._upload(write, parts)
        if etag is None:
            etag = await self._send(write, pieces)
        return etag

    async def _upload(self, write: S3Write, parts: Sequence[Part]) -> ETag | Conflict | None:
        """Upload in parts; return `None` if that is not safe, or saves nothing."""
        swap_request = (await self._features_of(write.ref)).swap_request
        if swap_request is None:
            return None
        if len(parts) <= 1 or len(write.ref.key.encode()) > _MAX_KEY_NBYTES:
            return None
        etag, notice = await self._multipart.put(write, parts, swap_request)
        self._options.on_write(notice)
        return etag

    async def _send(self, write: S3Write, pieces: Sequence[Piece]) -> ETag | Conflict:
        async def send(body: bytes) -> ETag | Conflict:
            checksum = await run_in_thread(_checksum, body, is_long=is_large(len(body)))
            params = {"ChecksumCRC32C": checksum, **write.headers}
            put = partial(self._puts.send, write.ref, body, **params)
            return await self._swapper.put(write, put)

        return await self._fetcher.write(write, pieces, send)

    async def _features_of(self, ref: ObjectRef) -> "ServerFeatures":
        if ref.bucket not in self._features:
            above = ref.key.rpartition("/")[0]
            await self.verify_conditional_writes(ObjectRef(ref.bucket, above))
        return self._features[ref.bucket]


class PutSender:
    """Sends PUTs of objects, small ones over an HTTP client of our own.

    One of 3 kB takes a quarter of the processor time that aiobotocore's takes.
    """

    def __init__(self, client: S3Client, signer: S3Signer, http: HttpClient) -> None:
        self._client = client
        self._signer = signer
        self._http = http

    async def send(self, ref: ObjectRef, body: bytes, **params: Any) -> S3Answer | Refusal:
        """Send one PUT with *params* of botocore; raise without a response, or bucket.

        Large bodies, and requests that only botocore can sign, are left to its client.
        """
        if is_large(len(body)):
            return await self._client.send(ref, "put_object", Body=body, **params)
        headers = _http_headers(params)
        sent = await self._send(ref, body, headers)
        if isinstance(sent, Refusal) and self._client.learn_region(ref, sent):
            sent = await self._send(ref, body, headers)
        if sent is None:
            return await self._client.send(ref, "put_object", Body=body, **params)
        return sent

    async def _send(
        self, ref: ObjectRef, body: bytes, headers: Mapping[str, str]
    ) -> S3Answer | Refusal | None:
        if (signed := await self._signer.sign_put(ref, headers, body)) is None:
            return None
        target, lines = signed
        try:
            response = await self._http.send("PUT", target, lines, body, is_eager=True)
        except FAILURES as error:
            raise storage_error(ref, error) from error
        if response.status == HTTPStatus.OK:
            response.release()
            return {"ETag": response.headers.get(b"etag", b"").decode("latin-1")}
        refusal = await read_refusal("PUT", response)
        if refusal.code == NO_BUCKET:
            raise no_bucket(ref)
        return replace(refusal, skew_s=skew_of(response.headers))


def _http_headers(params: Mapping[str, Any]) -> dict[str, str]:
    """Return the headers of a PUT with *params* of botocore."""
    metadata = {f"x-amz-meta-{name}": value for name, value in params["Metadata"].items()}
    return {header: params[name] for name, header in _HEADERS.items() if name in params} | metadata


def _checksum(body: bytes) -> str:
    """Return the CRC32C: without it SeaweedFS stores a body that was cut off as empty."""
    return b64encode(crc32c(body).to_bytes(4, "big")).decode()


@dataclass(frozen=True, slots=True)
class ServerFeatures:
    """Features that a server was seen to have."""

    conditional_delete: bool
    swap_request: SwapRequest | None


class ServerProbe:
    """Tries a server with a temporary object below *root*."""

    def __init__(self, client: S3Client, swapper: S3Swapper, root: ObjectRef) -> None:
        key = f"{root.prefix.key}{TEMPORARY}{secrets.token_hex(8)}"
        self._client = client
        self._swapper = swapper
        self._ref = ObjectRef(root.bucket, key)
        self._server = ""

    async def run(self) -> ServerFeatures:
        """Return the server's features; raise `UnwritableError` if it would lose writes."""
        with suppress(StorageDeniedError):  # so it exists; some servers would create a bucket
            await self._client.retried(self._ref, lambda: self._client.check_reachable(self._ref))
        try:
            return await self._run()
        finally:
            with suppress(StorageError):
                await asyncio.shield(self._client.send(self._ref, "delete_object"))

    async def _run(self) -> ServerFeatures:
        metadata = ids_metadata(next_ids(()))
        made = await self._client.do(self._ref, "put_object", Body=b"1", Metadata=metadata)
        headers = made["ResponseMetadata"].get("HTTPHeaders", {})
        self._server = headers.get("server", "")
        state = await self._state()
        etag = state.etag
        if etag_of(made) != etag:
            raise self._unwritable("answers a write with another ETag than a read")
        if not state.ids:
            raise self._unwritable("keeps no metadata, by which lost writes are found")
        for wrong in _WRONGS:
            await self._verify_refusal(wrong)
        await self._verify_replacement(etag, Body=b"22", Metadata=metadata)
        swap_request = await self._find_swap_request()
        refused = is_refused(await self._send("delete_object", IfMatch=_WRONG))
        # A server may refuse, and delete all the same.
        deletes_by_version = refused and await self._swapper.state(self._ref) is not None
        return ServerFeatures(deletes_by_version, swap_request)

    async def _verify_refusal(self, condition: Mapping[str, str]) -> None:
        (parameter,) = condition
        header = _HEADERS[parameter]
        before = (await self._state()).etag
        answer = await self._send("put_object", Body=b"wrong", **condition)
        if not isinstance(answer, Refusal) or (await self._state()).etag != before:
            raise self._unwritable(f"ignores {header}, and would lose writes")
        if not is_refused(answer):
            raise self._unwritable(f"does not support {header}: {answer.code}")

    async def _verify_replacement(self, etag: ETag, **params: Any) -> None:
        """Replace the version *etag*, repeatedly: servers also refuse during another request."""
        for _ in range(5):
            answer = await self._send("put_object", IfMatch=etag, **params)
            if not isinstance(answer, Refusal):
                return
            if not is_refused(answer):
                raise answer.failure(self._ref)
            if (await self._state()).etag != etag:
                return
        raise self._unwritable("refuses preconditions that hold")

    async def _find_swap_request(self) -> SwapRequest | None:
        if "AmazonS3" not in self._server and await self._copies_conditionally():
            return "copy"
        # SeaweedFS checks preconditions when an upload is completed, but not atomically.
        if "SeaweedFS" not in self._server and await self._completes_conditionally():
            return "complete"
        return None

    async def _copies_conditionally(self) -> bool:
        source = {"Bucket": bucket_of(self._ref), "Key": self._ref.key}
        options: dict[str, Any] = {"CopySource": source, "MetadataDirective": "REPLACE"}
        options["Metadata"] = ids_metadata(next_ids(()))
        for wrong in _WRONGS:
            if not is_refused(await self._send("copy_object", **options, **wrong)):
                return False
        right = await self._send("copy_object", **options, IfMatch=(await self._state()).etag)
        return not isinstance(right, Refusal)

    async def _completes_conditionally(self) -> bool:
        made = await self._send("create_multipart_upload")
        if isinstance(made, Refusal):
            return False
        upload = {"UploadId": made["UploadId"]}
        try:
            part = await self._send("upload_part", **upload, PartNumber=1, Body=b"333")
            if isinstance(part, Refusal):
                return False
            parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
            complete = partial(
                self._send, "complete_multipart_upload", **upload, MultipartUpload=parts
            )
            return all([is_refused(await complete(**wrong)) for wrong in _WRONGS])
        finally:
            await asyncio.shield(self._send("abort_multipart_upload", **upload))

    async def _state(self) -> ObjectState:
        if (state := await self._swapper.state(self._ref)) is None:
            raise self._unwritable("does not return an object that was just written")
        return state

    async def _send(self, operation: str, **params: Any) -> S3Answer | Refusal:
        return await self._client.send_until_answered(self._ref, operation, **params)

    def _unwritable(self, reason: str) -> UnwritableError:
        name = self._server or "without a name"
        return UnwritableError(f"{self._ref.bucket}: the server ({name}) {reason}")
