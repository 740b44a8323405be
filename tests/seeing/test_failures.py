"""`app.seeing.failures`: why answers fail, as the operator hears it."""

import logging
from http import HTTPStatus

import pytest

from app.errors import StorageUnavailableError, UnknownRefError, UnsupportedError
from app.model import ObjectRef
from app.seeing import failures
from app.seeing.failures import Seldom, tell_of_failure
from app.seeing.seen import Seen, begin_seeing

ERROR = StorageUnavailableError(ObjectRef("s3://bucket", "secret/name"), "unplugged")


def told(caplog: pytest.LogCaptureFixture, *, is_private: bool, level: int) -> str:
    """Give what is logged of a failure."""
    begin_seeing(Seen("GET", "em", "secret/name", b"::1", is_private=is_private))
    with caplog.at_level(level, logger=failures.__name__):
        tell_of_failure(HTTPStatus.SERVICE_UNAVAILABLE, ERROR)
    return caplog.text


async def test_a_failure_is_told_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    """The dataset, the object, and why."""
    text = told(caplog, is_private=False, level=logging.WARNING)

    assert "503, em: s3://bucket/secret/name: unplugged" in text


async def test_of_private_data_only_the_kind_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Keys say something of what is in there."""
    text = told(caplog, is_private=True, level=logging.WARNING)

    assert "503, em: StorageUnavailableError" in text
    assert "secret" not in text


async def test_for_debugging_all_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """The level says so."""
    assert "unplugged" in told(caplog, is_private=True, level=logging.DEBUG)


async def test_what_nobody_serves_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    """Else strangers could fill the log, and wake somebody up."""
    tell_of_failure(HTTPStatus.NOT_IMPLEMENTED, UnsupportedError("GetObjectAcl is not served"))

    assert not caplog.text


async def test_what_clients_mend_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    """It is theirs to hear."""
    with caplog.at_level(logging.DEBUG, logger=failures.__name__):
        tell_of_failure(HTTPStatus.NOT_FOUND, UnknownRefError("none"))

    assert caplog.text == ""


def test_the_same_is_told_once_a_minute() -> None:
    """A store that is down fails each request alike."""
    seldom = Seldom()
    record = logging.makeLogRecord({"msg": "a"})

    passed = [seldom.filter(each) for each in (record, record, logging.makeLogRecord({"msg": "b"}))]

    assert passed == [True, False, True]
