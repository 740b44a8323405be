"""Conditional writes and removals in S3, repeated until it is known whether they were done.

A response can be lost: the connection breaks, or the server fails after it did its work. The
service must not take such a write for a conflict with itself. So each write has an id, which the
object carries as metadata with those of the last few writes before it, and the object is looked at
before a request is repeated, and after each refusal.
"""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from app.errors import StorageError, StorageUnavailableError
from app.model import ETag, ObjectRef
from app.storage.contract import ABSENT, CONFLICT, Conflict, Expected, ObjectHeaders, is_as_expected
from app.storage.http_headers import derive_etag
from app.storage.http_reader import Refusal
from app.storage.s3_client import (
    ObjectState,
    S3Answer,
    S3Client,
    WriteIds,
    etag_of,
    head,
    ids_metadata,
    is_refused,
    is_transient_write,
)
from app.storage.wrappers import RetryPolicy

_KEPT_IDS: Final = 8
_NO_CONTENT: Final = 204
_DEFAULT_TYPE: Final = "binary/octet-stream"
"""Default of AWS; SeaweedFS guesses a type from the bytes."""

type Send = Callable[..., Awaitable[S3Answer | Refusal]]
"""Sends the write with the conditions it is called with."""
type Compare = Callable[[ObjectState], Awaitable[bool]]


def next_ids(before: WriteIds) -> WriteIds:
    """Return a new id in front of those of the object that is replaced."""
    return (secrets.token_hex(8), *before)[: _KEPT_IDS + 1]


@dataclass(frozen=True, slots=True)
class ObjectWrite:
    """An object to be written in place of the version *expected*."""

    ref: ObjectRef
    expected: Expected
    ids: WriteIds
    kept: ObjectHeaders

    @property
    def version(self) -> ETag | None:
        return self.expected if isinstance(self.expected, str) else None

    @property
    def conditions(self) -> dict[str, str]:
        """Parameters of botocore for the precondition."""
        if self.expected is None:
            return {}
        if self.expected == ABSENT:
            return {"IfNoneMatch": "*"}
        return {"IfMatch": str(self.expected)}

    @property
    def headers(self) -> dict[str, Any]:
        """Parameters of botocore for the headers and the ids of the object."""
        is_gzip, content_type, metadata = self.kept
        return {
            "Metadata": {**dict(metadata), **ids_metadata(self.ids)},
            "ContentType": content_type or _DEFAULT_TYPE,
            **({"ContentEncoding": "gzip"} if is_gzip else {}),
        }


class _Request[T](ABC):
    def __init__(self, client: S3Client, policy: RetryPolicy, ref: ObjectRef) -> None:
        self._client = client
        self._policy = policy
        self._ref = ref
        self._in_doubt = False

    async def run(self) -> T:
        try:
            return await self._policy.run(self._ref, self._attempt, is_transient=is_transient_write)
        except StorageError:
            if self._in_doubt:
                with suppress(StorageError):
                    if (settled := await self._settle()) is not None:
                        return settled
            raise

    async def _attempt(self) -> T:
        was_in_doubt = self._in_doubt
        if was_in_doubt and (settled := await self._settle()) is not None:
            return settled
        self._in_doubt = True
        answer = await self._send()
        if not isinstance(answer, Refusal):
            return await self._accepted(answer)
        if is_refused(answer) and (refused := await self._refused()) is not None:
            return refused
        error = answer.failure(self._ref)
        self._in_doubt = was_in_doubt or is_transient_write(error)
        raise error

    @abstractmethod
    async def _send(self) -> S3Answer | Refusal:
        """Send the request once."""

    @abstractmethod
    async def _accepted(self, answer: S3Answer) -> T:
        """Return the outcome according to the response."""

    @abstractmethod
    async def _refused(self) -> T | None:
        """Return the outcome after a failed precondition, `None` if there was none."""

    @abstractmethod
    async def _settle(self) -> T | None:
        """Look at the object; return `None` if the request is still to be done."""


class Swap(_Request[ETag | Conflict]):
    """One conditional write; its outcome is the new version, also if that was replaced since."""

    def __init__(
        self,
        client: S3Client,
        policy: RetryPolicy,
        write: ObjectWrite,
        send: Send,
        compare: Compare | None = None,
    ) -> None:
        super().__init__(client, policy, write.ref)
        self._write = write
        self._send_with = send
        self._compare = compare

    async def _send(self) -> S3Answer | Refusal:
        return await self._send_with(**self._write.conditions)

    async def _accepted(self, answer: S3Answer) -> ETag | Conflict:
        """Look for a write whose response has no ETag, and may be a proxy's."""
        if (etag := etag_of(answer) or await self._settle()) is None:
            raise StorageUnavailableError(
                self._ref, "the response to a write has no ETag, and nothing was written"
            )
        return etag

    async def _refused(self) -> ETag | Conflict | None:
        if self._write.expected is None:
            return None
        return await self._settle() or CONFLICT

    async def _settle(self) -> ETag | Conflict | None:
        state = await head(self._client, self._ref)
        own = self._write.ids[0]
        if state is not None:
            if own in state.ids:
                return state.etag if own == state.ids[0] else derive_etag(own.encode())
            if self._compare is not None and not state.ids and await self._compare(state):
                return state.etag
        if is_as_expected(state and state.etag, self._write.expected):
            return None
        return CONFLICT


class Removal(_Request[bool | Conflict]):
    """One DELETE, of the version *expected* only if that is one."""

    def __init__(
        self, client: S3Client, policy: RetryPolicy, ref: ObjectRef, expected: ETag | None
    ) -> None:
        super().__init__(client, policy, ref)
        self._expected = expected

    async def _send(self) -> S3Answer | Refusal:
        condition = {} if self._expected is None else {"IfMatch": str(self._expected)}
        return await self._client.send(self._ref, "delete_object", **condition)

    async def _accepted(self, answer: S3Answer) -> bool:
        status = answer["ResponseMetadata"]["HTTPStatusCode"]
        if status != _NO_CONTENT:
            raise StorageUnavailableError(self._ref, f"a DELETE was answered {status}, not 204")
        return True

    async def _refused(self) -> bool | Conflict:
        """Return `True` if the object is gone: the request may have been sent twice."""
        return True if await head(self._client, self._ref) is None else CONFLICT

    async def _settle(self) -> bool | Conflict | None:
        state = await head(self._client, self._ref)
        if state is None:
            return True
        return CONFLICT if self._expected not in (None, state.etag) else None
