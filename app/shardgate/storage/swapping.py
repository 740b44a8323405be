"""Writes by compare-and-swap over a network, repeated until their outcome is known.

A response can be lost: the connection breaks, or the server fails after it did its work. The
service must not take such a write for a conflict with itself. So each write has an id, which the
object carries as metadata with those of the last few writes before it, and the object is looked at
before a request is repeated, and after each refusal.
"""

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Final, Literal, NamedTuple

from cachetools import LRUCache

from shardgate.concurrency import SingleFlight, bounded_gather, is_large, run_in_thread
from shardgate.errors import (
    RangeNotSatisfiedError,
    StorageError,
    StorageThrottledError,
    StorageTimeoutError,
    StorageUnavailableError,
    VersionChangedError,
)
from shardgate.model import ByteRange, Condition, ETag, ObjectRef, Piece
from shardgate.storage.contract import (
    CONFLICT,
    Conflict,
    Expected,
    Found,
    ObjectHeaders,
    ObjectReader,
    OnWrite,
    WriteNotice,
    assemble,
    is_as_expected,
    nbytes_of,
    plan_spans,
)
from shardgate.storage.http_headers import derive_etag, is_derived
from shardgate.storage.http_reader import HttpReader
from shardgate.storage.refusals import NO_SUCH_KEY, Refusal
from shardgate.storage.wrappers import RetryPolicy

WRITE_IDS: Final = "shardgate-writes"
"""Name of the user metadata with the ids of writes."""
_WRITE_ID: Final = re.compile("[0-9a-f]{16}")
_KEPT_NBYTES: Final = 64 * 1024**2  # of bodies that were sent: most shards are written again

type WriteIds = tuple[str, ...]
"""Ids of the writes that made an object, the newest first; objects carry them as metadata."""
type Send[T] = Callable[[], Awaitable[T | Refusal | None]]
"""Sends one request; `None` is a response that proves no outcome."""


def next_ids(before: WriteIds) -> WriteIds:
    """Return a new id in front of up to eight of those of the object that is replaced."""
    return secrets.token_hex(8), *before[:8]


def ids_metadata(ids: WriteIds) -> dict[str, str]:
    """Return the user metadata that carries *ids*."""
    return {WRITE_IDS: " ".join(ids)}


def parse_ids(text: str) -> WriteIds:
    """Return the ids in the metadata *text*, which anybody may have written."""
    return tuple(each for each in text.split() if _WRITE_ID.fullmatch(each))


def is_refused(answer: object) -> bool:
    """Return whether a precondition failed, or its object or upload is gone."""
    if not isinstance(answer, Refusal):
        return False
    # An upload that is gone lost a race, or was swept: the write starts again.
    is_gone = answer.code in {NO_SUCH_KEY, "NoSuchUpload"}
    return is_gone or answer.status == HTTPStatus.PRECONDITION_FAILED


def is_transient_write(error: StorageError) -> bool:
    """Return whether a write can be sent again after it was looked for."""
    return isinstance(error, StorageThrottledError | StorageTimeoutError | StorageUnavailableError)


class ObjectState(NamedTuple):
    """Current state of an object."""

    etag: ETag
    ids: WriteIds
    generation: str | None = None
    """Number of the version in Google Cloud Storage."""


_ABSENT_STATE: Final = ObjectState(ETag(""), ())


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


class Swapper:
    """Writes and removes objects under conditions; *look* returns the state of an object."""

    def __init__(
        self, policy: RetryPolicy, look: Callable[[ObjectRef], Awaitable[ObjectState | None]]
    ) -> None:
        self._policy = policy
        self._look_at = look
        self._states: LRUCache[ObjectRef, ObjectState] = LRUCache(4096)
        """Last known states of objects, by which most writes need no look before them."""

    async def before(self, ref: ObjectRef, expected: Expected) -> ObjectState | Conflict:
        """Return the state that *ref* has in the version *expected*, if it is in that."""
        if not isinstance(expected, str):
            return _ABSENT_STATE
        if is_derived(expected):
            return CONFLICT
        state = self._states.get(ref)
        if state is None or state.etag != expected:
            state = await self.state(ref)
        return CONFLICT if state is None or state.etag != expected else state

    def note(self, ref: ObjectRef, state: ObjectState | None) -> None:
        """Remember the state of *ref*; forget it if that is `None`."""
        if state is None:
            self._states.pop(ref, None)
        else:
            self._states[ref] = state

    async def _look(self, ref: ObjectRef) -> ObjectState | None:
        state = await self._look_at(ref)
        self.note(ref, state)
        return state

    async def state(self, ref: ObjectRef) -> ObjectState | None:
        """Return the state of *ref*, `None` if absent."""
        return await self.retried(ref, lambda: self._look(ref))

    async def write(self, write: ObjectWrite, send: Send[ETag]) -> ETag | Conflict:
        """Write once; return the new version, also if that was replaced since."""
        own = write.ids[0]

        def outcome_in(state: ObjectState | None) -> ETag | Conflict | None:
            if state is not None and state.ids[:1] == (own,):
                return state.etag
            if state is not None and own in state.ids:
                return derive_etag(own.encode())  # written, and replaced by another write since
            return None if is_as_expected(state and state.etag, write.expected) else CONFLICT

        refused = None if write.expected is None else CONFLICT
        return await self._run(write.ref, send, outcome_in, refused)

    async def remove(
        self, ref: ObjectRef, expected: ETag | None, send: Send[Literal[True]]
    ) -> Literal[True] | Conflict:
        """Remove *ref*, in the version *expected* only if that is one."""

        def outcome_in(state: ObjectState | None) -> Literal[True] | Conflict | None:
            if state is None:
                return True
            return CONFLICT if expected not in (None, state.etag) else None

        return await self._run(ref, send, outcome_in, CONFLICT)

    async def retried[T](self, ref: ObjectRef, attempt: Callable[[], Awaitable[T]]) -> T:
        """Repeat *attempt* after errors that may be gone a moment later, also time-outs."""
        return await self._policy.run(ref, attempt, is_transient=is_transient_write)

    async def _run[T](
        self,
        ref: ObjectRef,
        send: Send[T],
        outcome_in: Callable[[ObjectState | None], T | None],
        refused: T | None,
    ) -> T:
        """Repeat *send* until a response or the object itself shows the outcome.

        *outcome_in* a state of the object is `None` where that proves none. A failed precondition
        that the state does not explain has the outcome *refused*; it is an error if that is `None`.
        """
        may_be_done = False  # a request was sent, and its outcome is not known

        async def look() -> T | None:
            return outcome_in(await self._look(ref))

        async def attempt() -> T:
            nonlocal may_be_done
            may_be_done_before = may_be_done
            if may_be_done_before and (outcome := await look()) is not None:
                return outcome
            may_be_done = True  # also without a response
            answer = await send()
            if isinstance(answer, Refusal):
                if refused is not None and is_refused(answer):
                    return await look() or refused
                error = answer.failure(ref)
                may_be_done = may_be_done_before or is_transient_write(error)
                raise error
            outcome = await look() if answer is None else answer
            if outcome is not None:
                return outcome
            # It may be the answer of a proxy.
            raise StorageUnavailableError(ref, "the response is not that of the store to a write")

        try:
            return await self.retried(ref, attempt)
        except StorageError:
            if may_be_done:
                with suppress(StorageError):
                    if (outcome := await look()) is not None:
                        return outcome
            raise


