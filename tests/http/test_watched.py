"""`app.http.watched`: every request is counted once, by what became of it."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from http import HTTPStatus
from ipaddress import ip_network
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.errors import TruncatedReadError
from app.http.answer import AtHand, Given, Headers, Later, Write
from app.http.clients import Networks
from app.http.watched import Watched
from app.main import create_app
from app.model import ObjectRef
from app.seeing.access_log import AccessLog
from app.seeing.outcomes import OUTCOMES
from app.seeing.requests import Requests
from app.seeing.told import Run
from app.settings import DatasetSettings, Settings
from app.storage.traced import METHODS

type Answering = Callable[..., Awaitable[None]]

HEADERS: Headers = [(b"content-length", b"4"), (b"x-request-id", b"id-1")]
HEAD = b"content-length: 4\r\nx-request-id: id-1\r\n"


class Stub:
    """A service that does one thing, whatever is asked."""

    def __init__(
        self, begun: AtHand | Later | None = None, answer: Answering | None = None
    ) -> None:
        self._begun = begun
        self._answer = answer

    def begin(
        self, _path: bytes, _given: Given, _peer: bytes, _now: float, /
    ) -> AtHand | Later | None:
        """Begin as was said."""
        return self._begun

    def refuse(self, status: HTTPStatus, detail: str, _given: Given, /) -> AtHand:
        """Refuse."""
        return AtHand(status, HEAD, detail.encode())

    async def __call__(self, scope: Any, receive: Any, send: Any, /) -> None:
        """Answer as was said."""
        assert self._answer is not None
        await self._answer(scope, receive, send)


class Log(AccessLog):
    """Keeps lines."""

    def __init__(self, lines: list[str], *, has_keys: bool) -> None:
        super().__init__("text", has_keys=has_keys)
        self.lines = lines
        self.has_ended = False

    def write(self, runs: Sequence[Run]) -> None:
        """Keep them."""
        self.lines += b"".join(self._lines(runs)).decode().splitlines()

    def end(self, *, within_s: float) -> None:
        """End."""
        self.has_ended = within_s > 0


def _watched(
    stub: Stub, lines: list[str] | None = None, proxies: Networks = (), *, has_keys: bool = False
) -> Watched:
    log = Log([] if lines is None else lines, has_keys=has_keys)
    requests = Requests(["em", "lm"], log)
    return Watched(stub, {"em": True, "lm": False}, requests, proxies=proxies)


def _get(
    watched: Watched,
    path: bytes = b"/em/c/0",
    given: Given | None = None,
    peer: bytes = b"::1",
) -> AtHand | Later | None:
    return watched.begin(path, given or {}, peer, asyncio.get_running_loop().time())


def _counted(watched: Watched, dataset: str = "em") -> dict[tuple[str, str], int]:
    return dict(watched.requests.settle().datasets[dataset].each)


async def _take(_status: HTTPStatus, _headers: Headers, body: bytes | AsyncIterator[bytes]) -> None:
    if not isinstance(body, bytes):
        async for _ in body:
            pass


@pytest.mark.parametrize(("status", "outcome"), [(200, "hit"), (206, "hit"), (304, "not_modified")])
async def test_what_is_at_hand_is_told_at_once(status: int, outcome: str) -> None:
    """It is counted and has its line before it is written."""
    lines: list[str] = []
    watched = _watched(Stub(AtHand(HTTPStatus(status), HEAD, b"body", b"id-1", "em", "ana")), lines)
    _get(watched)

    assert _counted(watched) == {("GET", outcome): 1}
    assert f"request=id-1 GET em {status} {outcome} 4 bytes" in lines[0]
    assert 'client=::1 caller="ana"' in lines[0]


@pytest.mark.parametrize(
    ("path", "dataset"),
    [
        (b"/em/c/0", "em"),
        (b"/%65m/c/0", "em"),
        (b"/~token/em/c/0", "em"),
        (b"/%7Etoken/em/c/0", "em"),
        (b"/em", "em"),
        (b"/lm/c/0", "lm"),
        (b"/none/c/0", ""),
        (b"/~token", ""),
        (b"/", ""),
        (b"", ""),
        (b"/\xff", ""),
    ],
)
async def test_each_spelling_of_a_dataset_counts_for_it(path: bytes, dataset: str) -> None:
    """What names none that is served counts together."""
    watched = _watched(Stub())
    await _ask(watched, _answer, path=path)

    assert _counted(watched, dataset) == {("GET", "answered"): 1}


async def test_what_is_no_request_is_counted_too() -> None:
    """It has neither a method nor a dataset."""
    watched = _watched(Stub())
    watched.refuse(HTTPStatus.BAD_REQUEST, "this is not HTTP/1.1", {})

    assert _counted(watched, "") == {("other", "refused"): 1}


async def test_the_log_ends_when_the_service_has() -> None:
    """Its last lines are waited for."""
    log = Log([], has_keys=False)
    at_hand = AtHand(HTTPStatus.OK, HEAD, b"body", b"id-1", "em")
    watched = Watched(Stub(at_hand, _pass), {"em": True}, Requests(["em"], log))
    _get(watched)
    assert (log.lines, log.has_ended) == ([], False)
    await watched({"type": "lifespan"}, None, None)

    assert (len(log.lines), log.has_ended) == (1, True)


async def _pass(*_: Any) -> None:
    pass


async def test_a_request_through_a_proxy_is_that_of_who_is_behind_it() -> None:
    """Where the proxy is known; another one may say what it likes."""
    lines: list[str] = []
    stub, proxies = (
        Stub(AtHand(HTTPStatus.OK, HEAD, b"body", b"id-1", "em")),
        [ip_network("10.0.0.0/8")],
    )
    watched = _watched(stub, lines, proxies)
    for peer in b"10.1.2.3", b"192.0.2.1":
        _get(watched, given={b"x-forwarded-for": b"198.51.100.7"}, peer=peer)
    watched.requests.settle()

    assert "client=198.51.100.7 " in lines[0]
    assert "client=192.0.2.1 " in lines[1]


@pytest.mark.parametrize("has_keys", [False, True])
@pytest.mark.parametrize("is_at_hand", [False, True])
async def test_keys_are_for_debugging_only(*, is_at_hand: bool, has_keys: bool) -> None:
    """At any other level no line has one, and none ever has a query or a token."""
    lines: list[str] = []
    at_hand = AtHand(HTTPStatus.OK, HEAD, b"body", b"id-1", "em")
    watched = _watched(Stub(at_hand, _answer), lines, has_keys=has_keys)
    if is_at_hand:
        _get(watched, b"/~token/em/c/7/8")
    else:
        await _ask(watched, _answer, path=b"/~token/em/c/7/8")
    watched.requests.settle()

    assert ('key="c/7/8"' in lines[0]) is has_keys
    assert "token" not in lines[0]


async def _run_later(later: Callable[[Write], Awaitable[None]], write: Write = _take) -> Watched:
    watched = _watched(Stub(later))
    begun = _get(watched)
    assert callable(begun)
    task = asyncio.ensure_future(begun(write))
    await asyncio.wait([task], timeout=0.05)
    task.cancel()
    await asyncio.wait([task])
    assert watched.counts.in_flight == 0
    return watched


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (200, "answered"),
        (304, "not_modified"),
        (307, "answered"),
        (404, "absent"),
        (403, "refused"),
        (416, "refused"),
        (501, "refused"),
        (502, "failed"),
        (503, "failed"),
    ],
)
async def test_what_has_to_be_waited_for_is_told_when_it_is_sent(status: int, outcome: str) -> None:
    """Its status says what became of it."""

    async def later(write: Write) -> None:
        await write(HTTPStatus(status), list(HEADERS), b"body")

    watched = await _run_later(later)

    assert _counted(watched) == {("GET", outcome): 1}
    assert watched.counts.datasets["em"].nbytes == 4


async def test_a_client_that_leaves_is_no_failure() -> None:
    """What is cancelled is counted as gone."""
    watched = await _run_later(lambda _: asyncio.sleep(60))

    assert _counted(watched) == {("GET", "gone"): 1}


async def test_an_answer_that_breaks_off_has_failed() -> None:
    """Whatever its status said; the bytes that were sent count."""

    async def pieces() -> AsyncIterator[bytes]:
        yield b"piece"
        raise TruncatedReadError(ObjectRef("s3://bucket", "key"), "cut")

    async def later(write: Write) -> None:
        await write(HTTPStatus.OK, list(HEADERS), pieces())

    watched = await _run_later(later)

    assert _counted(watched) == {("GET", "failed"): 1}
    assert watched.counts.datasets["em"].nbytes == 5


async def test_requests_that_wait_are_in_flight() -> None:
    """As long as they do."""
    watched = _watched(Stub(lambda _: asyncio.sleep(60)))
    begun = _get(watched)
    assert callable(begun)
    task = asyncio.ensure_future(begun(_take))
    await asyncio.sleep(0)

    assert watched.counts.in_flight == 1
    task.cancel()
    await asyncio.wait([task])
    assert watched.counts.in_flight == 0


async def _answer(_scope: Any, _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"body"})


async def _ask(
    watched: Watched, answer: Answering, method: str = "GET", path: bytes = b"/em/c"
) -> None:
    scope: dict[str, Any] = {"type": "http", "method": method, "headers": [], "client": None}
    scope["raw_path"] = path
    watched.service = Stub(answer=answer)
    await watched(scope, None, lambda _: asyncio.sleep(0))


async def test_an_answer_through_asgi_that_does_not_end_is_gone() -> None:
    """Who answers leaves off when the client does."""

    async def answer(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"piece", "more_body": True})

    watched = _watched(Stub())
    await _ask(watched, answer)

    assert _counted(watched) == {("GET", "gone"): 1}
    assert watched.counts.datasets["em"].nbytes == 5


async def test_a_fault_behind_asgi_has_failed() -> None:
    """Nothing was sent."""

    async def answer(*_: Any) -> None:
        raise ZeroDivisionError

    watched = _watched(Stub())
    with pytest.raises(ZeroDivisionError):
        await _ask(watched, answer)

    assert _counted(watched) == {("GET", "failed"): 1}
    assert watched.counts.in_flight == 0


async def test_invented_methods_are_one() -> None:
    """A client may not make labels."""

    async def answer(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 405, "headers": []})
        await send({"type": "http.response.body"})

    watched = _watched(Stub())
    for method in ("BREW", "TRACE", "PROPFIND"):
        await _ask(watched, answer, method)

    assert _counted(watched) == {("other", "refused"): 3}


async def test_clients_invent_no_labels() -> None:
    """Whatever they ask for, labels are of closed sets."""
    chance = random.Random(5)
    app = create_app(Settings(datasets={"em": DatasetSettings(url="memory://bucket")}))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for _ in range(500):
            method = chance.choice(["GET", "HEAD", "PUT", "DELETE", "POST", f"X{chance.random()}"])
            name = chance.choice(["em", "%65m", f"d{chance.random()}", "api", "~t/em", "api/x"])
            key = f"{chance.random()}" * chance.randrange(3)
            headers = {"x-request-id": str(chance.random())}
            await client.request(method, f"/{name}/{key}?{chance.random()}", headers=headers)
        text = (await client.get("/metrics")).text

    values: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            for label, value in sample.labels.items():
                values.setdefault(label, set()).add(value)
    assert values["dataset"] == {"", "em"}
    assert values["outcome"] <= {*OUTCOMES, "made", "conflict"}
    assert values["kind"] <= {"metadata", "object", "repo", "ref"}
    assert values["store"] == {"memory"}
    assert values["method"] <= {"GET", "HEAD", "PUT", "DELETE", "POST", "other", *METHODS}
    assert "error" not in values
