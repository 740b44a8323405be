"""Writes of objects in Google Cloud Storage and Azure by compare-and-swap, through obstore.

Google compares generations of objects and Azure ETags. obstore sends each object as a whole, and
has no DELETE of one version.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from functools import cache, partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, NamedTuple

import obstore
from obstore.exceptions import AlreadyExistsError, PreconditionError

from shardgate.concurrency import Backoff
from shardgate.errors import (
    BadKeyError,
    ConflictError,
    StorageDeniedError,
    StorageError,
    StorageTimeoutError,
    TooLargeError,
    UnwritableError,
)
from shardgate.model import ETag, ObjectRef, Piece
from shardgate.settings import StoreSettings
from shardgate.storage.contract import (
    ABSENT,
    CONFLICT,
    NO_HEADERS,
    TEMPORARY,
    Absent,
    Conflict,
    Expected,
    ObjectHeaders,
    ObjectReader,
    OnWrite,
    check_write,
    nbytes_of,
)
from shardgate.storage.http_headers import is_strong
from shardgate.storage.obstore_client import (
    FAILURES,
    NO_BUCKET_CODES,
    attributes_of,
    failure,
    is_google,
    is_name,
    open_client,
    refusal_of,
)
from shardgate.storage.refusals import NO_SUCH_KEY, Refusal, no_bucket
from shardgate.storage.swapping import (
    BodyFetcher,
    ObjectState,
    ObjectWrite,
    Probes,
    Swapper,
    is_refused,
    next_ids,
)
from shardgate.storage.wrappers import RetryPolicy

if TYPE_CHECKING:  # obstore defines this name for type checkers only
    from obstore import PutMode

_REFUSED: Final = Refusal("PUT", 412)
_WRONG: "Final[PutMode]" = {"e_tag": '"0x8D0000000000000"', "version": "1"}


class CloudWriteOptions(NamedTuple):
    """Limits of writes to Google Cloud Storage and Azure."""

    deadline_s: float = 30.0
    """Half of the longest time for one request with retries; longest wait of a large object."""
    backoff: Backoff = Backoff(first_s=0.5, longest_s=5.0, at_once=1)
    """Google takes about one write of an object a second, and answers 429 to more."""
    large_nbytes: int = 64 * 1024**2
    """Larger objects, each of which is in memory as a whole, are written one after the other."""
    largest_nbytes: int = 2 * 1024**3
    """Larger objects are refused: they would take twice their size of memory."""
    on_write: OnWrite = lambda _: None


class CloudWriter:
    """Writing side of `CloudStore`."""

    def __init__(
        self,
        reader: ObjectReader,
        settings: StoreSettings,
        look: Callable[[ObjectRef], Awaitable[ObjectState | None]],
        options: CloudWriteOptions,
    ) -> None:
        self._reader = reader
        longest_s = 2 * options.deadline_s
        self._options = options
        self._write_client = cache(
            partial(
                open_client,
                settings=settings,
                connect_s=options.deadline_s / 2,  # so that several attempts fit
                silence_s=longest_s,  # it counts the time of sending too
            )
        )
        self._turns = asyncio.Lock()  # of large objects
        policy = RetryPolicy(longest_s, backoff=options.backoff)
        self._swapper = Swapper(policy, look)
        self._fetcher = BodyFetcher(reader, RetryPolicy(options.deadline_s), options.on_write)
        self._probes = Probes(self._probe, longest_s)

    async def verify_conditional_writes(self, root: ObjectRef) -> None:
        await self._probes.run(root)

    def keeps_headers(self, ref: ObjectRef) -> bool:  # noqa: ARG002  the contract's argument
        return True

    async def put(
        self,
        ref: ObjectRef,
        pieces: Sequence[Piece],
        *,
        expected: Expected,
        headers: ObjectHeaders = NO_HEADERS,
    ) -> ETag | Conflict:
        check_write(ref, pieces, expected)
        _check_name(ref)
        before = await self._swapper.before(ref, expected)
        if isinstance(before, Conflict):
            return CONFLICT
        write = ObjectWrite(ref, expected, next_ids(before.ids), headers)
        mode = _mode_of(expected, before, ref)
        size = sum(map(nbytes_of, pieces))
        if size > self._options.largest_nbytes:
            limit = f"the limit for gs:// and az:// is {self._options.largest_nbytes}"
            raise TooLargeError(f"{ref}: the object would have {size} bytes, and {limit}")

        async def send(body: bytes) -> ETag | Conflict:
            return await self._swapper.write(write, lambda: self._send(write, body, mode))

        async with self._turn(ref) if size > self._options.large_nbytes else nullcontext():
            return await self._fetcher.write(write, pieces, send)

    @asynccontextmanager
    async def _turn(self, ref: ObjectRef) -> AsyncGenerator[None]:
        try:
            async with asyncio.timeout(self._options.deadline_s):
                await self._turns.acquire()
        except TimeoutError as error:
            raise StorageTimeoutError(ref, "other large objects are still being written") from error
        try:
            yield
        finally:
            self._turns.release()

    async def delete(self, ref: ObjectRef, *, expected: Expected) -> bool | Conflict:
        check_write(ref, (), expected)
        _check_name(ref)
        if isinstance(expected, Absent):
            return True
        if expected is not None:
            return False
        return await self._swapper.remove(ref, None, lambda: self._remove(ref))

    async def _send(
        self, write: ObjectWrite, body: bytes, mode: "PutMode"
    ) -> ETag | Refusal | None:
        """Send one PUT; return `None` if the response has no version."""
        ref = write.ref
        attributes = attributes_of(ref, write.kept, write.ids)
        try:
            written = await obstore.put_async(
                self._write_client(ref.bucket),
                ref.key,
                body,
                attributes=attributes,
                mode=mode,
                use_multipart=False,
            )
        except FAILURES as error:
            return _refusal(ref, error)
        if not is_strong(etag := written["e_tag"] or ""):
            return None
        if is_google(ref.bucket) and not written["version"]:
            return None
        self._swapper.note(ref, ObjectState(ETag(etag), write.ids, written["version"]))
        return ETag(etag)

    async def _remove(self, ref: ObjectRef) -> Refusal | None:
        """Send one DELETE; its success is proven by a look, since obstore tells no status."""
        self._swapper.note(ref, None)
        try:
            await obstore.delete_async(self._write_client(ref.bucket), ref.key)
        except FileNotFoundError:
            return None
        except FAILURES as error:
            refusal = _refusal(ref, error)
            if refusal.status == HTTPStatus.PRECONDITION_FAILED:  # and none was sent
                raise _leased(ref) from error
            return refusal
        return None

    async def _probe(self, root: ObjectRef) -> None:
        ref = ObjectRef(root.bucket, f"{root.prefix.key}{TEMPORARY}{secrets.token_hex(8)}")
        with suppress(StorageDeniedError):  # so it exists
            await self._swapper.retried(ref, lambda: self._reader.check_reachable(root))
        try:
            await self._try(ref)
        finally:
            with suppress(StorageError):
                await asyncio.shield(self._swapper.remove(ref, None, lambda: self._remove(ref)))

    async def _try(self, ref: ObjectRef) -> None:
        """Raise `UnwritableError` unless the server refuses wrong preconditions, and only those."""
        first = ObjectWrite(ref, None, next_ids(()), NO_HEADERS)
        etag = await self._swapper.write(first, lambda: self._send(first, b"1", "overwrite"))
        state = await self._swapper.state(ref)
        if state is None:
            raise _unwritable(ref, "does not return an object that was just written")
        if state.etag != etag:
            raise _unwritable(ref, "answers a write with another ETag than a read")
        if state.ids != first.ids:
            raise _unwritable(ref, "keeps no metadata, by which lost writes are found")
        mode = _mode_of(state.etag, state, ref)
        await self._verify_refusal(ref, state, "create")
        await self._verify_refusal(ref, state, _WRONG)
        second = ObjectWrite(ref, state.etag, next_ids(first.ids), NO_HEADERS)
        replaced = await self._swapper.write(second, lambda: self._send(second, b"22", mode))
        if isinstance(replaced, Conflict):
            raise _unwritable(ref, "refuses preconditions that hold")

    async def _verify_refusal(self, ref: ObjectRef, state: ObjectState, mode: "PutMode") -> None:
        wrong = ObjectWrite(ref, None, next_ids(()), NO_HEADERS)

        async def attempt() -> ETag | Refusal | None:
            answer = await self._send(wrong, b"wrong", mode)
            if isinstance(answer, Refusal) and not is_refused(answer):
                raise answer.failure(ref)
            return answer

        what = "If-None-Match" if mode == "create" else "If-Match"
        if is_google(ref.bucket):
            what = "x-goog-if-generation-match"
        answer = await self._swapper.retried(ref, attempt)
        if not is_refused(answer) or await self._swapper.state(ref) != state:
            raise _unwritable(ref, f"ignores {what}, and would lose writes")


def _mode_of(expected: Expected, before: ObjectState, ref: ObjectRef) -> "PutMode":
    """Return obstore's precondition for *ref*, which is *before* in the version *expected*.

    Raises: `UnwritableError` for a version of Google Cloud Storage without a generation.
    """
    if expected is None:
        return "overwrite"
    if expected == ABSENT:
        return "create"
    if is_google(ref.bucket) and not before.generation:
        raise _unwritable(ref, "tells no generations")
    return {"e_tag": before.etag, "version": before.generation or ""}


def _check_name(ref: ObjectRef) -> None:
    if not is_name(ref.key):
        raise BadKeyError(f"{ref.key!r} cannot be the key of an object: a segment is empty or dots")


def _refusal(ref: ObjectRef, error: Exception) -> Refusal:
    """Return the response of the server that obstore raised; raise if there was none."""
    refusal = refusal_of(error)
    if refusal is None:
        if isinstance(error, AlreadyExistsError | PreconditionError):
            return _REFUSED
        raise failure(ref, error) from error
    if refusal.code in NO_BUCKET_CODES:
        raise no_bucket(ref) from error
    if refusal.code.startswith("Lease"):
        raise _leased(ref) from error
    is_gone = refusal.code in {NO_SUCH_KEY, "BlobNotFound"}
    return _REFUSED if is_gone or refusal.code == "BlobAlreadyExists" else refusal


def _leased(ref: ObjectRef) -> ConflictError:
    return ConflictError(f"{ref}: the blob has a lease, which forbids other writes")


def _unwritable(ref: ObjectRef, reason: str) -> UnwritableError:
    return UnwritableError(f"{ref.bucket}: the server {reason}")
