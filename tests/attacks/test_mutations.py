"""Randomly changed objects are read, listed, described and written to without an internal error.

Whatever object of whatever format is changed, each request gets a documented status within 5 s.
"""

import ast
import asyncio
import time
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final
from urllib.parse import quote

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardgate
from shardgate.main import create_app
from shardgate.model import ObjectRef
from shardgate.settings import DatasetSettings, Settings
from shardgate.storage.contract import Found
from shardgate.storage.memory import MemoryStore
from tests.support.attacks.mutating import Change, at_random, changes, peak_growth
from tests.support.formats.cases import CASES
from tests.support.processor import processor_time_below
from tests.support.sessions import GROUP, array_document

ANSWERS: Final = {200, 201, 204, 206, 307, 400, 403, 404, 405, 409, 412, 415, 423, 424, 503}
"""Documented statuses without 500, and without 504, since no store here is slow."""
PLAIN: Final = {"accept-encoding": "identity"}
"""Makes the service decompress stored gzip chunks."""
BUCKET: Final = "memory://bucket"
MOST_S: Final = 5
MOST_BYTES: Final = 512 * 1024**2
ROUTES: Final = ("branches", "tags", "history", "operations", "status", "sessions")
KINDS: Final = {
    "metadata", "shard-index", "index-entry", "minishard-index", "mesh-manifest", "shard-end",
    "repo", "repo-beside", "ref", "snapshot-header", "chunk", "zip-header", "member",
}  # fmt: skip
"""Kinds of reads by the formats, each of which some container here causes."""
ELSEWHERE: Final = {
    "repo-backup", "config", "ref-deleted", "zip-directory", "references", "reference-source",
    "object",
}  # fmt: skip
"""Kinds of `verify`, old operations and version 1 of Icechunk, of archives of many entries, of
reference sets and of objects named by numbers, which the tests of these formats cover.
"""


@dataclass(frozen=True)
class Container:
    """A name, the objects of a container, and the keys of its chunks."""

    name: str
    objects: Mapping[str, bytes]
    chunks: Mapping[str, bytes]

    def __str__(self) -> str:
        return self.name


@cache
def containers() -> list[Container]:
    """Build one container of each kind."""
    found = [Container(str(case), case.build(case.chunks), case.chunks) for case in CASES]
    return [*found, asyncio.run(in_session())]


async def in_session() -> Container:
    """Return the objects of a repository that the service made, with an open session."""
    store = MemoryStore()
    async with serving(store) as client:
        await client.post("/api/datasets", json={"name": "any"})
        begun = await client.post("/api/datasets/any/sessions")
        prefix = f"@session.{begun.json()['session_id']}"
        chunks = {}
        for key, body in {
            "zarr.json": GROUP,
            "a/zarr.json": httpx.Response(200, json=array_document((6,), (2,))).content,
            "a/c/0": b"ab",
            "a/c/2": b"ef",
        }.items():
            assert (await client.put(f"/any/{prefix}/{key}", content=body)).is_success
            chunks[f"{prefix}/{key}"] = body
        await client.delete(f"/any/{prefix}/a/c/0")
    objects = {ref.key: await data_of(store, ref) for ref in await refs_in(store)}
    return Container("icechunk session", objects, chunks)


async def refs_in(store: MemoryStore) -> list[ObjectRef]:
    """Return the names of all objects."""
    return [each.ref async for each in store.list(ObjectRef(BUCKET, ""))]


async def data_of(store: MemoryStore, ref: ObjectRef) -> bytes:
    """Return the bytes of an object."""
    found = await store.get(ref)
    assert isinstance(found, Found)
    return found.data


def serving(store: MemoryStore) -> httpx.AsyncClient:
    """Return a client that calls the service without a server between."""
    settings = Settings(datasets={"any": DatasetSettings(url=BUCKET, writable=True)})
    gateway = create_app(settings, wrap=lambda _: store)
    transport = httpx.ASGITransport(gateway)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=PLAIN)


