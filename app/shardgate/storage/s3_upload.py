"""Multipart uploads to S3: some parts are sent, others are copied by the server.

All parts but the last have a least length (5 MiB in S3), so that some old bytes next to new ones
are fetched and sent again.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import partial
from itertools import pairwise
from math import ceil
from typing import Any, Final, Literal

from cachetools import TTLCache

from shardgate.concurrency import bounded_gather
from shardgate.errors import StorageError, VersionChangedError
from shardgate.model import ByteRange, ETag, ObjectRef, Piece
from shardgate.storage.contract import CONFLICT, TEMPORARY, Conflict, WriteNotice, nbytes_of
from shardgate.storage.refusals import Refusal
from shardgate.storage.s3_client import S3Answer, S3Client, S3Swapper, S3Write, bucket_of
from shardgate.storage.swapping import BodyFetcher, is_refused

_MAX_PARTS: Final = 10_000

type Part = ByteRange | list[Piece]
"""A range that the server copies, or pieces that are sent together."""
type SwapRequest = Literal["complete", "copy"]
"""The request whose preconditions the server honours after an upload: the one that completes it, or
the one that copies the completed object."""


class CannotCopyError(Exception):
    """The server has no UploadPartCopy."""


def plan_parts(
    pieces: Sequence[Piece], *, copies: bool = True, min_nbytes: int = 5 * 1024**2
) -> list[Part]:
    """Divide *pieces* into at most 10,000 parts; the server copies none unless *copies*."""
    joined = _joined(pieces)
    while True:
        plan = _PartPlan(min_nbytes, copies=copies)
        for nth, piece in enumerate(joined, 1):
            plan.take(piece, is_last=nth == len(joined))
        plan.send()
        if len(plan.parts) <= _MAX_PARTS:
            return plan.parts
        min_nbytes *= 2


class _PartPlan:
    """Parts of an object, and the pieces after them that wait to be sent together."""

    def __init__(self, min_nbytes: int, *, copies: bool) -> None:
        self.parts: list[Part] = []
        self._least = min_nbytes
        # Twice the least: a longer range is divided into parts of half as much at least.
        self._most_copied = max(256 * 1024**2, 2 * min_nbytes)
        self._most_sent = max(16 * 1024**2, min_nbytes)
        self._copies = copies
        self._waiting: list[Piece] = []
        self._nbytes = 0

    def take(self, piece: Piece, *, is_last: bool) -> None:
        if isinstance(piece, bytes) or not self._copies:
            for at in range(0, nbytes_of(piece), self._most_sent):
                if isinstance(piece, bytes):
                    self._wait(piece[at : at + self._most_sent])
                else:
                    start = piece.start + at
                    self._wait(ByteRange(start, min(start + self._most_sent, piece.stop)))
            return
        # What waits is filled up to the least length of a part with the beginning of the range.
        missing = max(0, self._least - self._nbytes) if self._waiting else 0
        least = 1 if is_last else self._least
        if piece.length - missing < least:
            self._wait(piece)
            return
        middle = piece.start + missing
        self._wait(ByteRange(piece.start, middle))
        self.send()
        self.parts += _split(ByteRange(middle, piece.stop), self._most_copied)

    def send(self) -> None:
        if self._waiting:
            self.parts.append(self._waiting)
            self._waiting = []
            self._nbytes = 0

    def _wait(self, piece: Piece) -> None:
        if nbytes := nbytes_of(piece):
            self._waiting.append(piece)
            self._nbytes += nbytes
        if self._nbytes >= self._most_sent:
            self.send()


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    joined: list[Piece] = []
    for each in filter(nbytes_of, pieces):
        last = joined[-1] if joined else b""
        if isinstance(last, ByteRange) and isinstance(each, ByteRange) and last.stop == each.start:
            joined[-1] = ByteRange(last.start, each.stop)
        else:
            joined.append(each)
    return joined


def _split(whole: ByteRange, most: int) -> list[ByteRange]:
    count = ceil(whole.length / most)
    edges = [whole.start + whole.length * nth // count for nth in range(count + 1)]
    return [ByteRange(start, stop) for start, stop in pairwise(edges)]


class MultipartWriter:
    """Uploads objects in parts, and removes old uploads that were never finished."""

    def __init__(
        self, client: S3Client, swapper: S3Swapper, fetcher: BodyFetcher, stale_s: float
    ) -> None:
        self._client = client
        self._swapper = swapper
        self._fetcher = fetcher
        self._stale = timedelta(seconds=stale_s)
        self._swept: TTLCache[ObjectRef, bool] = TTLCache(4096, ttl=600)

    async def put(
        self, write: S3Write, parts: Sequence[Part], swap_request: SwapRequest
    ) -> tuple[ETag | Conflict, WriteNotice]:
        """Upload *parts* and swap the object in by *swap_request*; return the bytes moved too.

        An object that is to be copied is completed under a temporary name.
        """
        await self.sweep(write.ref)
        ref = write.ref
        if swap_request == "copy":
            ref = ObjectRef(ref.bucket, f"{ref.key}{TEMPORARY}{write.ids[0]}")
        upload = _MultipartUpload(self._client, self._fetcher, ref, write)
        outcome: ETag | Conflict = CONFLICT
        try:
            with suppress(VersionChangedError):
                await upload.fill(parts)
                outcome = await self._swap(write, upload)
        finally:
            await asyncio.shield(self._clean(upload, is_completed=isinstance(outcome, str)))
        return outcome, upload.notice

    async def _swap(self, write: S3Write, upload: "_MultipartUpload") -> ETag | Conflict:
        if not upload.is_temporary:
            return await self._swapper.put(write, upload.complete)
        temporary = S3Write(upload.ref, None, write.ids, write.kept)
        await self._swapper.put(temporary, upload.complete)
        send = partial(
            self._client.send,
            write.ref,
            "copy_object",
            CopySource={"Bucket": bucket_of(upload.ref), "Key": upload.ref.key},
            MetadataDirective="REPLACE",
            **write.headers,
        )
        return await self._swapper.put(write, send)

    async def sweep(self, ref: ObjectRef) -> None:
        """Remove old temporary objects and uploads next to *ref*, every 10 minutes at most.

        Only the first page of each listing is read; later sweeps find the rest.
        """
        if ref in self._swept:
            return
        self._swept[ref] = True
        with suppress(StorageError, KeyError):  # botocore takes any XML for an entry
            await self._abort_uploads(ref, self._stale)
            prefix = ObjectRef(ref.bucket, f"{ref.key}{TEMPORARY}")
            answer = await self._client.do(prefix, "list_objects_v2")
            for each in _older(answer, answer.get("Contents", ()), "LastModified", self._stale):
                await self._discard(ObjectRef(ref.bucket, str(each["Key"])), "delete_object")

    async def _clean(self, upload: "_MultipartUpload", *, is_completed: bool) -> None:
        """Remove the parts and a temporary object; if that fails, a sweep does it later."""
        with suppress(StorageError):
            upload_id = await upload.begin()  # it may have begun after its caller was cancelled
            if not (is_completed or upload.is_temporary):
                await self._discard(upload.ref, "abort_multipart_upload", UploadId=upload_id)
        if upload.is_temporary:
            # Its name is of this write only, so uploads whose response was lost are found by it.
            with suppress(StorageError, KeyError):
                await self._abort_uploads(upload.ref, timedelta(0))
            await self._discard(upload.ref, "delete_object")

    async def _abort_uploads(self, ref: ObjectRef, age: timedelta) -> None:
        answer = await self._client.do(ref, "list_multipart_uploads")
        for each in _older(answer, answer.get("Uploads", ()), "Initiated", age):
            key = str(each["Key"])
            if key == ref.key or key.startswith(f"{ref.key}{TEMPORARY}"):
                upload = {"UploadId": str(each["UploadId"])}
                await self._discard(ObjectRef(ref.bucket, key), "abort_multipart_upload", **upload)

    async def _discard(self, ref: ObjectRef, operation: str, **params: Any) -> None:
        with suppress(StorageError):
            await self._client.do(ref, operation, **params)


class _MultipartUpload:
    def __init__(
        self, client: S3Client, fetcher: BodyFetcher, ref: ObjectRef, write: S3Write
    ) -> None:
        self.ref = ref
        self.is_temporary = ref != write.ref
        self.notice = WriteNotice()
        self._client = client
        self._fetcher = fetcher
        self._write = write
        self._parts: list[dict[str, Any]] = []
        create = client.do(ref, "create_multipart_upload", **write.headers)
        self._created = asyncio.ensure_future(create)

    async def begin(self) -> str:
        """Return the id; a cancelled caller leaves the request to others."""
        return str((await asyncio.shield(self._created))["UploadId"])

    async def fill(self, parts: Sequence[Part]) -> None:
        await self.begin()
        numbered = list(enumerate(parts, 1))
        self._parts = await bounded_gather(self._fill, numbered, limit=4)

    async def complete(self, **conditions: str) -> S3Answer | Refusal:
        return await self._client.send(
            self.ref,
            "complete_multipart_upload",
            UploadId=await self.begin(),
            MultipartUpload={"Parts": self._parts},
            **conditions,
        )

    async def _fill(self, numbered: tuple[int, Part]) -> dict[str, Any]:
        number, part = numbered
        params = {"UploadId": await self.begin(), "PartNumber": number}
        if isinstance(part, ByteRange):
            etag = await self._copy(part, params)
        else:
            etag = await self._send(part, params)
        return {"PartNumber": number, "ETag": etag}

    async def _copy(self, part: ByteRange, params: dict[str, Any]) -> str:
        source = self._write.ref
        answer = await self._client.send_until_answered(
            self.ref,
            "upload_part_copy",
            CopySource={"Bucket": bucket_of(source), "Key": source.key},
            CopySourceRange=f"bytes={part.start}-{part.stop - 1}",
            CopySourceIfMatch=str(self._write.expected),
            **params,
        )
        if isinstance(answer, Refusal):
            if is_refused(answer):
                raise VersionChangedError(source)
            is_unknown = answer.code in {"NotImplemented", "MethodNotAllowed"}
            if is_unknown or answer.status in {405, 501}:
                raise CannotCopyError
            raise answer.failure(self.ref)
        self.notice = self.notice._replace(copied=self.notice.copied + part.length)
        return str(answer["CopyPartResult"]["ETag"])

    async def _send(self, part: Sequence[Piece], params: dict[str, Any]) -> str:
        body, fetched = await self._fetcher.join(self._write.ref, part, self._write.version)
        answer = await self._client.do(self.ref, "upload_part", Body=body, **params)
        old = self.notice
        self.notice = old._replace(sent=old.sent + len(body), fetched=old.fetched + fetched)
        return str(answer["ETag"])


def _older(answer: S3Answer, listed: Any, member: str, age: timedelta) -> Iterator[dict[str, Any]]:
    """Yield the members of a listing that are older than *age* by the clock of the server."""
    date = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", "")
    try:
        now = parsedate_to_datetime(date).astimezone(UTC)
    except ValueError:
        now = datetime.now(UTC)
    for each in listed:
        if not age or each[member] < now - age:
            yield each
