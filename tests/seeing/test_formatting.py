"""`app.seeing.formatting`: what lines tell, and what they withhold."""

import asyncio
import json
import logging
from collections.abc import Generator
from contextvars import copy_context
from typing import Any

import pytest

from app.errors import StorageUnavailableError
from app.model import ObjectRef
from app.seeing.faults import tell_of_fault
from app.seeing.formatting import JsonFormatter, TextFormatter
from app.seeing.seen import Seen, begin_seeing, note_request_id

KEY = "c/7/secret"


class Heard(logging.Handler):
    """Keeps lines."""

    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one."""
        self.lines.append(self.format(record))


@pytest.fixture
def log() -> Generator[logging.Logger]:
    """Give a logger whose lines nobody else hears."""
    log = logging.getLogger("app.test_formatting")
    log.propagate = False
    yield log
    log.handlers.clear()


def _fail() -> None:
    empty: dict[str, str] = {}
    try:
        empty[KEY]
    except KeyError as error:
        ref = ObjectRef("s3://bucket", KEY)
        raise StorageUnavailableError(ref, f"is gone with {KEY}") from error


def _tell(
    log: logging.Logger, formatter: logging.Formatter, *, is_private: bool | None = None
) -> str:
    """Log a failure, of a request if it is said whether that *is_private*."""
    heard = Heard(formatter)
    log.handlers[:] = [heard]

    def run() -> None:
        if is_private is not None:
            begin_seeing(Seen("GET", "em", KEY, b"127.0.0.1", is_private=is_private))
            note_request_id(b'id"1')
        try:
            _fail()
        except StorageUnavailableError:
            log.exception("an answer broke off\r\nforged")

    copy_context().run(run)
    return heard.lines[0]


@pytest.mark.parametrize("kind", [TextFormatter, JsonFormatter])
def test_keys_of_private_data_are_not_told(
    log: logging.Logger, kind: type[TextFormatter | JsonFormatter]
) -> None:
    """An error's text may name them, so only its class and place are told; its cause's too."""
    line = _tell(log, kind(is_private=False, level="info"), is_private=True)

    assert KEY not in line
    assert "app.errors.StorageUnavailableError" in line
    assert "builtins.KeyError" in line
    assert "in _fail" in line


@pytest.mark.parametrize("kind", [TextFormatter, JsonFormatter])
@pytest.mark.parametrize(
    ("level", "is_private", "of_request"),
    [("info", True, False), ("debug", True, True), ("info", False, None)],
)
def test_all_is_told_of_public_data_and_for_debugging(
    log: logging.Logger,
    kind: type[TextFormatter | JsonFormatter],
    level: str,
    is_private: bool,  # noqa: FBT001
    of_request: bool | None,  # noqa: FBT001
) -> None:
    """What a request is for counts, and where there is none, whether anything is private."""
    line = _tell(log, kind(is_private=is_private, level=level), is_private=of_request)

    assert f"is gone with {KEY}" in line


def test_what_belongs_to_no_request_may_be_of_private_data(log: logging.Logger) -> None:
    """Nobody knows, so it is withheld where there are such data."""
    assert KEY not in _tell(log, TextFormatter(is_private=True, level="info"))


def test_a_record_is_one_object_on_one_line(log: logging.Logger) -> None:
    """A traceback is a member of it, and nothing in a message ends a line."""
    line = _tell(log, JsonFormatter(is_private=False, level="info"), is_private=False)
    told: dict[str, Any] = json.loads(line)

    assert "\n" not in line
    assert told["level"] == "error"
    assert told["logger"] == "app.test_formatting"
    assert told["message"] == "an answer broke off\r\nforged"
    assert told["request_id"] == 'id"1'
    assert told["exception"].startswith("Traceback")
    assert told["time"].endswith("Z")


def test_a_message_forges_no_line(log: logging.Logger) -> None:
    """For people, too, each record begins a line, and only a record does, or its traceback."""
    line = _tell(log, TextFormatter(is_private=False, level="info"), is_private=False)

    assert "an answer broke off  forged request=id" in line.splitlines()[0]


async def test_faults_beside_requests_name_no_arguments(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Asyncio would write out what a callback was called with."""

    def fail(_: str) -> None:
        raise RuntimeError

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(tell_of_fault)
    loop.call_soon(fail, KEY)
    await asyncio.sleep(0.01)

    assert caplog.messages == ["a callback failed"]
    assert caplog.records[0].exc_info is not None
