"""What a server makes of conditions, which many take and do not heed; tried with an object."""

import asyncio
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

from app.errors import StorageDeniedError, StorageError, UnwritableError
from app.model import ETag, ObjectRef
from app.storage.contract import TEMPORARY
from app.storage.patience import Patience
from app.storage.refusals import Refusal
from app.storage.s3.client import Answer, S3Client, bucket_of
from app.storage.s3.look import Seen, etag_of, failure, is_refused, look, may_pass, server_of
from app.storage.s3.write_ids import metadata_of, next_ids

_WRONG: Final = '"00000000000000000000000000000000"'
_WRONGS: Final = ({"IfMatch": _WRONG}, {"IfNoneMatch": "*"})
"""Conditions that an object which is there does not meet."""
_HEADERS: Final = {"IfMatch": "If-Match", "IfNoneMatch": "If-None-Match"}
_TRIES: Final = 5
_AMAZON: Final = "AmazonS3"
_SEAWEEDFS: Final = "SeaweedFS"
"""Checks the conditions of a completed upload, but others can write before it completes."""

type Joining = Literal["complete", "copy"]
"""Which request may put an object in the place of another that was uploaded in parts: the one that
completes the upload, or one that copies a finished object."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a server was seen to do."""

    keeps_metadata: bool
    deletes: bool
    """Whether it removes just the version that is told."""
    joining: Joining | None


class Probe:
    """Tries one server."""

    def __init__(self, client: S3Client, patience: Patience, root: ObjectRef) -> None:
        key = f"{root.prefix.key}{TEMPORARY}{secrets.token_hex(8)}"
        self._client = client
        self._patience = patience
        self._ref = ObjectRef(root.bucket, key)
        self._server = ""

    async def run(self) -> Abilities:
        """Find out what the server does.

        Raises: `UnwritableError` if it would lose writes, `StorageError`.
        """
        with suppress(StorageDeniedError):  # refused, and so there; some make a bucket unasked
            await self._patience.run(
                self._ref, lambda: self._client.reach(self._ref), may_pass=may_pass
            )
        try:
            return await self._run()
        finally:
            with suppress(StorageError):
                await asyncio.shield(self._client.ask(self._ref, "delete_object"))

    async def _run(self) -> Abilities:
        metadata = metadata_of(next_ids(()))
        made = self._done(await self._ask("put_object", Body=b"1", Metadata=metadata))
        etag = await self._seen()
        if etag_of(made) != etag:
            raise self._unwritable("does not tell the versions of what is written")
        for wrong in _WRONGS:
            await self._demand_refusal(**wrong)
        await self._demand_replacement(etag, Body=b"22", Metadata=metadata)
        joining = await self._joining()
        seen = await self._look()
        keeps_metadata = seen is not None and bool(seen.ids)
        return Abilities(keeps_metadata, await self._deletes(), joining)

    async def _demand_refusal(self, **condition: str) -> None:
        header = _HEADERS[next(iter(condition))]
        before = await self._seen()
        answer = await self._ask("put_object", Body=b"wrong", **condition)
        if not isinstance(answer, Refusal) or await self._seen() != before:
            raise self._unwritable(f"does not heed {header}, and would lose writes")
        if not is_refused(answer):
            raise self._unwritable(f"knows no {header}: {answer.code}")

    async def _demand_replacement(self, etag: ETag, **params: Any) -> None:
        """Replace the version *etag*; a refusal may be that of a repeated request that was done.

        Servers also refuse for a moment, while another request for the object is under way.
        """
        for _ in range(_TRIES):
            answer = await self._ask("put_object", IfMatch=etag, **params)
            if not is_refused(answer):
                self._done(answer)
                return
            if await self._seen() != etag:
                return
        raise self._unwritable("refuses right conditions")

    async def _deletes(self) -> bool:
        answer = await self._ask("delete_object", IfMatch=_WRONG)
        return is_refused(answer) and await self._look() is not None

    async def _joining(self) -> Joining | None:
        if _AMAZON not in self._server and await self._copies():
            return "copy"
        if _SEAWEEDFS not in self._server and await self._completes():
            return "complete"
        return None

    async def _copies(self) -> bool:
        source = {"Bucket": bucket_of(self._ref), "Key": self._ref.key}
        options: dict[str, Any] = {"CopySource": source, "MetadataDirective": "REPLACE"}
        options["Metadata"] = metadata_of(next_ids(()))
        for wrong in _WRONGS:
            if not is_refused(await self._ask("copy_object", **options, **wrong)):
                return False
        right = await self._ask("copy_object", **options, IfMatch=await self._seen())
        return not isinstance(right, Refusal)

    async def _completes(self) -> bool:
        made = await self._ask("create_multipart_upload")
        if isinstance(made, Refusal) or "UploadId" not in made:
            return False
        upload = {"UploadId": made["UploadId"]}
        try:
            part = await self._ask("upload_part", **upload, PartNumber=1, Body=b"333")
            if isinstance(part, Refusal) or "ETag" not in part:
                return False
            parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
            complete = partial(
                self._ask, "complete_multipart_upload", **upload, MultipartUpload=parts
            )
            return all([is_refused(await complete(**wrong)) for wrong in _WRONGS])
        finally:
            await asyncio.shield(self._ask("abort_multipart_upload", **upload))

    async def _seen(self) -> ETag:
        if (seen := await self._look()) is None:
            raise self._unwritable("does not show what was just written")
        return seen.etag

    async def _look(self) -> Seen | None:
        return await self._patience.run(
            self._ref, lambda: look(self._client, self._ref), may_pass=may_pass
        )

    async def _ask(self, operation: str, **params: Any) -> Answer | Refusal:
        """Ask until there is an answer; what the server cannot do is one."""

        async def ask() -> Answer | Refusal:
            answer = await self._client.ask(self._ref, operation, **params)
            if isinstance(answer, Refusal) and may_pass(error := failure(self._ref, answer)):
                raise error
            return answer

        return await self._patience.run(self._ref, ask, may_pass=may_pass)

    def _done(self, answer: Answer | Refusal) -> Mapping[str, Any]:
        if isinstance(answer, Refusal):
            raise failure(self._ref, answer)
        self._server = server_of(answer)
        return answer

    def _unwritable(self, reason: str) -> UnwritableError:
        named = self._server or "of no name"
        return UnwritableError(f"{self._ref.bucket}: the server ({named}) {reason}")