class Probes:
    """Runs *probe* once for each root, to the end even if the caller is cancelled.

    A probe that stopped half-way would leave its object or its upload.
    """

    def __init__(self, probe: Callable[[ObjectRef], Awaitable[None]], deadline_s: float) -> None:
        self._probe = probe
        self._deadline_s = deadline_s
        self._passed: set[ObjectRef] = set()
        self._running = SingleFlight[ObjectRef](outlasts=True)

    async def run(self, root: ObjectRef) -> bool:
        """Return whether the probe ran now. Raises: what it raises, `StorageTimeoutError`."""
        if root in self._passed:
            return False
        await self._running.run(root, partial(self._run, root))
        return True

    async def _run(self, root: ObjectRef) -> None:
        try:
            async with asyncio.timeout(self._deadline_s):
                await self._probe(root)
        except TimeoutError as error:
            raise StorageTimeoutError(root, "the trial of preconditions took too long") from error
        self._passed.add(root)


class BodyFetcher:
    """Joins bodies from new bytes and ranges of old objects, and keeps those sent last."""

    def __init__(
        self, reader: ObjectReader | HttpReader, policy: RetryPolicy, on_write: OnWrite
    ) -> None:
        self._reader = reader
        self._policy = policy
        self._on_write = on_write
        self._sent: LRUCache[ObjectRef, tuple[ETag, bytes]] = LRUCache(
            _KEPT_NBYTES, lambda sent: len(sent[1])
        )

    async def write(
        self,
        write: ObjectWrite,
        pieces: Sequence[Piece],
        send: Callable[[bytes], Awaitable[ETag | Conflict]],
    ) -> ETag | Conflict:
        """Pass the joined *pieces* to *send*, and keep them for the next rewrite."""
        try:
            body, fetched = await self.join(write.ref, pieces, write.version)
        except VersionChangedError:
            return CONFLICT
        try:
            etag = await send(body)
        finally:
            self._on_write(WriteNotice(len(body), fetched))
        if not isinstance(etag, Conflict):
            self._sent.pop(write.ref, None)
            if len(body) <= _KEPT_NBYTES:
                self._sent[write.ref] = etag, body
        return etag

    async def join(
        self, ref: ObjectRef, pieces: Sequence[Piece], version: Condition | None
    ) -> tuple[bytes, int]:
        """Concatenate *pieces*, whose ranges are of *version*; return the bytes fetched too.

        Raises: `VersionChangedError`, `RangeNotSatisfiedError`, `StorageError`.
        """
        is_long = is_large(sum(map(nbytes_of, pieces)))
        sent_etag, body = self._sent.get(ref, (None, b""))
        if sent_etag is not None and sent_etag == version:
            size = len(body)
            if any(isinstance(piece, ByteRange) and piece.stop > size for piece in pieces):
                raise RangeNotSatisfiedError(ref, size)
            spans = [ByteRange(0, size)]
            read = [body]
            fetched = 0
        else:
            spans = plan_spans(piece for piece in pieces if isinstance(piece, ByteRange))
            read = await bounded_gather(lambda span: self._read(ref, span, version), spans)
            fetched = sum(map(len, read))
        return await run_in_thread(assemble, pieces, spans, read, is_long=is_long), fetched

    async def _read(self, ref: ObjectRef, span: ByteRange, version: Condition | None) -> bytes:
        found = await self._policy.run(ref, lambda: self._reader.get(ref, span, if_match=version))
        if not isinstance(found, Found):
            raise VersionChangedError(ref)
        if found.byte_range != span:
            raise RangeNotSatisfiedError(ref, found.size)
        return found.data
