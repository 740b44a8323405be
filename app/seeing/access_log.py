"""One line for each request."""

import asyncio
import logging
import os
import select
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import groupby
from typing import Final, NamedTuple

import orjson

from app.seeing.times import timestamp
from app.seeing.told import Details, Kind, Told, details_at_hand, kind_of
from app.settings import ServerSettings

_NAME: Final = "app.access"
_STDERR: Final = 2
_KEPT: Final = 1024
_LEFT_NBYTES: Final = 4 * 1024**2
"""So much waits for who does not read; what is told then is lost."""


class _Style(NamedTuple):
    """How a line is written: a moment, an id and a number of bytes are put between its parts."""

    beginning: tuple[str, str]
    """What comes before the moment, and before the id."""
    spell: Callable[[int, str, str, str, Details], tuple[str, str]]
    """Write what comes before the number of bytes, and behind it."""
    is_quoted: bool
    """Whether an id is between quotes."""

    def line_of(self, kind: Kind) -> bytes:
        """Write all of a line but the three, which are left to ``%``."""
        status, dataset, caller, client, details = kind
        details = details_at_hand(status) if details is None else details
        spelled = self.spell(status, dataset, caller, client, details)
        parts = (part.replace("%", "%%") for part in (*self.beginning, *spelled))
        return "{}%b{}%b{}%d{}".format(*parts).encode(errors="backslashreplace")


class AccessLog:
    """Makes the lines of a number of requests, and writes them at once.

    A record of `logging` takes ten microseconds, and a call of the system for each; the second of
    two lines in a row takes less than one.
    """

    def __init__(self, log_format: str, *, has_keys: bool, descriptor: int = _STDERR) -> None:
        """Name the keys of requests if it *has_keys*, for debugging."""
        self._style = _JSON if log_format == "json" else _TEXT
        self._line_at_hand = lru_cache(maxsize=_KEPT)(self._style.line_of)
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

    def write(self, told: Sequence[Told]) -> None:
        """Write a line of each, as far as somebody takes them: nothing waits for a log."""
        if len(self._left) < _LEFT_NBYTES:
            self._left += b"".join(self._lines(told))
        begin = 0
        with suppress(OSError):  # a full disk
            while begin < len(self._left) and self._poll.poll(0):
                most = begin + self._piece_nbytes
                end = self._left.rfind(b"\n", begin, most) + 1 or most
                begin += self._write(self._left[begin:end])
        self._left = self._left[begin:]

    def _write(self, lines: bytes) -> int:
        """Write *lines*, unless nobody will ever read them; tell how much is done with."""
        try:
            return os.write(self._descriptor, lines)
        except BrokenPipeError:
            return len(lines)

    def _lines(self, told: Sequence[Told]) -> list[bytes]:
        if self._style.is_quoted and _has_quotes(told):
            told = [(ended, _escaped(each), nbytes, kind) for ended, each, nbytes, kind in told]
        lines: list[bytes] = []
        moments = _Moments()
        for kind, alike in groupby(told, key=kind_of):
            is_at_hand = kind[-1] is None
            line = self._line_at_hand(kind) if is_at_hand else self._style.line_of(kind)
            lines += [
                line % (moments[ended_s], request_id, nbytes)
                for ended_s, request_id, nbytes, _ in alike
            ]
        return lines


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


def _spell_json(
    status: int, dataset: str, caller: str, client: str, details: Details
) -> tuple[str, str]:
    method, outcome, seconds, key, trace_id = details
    more = f',"trace_id":"{trace_id}"' if trace_id else ""
    if key:
        more += f',"key":{_quoted(key)}'
    before = (
        f'","method":"{method}","dataset":"{dataset}","status":{int(status)}'
        f',"outcome":"{outcome}","bytes":'
    )
    after = f',"ms":{_ms(seconds)},"client":"{client}","caller":{_quoted(caller)}{more}}}\n'
    return before, after


def _spell_text(
    status: int, dataset: str, caller: str, client: str, details: Details
) -> tuple[str, str]:
    method, outcome, seconds, key, trace_id = details
    more = f" trace_id={trace_id}" if trace_id else ""
    if key:
        more += f" key={_quoted(key)}"
    return (
        f" {method} {dataset or '-'} {int(status)} {outcome} ",
        f" bytes {_ms(seconds)} ms client={client} caller={_quoted(caller)}{more}\n",
    )


def _has_quotes(told: Sequence[Told]) -> bool:
    """Tell whether an id has what means something between quotes: clients give such ids seldom."""
    ids = b"".join([request_id for _, request_id, _, _ in told])
    return b'"' in ids or b"\\" in ids


def _escaped(request_id: bytes) -> bytes:
    return request_id.replace(b"\\", b"\\\\").replace(b'"', b'\\"')


def _ms(seconds: float | None) -> str:
    return "0" if seconds is None else f"{seconds * 1e3:.3f}"


def _quoted(text: str) -> str:
    return orjson.dumps(text).decode()


_JSON: Final = _Style(
    ('{"time":"', '","level":"info","logger":"app.access","message":"request","request_id":"'),
    _spell_json,
    is_quoted=True,
)
_TEXT: Final = _Style(("", " INFO app.access request="), _spell_text, is_quoted=False)
