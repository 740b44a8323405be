"""`shardgate.observability.logging`: contents of log lines, and what they withhold."""

import asyncio
import json
import logging
import os
import select
import sys
import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

from shardgate.errors import (
    ShardgateError,
    StorageUnavailableError,
    UnknownRefError,
    UnsupportedError,
)
from shardgate.model import ObjectRef
from shardgate.observability.logging import (
    AccessLog,
    AccessRecord,
    LineFormatter,
    RepetitionFilter,
    log_failure,
    log_loop_exception,
    open_access_log,
    timestamp,
)
from shardgate.observability.metrics import RequestContext, current_request
from shardgate.settings import ServerSettings
from tests.support.processes import wait_until
from tests.support.records import replaced

LONGEST_S = 20
"""Far more than writing takes on a busy machine."""
KEY = "c/7/secret"
ERROR = StorageUnavailableError(ObjectRef("s3://bucket", KEY), "unplugged")
RECORD = AccessRecord(0.25, b"id", "GET", "em", 200, "hit", 65536, b"::1", "lab")
TRACED = replaced(RECORD, seconds=0.0000314, trace_id="ab" * 16, key="c/0")


class Pipe:
    """A pipe whose reader reads only when told to."""

    def __init__(self) -> None:
        self._read, self.write = os.pipe()
        os.set_blocking(self._read, False)

    def text(self) -> str:
        """Return the text written since the last call."""
        with suppress(BlockingIOError):
            return os.read(self._read, 2**20).decode()
        return ""

    def close_reader(self) -> None:
        """Break the pipe."""
        os.close(self._read)

    def lines(self, count: int) -> list[str]:
        """Return the lines written until there are *count*."""
        text = ""
        while text.count("\n") < count:
            readable, _, _ = select.select([self._read], [], [], LONGEST_S)
            assert readable
            text += self.text()
        return text.splitlines()


@pytest.fixture
def pipe() -> Generator[Pipe]:
    """Open a pipe, and close it when no thread writes to it."""
    pipe = Pipe()
    yield pipe
    with suppress(OSError):
        pipe.close_reader()
    for thread in threading.enumerate():
        if thread.name == "access-log":
            thread.join(10)
    os.close(pipe.write)


def _written(pipe: Pipe, log_format: str, *records: AccessRecord) -> list[str]:
    log = AccessLog(log_format, has_keys=True, descriptor=pipe.write)
    log.start()
    for record in records:
        log.add(record)
    log.close()
    return pipe.text().splitlines()


def test_json_has_all_fields(pipe: Pipe) -> None:
    """A JSON line has every field by name; a request answered from memory has 0 ms."""
    line, from_memory = _written(pipe, "json", TRACED, RECORD)

    assert '"ms":0,' in from_memory
    assert json.loads(line) == {
        "time": "1970-01-01T00:00:00.250Z",
        "level": "info",
        "logger": "shardgate.access",
        "message": "request",
        "request_id": "id",
        "method": "GET",
        "dataset": "em",
        "status": 200,
        "outcome": "hit",
        "bytes": 65536,
        "ms": 0.031,
        "client": "::1",
        "caller": "lab",
        "trace_id": "ab" * 16,
        "key": "c/0",
    }


def test_text_has_all_fields(pipe: Pipe) -> None:
    """A text line has every field in the same order."""
    begin = "1970-01-01T00:00:00.250Z INFO shardgate.access request=id GET em 200 hit 65536 bytes"
    plain, no_dataset, traced = _written(pipe, "text", RECORD, replaced(RECORD, dataset=""), TRACED)

    assert plain == f'{begin} 0 ms client=::1 caller="lab"'
    assert "GET - 200" in no_dataset
    assert traced == f'{begin} 0.031 ms client=::1 caller="lab" trace_id={"ab" * 16} key="c/0"'


@pytest.mark.parametrize("text", ['"', "\\", '\\"},{', "a" * 128, "%2F/%d%b", "c/\x1b[31m\n"])
def test_client_texts_are_escaped(pipe: Pipe, text: str) -> None:
    """Quotes, line breaks and control characters in request ids, callers and keys are escaped."""
    record = replaced(RECORD, request_id=text.encode(), caller=text, key=text)
    as_json, as_text = (
        *_written(pipe, "json", record),
        *_written(pipe, "text", replaced(record, request_id=b"id")),
    )
    line = json.loads(as_json)

    assert [line[name] for name in ("request_id", "caller", "key")] == [text] * 3
    assert f"key={json.dumps(text)}" in as_text
    assert "\x1b" not in as_json + as_text


def test_a_lone_surrogate_is_logged(pipe: Pipe) -> None:
    """A lone surrogate in a caller's name is logged, escaped."""
    odd = replaced(RECORD, caller="\ud800")

    assert '"\\ud800"' in _written(pipe, "text", odd)[0]
    assert json.loads(_written(pipe, "json", odd)[0])["caller"] == "\ud800"


