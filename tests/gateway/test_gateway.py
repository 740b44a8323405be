"""`shardgate.gateway`: limits of concurrent requests, of waiting, and disconnected clients."""

import asyncio
from collections.abc import AsyncGenerator, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from threading import Event, Semaphore
from typing import Any

import httpx
import pytest

from shardgate.model import ObjectRef
from shardgate.server.asgi import UntilDisconnect
from shardgate.settings import DatasetSettings, LimitSettings, ServerSettings, Settings
from shardgate.storage.contract import Found, Listed, NotModified
from shardgate.storage.memory import MemoryStore
from tests.support.attacks.raw import connect
from tests.support.processes import wait_until
from tests.support.serving import serving

ORIGIN = {"origin": "https://a.example"}
LONG_S = 20


class Gated(MemoryStore):
    """A store that returns objects called ``slow`` only after its gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = Semaphore(0)
        self.gate = Event()
        for name, bucket in product(("slow", "fast"), ("memory://any", "memory://other")):
            self.place(ObjectRef(bucket, name), name.encode())

    async def get(self, ref: ObjectRef, *args: Any, **kwargs: Any) -> Found | NotModified | None:
        """Read."""
        if ref.key.startswith("slow"):
            self.asked.release()
            await self._opened()
        return await super().get(ref, *args, **kwargs)

    async def list(self, prefix: ObjectRef, **kwargs: str) -> AsyncGenerator[Listed]:
        """List."""
        await self._opened()
        async for each in super().list(prefix, **kwargs):
            yield each

    async def _opened(self) -> None:
        while not self.gate.is_set():  # noqa: ASYNC110 - it is opened by another thread
            await asyncio.sleep(0.005)


@dataclass
class Service:
    """The service, and a pool of threads for waiting requests."""

    client: httpx.Client
    store: Gated
    pool: ThreadPoolExecutor

    def wait(self, number: int, path: str = "/any/slow") -> list[Future[httpx.Response]]:
        """Start *number* requests that wait for the store."""
        waiting = [self.pool.submit(self.client.get, f"{path}{n}") for n in range(number)]
        for _ in waiting:
            assert self.store.asked.acquire(timeout=LONG_S)
        return waiting


@contextmanager
def service(
    server: ServerSettings | None = None, names: Sequence[str] = ("any",), **limits: Any
) -> Generator[Service]:
    """Serve a store that waits."""
    store = Gated()
    settings = Settings(
        server=server or ServerSettings(cors_origins=("https://a.example",)),
        limits=LimitSettings(**limits),
        datasets={
            name: DatasetSettings(url=f"memory://{name}", writable=True, view="raw")
            for name in names
        },
    )
    with ExitStack() as stack:
        url = stack.enter_context(serving(settings, wrap=lambda _: store))
        client = stack.enter_context(httpx.Client(base_url=url, timeout=LONG_S))
        pool = stack.enter_context(ThreadPoolExecutor(4))
        stack.callback(store.gate.set)
        yield Service(client, store, pool)


def test_request_above_the_limit_is_refused() -> None:
    """A request above the limit, all of which one dataset may use, is 503 with Retry-After and CORS
    headers.

    Health, metrics, preflights and cached chunks are still served.
    """
    with service(requests=4) as served:
        served.client.get("/any/fast")
        waiting = served.wait(3) + served.wait(1, "/any/slow?v=")
        answers = [
            served.client.get("/any/other", headers=ORIGIN),
            served.client.get("/any/other?v=1", headers=ORIGIN),
            served.client.get("/api/datasets", headers=ORIGIN),
            served.client.put("/any/k", content=b"x", headers=ORIGIN),
        ]
        alive = [served.client.get(path).status_code for path in ("/healthz", "/metrics")]
        quick = served.client.get("/any/fast")
        preflight = served.client.options("/any/slow")
        served.store.gate.set()

        for answer in answers:
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "1"
            assert answer.headers["access-control-allow-origin"] == ORIGIN["origin"]
            assert "too many concurrent requests (limit 4)" in answer.json()["detail"]
        assert alive == [200, 200]
        assert quick.content == b"fast"
        assert preflight.is_success
        assert [each.result().status_code for each in waiting] == [404, 404, 404, 200]
        assert served.client.get("/any/other").status_code == 404


def test_dataset_leaves_a_quarter_of_the_requests_to_others() -> None:
    """A request above three quarters of the limit for one dataset is 503; others are served."""
    with service(names=("any", "other"), requests=4) as served:
        waiting = served.wait(2) + served.wait(1, "/any/slow?v=")
        paths = ["/any/fast", "/any/fast?v=1", "/%61ny/fast", "/api/datasets/any", "/any/"]
        refused = [served.client.get(path) for path in paths]
        read = [served.client.get(path) for path in ("/other/fast", "/api/datasets")]
        served.store.gate.set()

        assert {each.status_code for each in refused} == {503}
        for each in refused:
            assert each.json()["detail"] == "too many concurrent requests of any (limit 3)"
            assert each.headers["retry-after"] == "1"
        assert [each.status_code for each in read] == [200, 200]
        assert [each.result().status_code for each in waiting] == [404, 404, 200]
        assert served.client.get("/any/fast").content == b"fast"


def begin_writes(served: Service, stack: ExitStack, path: str, number: int) -> None:
    """Send the heads of *number* writes, without their bodies."""
    head = f"PUT {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
    for _ in range(number):
        connection = stack.enter_context(connect(str(served.client.base_url)))
        connection.sendall(head.encode())


def refusal_of_write(served: Service, path: str) -> str:
    """Write until that is refused, and return the reason."""
    while (refused := served.client.put(path, content=b"x")).status_code != 503:
        pass
    return str(refused.json()["detail"])


def test_writes_leave_a_quarter_of_the_requests_to_reads() -> None:
    """A write above three quarters of the limit, or of that of its dataset, is 503, and a read is
    not; writes of clients that leave make room.
    """
    with service(names=("any", "other"), requests=16) as served:
        with ExitStack() as stack:
            begin_writes(served, stack, "/any/k", 9)
            reason = "too many concurrent writes of any (limit 9)"
            assert refusal_of_write(served, "/any/k") == reason
            begin_writes(served, stack, "/other/k", 3)
            assert refusal_of_write(served, "/other/k") == "too many concurrent writes (limit 12)"
            assert served.client.get("/any/fast").content == b"fast"
        wait_until(lambda: served.client.put("/any/k", content=b"x").is_success)


def test_refused_request_gets_no_100_continue() -> None:
    """A request above the limit is 503 instead of 100.

    X-Forwarded-For of an untrusted client is ignored, so its second request is 429.
    """
    head = (
        b"PUT /any/k HTTP/1.1\r\nHost: [::1]\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n"
    )
    with service(requests=1) as served:
        served.wait(1)
        with connect(str(served.client.base_url)) as connection:
            connection.sendall(head)
            assert connection.recv(65536).startswith(b"HTTP/1.1 503 ")
    with service(client_requests=1) as served:
        served.wait(1)
        answer = served.client.get("/any/other", headers={"x-forwarded-for": "192.0.2.1"})
        assert answer.status_code == 429


def test_client_limit_uses_x_forwarded_for_of_trusted_proxies() -> None:
    """A client above `client_requests`, as named by trusted proxies, is 429; others are served."""
    proxies = ServerSettings(trusted_proxies=("127.0.0.0/8", "10.0.0.0/8"))
    with service(proxies, client_requests=1) as served:

        def ask(forwarded: str | None) -> httpx.Response:
            headers = {} if forwarded is None else {"x-forwarded-for": forwarded}
            return served.client.get("/any/other", headers=headers)

        headers = {"x-forwarded-for": "9.9.9.9, 192.0.2.1, 10.0.0.7"}
        waiting = served.pool.submit(served.client.get, "/any/slow", headers=headers)
        assert served.store.asked.acquire(timeout=LONG_S)
        refused = [ask("192.0.2.1"), ask("9.9.9.9, 192.0.2.1"), ask("192.0.2.1,10.2.0.1")]
        served_ones = [ask(None), ask("9.9.9.9"), ask("192.0.2.2"), ask("192.0.2.1, 192.0.2.3")]
        served.store.gate.set()

        assert [answer.status_code for answer in refused] == [429] * 3
        assert {answer.headers["retry-after"] for answer in refused} == {"1"}
        assert [answer.status_code for answer in served_ones] == [404] * 4
        assert waiting.result().content == b"slow"
        assert ask("192.0.2.1").status_code == 404


def test_browser_above_the_limit_gets_a_page() -> None:
    """A browser above a limit gets a page that can be tried again, at the sign-in too."""
    with service(client_requests=1) as served:
        waiting = served.pool.submit(served.client.get, "/any/slow")
        assert served.store.asked.acquire(timeout=LONG_S)
        refused = [
            served.client.get(path, headers={"accept": "text/html"})
            for path in ("/login", "/login/callback?code=a", "/any/", "/")
        ]
        served.store.gate.set()
        waiting.result()

    for answer in refused:
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert '<a class="button" href="">Try again</a>' in answer.text


def test_request_above_answer_s_is_504(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that waits longer than `answer_s` is 504 with Retry-After."""
    monkeypatch.setattr("shardgate.concurrency._SWEEP_S", 0.02)
    paths = ("/any/slow", "/any/slow?v=1", "/any?list-type=2")
    with service(answer_s=1) as served:
        asked = [served.pool.submit(served.client.get, path, headers=ORIGIN) for path in paths]
        for answer in (each.result() for each in asked):
            assert answer.status_code == 504
            assert answer.headers["retry-after"] == "1"
            assert answer.headers["access-control-allow-origin"] == ORIGIN["origin"]
        served.store.gate.set()
        assert served.client.get("/any/slow").content == b"slow"


async def _never() -> dict[str, Any]:
    await asyncio.Event().wait()
    raise AssertionError


async def test_finished_work_leaves_no_watcher() -> None:
    """Finished work leaves no watcher; its errors and outer cancellations are raised."""
    async with UntilDisconnect(_never):
        await asyncio.sleep(0.1)
    with pytest.raises(KeyError):
        async with UntilDisconnect(_never):
            raise KeyError
    await asyncio.sleep(0)

    assert asyncio.all_tasks() == {asyncio.current_task()}

    async def wait() -> None:
        async with UntilDisconnect(_never):
            await asyncio.sleep(60)

    task = asyncio.create_task(wait())
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
