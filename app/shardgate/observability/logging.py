"""Log lines as text or JSON, and the access log."""

import asyncio
import json
import logging
import os
import select
import threading
import traceback
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import lru_cache
from http import HTTPStatus
from queue import SimpleQueue
from typing import Any, Final, NamedTuple

import orjson
from cachetools import TTLCache

from shardgate.errors import ShardgateError
from shardgate.observability.metrics import (
    Outcome,
    RequestContext,
    current_request,
    is_failure,
    mask_tokens,
)
from shardgate.settings import ServerSettings

_ACCESS: Final = "shardgate.access"
_FAILURES: Final = "shardgate.failures"
PAUSE_S: Final = 0.1
"""Pause before a write is tried again, and for which lines of requests are gathered."""
# A name in a message must not begin a line of its own.
_CONTROLS: Final = dict.fromkeys([*range(32), 127], " ")

_app_log: Final = logging.getLogger("shardgate")
_failures_log: Final = logging.getLogger(_FAILURES)


class AccessRecord(NamedTuple):
    """One finished request, as the access log writes it."""

    ended_at: float
    request_id: bytes
    method: str
    dataset: str
    status: int
    outcome: Outcome
    nbytes: int
    client: bytes
    caller: str
    seconds: float | None = None
    """`None` if nothing was awaited."""
    trace_id: str = ""
    key: str = ""


class LineWriter[T]:
    """Writes a line for each record in a thread; `QueueHandler` would cost ten times as much."""

    def __init__(
        self, name: str, format_line: Callable[[T], bytes], descriptor: int, *, pause_s: float
    ) -> None:
        """Call the thread *name*; after each write, gather lines for *pause_s*."""
        self._format = format_line
        self._descriptor = descriptor
        self._pause_s = pause_s
        self._queue = SimpleQueue[T | None]()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def add(self, record: T) -> bool:
        """Write *record* soon, or drop it if too many wait; return whether it will be written."""
        is_taken = self._queue.qsize() < 32 * 1024  # with a slow reader memory would grow
        if is_taken:
            self._queue.put(record)
        return is_taken

    def close(self) -> None:
        """Write the queued records, for up to a second."""
        self._is_closing.set()
        self._queue.put(None)
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        lines = b""
        while (record := self._queue.get()) is not None:
            line = self._format(record)
            if len(lines) + len(line) > select.PIPE_BUF:  # a pipe takes no more as a whole
                self._write(lines)
                lines = b""
            lines += line
            if self._queue.empty():
                self._write(lines)
                lines = b""
                # Lines are gathered: to wake the thread for each would cost as much as its line.
                self._is_closing.wait(self._pause_s)
        self._write(lines)

    def _write(self, lines: bytes) -> None:
        """Write *lines*, waiting for a full pipe or disk; drop them if the pipe has no reader."""
        while lines:
            try:
                lines = lines[os.write(self._descriptor, lines) :]
            except BlockingIOError:
                select.select([], [self._descriptor], [])
            except BrokenPipeError:
                return
            except OSError:  # such as a full disk, which may get room
                if self._is_closing.wait(PAUSE_S):
                    return


class AccessLog(LineWriter[AccessRecord]):
    """Log of all requests."""

    def __init__(self, log_format: str, *, has_keys: bool, descriptor: int = 2) -> None:
        """Write lines of *log_format*, ``text`` or ``json``."""
        self.has_keys = has_keys
        format_line = _format_json if log_format == "json" else _format_text
        super().__init__("access-log", format_line, descriptor, pause_s=PAUSE_S)


def open_access_log(settings: ServerSettings) -> AccessLog | None:
    """Return the access log, if *settings* enable it and the level is ``info`` or lower."""
    log = logging.getLogger(_ACCESS)
    if not (settings.access_log and log.isEnabledFor(logging.INFO)):
        return None
    return AccessLog(settings.log_format, has_keys=log.isEnabledFor(logging.DEBUG))


def _format_text(record: AccessRecord) -> bytes:
    time = timestamp(int(record.ended_at * 1000))
    milliseconds = "0" if record.seconds is None else f"{record.seconds * 1e3:.3f}"
    more = f" trace_id={record.trace_id}" if record.trace_id else ""
    more += f" key={dump_json(record.key).decode()}" if record.key else ""
    return (
        f"{time} INFO {_ACCESS} request={record.request_id.decode()}"
        f" {record.method} {record.dataset or '-'} {record.status:d} {record.outcome}"
        f" {record.nbytes} bytes {milliseconds} ms client={record.client.decode()}"
        f" caller={dump_json(record.caller).decode()}{more}\n"
    ).encode()


