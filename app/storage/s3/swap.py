"""One conditional write, sent until it is known what became of it.

An answer can be lost: the connection breaks, or the server fails after it has done its work.
Nobody must call such a write a conflict with itself. So the object is looked at before anything is
sent again, and after every refusal.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

from app.errors import StorageError, StorageUnavailableError
from app.model import ETag, ObjectRef
from app.storage.contract import ABSENT, CONFLICT, Conflict, Expected, ObjectHeaders
from app.storage.patience import Patience
from app.storage.ranges import derived
from app.storage.refusals import Refusal
from app.storage.s3.client import Answer, S3Client
from app.storage.s3.look import Seen, etag_of, failure, is_refused, look, may_pass
from app.storage.s3.write_ids import WriteIds, metadata_of
from app.storage.writes import is_as_expected

_UNTOLD_TYPE: Final = "binary/octet-stream"
"""AWS's own default; SeaweedFS guesses one from the bytes."""

type Send = Callable[..., Awaitable[Answer | Refusal]]
"""Sends the write with the conditions that it is called with."""
type Holds = Callable[[Seen], Awaitable[bool]]
"""Compares an object with what was to be written, where objects carry no ids."""


@dataclass(frozen=True, slots=True)
class Write:
    """What is to be written where, in place of what."""

    ref: ObjectRef
    expected: Expected
    ids: WriteIds
    kept: ObjectHeaders

    @property
    def conditions(self) -> dict[str, str]:
        """Say to S3 what is expected."""
        if self.expected is None:
            return {}
        if self.expected == ABSENT:
            return {"IfNoneMatch": "*"}
        return {"IfMatch": str(self.expected)}

    @property
    def headers(self) -> dict[str, Any]:
        """Say to S3 what the object carries."""
        is_gzip, content_type, metadata = self.kept
        return {
            "Metadata": {**dict(metadata), **metadata_of(self.ids)},
            "ContentType": content_type or _UNTOLD_TYPE,
            **({"ContentEncoding": "gzip"} if is_gzip else {}),
        }


class Swap:
    """Sends one write."""

    def __init__(
        self,
        client: S3Client,
        patience: Patience,
        write: Write,
        send: Send,
        holds: Holds | None = None,
    ) -> None:
        self._client = client
        self._patience = patience
        self._write = write
        self._send = send
        self._holds = holds
        self._in_doubt = False

    async def run(self) -> ETag | Conflict:
        """Give the version that was written, also if it has been replaced since.

        Raises: `StorageError` if nobody knows whether it was.
        """
        try:
            return await self._patience.run(self._write.ref, self._attempt, may_pass=may_pass)
        except StorageError:
            if not self._in_doubt:
                raise
            settled = await self._settled_at_last()
            if settled is None:
                raise
            return settled

    async def _attempt(self) -> ETag | Conflict:
        was_in_doubt = self._in_doubt
        if was_in_doubt and (settled := await self._settle()) is not None:
            return settled
        self._in_doubt = True
        answer = await self._send(**self._write.conditions)
        if not isinstance(answer, Refusal):
            return etag_of(answer) or await self._found()
        if is_refused(answer) and self._write.expected is not None:
            settled = await self._settle()
            return CONFLICT if settled is None else settled
        error = failure(self._write.ref, answer)
        self._in_doubt = was_in_doubt or may_pass(error)
        raise error

    async def _settle(self) -> ETag | Conflict | None:
        """Look for the write; `None` if it is still to be done."""
        seen = await look(self._client, self._write.ref)
        ours = self._write.ids[0]
        if seen is not None:
            if ours in seen.ids:
                return seen.etag if ours == seen.ids[0] else derived(ours.encode())
            if self._holds is not None and not seen.ids and await self._holds(seen):
                return seen.etag
        if is_as_expected(None if seen is None else seen.etag, self._write.expected):
            return None
        return CONFLICT

    async def _settled_at_last(self) -> ETag | Conflict | None:
        try:
            return await self._settle()
        except StorageError:
            return None

    async def _found(self) -> ETag | Conflict:
        """Look for a write whose answer has no ETag, and may be of a proxy that did not pass it on.

        Raises: `StorageUnavailableError` if it is still to be done.
        """
        if (settled := await self._settle()) is None:
            raise StorageUnavailableError(
                self._write.ref, "the answer to a write has no ETag, and nothing was written"
            )
        return settled
