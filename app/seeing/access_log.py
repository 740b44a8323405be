"""One line for each request."""

import asyncio
import logging
import os
import select
import time
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

type Told = tuple[float, float, bytes, str, str, int, Outcome, int, str, str, str, str]
"""Of a finished request: when it ended by `time.perf_counter`, and its seconds; its id, method,
dataset, status, outcome, bytes, client, caller, key, and the id of its trace."""


class AccessLog:
    """Makes the line of each request at once, and writes a number of them together.

    A record of `logging` takes ten microseconds, and a call of the system for each. Lines that
    are made later take longer: by then what they tell of is in the processor's caches no more.
    """

    def __init__(self, log_format: str, *, has_keys: bool, descriptor: int = _STDERR) -> None:
        """Name the keys of requests if it *has_keys*, for debugging."""
        self._line = _as_json if log_format == "json" else _as_text
        self.has_keys = has_keys
        self._descriptor = descriptor
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)
        self._waiting: list[str] = []
        self._left = b""
        self._is_timed = False
        self._ahead_s = time.time() - time.perf_counter()
        self._at_ms, self._moment = 0, ""

    def tell(self, told: Told) -> None:
        """Write the line of a finished request, in a moment."""
        if (at_ms := int((self._ahead_s + told[0]) * 1000)) != self._at_ms:
            self._at_ms, self._moment = at_ms, timestamp(at_ms)
        self._waiting.append(self._line(self._moment, told))
        if len(self._waiting) >= _AT_ONCE:
            self.flush()
        elif not self._is_timed:
            self._is_timed = True
            asyncio.get_running_loop().call_later(_LONGEST_S, self._end_waiting)

    def flush(self) -> None:
        """Write the lines that wait, as far as somebody takes them: nothing waits for a log."""
        if len(self._left) < _LEFT_NBYTES:
            text = "".join(self._waiting)
            self._left += text.encode(errors="backslashreplace")
        self._waiting.clear()
        left = memoryview(self._left)
        self._ahead_s = time.time() - time.perf_counter()
        with suppress(OSError):  # nobody reads any more
            while left and self._poll.poll(0):
                # A pipe that takes anything takes so much at once.
                left = left[os.write(self._descriptor, left[: select.PIPE_BUF]) :]
        self._left = bytes(left)

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
    _, took_s, name, method, dataset, status, outcome, nbytes, client, caller, key, trace = told
    request_id = name.decode()
    if '"' in request_id or "\\" in request_id:
        request_id = request_id.replace("\\", "\\\\").replace('"', '\\"')
    more = f',"trace_id":"{trace}"' if trace else ""
    if key:
        more += f',"key":{_quoted(key)}'
    return (
        f'{{"time":"{moment}","level":"info","logger":"app.access","message":"request",'
        f'"request_id":"{request_id}",{_json_answered(method, dataset, status, outcome)},'
        f'"bytes":{nbytes},"ms":{took_s * 1e3:.3f},{_json_asker(client, caller)}{more}}}\n'
    )


def _as_text(moment: str, told: Told) -> str:
    _, took_s, name, method, dataset, status, outcome, nbytes, client, caller, key, trace = told
    more = f" trace_id={trace}" if trace else ""
    if key:
        more += f" key={_quoted(key)}"
    return (
        f"{moment} INFO app.access request={name.decode()} "
        f"{_text_answered(method, dataset, status, outcome)} {nbytes} bytes "
        f"{took_s * 1e3:.3f} ms {_text_asker(client, caller)}{more}\n"
    )


# What many lines have in common is spelled once.


@lru_cache(maxsize=_KEPT)
def _json_answered(method: str, dataset: str, status: int, outcome: Outcome) -> str:
    return f'"method":"{method}","dataset":"{dataset}","status":{int(status)},"outcome":"{outcome}"'


@lru_cache(maxsize=_KEPT)
def _json_asker(client: str, caller: str) -> str:
    return f'"client":"{client}","caller":{_quoted(caller)}'


@lru_cache(maxsize=_KEPT)
def _text_answered(method: str, dataset: str, status: int, outcome: Outcome) -> str:
    return f"{method} {dataset or '-'} {int(status)} {outcome}"


@lru_cache(maxsize=_KEPT)
def _text_asker(client: str, caller: str) -> str:
    return f"client={client} caller={_quoted(caller)}"


def _quoted(text: str) -> str:
    return orjson.dumps(text).decode()
