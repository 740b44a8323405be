"""`shardgate.server.asgi`: the service below a path of another application, and its lifespan."""

import logging
import threading
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from pydantic import SecretStr
from starlette.applications import Starlette
from starlette.routing import Mount

from shardgate import Settings, create_app
from shardgate.server.asgi import AsgiApp, request_of
from shardgate.settings import DatasetSettings, ServerSettings, TokenSettings
from shardgate.storage.stores import Stores
from tests.support.auth.people import TOKENS, caller
from tests.support.files import write_files
from tests.support.formats.zarr.building import build

CHUNKS = {"c/0/0": b"0123456789", "c/0/1": b"another"}
ANA = {"authorization": f"Bearer {TOKENS['ana']}"}


@pytest.fixture
def app(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> AsgiApp:
    """Build the service of an array, which is writable, and of a private copy of it."""
    caplog.set_level(logging.INFO, "shardgate.access")
    write_files(build(CHUNKS), tmp_path)
    url = tmp_path.as_uri()
    return create_app(
        Settings(
            server=ServerSettings(access_log=True, hosts=("outer.example",)),
            tokens=TokenSettings(secret=SecretStr("x" * 32)),
            callers={"ana": caller(TOKENS["ana"])},
            datasets={
                "em": DatasetSettings(url=url, writable=True),
                "private": DatasetSettings(url=url, read=("ana",)),
            },
        )
    )


@asynccontextmanager
async def client_of(outer: Any) -> AsyncGenerator[httpx.AsyncClient]:
    """Call an application."""
    transport = httpx.ASGITransport(outer)
    async with httpx.AsyncClient(transport=transport, base_url="http://outer.example") as client:
        yield client


@pytest.mark.parametrize("path", ["/arrays", "/api", "/my data/v 1"])
async def test_mounted_service_answers_below_its_path(app: AsgiApp, path: str) -> None:
    """Chunks, pages, the API and writes of a mounted service are below the path of the mount."""
    async with client_of(Starlette(routes=[Mount(path, app)])) as client:
        for _ in range(2):  # the second one is answered from memory
            chunk = await client.get(f"{path}/em/c/0/0")
            assert chunk.content == CHUNKS["c/0/0"]
            assert chunk.headers.get_list("x-content-type-options") == ["nosniff"]
        assert (await client.get(f"{path}/em/c/0/1?v=1")).content == CHUNKS["c/0/1"]
        assert (await client.put(f"{path}/em/c/0/1", content=b"new")).is_success
        assert (await client.get(f"{path}/em/c/0/1")).content == b"new"
        assert (await client.get("/em/c/0/0")).status_code == 404
        assert (await client.get(f"{path}/healthz")).json() == {"status": "ok"}
        assert (await client.get(f"{path}/_shard/em/c/0/0")).headers["x-shard"]
        assert b'href="./c/"' in (await client.get(f"{path}/em/")).content


@pytest.mark.parametrize("path", ["/arrays", "/api", "/my data/v 1"])
async def test_links_of_mounted_service_lead_below_its_path(app: AsgiApp, path: str) -> None:
    """Paths in JSON, in pages, in redirects and of tokens begin with the path of the mount."""
    async with client_of(Starlette(routes=[Mount(path, app)])) as client:
        listed = await client.get(f"{path}/api/datasets", headers=ANA)
        paths = [each["path"] for each in listed.json()["datasets"]]
        chunks = [await client.get(f"{each}c/0/0", headers=ANA) for each in paths]
        minted = await client.post(f"{path}/api/tokens", json={"dataset": "private"}, headers=ANA)
        below = minted.json()["paths"]["private"]
        by_token = await client.get(f"{below}c/0/0")
        page = await client.get(f"{path}/em/", headers={"accept": "text/html"})
        bare = await client.get(below.removesuffix("/private/"))
        docs = await client.get(f"{path}/docs/swagger-ui.css")

    quoted = path.replace(" ", "%20")
    assert paths == [f"{quoted}/em/", f"{quoted}/private/"]
    assert [each.content for each in (*chunks, by_token)] == [CHUNKS["c/0/0"]] * 3
    assert f"http://outer.example{quoted}/em" in page.text
    assert bare.headers["location"] == f"./{below.split('/')[-3]}/"
    assert docs.headers["content-type"].startswith("text/css")


async def test_routes_of_the_api_are_not_looked_for_in_memory(
    app: AsgiApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request of the API, whose name no dataset has, is not looked up among datasets."""
    looked_for: list[str] = []
    monkeypatch.setattr(app, "cached", lambda request: looked_for.append(request.name))

    async with client_of(app) as client:
        assert (await client.get("/api/datasets")).is_success
        assert (await client.get("/em/c/0/0")).is_success

    assert looked_for == ["em"]


async def test_signature_covers_the_path_of_the_mount() -> None:
    """The path that a client has signed is the whole one, and the raw one if there is one."""
    scope: dict[str, Any] = {
        "type": "http", "method": "GET", "path": "/a b/em/c", "root_path": "/a b",
        "query_string": b"", "headers": [],
    }  # fmt: skip
    for more in ({}, {"raw_path": b"/a%20b/em/c"}):
        request = request_of(scope | more, {})
        assert (request.sent_path, request.raw_path) == (b"/a%20b/em/c", b"/em/c")
    stripped = request_of(scope | {"path": "/em/c"}, {})
    assert (stripped.raw_path, stripped.base_path) == (b"/em/c", "/a%20b")


def _is_logging() -> bool:
    return any(thread.name == "access-log" for thread in threading.enumerate())


async def test_lifespan_is_run_by_the_outer_application(app: AsgiApp) -> None:
    """The lifespan of a mounted service opens and closes it as that of an outer application."""
    outer = FastAPI(lifespan=app.lifespan)
    outer.mount("/arrays", app)
    async with outer.router.lifespan_context(outer), client_of(outer) as client:
        assert _is_logging()
        assert (await client.get("/arrays/em/c/0/0")).is_success
    assert not _is_logging()


async def test_lifespan_begins_with_the_first_request(
    app: AsgiApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service whose lifespan nobody runs is opened by its first request."""
    lifespan, stack = app.lifespan, AsyncExitStack()

    @asynccontextmanager
    async def open_until_the_test_ends() -> AsyncGenerator[None]:
        await stack.enter_async_context(lifespan())
        yield

    monkeypatch.setattr(app, "lifespan", open_until_the_test_ends)
    assert not _is_logging()
    async with stack, client_of(app) as client:
        assert (await client.get("/em/c/0/0")).is_success
        assert _is_logging()
    assert not _is_logging()


async def test_access_log_is_closed_after_a_failed_start(
    app: AsgiApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The access log is open as long as the service, also where its start fails."""

    async def fail(_: Stores) -> Stores:
        assert _is_logging()
        raise ZeroDivisionError

    monkeypatch.setattr(Stores, "__aenter__", fail)
    with pytest.raises(ZeroDivisionError):
        async with app.lifespan():
            pass
    assert not _is_logging()