def test_lines_are_in_the_order_of_requests_and_soon_written(pipe: Pipe) -> None:
    """Lines are written in the order of requests, in less than two seconds."""
    log = AccessLog("text", has_keys=False, descriptor=pipe.write)
    log.start()
    for number in range(500):
        log.add(replaced(RECORD, nbytes=number))
    lines = pipe.lines(500)
    log.close()

    assert [int(line.split()[8]) for line in lines] == list(range(500))


def test_lines_of_two_logs_are_not_interleaved(pipe: Pipe) -> None:
    """Lines that two logs write to one full pipe are whole."""
    logs = [AccessLog("text", has_keys=True, descriptor=pipe.write) for _ in range(2)]
    for log in logs:
        log.start()
        for number in range(4096):
            log.add(replaced(TRACED, key="k" * (number % 40 + 1)))
    lines = pipe.lines(2 * 4096)
    for log in logs:
        log.close()

    assert all(line.count("INFO") == line.count(" key=") == 1 for line in lines)


@pytest.mark.parametrize("is_full", [False, True])
def test_broken_pipe_or_full_disk_does_not_block_the_end(pipe: Pipe, *, is_full: bool) -> None:
    """A log on a broken pipe or full disk closes in seconds."""
    pipe.close_reader()
    descriptor = os.open("/dev/full", os.O_WRONLY) if is_full else os.dup(pipe.write)
    try:
        assert _fill(AccessLog("text", has_keys=False, descriptor=descriptor)) < LONGEST_S
    finally:
        os.close(descriptor)


def _fill(log: AccessLog) -> float:
    """Log more lines than the queue keeps, and return the seconds that closing takes."""
    log.start()
    for _ in range(40_000):
        log.add(RECORD)
    began_at = time.monotonic()
    log.close()
    return time.monotonic() - began_at


def test_lines_beyond_the_limit_are_dropped(tmp_path: Path) -> None:
    """A log keeps 32,768 lines until they can be written, and drops those that follow."""
    path = tmp_path / "log"
    with path.open("wb") as file:
        log = AccessLog("text", has_keys=False, descriptor=file.fileno())
        for _ in range(40_000):
            log.add(RECORD)
        log.start()
        log.close()
        wait_until(lambda: path.read_bytes().count(b"\n") >= 32 * 1024)

    assert path.read_bytes().count(b"\n") == 32 * 1024


def test_closing_waits_a_second_for_a_reader(pipe: Pipe) -> None:
    """Closing a log whose pipe is full and not read takes a second; the written lines are whole."""
    took_s = _fill(AccessLog("text", has_keys=False, descriptor=pipe.write))

    assert 0.9 < took_s < LONGEST_S
    assert all(line.endswith('caller="lab"') for line in pipe.text().splitlines())


@pytest.mark.parametrize("is_blocking", [True, False])
def test_closing_loses_no_line_for_a_slow_reader(pipe: Pipe, *, is_blocking: bool) -> None:
    """Closing a log writes all lines to a slow reader, on blocking and non-blocking pipes."""
    os.set_blocking(pipe.write, is_blocking)
    log = AccessLog("text", has_keys=False, descriptor=pipe.write)
    log.start()
    for _ in range(2000):
        log.add(RECORD)
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(pipe.lines(2000)))
    reader.start()
    log.close()
    reader.join()

    assert len(lines) == 2000


@pytest.mark.parametrize(
    ("level", "is_open", "has_keys"),
    [("DEBUG", True, True), ("INFO", True, False), ("WARNING", False, None)],
)
def test_access_log_follows_the_level(level: str, *, is_open: bool, has_keys: bool | None) -> None:
    """The access log is written at INFO and DEBUG, with keys at DEBUG, and not at WARNING."""
    logging.getLogger("shardgate").setLevel(level)
    log = open_access_log(ServerSettings(access_log=True))

    assert (log is not None) is is_open
    assert log is None or log.has_keys is has_keys
    assert open_access_log(ServerSettings()) is None


def test_timestamps_are_rfc_3339_in_utc() -> None:
    """Timestamps are RFC 3339 in UTC with milliseconds."""
    now = datetime.fromisoformat(timestamp(int(time.time() * 1000)))

    assert timestamp(1_700_000_000_250) == "2023-11-14T22:13:20.250Z"
    assert timedelta(0) <= datetime.now(UTC) - now < timedelta(seconds=60)


def _begin_request(*, is_private: bool) -> None:
    request = RequestContext("GET", "em", KEY, b"::1", is_private=is_private)
    request.request_id = b'id"1'
    current_request.set(request)