type Request = tuple[str, str, bytes | None]


class Service:
    """The service on a memory store that is refilled for each container."""

    def __init__(self) -> None:
        self._store = MemoryStore()
        self._client = serving(self._store)
        self._runner = asyncio.Runner()
        self._number = 0

    def ask(self, objects: Mapping[str, bytes], chunks: Mapping[str, bytes]) -> None:
        """Send all kinds of requests for *objects*."""
        self._number += 1
        prefix = f"n{self._number}"
        for ref in self._runner.run(refs_in(self._store)):
            self._store.remove(ref)
        for key, data in objects.items():
            self._store.place(ObjectRef(BUCKET, f"{prefix}/{key}"), data)
        self._runner.run(self._ask(requests(prefix, objects, chunks)))

    async def _ask(self, asked: list[Request]) -> None:
        for method, path, body in asked:
            with processor_time_below(MOST_S, time.process_time):
                answer = await self._client.request(method, path, content=body)

            assert answer.status_code in ANSWERS, (method, path, answer.text)

    def close(self) -> None:
        """Close the event loop."""
        self._runner.close()


def requests(
    prefix: str, objects: Mapping[str, bytes], chunks: Mapping[str, bytes]
) -> list[Request]:
    """Return requests of each kind for the keys of a container."""
    keys = [f"/any/{prefix}/{quote(key, safe='/@')}" for key in (*chunks, *objects)]
    found: list[Request] = [("GET", key, None) for key in keys[:12]]
    found += [("GET", f"/any?list-type=2&prefix={prefix}/{end}", None) for end in ("", "a/")]
    found += [("GET", f"/any/{prefix}/", None), ("GET", "/api/datasets/any", None)]
    if "repo" in objects or any(key.startswith("refs/") for key in objects):
        base = "/api/datasets/any"
        found += [("GET", f"{base}/{route}?path={prefix}", None) for route in ROUTES]
        found.append(("POST", f"{base}/sessions?path={prefix}", b""))
    found += [
        ("PUT", key, body) for key, body in zip(keys, list(chunks.values())[:2], strict=False)
    ]
    return [*found, ("DELETE", f"/any?prefix={prefix}/", None)]


@pytest.fixture(scope="module")
def service() -> Generator[Service]:
    """Run one service for the whole module."""
    with closing(Service()) as running:
        yield running


@pytest.mark.parametrize("container", containers(), ids=str)
def test_unchanged_container_is_served(service: Service, container: Container) -> None:
    """All requests for an unchanged container get a documented status within 5 s."""
    service.ask(container.objects, container.chunks)


def change_at_random(service: Service, examples: int) -> None:
    """Change one random object of a container at random and send all requests."""

    @at_random(examples)
    @given(
        st.sampled_from(containers()),
        st.floats(0, 1, exclude_max=True),
        st.lists(changes(), min_size=1, max_size=3),
    )
    def check(container: Container, which: float, made: list[Change]) -> None:
        name = sorted(container.objects)[int(which * len(container.objects))]
        data = container.objects[name]
        for change in made:
            data = change(data)
        service.ask({**container.objects, name: data}, container.chunks)

    check()


@pytest.mark.parametrize("examples", [30, pytest.param(10_000, marks=pytest.mark.soak)])
def test_changed_container_is_served_without_an_internal_error(
    service: Service, examples: int
) -> None:
    """Requests for randomly changed objects get documented statuses, in bounded time and memory."""
    with peak_growth() as growth:
        change_at_random(service, examples)

    assert growth() < MOST_BYTES


def test_table_lists_every_kind_of_read() -> None:
    """The tables above list every kind of read in the package."""
    found = set()
    for path in Path(shardgate.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Read" and node.args:
                kind = node.args[0]
                if isinstance(kind, ast.Constant):
                    found.add(kind.value)

    assert found == KINDS | ELSEWHERE
