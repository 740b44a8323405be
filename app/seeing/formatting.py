"""Log records as lines: for people, or JSON for programs."""

import logging
import traceback
from collections.abc import Iterator
from typing import Final

import orjson

from app.seeing.seen import seen_now
from app.seeing.times import timestamp

_CONTROLS: Final = dict.fromkeys([*range(32), 127], " ")


class _Formatter(logging.Formatter):
    """Withholds what errors say where that could name what not everybody may know.

    The texts of errors name objects and keys. They are told for data that everybody may read, and
    of all data where *level* is for debugging.
    """

    def __init__(self, *, is_private: bool, level: str) -> None:
        """Take what belongs to no request for private if that is what it may be."""
        super().__init__()
        self._is_private = is_private
        self._is_debugging = level.upper() == "DEBUG"

    def _trace(self, record: logging.LogRecord) -> str:
        """Write the traceback of *record*, if it has one."""
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return ""
        seen = seen_now()
        is_private = self._is_private if seen is None else seen.is_private
        if self._is_debugging or not is_private:
            return "".join(traceback.format_exception(error)).rstrip()
        return "\n".join(_trace_without_text(error))


class TextFormatter(_Formatter):
    """One line for each record, and its traceback below."""

    def format(self, record: logging.LogRecord) -> str:
        """Write *record*."""
        head = f"{timestamp(int(record.created * 1000))} {record.levelname} {record.name}"
        line = f"{head} {record.getMessage().translate(_CONTROLS)}"
        if (seen := seen_now()) is not None:
            line = f"{line} request={seen.request_id.decode()}"
            line += f" trace_id={seen.trace_id}" if seen.trace_id else ""
        trace = self._trace(record)
        return f"{line}\n{trace}" if trace else line


class JsonFormatter(_Formatter):
    """One object for each record, on one line."""

    def format(self, record: logging.LogRecord) -> str:
        """Write *record*."""
        told = {
            "time": timestamp(int(record.created * 1000)),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (seen := seen_now()) is not None:
            told["request_id"] = seen.request_id.decode()
            told |= {"trace_id": seen.trace_id} if seen.trace_id else {}
        if trace := self._trace(record):
            told["exception"] = trace
        return orjson.dumps(told).decode()


def _trace_without_text(error: BaseException | None) -> Iterator[str]:
    """Write where *error* was raised, and its class; then that of its cause."""
    while error is not None:
        yield "".join(traceback.format_tb(error.__traceback__)).rstrip()
        yield f"{type(error).__module__}.{type(error).__qualname__}"
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
