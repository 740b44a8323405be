"""One line for each request."""

import asyncio
import logging
import os
import select
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, Final, NamedTuple

import orjson

from app.seeing.times import timestamp
from app.seeing.told import FIELDS, Details, Run, details_at_hand
from app.settings import ServerSettings

_NAME: Final = "app.access"
_STDERR: Final = 2
_KEPT: Final = 1024
_LEFT_NBYTES: Final = 4 * 1024**2
"""So much waits for who does not read; what is told then is lost."""


class _Style(NamedTuple):
    """How a line is written."""

    beginning: bytes
    """What comes before the moment."""
    before_id: str
    spell: Callable[[int, str, str, Details], tuple[str, str, str]]
    """Write what comes between the id and the number of bytes, between that and the client, and
    behind it."""
    is_quoted: bool
    """Whether an id is between quotes."""

    def rest_of(self, status: int, dataset: str, caller: str, details: Details | None) -> bytes:
        """Write what follows the moment; the fields of each request are left to ``%``."""
        details = details_at_hand(status) if details is None else details
        spelled = self.spell(status, dataset, caller, details)
        parts = (part.replace("%", "%%") for part in (self.before_id, *spelled))
        return "{}%b{}%d{}%b{}".format(*parts).encode(errors="backslashreplace")


class AccessLog:
    """Makes the lines of a number of requests, and writes them at once.

    A record of `logging` takes ten microseconds, and a call of the system for each; the second of
    two lines in a row takes less than one.
    """

    def __init__(self, log_format: str, *, has_keys: bool, descriptor: int = _STDERR) -> None:
        """Name the keys of requests if it *has_keys*, for debugging."""
        self._style = _JSON if log_format == "json" else _TEXT
        self._rest_at_hand = lru_cache(maxsize=_KEPT)(self._style.rest_of)
        self.has_keys = has_keys
        self._descriptor = descriptor
        is_file = os.path.isfile(descriptor)  # noqa: PTH113  it has no path
        # A pipe that takes anything takes so much at once, and all of it in one place.
        self._piece_nbytes = _LEFT_NBYTES if is_file else select.PIPE_BUF
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)
        self._left = b""

    @property
    def is_behind(self) -> bool:
        """Whether there are lines that nobody has taken."""
        return bool(self._left)

    def write(self, runs: Sequence[Run]) -> None:
        """Write a line of each, as far as somebody takes them: nothing waits for a log."""
        if len(self._left) < _LEFT_NBYTES:
            self._left += b"".join(self._lines(runs))
        begin = 0
        with suppress(OSError):  # a full disk
            while begin < len(self._left) and self._poll.poll(0):
                most = begin + self._piece_nbytes
                end = self._left.rfind(b"\n", begin, most) + 1 or most
                begin += self._write(self._left[begin:end])
        self._left = self._left[begin:]

    def end(self, *, within_s: float) -> None:
        """Write what is left, as far as somebody takes it in that time; a full disk does not."""
        deadline, before = time.monotonic() + within_s, b""
        while self._left not in (b"", before) and (left_s := deadline - time.monotonic()) > 0:
            self._poll.poll(left_s * 1000)
            before = self._left
            self.write(())

    def _write(self, lines: bytes) -> int:
        """Write *lines*, unless nobody will ever read them; tell how much is done with."""
        try:
            return os.write(self._descriptor, lines)
        except BrokenPipeError:
            return len(lines)

    def _lines(self, runs: Sequence[Run]) -> list[bytes]:
        moments = _Moments()
        return [self._lines_of(run, moments[run.kind[0]]) for run in runs]

    def _lines_of(self, run: Run, moment: bytes) -> bytes:
        """Write the lines of requests that ended at one *moment*; the first one costs the most."""
        _, status, dataset, caller, details = run.kind
        rest_of = self._rest_at_hand if details is None else self._style.rest_of
        line = self._style.beginning + moment + rest_of(status, dataset, caller, details)
        fields = _escaped(run) if self._style.is_quoted else run.fields
        return (line * len(run.sizes)) % fields


class _Moments(dict[float, bytes]):
    """Times by the event loop, as they are written: many requests end at the same."""

    def __init__(self) -> None:
        super().__init__()
        self._ahead_s = time.time() - asyncio.get_running_loop().time()

    def __missing__(self, ended_s: float) -> bytes:
        self[ended_s] = moment = timestamp(int((self._ahead_s + ended_s) * 1000)).encode()
        return moment


def open_access_log(settings: ServerSettings) -> AccessLog | None:
    """Open it if it is asked for, and the level of the log has room for it."""
    log = logging.getLogger(_NAME)
    if not (settings.access_log and log.isEnabledFor(logging.INFO)):
        return None
    return AccessLog(settings.log_format, has_keys=log.isEnabledFor(logging.DEBUG))


def _spell_json(status: int, dataset: str, caller: str, details: Details) -> tuple[str, str, str]:
    method, outcome, seconds, key, trace_id = details
    more = f',"trace_id":"{trace_id}"' if trace_id else ""
    if key:
        more += f',"key":{_quoted(key)}'
    before = (
        f'","method":"{method}","dataset":"{dataset}","status":{int(status)}'
        f',"outcome":"{outcome}","bytes":'
    )
    after = f'","caller":{_quoted(caller)}{more}}}\n'
    return before, f',"ms":{_ms(seconds)},"client":"', after


def _spell_text(status: int, dataset: str, caller: str, details: Details) -> tuple[str, str, str]:
    method, outcome, seconds, key, trace_id = details
    more = f" trace_id={trace_id}" if trace_id else ""
    if key:
        more += f" key={_quoted(key)}"
    return (
        f" {method} {dataset or '-'} {int(status)} {outcome} ",
        f" bytes {_ms(seconds)} ms client=",
        f" caller={_quoted(caller)}{more}\n",
    )


def _escaped(run: Run) -> tuple[Any, ...]:
    """Give the fields of *run* with ids as they are between quotes: seldom others than they are."""
    ids = b"".join(run.ids)
    if b'"' not in ids and b"\\" not in ids:
        return run.fields
    fields = list(run.fields)
    fields[::FIELDS] = (each.replace(b"\\", b"\\\\").replace(b'"', b'\\"') for each in run.ids)
    return tuple(fields)


def _ms(seconds: float | None) -> str:
    return "0" if seconds is None else f"{seconds * 1e3:.3f}"


def _quoted(text: str) -> str:
    return orjson.dumps(text).decode()


_JSON: Final = _Style(
    b'{"time":"',
    '","level":"info","logger":"app.access","message":"request","request_id":"',
    _spell_json,
    is_quoted=True,
)
_TEXT: Final = _Style(b"", " INFO app.access request=", _spell_text, is_quoted=False)
