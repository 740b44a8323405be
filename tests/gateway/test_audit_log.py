"""`shardgate.gateway.audit.AuditLog`: lines in a file that is moved, torn or on a full disk."""

import json
import os
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from pathlib import Path

import pytest

from shardgate.errors import ConfigurationError
from shardgate.gateway.audit import AuditLog
from tests.support.processes import wait_until


class _Losses:
    """Counts lost lines."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, count: int) -> None:
        self.count += count


def _start(path: Path, losses: _Losses) -> AuditLog:
    log = AuditLog(str(path), losses)
    log.start()
    return log


def test_lines_of_two_processes_are_whole(tmp_path: Path) -> None:
    """Two logs with one file append whole lines."""
    path = tmp_path / "log"
    logs = [AuditLog(str(path), _Losses()) for _ in range(2)]
    for log in logs:
        log.start()
        for number in range(2000):
            log.log({"number": number, "key": "k" * (number % 300)})
    for log in logs:
        log.close()
    numbers = [json.loads(line)["number"] for line in path.read_bytes().splitlines()]

    assert sorted(numbers) == sorted(2 * list(range(2000)))


def test_name_of_a_caller_is_escaped(tmp_path: Path) -> None:
    """Line breaks and lone surrogates in what a line names are escaped."""
    path = tmp_path / "log"
    log = _start(path, _Losses())
    log.log({"caller": "a\n\ud800\x1b", "status": 200})
    log.close()
    (line,) = path.read_bytes().splitlines()

    assert json.loads(line)["caller"] == "a\n\ud800\x1b"
    assert b"\x1b" not in line


@pytest.mark.parametrize("move", [Path.unlink, lambda path: path.rename(f"{path}.1")])
def test_log_whose_file_was_moved_is_opened_anew(
    tmp_path: Path, move: Callable[[Path], object]
) -> None:
    """A line goes to a new file once the old one was renamed or removed."""
    path = tmp_path / "log"
    log = _start(path, _Losses())
    log.log({"number": 1})
    wait_until(lambda: path.exists() and path.read_bytes().endswith(b"\n"))
    move(path)
    log.log({"number": 2})
    log.close()

    assert json.loads(path.read_bytes()) == {"number": 2}


def _start_on_a_full_disk(path: Path) -> tuple[AuditLog, _Losses]:
    path.symlink_to("/dev/full")
    losses = _Losses()
    return _start(path, losses), losses


def test_lines_of_a_full_disk_wait_and_are_counted_when_lost(tmp_path: Path) -> None:
    """Lines wait while the disk is full; those that do not fit, or wait at the end, are counted."""
    log, losses = _start_on_a_full_disk(tmp_path / "log")
    for _ in range(40_000):
        log.log({})
    refused = losses.count
    log.close()

    assert 0 < refused < losses.count == 40_000


def test_lines_that_waited_are_written(tmp_path: Path) -> None:
    """Lines that wait for a full disk are written once it has room."""
    path = tmp_path / "log"
    log, losses = _start_on_a_full_disk(path)
    for number in range(3):
        log.log({"number": number})
    path.unlink()
    wait_until(lambda: path.exists() and path.read_bytes().count(b"\n") == 3)
    log.close()

    assert losses.count == 0


def test_torn_line_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of which a part was written is written again as a whole, on a line of its own."""
    path = tmp_path / "log"
    write = os.write
    limits = iter([14, 3])
    monkeypatch.setattr(
        os, "write", lambda descriptor, data: write(descriptor, data[: next(limits, None)])
    )
    log = AuditLog(str(path), _Losses())
    for number in range(3):
        log.log({"number": number})
    log.start()
    log.close()
    whole = []
    for line in path.read_bytes().splitlines():
        with suppress(json.JSONDecodeError):
            whole.append(json.loads(line)["number"])

    assert whole == [0, 1, 2]


def test_line_behind_a_torn_one_begins_anew(tmp_path: Path) -> None:
    """A line behind a part of another one, which an ended process has left, is on its own."""
    path = tmp_path / "log"
    path.write_bytes(b'{"number": 0}\n{"num')
    log = _start(path, _Losses())
    log.log({"number": 1})
    log.close()

    assert [*map(json.loads, path.read_bytes().splitlines()[::2])] == [{"number": 0}, {"number": 1}]


def test_line_behind_the_end_is_counted_as_lost(tmp_path: Path) -> None:
    """A line of a request that outlives the log is counted."""
    losses = _Losses()
    log = _start(tmp_path / "log", losses)
    log.close()
    log.log({})

    assert losses.count == 1


def test_log_without_a_file_is_standard_output() -> None:
    """A log called ``-`` writes to standard output, and leaves it open."""
    with tempfile.TemporaryFile("w+") as out:
        with redirect_stdout(out):
            log = AuditLog("-", _Losses())
        log.start()
        log.log({"number": 1})
        log.close()
        out.seek(0)

        assert json.loads(out.read()) == {"number": 1}


def test_log_that_cannot_be_opened_stops_the_start(tmp_path: Path) -> None:
    """A file in a folder that does not exist is a fault of the configuration."""
    with pytest.raises(ConfigurationError, match=r"server\.audit_log: .*No such file"):
        AuditLog(str(tmp_path / "none" / "log"), _Losses())
