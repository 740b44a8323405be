"""`app.seeing.requests`: what is over is counted and told, a number of them together."""

import asyncio
import threading
import time
from collections.abc import Callable, Generator, Iterable
from datetime import datetime, timedelta

import pytest

from app.seeing.access_log import AccessLog
from app.seeing.request_counts import RequestCounts
from app.seeing.requests import Requests
from app.seeing.told import Details, Run
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
    ended: float = 0.0,
    request_id: bytes = b"id",
    nbytes: int = 10,
    status: int = 200,
    dataset: str = "em",
    caller: str = "",
    client: bytes = b"::1",
) -> None:
    requests.tell((ended, status, dataset, caller, details), request_id, nbytes, client)


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


async def test_a_pipe_has_room_for_many_long_lines(logged: Logged) -> None:
    """No reader is waited for as long as there is some."""
    requests, written = logged
    for _ in range(128):
        client = b"2001:db8::1:2:3:4"
        _tell(requests, request_id=b"i" * 128, nbytes=2**40, caller="c" * 250, client=client)
    requests.settle()

    assert written().count("\n") == 128


async def test_each_line_tells_of_its_own_request(logged: Logged) -> None:
    """However much it has in common with those before, the moment too."""
    requests, written = logged
    told = [
        ("a", 1, 200, "", "::1", "GET", "hit"),
        ("b", 2, 200, "", "::1", "GET", "hit"),
        ("c", 2, 200, "", "::2", "GET", "hit"),
        ("d", 3, 206, "", "::2", "GET", "hit"),
        ("e", 3, 206, "lab", "::2", "GET", "hit"),
        ("f", 3, 206, "lab", "::2", "HEAD", "answered"),
        ("g", 4, 206, "lab", "::1", "HEAD", "answered"),
        ("h", 4, 206, "lab", "::1", "HEAD", "absent"),
        ("i", 4, 200, "", "::1", "GET", "hit"),
    ]
    for request_id, nbytes, status, caller, client, method, outcome in told:
        _tell(
            requests,
            None if outcome == "hit" else Details(method, outcome, None),  # type: ignore[arg-type]  # of the set
            request_id=request_id.encode(),
            nbytes=nbytes,
            status=status,
            caller=caller,
            client=client.encode(),
        )
    requests.settle()

    assert [line.partition(" request=")[2] for line in written().splitlines()] == [
        f"{request_id} {method} em {status} {outcome} {nbytes} bytes 0 ms"
        f' client={client} caller="{caller}"'
        for request_id, nbytes, status, caller, client, method, outcome in told
    ]


async def test_requests_of_one_kind_share_it(logged: Logged) -> None:
    """What is kept of them is short, and so is the time in which their lines are written."""
    requests, written = logged
    runs: list[int] = []

    class Counting(RequestCounts):
        def count(self, each: Iterable[Run]) -> None:
            runs.extend(len(run.ids) for run in each)

    requests.counts = Counting(["em"])
    for client in (b"::1", b"::2", b"::3"):
        _tell(requests, client=client)
    _tell(requests, status=206)
    requests.settle()

    assert runs == [3, 1]
    assert written().count("\n") == 4


async def test_lines_tell_when_each_request_ended(logged: Logged) -> None:
    """Not when they were written."""
    requests, written = logged
    now = asyncio.get_running_loop().time()
    for ended in (now - 3600, now - 3600, now):
        _tell(requests, ended=ended)
    requests.settle()
    first, again, last = (
        datetime.fromisoformat(line.split()[0]) for line in written().splitlines()
    )

    assert first == again
    assert last - first == timedelta(hours=1)


@pytest.mark.parametrize("log_format", ["text", "json"])
async def test_the_end_waits_for_the_reader(log_format: str) -> None:
    """A process that is stopped loses no line, though a pipe has no room for all at once."""
    with piped() as (write, written):
        requests = Requests(["em"], AccessLog(log_format, has_keys=False, descriptor=write))
        for _ in range(511):
            _tell(requests, request_id=b"i" * 36, caller="c" * 200)
        lines, is_over = [""], threading.Event()

        def read() -> None:
            while not is_over.wait(0.02):
                lines.append(written())

        reader = threading.Thread(target=read)
        reader.start()
        requests.end()
        is_over.set()
        reader.join()
        lines.append(written())

    assert sum(each.count("\n") for each in lines) == 511


async def test_the_end_does_not_wait_for_who_does_not_read(logged: Logged) -> None:
    """It comes in a second, though lines are lost."""
    requests, written = logged
    for _ in range(511):
        _tell(requests, caller="c" * 200)
    began = time.monotonic()
    requests.end()

    assert 0.9 < time.monotonic() - began < 5
    assert 0 < written().count("\n") < 511


async def test_whoever_asks_finds_all_that_is_over(logged: Logged) -> None:
    """Each counts once."""
    requests, _ = logged
    answered, refused = Details("GET", "answered", 0.1), Details("PUT", "refused", None)
    for details in (None, None, answered, answered, answered, refused, refused):
        _tell(requests, details)
    _tell(requests, status=304)
    requests.settle()
    counts = requests.settle()

    assert dict(counts.datasets["em"].each) == {
        ("GET", "hit"): 2,
        ("GET", "not_modified"): 1,
        ("GET", "answered"): 3,
        ("PUT", "refused"): 2,
    }
    assert counts.datasets["em"].nbytes == 80
    assert {what: histogram.total for what, histogram in counts.seconds.items()} == {
        ("GET", "answered"): pytest.approx(0.3)
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
