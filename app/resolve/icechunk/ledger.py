"""The document of one session, as it is now: asked for afresh, and replaced by compare-and-swap."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from app.concurrency import SingleFlight, run_in_thread, yield_to_loop
from app.errors import BusyError, DamagedError
from app.formats.compression import zstd_capacity
from app.formats.icechunk.session import SessionDocument, decode_session, encode_session
from app.formats.reading import DecodeError
from app.model import ETag, ObjectRef
from app.storage.contract import Conflict, Found, NotModified, ObjectStore

_ATTEMPTS: Final = 50
_FIRST_PAUSE_S: Final = 0.005
_LONGEST_PAUSE_S: Final = 0.2
_IN_THREAD_NBYTES: Final = 64 * 1024
_BLOCK_NBYTES: Final = 128 * 1024
"""What a document of one block of zstd can hold."""

type Edit = Callable[[SessionDocument | None], SessionDocument | None]
"""Gives what takes the place of a document, `None` if that is to stay; it may raise."""


class _Known(NamedTuple):
    document: SessionDocument
    etag: ETag


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    edit: Edit
    done: "asyncio.Future[SessionDocument | None]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Ledger:
    """Asks for a document and replaces it, one after the other.

    Who comes while it is being asked for waits for the next time: what he is told was asked after
    he came. Changes that wait meanwhile go into one replacement.
    """

    def __init__(self, store: ObjectStore, ref: ObjectRef, *, limit_nbytes: int) -> None:
        self._store = store
        self._ref = ref
        self._limit_nbytes = limit_nbytes
        self._known: _Known | None = None
        self._lock = asyncio.Lock()
        self._flights = SingleFlight[tuple[str, int]]()
        self._asked = 0
        self._changed = 0
        self._waiting: list[_Waiting] = []

    @property
    def known(self) -> SessionDocument | None:
        """Tell what was learned last."""
        return None if self._known is None else self._known.document

    async def ask(self) -> SessionDocument | None:
        """Read the document, at some time from now on; `None` if there is none."""
        return await self._flights.run(("ask", self._asked), self._ask)

    async def change(self, edit: Edit) -> SessionDocument | None:
        """Replace the document by what *edit* makes of it; give what it is then.

        *edit* is called again where another replica was faster. First it may be told what was
        known before.

        Raises: what *edit* does, `BusyError`, `DamagedError`, `StorageError`.
        """
        waiting = _Waiting(edit)
        self._waiting.append(waiting)
        try:
            await self._flights.run(("change", self._changed), self._change)
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
        return await waiting.done

    async def _ask(self) -> SessionDocument | None:
        async with self._lock:
            self._asked += 1
            await self._read()
            return self.known

    async def _read(self) -> None:
        known = self._known
        found = await self._store.get(self._ref, if_none_match=known and known.etag)
        if isinstance(found, NotModified):
            return
        self._known = None if found is None else await self._decoded(found)

    async def _decoded(self, found: Found) -> _Known:
        try:
            is_short = len(found.data) <= _IN_THREAD_NBYTES
            if is_short and zstd_capacity(found.data, self._limit_nbytes) <= _BLOCK_NBYTES:
                document = decode_session(found.data, self._limit_nbytes)
            else:
                document = await asyncio.to_thread(decode_session, found.data, self._limit_nbytes)
        except DecodeError as error:
            raise DamagedError(self._ref, str(error)) from error
        return _Known(document, found.etag)

    async def _change(self) -> None:
        async with self._lock:
            self._changed += 1
            taken, self._waiting = self._waiting, []
            try:
                await self._repeat(taken)
            except BaseException as error:
                for each in taken:
                    _fail(each, error)
                if not isinstance(error, Exception):
                    raise

    async def _repeat(self, taken: list[_Waiting]) -> None:
        if self._known is None:
            await self._read()
        for lost in range(_ATTEMPTS):
            if lost > 1:
                await asyncio.sleep(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**lost))
            if await self._attempt(taken):
                return
            await self._read()
        raise BusyError(f"{self._ref}: others have replaced it {_ATTEMPTS} times meanwhile")

    async def _attempt(self, taken: list[_Waiting]) -> bool:
        known = self._known
        document = before = known and known.document
        made = []
        for number, each in enumerate(taken):
            await yield_to_loop(number)
            if each.done.done():
                continue
            try:
                document = each.edit(document) or document
                made.append((each, document))
            except Exception as error:  # noqa: BLE001  who asked for it hears of it
                _fail(each, error)
        if document is not None and document is not before:
            is_long = document.nbytes > _IN_THREAD_NBYTES
            data = await run_in_thread(encode_session, document, is_long=is_long)
            if known is None:
                return False
            etag = await self._store.put(self._ref, [data], expected=known.etag)
            if isinstance(etag, Conflict):
                return False
            self._known = _Known(document, etag)
        for each, then in made:
            if not each.done.done():
                each.done.set_result(then)
        return True


def _fail(waiting: _Waiting, error: BaseException) -> None:
    if waiting.done.done():
        return
    if isinstance(error, Exception):
        waiting.done.set_exception(error)
        waiting.done.exception()  # or asyncio logs it where nobody waits any more
    else:
        waiting.done.cancel()
