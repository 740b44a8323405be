"""Conditional writes and removals in S3, repeated until it is known whether they were done.

A response can be lost: the connection breaks, or the server fails after it did its work. The
service must not take such a write for a conflict with itself. So each write has an id, which the
object carries as metadata with those of the last few writes before it, and the object is looked at
before a request is repeated, and after each refusal.
"""

import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, NamedTuple

from app.errors import StorageError, StorageUnavailableError
from app.model import ETag, ObjectRef
from app.storage.contract import ABSENT, CONFLICT, Conflict, Expected, ObjectHeaders, is_as_expected
from app.storage.http_headers import METADATA, derive_etag, version_of
from app.storage.http_reader import HttpReader, Refusal
from app.storage.s3_client import S3Answer, S3Client, is_refused, is_transient_write

_WRITE_IDS: Final = "shardgate-writes"
_WRITE_ID: Final = re.compile("[0-9a-f]{16}")
_BARE_ETAG: Final = re.compile('[^"]+')
_KEPT_IDS: Final = 8
_NO_CONTENT: Final = 204
_DEFAULT_TYPE: Final = "binary/octet-stream"
"""Default of AWS; SeaweedFS guesses a type from the bytes."""

type Send = Callable[..., Awaitable[S3Answer | Refusal]]
"""Sends the write with the conditions it is called with."""
type WriteIds = tuple[str, ...]
"""Ids of the writes that made an object, the newest first; objects carry them as metadata."""


def next_ids(before: WriteIds) -> WriteIds:
    """Return a new id in front of those of the object that is replaced."""
    return (secrets.token_hex(8), *before)[: _KEPT_IDS + 1]


def ids_metadata(ids: WriteIds) -> dict[str, str]:
    """Return the user metadata that carries *ids*."""
    return {_WRITE_IDS: " ".join(ids)}


def etag_of(answer: Mapping[str, Any]) -> ETag | None:
    """Return the version in the response to a write, if it has one."""
    etag = str(answer.get("CopyObjectResult", answer).get("ETag") or "")
    if not etag or etag.startswith("W/"):
        return None
    return ETag(f'"{etag}"' if _BARE_ETAG.fullmatch(etag) else etag)


class ObjectState(NamedTuple):
    """Current state of an object."""

    etag: ETag
    ids: WriteIds


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


class Swapper:
    """Writes and removes objects under conditions."""

    def __init__(self, client: S3Client, reader: HttpReader) -> None:
        self._client = client
        self._reader = reader

    async def state(self, ref: ObjectRef) -> ObjectState | None:
        """Return version and write ids of *ref*, `None` if absent."""
        return await self._client.retried(ref, lambda: self._look(ref))

    async def write(self, write: ObjectWrite, send: Send) -> ETag | Conflict:
        """Write once; return the new version, also if that was replaced since."""
        own = write.ids[0]

        def settle(state: ObjectState | None) -> ETag | Conflict | None:
            if state is not None and own in state.ids:
                return state.etag if own == state.ids[0] else derive_etag(own.encode())
            return None if is_as_expected(state and state.etag, write.expected) else CONFLICT

        attempt = partial(send, **write.conditions)
        lost = None if write.expected is None else CONFLICT
        return await self._run(write.ref, attempt, etag_of, settle, lost)

    async def remove(self, ref: ObjectRef, expected: ETag | None) -> Literal[True] | Conflict:
        """Remove *ref*, in the version *expected* only if that is one."""

        def accept(answer: S3Answer) -> Literal[True] | None:
            return True if answer["ResponseMetadata"]["HTTPStatusCode"] == _NO_CONTENT else None

        def settle(state: ObjectState | None) -> Literal[True] | Conflict | None:
            if state is None:
                return True
            return CONFLICT if expected not in (None, state.etag) else None

        condition = {} if expected is None else {"IfMatch": str(expected)}
        attempt = partial(self._client.send, ref, "delete_object", **condition)
        return await self._run(ref, attempt, accept, settle, CONFLICT)

    async def _run[T](
        self,
        ref: ObjectRef,
        send: Send,
        accept: Callable[[S3Answer], T | None],
        settle: Callable[[ObjectState | None], T | None],
        lost: T | None,
    ) -> T:
        """Repeat *send* until a response or the object itself shows the outcome.

        *accept* returns the outcome that a response proves, and *settle* that which the state of
        the object proves. A refusal that the state does not explain has the outcome *lost*.
        """
        in_doubt = False

        async def attempt() -> T:
            nonlocal in_doubt
            was_in_doubt = in_doubt
            if was_in_doubt and (known := settle(await self._look(ref))) is not None:
                return known
            in_doubt = True
            answer = await send()
            if not isinstance(answer, Refusal):  # perhaps of a proxy
                if (known := accept(answer) or settle(await self._look(ref))) is not None:
                    return known
                raise StorageUnavailableError(ref, "the response is not that of S3 to a write")
            if lost is not None and is_refused(answer):
                return settle(await self._look(ref)) or lost
            error = answer.failure(ref)
            in_doubt = was_in_doubt or is_transient_write(error)
            raise error

        try:
            return await self._client.retried(ref, attempt)
        except StorageError:
            if in_doubt:
                with suppress(StorageError):
                    if (known := settle(await self._look(ref))) is not None:
                        return known
            raise

    async def _look(self, ref: ObjectRef) -> ObjectState | None:
        if (found := await self._reader.head(ref)) is None:
            return None
        headers, size = found
        listed = headers.get(METADATA + _WRITE_IDS.encode(), b"").decode("latin-1").split()
        ids = tuple(each for each in listed if _WRITE_ID.fullmatch(each))
        return ObjectState(version_of(headers, size), ids)
