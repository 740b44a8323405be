"""`app.http.instrumentation`: each request is counted and logged once, with its outcome."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus
from ipaddress import ip_network
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.errors import TruncatedReadError
from app.http.instrumentation import InstrumentedApp
from app.http.limits import Networks
from app.http.problems import Headers
from app.http.responses import DeferredResponse, Exchange, ImmediateResponse, RequestHeaders
from app.main import create_app
from app.model import ObjectRef
from app.observability.logging import AccessLog, AccessRecord
from app.observability.metrics import Metrics
from app.observability.requests import OUTCOMES
from app.resolve.bodies import Body
from app.settings import DatasetSettings, Settings
from app.storage.wrappers import METHODS

type Asgi = Callable[..., Awaitable[None]]

HEADERS: Headers = [(b"content-length", b"4"), (b"x-request-id", b"id-1")]
HEAD = b"content-length: 4\r\nx-request-id: id-1\r\n"
HIT = ImmediateResponse(HTTPStatus.OK, HEAD, b"body", b"id-1", "em", "ana")


class Stub:
    """An application that gives the same response to every request."""

    def __init__(
        self, begun: ImmediateResponse | DeferredResponse | None = None, respond: Asgi | None = None
    ) -> None:
        self._begun = begun
        self._respond = respond

    def begin(
        self, _path: bytes, _headers: RequestHeaders, _peer: bytes, _now: float, /
    ) -> ImmediateResponse | DeferredResponse | None:
        """Begin."""
        return self._begun

    def refuse(
        self, status: HTTPStatus, detail: str, _headers: RequestHeaders, /
    ) -> ImmediateResponse:
        """Refuse."""
        return ImmediateResponse(status, HEAD, detail.encode())

    async def __call__(self, scope: Any, receive: Any, send: Any, /) -> None:
        """Respond."""
        assert self._respond is not None
        await self._respond(scope, receive, send)


class Log(AccessLog):
    """Keeps records."""

    def __init__(self, *, has_keys: bool) -> None:
        super().__init__("text", has_keys=has_keys)
        self.records: list[AccessRecord] = []
        self.events: list[str] = []

    def add(self, record: AccessRecord) -> None:
        """Keep one."""
        self.records.append(record)

    def start(self) -> None:
        """Start."""
        self.events.append("start")

    def close(self) -> None:
        """Close."""
        self.events.append("close")


class Instrumented(InstrumentedApp):
    """Instruments a stub that serves a public dataset, ``em``, and a private one, ``lm``."""

    def __init__(self, stub: Stub, proxies: Networks = (), *, has_keys: bool = False) -> None:
        self.all_metrics = Metrics(["em", "lm"])
        self.log = Log(has_keys=has_keys)
        super().__init__(
            stub,
            {"em": True, "lm": False},
            self.all_metrics.requests,
            access_log=self.log,
            proxies=proxies,
        )

    def get(
        self, path: bytes = b"/em/c/0", headers: RequestHeaders | None = None, peer: bytes = b"::1"
    ) -> ImmediateResponse | DeferredResponse | None:
        """Begin a GET."""
        return self.begin(path, headers or {}, peer, asyncio.get_running_loop().time())

    async def ask(self, method: str = "GET", path: bytes = b"/em/c") -> None:
        """Send a request through ASGI."""
        scope: dict[str, Any] = {"type": "http", "method": method, "headers": [], "client": None}
        await self(scope | {"raw_path": path}, None, lambda _: asyncio.sleep(0))

    @property
    def counted(self) -> list[tuple[object, ...]]:
        """Dataset, method, outcome and number of each kind of request."""
        samples = [
            sample
            for metric in self.all_metrics.registry.collect()
            if metric.name == "shardgate_requests"
            for sample in metric.samples
        ]
        return [(*each.labels.values(), each.value) for each in samples]

    def value(self, name: str, **labels: str) -> float | None:
        """Return a sample of the metrics."""
        return self.all_metrics.registry.get_sample_value(f"shardgate_{name}", labels)


def _responding(status: int = 200, *bodies: bytes, is_cut: bool = False) -> Asgi:
    async def respond(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        for number, body in enumerate(bodies, 1):
            more_body = is_cut or number < len(bodies)
            await send({"type": "http.response.body", "body": body, "more_body": more_body})

    return respond


class Taker:
    """A connection that takes the whole response."""

    def __init__(self) -> None:
        self.status = self.sent_nbytes = 0
        self.response_complete = False

    async def write(self, status: HTTPStatus, _: Headers, body: Body) -> None:
        """Take a response."""
        self.status = status
        if isinstance(body, bytes):
            self.sent_nbytes = len(body)
        else:
            async for piece in body:
                self.sent_nbytes += len(piece)
        self.response_complete = True


@pytest.mark.parametrize(("status", "outcome"), [(200, "hit"), (206, "hit"), (304, "not_modified")])
async def test_responses_from_memory_are_counted_and_logged(status: int, outcome: str) -> None:
    """They are not timed."""
    app = Instrumented(Stub(HIT._replace(status=HTTPStatus(status))))
    app.get()

    assert app.counted == [("em", "GET", outcome, 1)]
    assert app.value("request_seconds_count", method="GET", outcome=outcome) is None
    (record,) = app.log.records
    assert record[1:] == (b"id-1", "GET", "em", status, outcome, 4, b"::1", "ana", None, "", "")


@pytest.mark.parametrize(
    ("dataset", "paths"),
    [
        ("em", [b"/em/c/0", b"/%65m/c/0", b"/~token/em/c/0", b"/%7Etoken/em/c/0", b"/em"]),
        ("lm", [b"/lm/c/0"]),
        ("", [b"/none/c/0", b"/~token", b"/", b"", b"/\xff"]),
    ],
)
async def test_each_spelling_of_a_dataset_counts_for_it(dataset: str, paths: list[bytes]) -> None:
    """All names that are not served share one label."""
    app = Instrumented(Stub(respond=_responding(200, b"body")))
    for path in paths:
        await app.ask(path=path)

    assert app.counted == [(dataset, "GET", "answered", len(paths))]


async def _fail(*_: Any) -> None:
    raise ZeroDivisionError


async def test_the_client_is_the_one_behind_a_known_proxy() -> None:
    """Another one may send any header; a malformed request is counted, and not logged."""
    app = Instrumented(Stub(HIT), [ip_network("10.0.0.0/8")])
    for peer in b"10.1.2.3", b"192.0.2.1":
        app.get(headers={b"x-forwarded-for": b"198.51.100.7"}, peer=peer)
    app.refuse(HTTPStatus.BAD_REQUEST, "this is not HTTP/1.1", {})

    assert [record.client for record in app.log.records] == [b"198.51.100.7", b"192.0.2.1"]
    assert ("", "other", "refused", 1) in app.counted


@pytest.mark.parametrize("has_keys", [False, True])
@pytest.mark.parametrize("is_in_memory", [False, True])
async def test_keys_are_logged_for_debugging_only(*, is_in_memory: bool, has_keys: bool) -> None:
    """A token is never logged."""
    app = Instrumented(Stub(HIT, _responding(200, b"body")), has_keys=has_keys)
    if is_in_memory:
        app.get(b"/~token/em/c/7/~token/8")
    else:
        await app.ask(path=b"/~token/em/c/7/~token/8")

    assert [record.key for record in app.log.records] == ["c/7/~/8" if has_keys else ""]


async def _run(later: DeferredResponse) -> Instrumented:
    """Respond to a GET; leave after a moment."""
    app = Instrumented(Stub(later))
    begun = app.get()
    assert callable(begun)
    task = asyncio.ensure_future(begun(Taker()))
    await asyncio.sleep(0.01)
    assert app.value("requests_in_flight") == (0 if task.done() else 1)
    task.cancel()
    await asyncio.wait([task])
    assert app.value("requests_in_flight") == 0
    return app


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
async def test_the_status_of_a_complete_response_is_its_outcome(status: int, outcome: str) -> None:
    """The time, and the bytes of the body, are counted at its end."""

    async def later(exchange: Exchange) -> None:
        await exchange.write(HTTPStatus(status), list(HEADERS), b"body")

    app = await _run(later)

    assert app.counted == [("em", "GET", outcome, 1)]
    assert app.value("sent_bytes_total", dataset="em") == 4
    assert app.value("request_seconds_count", method="GET", outcome=outcome) == 1
    assert app.log.records[0].seconds


async def test_a_client_that_leaves_is_gone() -> None:
    """That is no failure of the service, of an ASGI application too, which stops then."""
    app = await _run(lambda _: asyncio.sleep(60))
    assert app.counted == [("em", "GET", "gone", 1)]

    app = Instrumented(Stub(respond=_responding(200, b"piece", is_cut=True)))
    await app.ask()
    assert app.counted == [("em", "GET", "gone", 1)]
    assert app.value("sent_bytes_total", dataset="em") == 5


async def test_a_response_that_breaks_off_has_failed() -> None:
    """Its status does not matter, the bytes that were sent count; so has a fault of ours.

    The log is open as long as the service, also where its start fails.
    """

    async def pieces() -> AsyncIterator[bytes]:
        yield b"piece"
        raise TruncatedReadError(ObjectRef("s3://bucket", "key"), "cut")

    async def later(exchange: Exchange) -> None:
        await exchange.write(HTTPStatus.OK, list(HEADERS), pieces())

    app = await _run(later)

    assert app.counted == [("em", "GET", "failed", 1)]
    assert app.value("sent_bytes_total", dataset="em") == 5
    app = Instrumented(Stub(respond=_fail))
    with pytest.raises(ZeroDivisionError):
        await app({"type": "lifespan"}, None, None)
    assert app.log.events == ["start", "close"]
    with pytest.raises(ZeroDivisionError):
        await app.ask()
    assert app.counted == [("em", "GET", "failed", 1)]
    assert app.value("requests_in_flight") == 0


async def test_clients_invent_no_labels() -> None:
    """Labels are of closed sets, and invented methods share one."""
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
