"""`app.seeing.requests`: what is over is counted and told, a number of them together."""

import asyncio
from collections.abc import Callable, Generator

import pytest

from app.seeing.access_log import AccessLog
from app.seeing.requests import Requests
from app.seeing.told import Details, Told
from tests.piped import piped

type Logged = tuple[Requests, Callable[[], str]]


@pytest.fixture
def logged() -> Generator[Logged]:
    """Give requests, and what has been written of them since that was asked for before."""
    with piped() as (write, written):
        yield Requests(["em"], AccessLog("text", has_keys=False, descriptor=write)), written


def _told(
    details: Details | None = None,
    *,
    request_id: bytes = b"id",
    status: int = 200,
    dataset: str = "em",
    caller: str = "",
) -> Told:
    ended = asyncio.get_running_loop().time()
    return (ended, request_id, 10, (status, dataset, caller, "::1", details))


async def test_a_number_of_lines_is_written_at_once(logged: Logged) -> None:
    """The last one brings them."""
    requests, written = logged
    for _ in range(127):
        requests.tell(_told())
    assert written() == ""
    requests.tell(_told())

    assert written().count("\n") == 128


async def test_a_line_does_not_wait_for_long(logged: Logged) -> None:
    """Again and again."""
    requests, written = logged
    for _ in range(2):
        requests.tell(_told())
        assert written() == ""
        await asyncio.sleep(0.3)
        assert written().count("\n") == 1


async def test_lines_are_in_the_order_in_which_requests_ended(logged: Logged) -> None:
    """Those at hand, and those that waited."""
    requests, written = logged
    waited = Details("GET", "answered", 0.1)
    for number in range(6):
        requests.tell(_told(waited if number % 2 else None, request_id=b"id-%d" % number))
    requests.settle()
    ids = [line.partition(" request=")[2][:4] for line in written().splitlines()]

    assert ids == [f"id-{number}" for number in range(6)]


async def test_what_a_late_reader_left_is_written_though_nobody_asks(logged: Logged) -> None:
    """A pipe holds less than the lines of a busy moment."""
    requests, written = logged
    for number in range(2048):
        requests.tell(_told(request_id=b"id-%d" % number))
    lines = written()
    assert lines.count("\n") < 2048
    async with asyncio.timeout(10):
        while lines.count("\n") < 2048:
            await asyncio.sleep(0.05)
            lines += written()

    assert f"request=id-{2047} " in lines.splitlines()[-1]


async def test_lines_that_are_written_at_once_have_room(logged: Logged) -> None:
    """Else each would leave some behind."""
    requests, written = logged
    for _ in range(128):
        ended, client = asyncio.get_running_loop().time(), "2001:db8::1:2:3:4"
        requests.tell((ended, b"i" * 128, 2**40, (200, "em", "c" * 250, client, None)))

    assert written().count("\n") == 128


async def test_whoever_asks_finds_all_that_is_over(logged: Logged) -> None:
    """Each counts once."""
    requests, _ = logged
    for details in (None, Details("GET", "answered", 0.1), Details("PUT", "refused", None)):
        requests.tell(_told(details))
    requests.tell(_told(status=304))
    requests.settle()
    counts = requests.settle()

    assert dict(counts.datasets["em"].each) == {
        ("GET", "hit"): 1,
        ("GET", "not_modified"): 1,
        ("GET", "answered"): 1,
        ("PUT", "refused"): 1,
    }
    assert counts.datasets["em"].nbytes == 40
    assert {what: histogram.total for what, histogram in counts.seconds.items()} == {
        ("GET", "answered"): 0.1
    }


async def test_requests_are_counted_without_a_log() -> None:
    """Though no time passes."""
    requests = Requests(["em"])
    for _ in range(300):
        requests.tell(_told())

    assert requests.counts.datasets["em"].hits == 256
    assert requests.settle().datasets["em"].hits == 300


@pytest.mark.parametrize(
    ("dataset", "caller", "error"), [("none", "", KeyError), ("em", "\ud800", TypeError)]
)
async def test_what_cannot_be_told_is_told_once(
    logged: Logged, dataset: str, caller: str, error: type[Exception]
) -> None:
    """The next ones are: it can be neither counted, nor written."""
    requests, written = logged
    requests.tell(_told(dataset=dataset, caller=caller))
    with pytest.raises(error):
        requests.settle()
    requests.tell(_told())
    requests.settle()

    assert written().count("\n") == 1
