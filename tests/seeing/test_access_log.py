"""`app.seeing.access_log`: one line for each request."""

import asyncio
import json
import logging
import os
from collections.abc import Generator
from datetime import UTC, datetime, timedelta
from itertools import chain

import pytest

from app.seeing.access_log import AccessLog, open_access_log
from app.seeing.times import timestamp
from app.seeing.told import Details, Run
from app.settings import ServerSettings
from tests.piped import piped

KEY = "c/0/\x1b[31m"
PERCENT = "c/%2F/%d%b"


def _run(details: Details | None, *request_ids: str, status: int = 200, client: str = "::1") -> Run:
    ended = asyncio.get_running_loop().time()
    fields = [(each.encode(), 65536 + i, client.encode()) for i, each in enumerate(request_ids)]
    return Run((ended, status, "em", "lab", details), tuple(chain.from_iterable(fields)))


def _waited(key: str = "", seconds: float | None = 0.0000314) -> Details:
    return Details("PUT", "answered", seconds, key, "ab" * 16)


def _line(
    log_format: str,
    details: Details | None = None,
    *,
    request_id: str = "id",
    status: int = 200,
    client: str = "::1",
) -> str:
    async def line() -> str:
        with piped() as (write, written):
            log = AccessLog(log_format, has_keys=True, descriptor=write)
            log.write([_run(details, request_id, status=status, client=client)])
            return written()

    return asyncio.run(line())


async def test_a_log_that_nobody_reads_stops_nothing() -> None:
    """Its lines are lost."""
    read, write = os.pipe()
    os.close(read)
    log = AccessLog("text", has_keys=False, descriptor=write)
    for _ in range(3):
        log.write([_run(_waited(), "id")] * 64)

    assert not log.is_behind
    os.close(write)


async def test_who_reads_late_holds_nothing_up() -> None:
    """Lines wait for a reader, up to a bound, and are whole."""
    with piped() as (write, written):
        log = AccessLog("text", has_keys=True, descriptor=write)
        for _ in range(1024):
            log.write([_run(_waited(), "id")] * 64)
        was_behind, lines = log.is_behind, ""
        while more := written():
            lines += more
            log.write([])

    assert (was_behind, log.is_behind) == (True, False)
    assert 2**22 < len(lines) < 2**23
    assert {line.partition(" trace_id=")[2] for line in lines.splitlines()} == {"ab" * 16}


async def test_lines_of_several_processes_are_not_mixed() -> None:
    """They write to one pipe, each when there is room for some of its lines."""
    with piped() as (write, written):
        logs = [AccessLog("text", has_keys=True, descriptor=write) for _ in range(2)]
        lines = ""
        for number in range(40):
            logs[number % 2].write([_run(_waited("k" * number), "id")] * 1024)
            lines += written()
        while any(each.is_behind for each in logs):
            for each in logs:
                each.write([])
            lines += written()

    assert lines.count("\n") == 40 * 1024
    assert all(line.count("INFO") == line.count("trace_id") == 1 for line in lines.splitlines())


def test_json_has_all_facts() -> None:
    """Programs find each under its name."""
    told = json.loads(_line("json", _waited("c/0")))
    age = datetime.now(UTC) - datetime.fromisoformat(told.pop("time"))
    assert timedelta(0) <= age < timedelta(seconds=60)

    assert told == {
        "level": "info",
        "logger": "app.access",
        "message": "request",
        "request_id": "id",
        "method": "PUT",
        "dataset": "em",
        "status": 200,
        "outcome": "answered",
        "bytes": 65536,
        "ms": 0.031,
        "client": "::1",
        "caller": "lab",
        "trace_id": "ab" * 16,
        "key": "c/0",
    }


def test_text_has_them_too() -> None:
    """People read them in a row."""
    told = 'PUT em 200 answered 65536 bytes 0.031 ms client=::1 caller="lab"'

    assert f" INFO app.access request=id {told} trace_id=" in _line("text", _waited())


@pytest.mark.parametrize(("status", "outcome"), [(200, "hit"), (206, "hit"), (304, "not_modified")])
def test_what_was_at_hand_took_no_time(status: int, outcome: str) -> None:
    """It waited for nothing."""
    told = f'id GET em {status} {outcome} 65536 bytes 0 ms client=::1 caller="lab"\n'
    as_json = json.loads(_line("json", status=status))

    assert _line("text", status=status).endswith(told)
    assert [as_json[name] for name in ("method", "status", "outcome", "ms")] == [
        *("GET", status, outcome),
        0,
    ]
    assert _line("json", _waited(seconds=None)).count('"ms":0,') == 1


@pytest.mark.parametrize("request_id", ['"', "\\", '\\"},{', "a" * 128])
def test_what_clients_choose_stays_a_text(request_id: str) -> None:
    """An id may have any visible letter in it."""
    assert json.loads(_line("json", request_id=request_id))["request_id"] == request_id


async def test_ids_of_clients_stand_among_ours() -> None:
    """Each in its own line, as it is."""
    ids = ["ours-1", '"', "%d%b", "ours-2", "\\"]
    with piped() as (write, written):
        AccessLog("json", has_keys=False, descriptor=write).write([_run(None, *ids)])
        lines = [json.loads(line) for line in written().splitlines()]

    assert [line["request_id"] for line in lines] == ids
    assert [line["bytes"] for line in lines] == [65536, 65537, 65538, 65539, 65540]


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_key_is_no_command_to_a_terminal(log_format: str) -> None:
    """Control characters are written as what they are."""
    line = _line(log_format, _waited(KEY))

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


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_percent_signs_are_told_as_they_are(log_format: str) -> None:
    """Nothing is put in their place."""
    assert f'"{PERCENT}"' in _line(log_format, _waited(PERCENT))
    assert "fe80::1%eth0" in _line(log_format, client="fe80::1%eth0")