def _format_json(record: AccessRecord) -> bytes:
    line = {
        "time": timestamp(int(record.ended_at * 1000)),
        "level": "info",
        "logger": _ACCESS,
        "message": "request",
        "request_id": record.request_id.decode(),
        "method": record.method,
        "dataset": record.dataset,
        "status": int(record.status),
        "outcome": record.outcome,
        "bytes": record.nbytes,
        "ms": 0 if record.seconds is None else round(record.seconds * 1e3, 3),
        "client": record.client.decode(),
        "caller": record.caller,
    }
    optional = {"trace_id": record.trace_id, "key": record.key}
    return dump_json(line | {name: text for name, text in optional.items() if text}) + b"\n"


def dump_json(value: object) -> bytes:
    """Return *value* as JSON on one line."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:  # of lone surrogates, which tokens may contain
        return json.dumps(value).encode()


@lru_cache(maxsize=64)
def timestamp(milliseconds: int) -> str:
    """Return a time, in milliseconds since the epoch, as RFC 3339 in UTC."""
    second, rest = divmod(milliseconds, 1000)
    return f"{datetime.fromtimestamp(second, UTC):%Y-%m-%dT%H:%M:%S}.{rest:03d}Z"


class LineFormatter(logging.Formatter):
    """Formats records as one line of text and a traceback, or as one line of JSON.

    It withholds texts of private errors; *is_private* is for records without a request.
    """

    def __init__(self, log_format: str, *, is_private: bool, level: str) -> None:
        super().__init__()
        self._is_json = log_format == "json"
        self._is_private = is_private
        self._is_debugging = level.upper() == "DEBUG"

    def format(self, record: logging.LogRecord) -> str:
        """Format *record*."""
        request = current_request.get()
        time = timestamp(int(record.created * 1000))
        message = record.getMessage()
        request_id = None if request is None else request.request_id.decode()
        trace_id = None if request is None else request.trace_id or None
        trace = self._traceback(record, request)
        if self._is_json:
            line = {
                "time": time,
                "level": record.levelname.lower(),
                "logger": record.name,
                "message": message,
                "request_id": request_id,
                "trace_id": trace_id,
                "exception": trace,
            }
            return dump_json({k: v for k, v in line.items() if v is not None}).decode()
        text = f"{time} {record.levelname} {record.name} {message.translate(_CONTROLS)}"
        if request_id is not None:
            text += f" request={request_id}"
        if trace_id is not None:
            text += f" trace_id={trace_id}"
        return text if trace is None else f"{text}\n{trace}"

    def _traceback(self, record: logging.LogRecord, request: RequestContext | None) -> str | None:
        if record.exc_info is None or (error := record.exc_info[1]) is None:
            return None
        is_private = self._is_private if request is None else request.is_private
        if self._is_debugging or not is_private:
            return "".join(traceback.format_exception(error)).rstrip()
        return "\n".join(_traceback_without_text(error))


def _traceback_without_text(error: BaseException | None) -> Iterator[str]:
    """Yield the stack and the class of *error* and of its causes."""
    while error is not None:
        yield "".join(traceback.format_tb(error.__traceback__)).rstrip()
        yield f"{type(error).__module__}.{type(error).__qualname__}"
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def logging_config(settings: ServerSettings, *, is_private: bool) -> dict[str, Any]:
    """Return the `dictConfig`; libraries log warnings only, as other records show keys."""
    level = settings.log_level.upper()
    uvicorn_level = level if logging.getLevelName(level) >= logging.WARNING else "WARNING"
    formatter = {"()": LineFormatter, "log_format": settings.log_format, "level": level}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {**formatter, "is_private": is_private}},
        "filters": {"repeated": {"()": RepetitionFilter}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
        "root": {"handlers": ["stderr"], "level": "WARNING"},
        "loggers": {
            "shardgate": {"level": level},
            _FAILURES: {"filters": ["repeated"]},
            "uvicorn": {"level": uvicorn_level},
        },
    }


class RepetitionFilter(logging.Filter):
    """Passes a repeated message once a minute: while a store is down, all requests fail alike."""

    def __init__(self) -> None:
        super().__init__()
        self._passed: TTLCache[str, bool] = TTLCache(maxsize=1024, ttl=60)
        self._lock = threading.Lock()  # logging filters without one, and several threads log

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the message of *record* is a new one."""
        message = record.getMessage()
        with self._lock:
            is_new = message not in self._passed
            if is_new:
                self._passed[message] = True
        return is_new


def log_failure(status: HTTPStatus, error: ShardgateError, dataset: str = "") -> None:
    """Log the reason of a failed response; of private data only the class of the error."""
    if not is_failure(status):
        return
    request = current_request.get()
    is_public = request is not None and not request.is_private
    has_reason = is_public or _failures_log.isEnabledFor(logging.DEBUG)
    reason = mask_tokens(str(error)) if has_reason else type(error).__name__
    if request is not None and not dataset:
        dataset = request.dataset
    name = dataset or "no dataset"
    _failures_log.warning("%d, %s: %s", status, name, reason)


def log_loop_exception(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an exception that reached the event loop, without arguments, which may name keys."""
    message = "a callback failed" if "handle" in context else context["message"]
    _app_log.error("%s", message, exc_info=context.get("exception"))