def _log_error(formatter: LineFormatter, *, is_private: bool | None = None) -> str:
    """Format an error with a cause, of a request if *is_private* is given."""

    def run() -> str:
        if is_private is not None:
            _begin_request(is_private=is_private)
        try:
            raise ERROR from KeyError(KEY)
        except StorageUnavailableError:
            found: Any = sys.exc_info()
        record = {"msg": "an answer broke off\r\nforged", "exc_info": found}
        named = {"name": "shardgate.test_logging", "levelname": "ERROR"}
        return formatter.format(logging.makeLogRecord({**named, **record}))

    return copy_context().run(run)


def test_message_with_a_lone_surrogate_is_one_record_of_json() -> None:
    """A message with half of a character, as in the name of a file, is logged as JSON."""
    record = logging.makeLogRecord({"msg": "\udc80"})
    line = LineFormatter("json", is_private=False, level="info").format(record)

    assert json.loads(line)["message"] == "\udc80"


@pytest.mark.parametrize("log_format", ["text", "json"])
@pytest.mark.parametrize(
    ("level", "is_private", "of_request", "names_key"),
    [
        ("info", False, True, False),
        ("info", True, None, False),
        ("info", True, False, True),
        ("debug", True, True, True),
        ("info", False, None, True),
    ],
)
def test_errors_name_keys_of_public_data_only(
    log_format: str, level: str, *, is_private: bool, of_request: bool | None, names_key: bool
) -> None:
    """An error's text, with the key, is logged for public data or at DEBUG.

    For private data the class and the place are logged.
    """
    line = _log_error(
        LineFormatter(log_format, is_private=is_private, level=level), is_private=of_request
    )

    assert (KEY in line) is names_key
    assert "StorageUnavailableError" in line
    assert "KeyError" in line
    assert "in run" in line


def test_message_with_line_breaks_is_one_record() -> None:
    """Line breaks in a message are escaped in JSON and blanks in text.

    A JSON record contains its traceback.
    """
    as_json, as_text = (
        _log_error(LineFormatter(log_format, is_private=False, level="info"), is_private=False)
        for log_format in ("json", "text")
    )
    record: dict[str, Any] = json.loads(as_json)

    assert "\n" not in as_json
    assert record.pop("exception").startswith("KeyError")
    assert record.pop("time").endswith("Z")
    assert record == {
        "level": "error",
        "logger": "shardgate.test_logging",
        "message": "an answer broke off\r\nforged",
        "request_id": 'id"1',
    }
    assert "an answer broke off  forged request=id" in as_text.splitlines()[0]


async def test_exceptions_in_event_loop_name_no_arguments(caplog: pytest.LogCaptureFixture) -> None:
    """An exception in a callback of the event loop is logged without the callback's arguments."""

    def fail(_: str) -> None:
        raise RuntimeError

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(log_loop_exception)
    loop.call_soon(fail, KEY)
    await asyncio.sleep(0)

    assert "a callback failed" in caplog.text
    assert "RuntimeError" in caplog.text
    assert KEY not in caplog.text


@pytest.mark.parametrize(
    ("is_private", "level", "status", "error", "messages"),
    [
        (False, "WARNING", 503, ERROR, [f"503, em: s3://bucket/{KEY}: unplugged"]),
        (True, "WARNING", 503, ERROR, ["503, em: StorageUnavailableError"]),
        (True, "DEBUG", 503, ERROR, [f"503, em: s3://bucket/{KEY}: unplugged"]),
        (False, "DEBUG", 501, UnsupportedError("GetObjectAcl is not served"), []),
        (False, "DEBUG", 404, UnknownRefError("none"), []),
    ],
)
async def test_failures_are_logged_with_their_reason(
    caplog: pytest.LogCaptureFixture,
    level: str,
    status: int,
    error: ShardgateError,
    messages: list[str],
    *,
    is_private: bool,
) -> None:
    """Failures of the service are logged with their reason, for private data with the class only.

    Errors of clients are not logged.
    """
    _begin_request(is_private=is_private)
    with caplog.at_level(level, logger="shardgate"):
        log_failure(HTTPStatus(status), error)

    assert caplog.messages == messages


def test_messages_of_several_threads_are_filtered() -> None:
    """Messages that several threads log at the same time are filtered without an error."""
    repeated = RepetitionFilter()
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def log(thread: int) -> int:
        texts = (f"{thread} {number}" for number in range(3000))
        return sum(repeated.filter(logging.makeLogRecord({"msg": text})) for text in texts)

    try:
        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(log, range(4))) == [3000] * 4
    finally:
        sys.setswitchinterval(before_s)


def test_repeated_message_is_filtered() -> None:
    """A message that repeats within a minute is logged once; other messages are logged."""
    repeated = RepetitionFilter()
    record = logging.makeLogRecord({"msg": "a"})
    records = (record, record, logging.makeLogRecord({"msg": "b"}))

    assert [repeated.filter(each) for each in records] == [True, False, True]
