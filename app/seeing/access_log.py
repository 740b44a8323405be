"""One line for each request."""

import asyncio
import logging
import os
import select
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from typing import Final

import orjson

from app.seeing.outcomes import Outcome
from app.seeing.times import timestamp
from app.settings import ServerSettings

_NAME: Final = "app.access"
_STDERR: Final = 2
_AT_ONCE: Final = 64
_LONGEST_S: Final = 0.2
"""So long a line waits for others; a process that is killed loses it."""
_KEPT: Final = 1024
_LEFT_NBYTES: Final = 4 * 1024**2
"""So much waits for who does not read; what is told then is lost."""

type Shared = tuple[str, str, int, Outcome, str, str]
"""What many requests have in common: method, dataset, status, outcome, client and caller."""

type Told = tuple[float, float, bytes, str, str, int, Outcome, str, str, int, str, str]
"""Of a finished request: when it began and ended by `time.perf_counter`; its id, what it shares
with others, its bytes, its key, and the id of its trace."""


class AccessLog:
    """Makes the lines of a number of requests together, and writes them at once.

    A record of `logging` takes ten microseconds, and a call of the system for each. A line that
    is made between two bodies takes five, for they drive what it needs out of the processor's
    caches; the second of two lines in a row takes one.
    """

    def __init__(self, log_format: str, *, has_keys: bool, descriptor: int = _STDERR) -> None:
        """Name the keys of requests if it *has_keys*, for debugging."""
        self._line = _as_json if log_format == "json" else _as_text
        self.has_keys = has_keys
        self._descriptor = descriptor
        is_file = os.path.isfile(descriptor)  # noqa: PTH113  it has no path
        # A pipe that takes anything takes so much at once.
        self._piece_nbytes = _LEFT_NBYTES if is_file else select.PIPE_BUF
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)
        self._waiting: list[Told] = []
        self._left = b""
        self._is_timed = False

    def tell(self, told: Told) -> None:
        """Write the line of a finished request, in a moment."""
        self._waiting.append(told)
        if len(self._waiting) >= _AT_ONCE:
            self.flush()
        elif not self._is_timed:
            self._is_timed = True
            asyncio.get_running_loop().call_later(_LONGEST_S, self._end_waiting)

    def flush(self) -> None:
        """Write the lines that wait, as far as somebody takes them: nothing waits for a log."""
        if len(self._left) < _LEFT_NBYTES:
            self._left += "".join(self._lines()).encode(errors="backslashreplace")
        self._waiting.clear()
        left = memoryview(self._left)
        with suppress(OSError):  # nobody reads any more
            while left and self._poll.poll(0):
                left = left[os.write(self._descriptor, left[: self._piece_nbytes]) :]
        self._left = bytes(left)

    def _lines(self) -> Iterator[str]:
        ahead_s = time.time() - time.perf_counter()
        last_ms, moment = 0, ""
        for told in self._waiting:
            if (at_ms := int((ahead_s + told[1]) * 1000)) != last_ms:
                last_ms, moment = at_ms, timestamp(at_ms)
            yield self._line(moment, told)

    def _end_waiting(self) -> None:
        self._is_timed = False
        self.flush()


def open_access_log(settings: ServerSettings) -> AccessLog | None:
    """Open it if it is asked for, and the level of the log has room for it."""
    log = logging.getLogger(_NAME)
    if not (settings.access_log and log.isEnabledFor(logging.INFO)):
        return None
    return AccessLog(settings.log_format, has_keys=log.isEnabledFor(logging.DEBUG))


def _as_json(moment: str, told: Told) -> str:
    began, ended, name, method, dataset, status, outcome, client, caller, nbytes, key, trace = told
    answered, asker = _json_shared((method, dataset, status, outcome, client, caller))
    request_id = name.decode()
    if '"' in request_id or "\\" in request_id:
        request_id = request_id.replace("\\", "\\\\").replace('"', '\\"')
    more = f',"trace_id":"{trace}"' if trace else ""
    if key:
        more += f',"key":{_quoted(key)}'
    return (
        f'{{"time":"{moment}","level":"info","logger":"app.access","message":"request",'
        f'"request_id":"{request_id}",{answered},"bytes":{nbytes},"ms":{(ended - began) * 1e3:.3f},'
        f"{asker}{more}}}\n"
    )


def _as_text(moment: str, told: Told) -> str:
    began, ended, name, method, dataset, status, outcome, client, caller, nbytes, key, trace = told
    answered, asker = _text_shared((method, dataset, status, outcome, client, caller))
    more = f" trace_id={trace}" if trace else ""
    if key:
        more += f" key={_quoted(key)}"
    return (
        f"{moment} INFO app.access request={name.decode()} {answered} {nbytes} bytes "
        f"{(ended - began) * 1e3:.3f} ms {asker}{more}\n"
    )


@lru_cache(maxsize=_KEPT)
def _json_shared(shared: Shared) -> tuple[str, str]:
    method, dataset, status, outcome, client, caller = shared
    return (
        f'"method":"{method}","dataset":"{dataset}","status":{int(status)},"outcome":"{outcome}"',
        f'"client":"{client}","caller":{_quoted(caller)}',
    )


@lru_cache(maxsize=_KEPT)
def _text_shared(shared: Shared) -> tuple[str, str]:
    method, dataset, status, outcome, client, caller = shared
    return (
        f"{method} {dataset or '-'} {int(status)} {outcome}",
        f"client={client} caller={_quoted(caller)}",
    )


def _quoted(text: str) -> str:
    return orjson.dumps(text).decode()
