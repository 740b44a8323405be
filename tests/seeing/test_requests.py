"""`app.seeing.requests`: what is over is counted and told, a number of them together."""

import asyncio
from collections.abc import Callable, Generator
from datetime import datetime, timedelta

import pytest

from app.seeing.access_log import AccessLog
from app.seeing.requests import Requests
from app.seeing.told import Details
from tests.piped import piped

type Logged = tuple[Requests, Callable[[], str]]


@pytest.fixture
def logged() -> Generator[Logged]:
    """Give requests, and what has been written of them since that was asked for before."""
    with piped() as (write, written):
        yield Requests(["em"], AccessLog("text", has_keys=False, descriptor=write)), written


def _tell(
    requests: Requests,
    details: Details | None = None,
    *,
    request_id: bytes = b"id",
    nbytes: int = 10,
    status: int = 200,
    dataset: str = "em",
    caller: str = "",
    client: str = "::1",
) -> None:
    ended = asyncio.get_running_loop().time()
    requests.tell((ended, status, dataset, caller, client, details), request_id, nbytes)


async def test_a_number_of_lines_is_written_at_once(logged: Logged) -> None:
    """The last one brings them."""
    requests, written = logged
    for _ in range(511):
        _tell(requests)
    assert written() == ""
    _tell(requests)

    assert written().count("\n") == 512


async def test_a_line_does_not_wait_for_long(logged: Logged) -> None:
    """Again and again."""
    requests, written = logged
    for _ in range(2):
        _tell(requests)
        assert written() == ""
        await asyncio.sleep(0.3)
        assert written().count("\n") == 1


async def test_lines_are_in_the_order_in_which_requests_ended(logged: Logged) -> None:
    """Those at hand, and those that waited."""
    requests, written = logged
    waited = Details("GET", "answered", 0.1)
    for number in range(6):
        _tell(requests, waited if number % 2 else None, request_id=b"id-%d" % number)
    requests.settle()
    ids = [line.partition(" request=")[2][:4] for line in written().splitlines()]

    assert ids == [f"id-{number}" for number in range(6)]


async def test_what_a_late_reader_left_is_written_though_nobody_asks(logged: Logged) -> None:
    """A pipe holds less than the lines of a busy moment."""
    requests, written = logged
    for number in range(2048):
        _tell(requests, request_id=b"id-%d" % number)
    lines = written()
    assert lines.count("\n") < 2048
    async with asyncio.timeout(10):
        while lines.count("\n") < 2048:
            await asyncio.sleep(0.05)
            lines += written()

    assert f"request=id-{2047} " in lines.splitlines()[-1]


async def test_each_line_tells_of_its_own_request(logged: Logged) -> None:
    """However much they have in common with those before."""
    requests, written = logged
    told = [
        ("a", 1, 200, "", "::1"),
        ("b", 2, 200, "", "::1"),
        ("c", 2, 206, "", "::1"),
        ("d", 2, 206, "lab", "::1"),
        ("e", 2, 206, "lab", "::2"),
        ("f", 3, 206, "lab", "::2"),
    ]
    for request_id, nbytes, status, caller, client in told:
        _tell(
            requests,
            request_id=request_id.encode(),
            nbytes=nbytes,
            status=status,
            caller=caller,
            client=client,
        )
    requests.settle()

    assert [line.partition(" request=")[2] for line in written().splitlines()] == [
        f'{request_id} GET em {status} hit {nbytes} bytes 0 ms client={client} caller="{caller}"'
        for request_id, nbytes, status, caller, client in told
    ]


async def test_lines_tell_when_each_request_ended(logged: Logged) -> None:
    """Not when they were written."""
    requests, written = logged
    now = asyncio.get_running_loop().time()
    for ended in (now - 3600, now - 3600, now):
        requests.tell((ended, 200, "em", "", "::1", None), b"id", 10)
    requests.settle()
    first, again, last = (
        datetime.fromisoformat(line.split()[0]) for line in written().splitlines()
    )

    assert first == again
    assert last - first == timedelta(hours=1)


async def test_whoever_asks_finds_all_that_is_over(logged: Logged) -> None:
    """Each counts once."""
    requests, _ = logged
    for details in (None, Details("GET", "answered", 0.1), Details("PUT", "refused", None)):
        _tell(requests, details)
    _tell(requests, status=304)
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
    for _ in range(1100):
        _tell(requests)

    assert requests.counts.datasets["em"].hits == 1024
    assert requests.settle().datasets["em"].hits == 1100


@pytest.mark.parametrize(
    ("dataset", "caller", "error"), [("none", "", KeyError), ("em", "\ud800", TypeError)]
)
async def test_what_cannot_be_told_is_told_once(
    logged: Logged, dataset: str, caller: str, error: type[Exception]
) -> None:
    """The next ones are: it can be neither counted, nor written."""
    requests, written = logged
    _tell(requests, dataset=dataset, caller=caller)
    with pytest.raises(error):
        requests.settle()
    _tell(requests)
    requests.settle()

    assert written().count("\n") == 1
