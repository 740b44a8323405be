"""`app.seeing.access_log`: one line for each request."""

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta

import pytest

from app.seeing.access_log import AccessLog, Shared, Told, open_access_log
from app.seeing.times import timestamp
from app.settings import ServerSettings

KEY = "c/0/\x1b[31m"


def _told(request_id: str = "id", key: str = "") -> Told:
    shared: Shared = ("GET", "em", 200, "hit", "::1", "lab")
    ended = time.perf_counter()
    asked = (ended - 0.0000314, ended, request_id.encode())
    return (*asked, *shared, 65536, key, "ab" * 16)


@contextmanager
def _written(log_format: str) -> Generator[tuple[AccessLog, Callable[[], str]]]:
    """Give a log, and what has been written since that was asked for before."""
    read, write = os.pipe()
    os.set_blocking(read, False)

    def written() -> str:
        with suppress(BlockingIOError):
            return os.read(read, 2**20).decode()
        return ""

    try:
        yield AccessLog(log_format, has_keys=True, descriptor=write), written
    finally:
        os.close(read)
        os.close(write)


def _line(log_format: str, *, request_id: str = "id", key: str = "") -> str:
    async def tell() -> str:
        with _written(log_format) as (log, written):
            log.tell(_told(request_id, key))
            log.flush()
            return written()

    return asyncio.run(tell())


async def test_lines_are_written_together() -> None:
    """A number of them at once, or when one has waited long enough."""
    with _written("text") as (log, written):
        for _ in range(63):
            log.tell(_told())
        assert written() == ""
        log.tell(_told())
        assert written().count("\n") == 64

        log.tell(_told())
        assert written() == ""
        await asyncio.sleep(0.3)
        assert written().count("\n") == 1


async def test_a_log_that_nobody_reads_stops_nothing() -> None:
    """Its lines are lost."""
    read, write = os.pipe()
    os.close(read)
    log = AccessLog("text", has_keys=False, descriptor=write)
    for _ in range(200):
        log.tell(_told())

    os.close(write)


async def test_who_reads_late_holds_nothing_up() -> None:
    """Lines wait for a reader, up to a bound, and are whole."""
    with _written("text") as (log, written):
        for _ in range(64 * 1024):
            log.tell(_told())
        lines = ""
        while more := written():
            lines += more
            log.flush()

    assert 2**22 < len(lines) < 2**23
    assert {line.partition(" trace_id=")[2] for line in lines.splitlines()} == {"ab" * 16}


def test_json_has_all_facts() -> None:
    """Programs find each under its name."""
    told = json.loads(_line("json"))
    age = datetime.now(UTC) - datetime.fromisoformat(told.pop("time"))
    assert timedelta(0) <= age < timedelta(seconds=60)

    assert told == {
        "level": "info",
        "logger": "app.access",
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
    }


def test_text_has_them_too() -> None:
    """People read them in a row."""
    told = 'GET em 200 hit 65536 bytes 0.031 ms client=::1 caller="lab"'

    assert f" INFO app.access request=id {told} trace_id=" in _line("text")


@pytest.mark.parametrize("request_id", ['"', "\\", '\\"},{', "a" * 128])
def test_what_clients_choose_stays_a_text(request_id: str) -> None:
    """An id may have any visible letter in it."""
    assert json.loads(_line("json", request_id=request_id))["request_id"] == request_id


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_key_is_no_command_to_a_terminal(log_format: str) -> None:
    """Control characters are written as what they are."""
    line = _line(log_format, key=KEY)

    assert line.count("\n") == 1
    assert "\x1b" not in line


@pytest.fixture
def app_level() -> Generator[logging.Logger]:
    """Give the logger whose level the settings say, and put it back."""
    log = logging.getLogger("app")
    before = log.level
    yield log
    log.setLevel(before)


@pytest.mark.parametrize(
    ("level", "is_open"), [("DEBUG", True), ("INFO", True), ("WARNING", False)]
)
def test_it_is_as_important_as_info(app_level: logging.Logger, level: str, is_open: bool) -> None:  # noqa: FBT001
    """A log of warnings has no line about each request."""
    app_level.setLevel(level)

    assert (open_access_log(ServerSettings(access_log=True)) is not None) is is_open
    assert open_access_log(ServerSettings()) is None


def test_times_are_those_of_rfc_3339() -> None:
    """They are in UTC, and sort as text."""
    assert timestamp(0) == "1970-01-01T00:00:00.000Z"
    assert timestamp(1_700_000_000_250) == "2023-11-14T22:13:20.250Z"
