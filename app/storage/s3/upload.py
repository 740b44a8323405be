"""Objects that are uploaded in parts, some of which the server copies from another."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from app.errors import StorageError, StorageUnavailableError, VersionChangedError
from app.model import ByteRange, ObjectRef
from app.storage.abreast import abreast
from app.storage.moved import Moved
from app.storage.parts import Part
from app.storage.patience import Patience
from app.storage.refusals import Refusal
from app.storage.s3.client import Answer, S3Client, bucket_of
from app.storage.s3.fetch import Fetcher
from app.storage.s3.look import failure, is_refused, may_pass
from app.storage.s3.swap import Write

_AT_ONCE: Final = 4
_UNKNOWN_STATUS: Final = frozenset({405, 501})
_UNKNOWN_CODES: Final = frozenset({"NotImplemented", "MethodNotAllowed"})
_DEMANDED: Final = {
    "create_multipart_upload": "UploadId",
    "upload_part": "ETag",
    "upload_part_copy": "CopyPartResult",
}
"""Members of answers that S3 always sends."""


class CannotCopyError(Exception):
    """The server has no UploadPartCopy."""


@dataclass(frozen=True, slots=True)
class Tools:
    """What it takes to write to a server."""

    client: S3Client
    patience: Patience
    fetcher: Fetcher

    async def demand(self, ref: ObjectRef, operation: str, **params: Any) -> Answer:
        """Ask what harms nobody to be done twice, until it is done."""

        async def ask() -> Answer:
            answer = await self.client.ask(ref, operation, **params)
            if isinstance(answer, Refusal):
                raise _error(ref, operation, answer)
            if (member := _DEMANDED.get(operation)) and not answer.get(member):
                raise StorageUnavailableError(ref, f"the answer to {operation} has no {member}")
            return answer

        return await self.patience.run(ref, ask, may_pass=may_pass)

    async def try_to(self, ref: ObjectRef, operation: str, **params: Any) -> None:
        """Ask for what need not be done."""
        with suppress(StorageError):
            await self.demand(ref, operation, **params)


class Upload:
    """One upload to *ref*, which need not be where the object is wanted in the end."""

    def __init__(self, tools: Tools, ref: ObjectRef, write: Write) -> None:
        self._tools = tools
        self._ref = ref
        self._write = write
        self._id = ""
        self._parts: list[dict[str, Any]] = []
        self.moved = Moved()

    async def fill(self, parts: Sequence[Part]) -> None:
        """Begin, and let all *parts* be there.

        Raises: `VersionChangedError`, `CannotCopyError`, `StorageError`.
        """
        begun = await self._tools.demand(
            self._ref, "create_multipart_upload", **self._write.headers
        )
        self._id = str(begun["UploadId"])
        numbered = list(enumerate(parts, 1))
        self._parts = await abreast(self._fill, numbered, at_a_time=_AT_ONCE)

    async def complete(self, **conditions: str) -> Answer | Refusal:
        """Make an object of the parts."""
        return await self._tools.client.ask(
            self._ref,
            "complete_multipart_upload",
            UploadId=self._id,
            MultipartUpload={"Parts": self._parts},
            **conditions,
        )

    async def abort(self) -> None:
        """Give the parts up."""
        if self._id:
            await asyncio.shield(abort(self._tools, self._ref, self._id))

    async def _fill(self, numbered: tuple[int, Part]) -> dict[str, Any]:
        number, part = numbered
        if isinstance(part, ByteRange):
            etag = await self._copy(number, part)
        else:
            etag = await self._send(number, part)
        return {"PartNumber": number, "ETag": etag}

    async def _copy(self, number: int, part: ByteRange) -> str:
        source = self._write.ref
        answer = await self._tools.demand(
            self._ref,
            "upload_part_copy",
            UploadId=self._id,
            PartNumber=number,
            CopySource={"Bucket": bucket_of(source), "Key": source.key},
            CopySourceRange=f"bytes={part.start}-{part.stop - 1}",
            CopySourceIfMatch=str(self._write.expected),
        )
        self.moved = self.moved._replace(copied=self.moved.copied + part.length)
        return str(answer["CopyPartResult"]["ETag"])

    async def _send(self, number: int, part: Sequence[bytes | ByteRange]) -> str:
        version = self._write.expected if isinstance(self._write.expected, str) else None
        body, fetched = await self._tools.fetcher.join(self._write.ref, part, version)
        answer = await self._tools.demand(
            self._ref, "upload_part", UploadId=self._id, PartNumber=number, Body=body
        )
        self.moved = Moved(
            self.moved.sent + len(body), self.moved.fetched + fetched, self.moved.copied
        )
        return str(answer["ETag"])


async def abort(tools: Tools, ref: ObjectRef, upload_id: str) -> None:
    """Give an upload up, which may be gone already; if that fails, it is done another day."""
    await tools.try_to(ref, "abort_multipart_upload", UploadId=upload_id)


def _error(ref: ObjectRef, operation: str, refusal: Refusal) -> Exception:
    if operation == "upload_part_copy":
        if is_refused(refusal):
            return VersionChangedError(ref)
        if refusal.status in _UNKNOWN_STATUS or refusal.code in _UNKNOWN_CODES:
            return CannotCopyError()
    return failure(ref, refusal)
