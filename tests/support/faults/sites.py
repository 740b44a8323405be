"""Stores that one gateway reaches directly, and others through a proxy that injects faults."""

import json
import re
from collections.abc import Callable, Container, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from threading import Event
from typing import Any, Final

import httpx
import numpy as np
import zarr

from tests.support.committing import Client, put_array, put_chunks, put_group
from tests.support.gateways import Gateway, forked, of_dataset
from tests.support.labs import SMALL, Lab, value
from tests.support.seaweedfs import SeaweedFS
from tests.support.sessions import GROUP, array_document
from tests.support.storage.proxy import Mishap, Proxy
from tests.support.writable_repositories import Api, Place, new_place

DEADLINE_S: Final = 60
"""Longest wait for any response."""


def killed(
    proxy: Proxy, doomed: Gateway, nth: Container[int], moment: Mishap, work: Callable[[], object]
) -> bool:
    """Kill the gateway at the *nth* request that *work* sends; return whether it was killed."""
    proxy.between = doomed.kill
    proxy.spoil(nth, moment)
    try:
        work()
    except httpx.TransportError:
        assert doomed.wait(DEADLINE_S)
        return True
    finally:
        proxy.between = lambda: None
    return False


@dataclass(frozen=True)
class NthOf:
    """Container of one number, for `Proxy.spoil`: that of the *nth* request that matches."""

    proxy: Proxy
    pattern: str
    nth: int

    def __contains__(self, number: object) -> bool:
        """Return whether *number*, which is that of the last request seen, is the one."""
        matching = [at for at, seen in enumerate(self.proxy.seen) if re.match(self.pattern, seen)]
        return len(matching) == self.nth + 1 and matching[-1] == number


class Hold:
    """Holds up the first request that matches *pattern*."""

    def __init__(self, pattern: str) -> None:
        self.has_arrived = Event()
        self._pattern = pattern
        self._is_over = Event()

    def __call__(self, request: str) -> None:
        """Wait, if this is the request."""
        if re.match(self._pattern, request) and not self.has_arrived.is_set():
            self.has_arrived.set()
            self._is_over.wait(DEADLINE_S)

    def end(self) -> None:
        """Let the request pass."""
        self._is_over.set()


@contextmanager
def held_up(proxy: Proxy, pattern: str) -> Generator[Hold]:
    """Hold up the first request that matches, at most until the end of the block."""
    proxy.before = hold = Hold(pattern)
    try:
        yield hold
    finally:
        hold.end()
        proxy.before = lambda _request: None


class Site:
    """Arrays in a store, a gateway that reaches the store directly, and the proxy."""

    def __init__(self, lab: Lab, healthy: Gateway, proxy: Proxy, client: httpx.Client) -> None:
        self.lab = lab
        self.healthy = healthy
        self.proxy = proxy
        self._client = client
        self._warm = lab.new_array()

    @contextmanager
    def behind_proxy(self, **environ: str) -> Generator[Gateway]:
        """Run a gateway behind the proxy that has already probed the store."""
        self.proxy.spoil([], Mishap.ERROR)
        told = of_dataset(self.lab.url, self.lab.seaweedfs, endpoint_url=self.proxy.url)
        with forked(told | environ) as made:
            assert self.put(made, f"{self._warm}/c/0", value(SMALL, 0, 0)).is_success
            yield made

    def put(self, gateway: Gateway, key: str, data: bytes | None) -> httpx.Response:
        """Put *data* under *key*, or delete the key if *data* is None."""
        method = "DELETE" if data is None else "PUT"
        return self._client.request(method, f"{gateway.url}/data/{key}", content=data)

    def get(self, gateway: Gateway, key: str) -> bytes | None:
        """Return the bytes under *key*, or None if it is absent."""
        answer = self._client.get(f"{gateway.url}/data/{key}")
        assert answer.status_code in {HTTPStatus.OK, HTTPStatus.NOT_FOUND}, answer.text
        return answer.content if answer.is_success else None


@contextmanager
def opened(seaweedfs: SeaweedFS, folder: Path) -> Generator[Site]:
    """Start the direct gateway and the proxy."""
    lab = Lab(folder, seaweedfs)
    with ExitStack() as stack:
        healthy = stack.enter_context(forked(of_dataset(lab.url, seaweedfs)))
        proxy = stack.enter_context(Proxy(seaweedfs.endpoint_url).running())
        client = stack.enter_context(httpx.Client(timeout=DEADLINE_S))
        yield Site(lab, healthy, proxy, client)


NOWHERE: Final = "0" * 20
"""No snapshot has this id."""
NBYTES: Final = 600
"""Size of a chunk that is too large to be inline in a manifest."""
IMPATIENT: Final = {"SHARDGATE_LIMITS__TIMEOUT_S": "3", "SHARDGATE_LIMITS__DEADLINE_S": "3"}
PATIENT: Final = {"SHARDGATE_LIMITS__TIMEOUT_S": "60", "SHARDGATE_LIMITS__DEADLINE_S": "60"}


class RepositorySite:
    """A repository in SeaweedFS, a gateway that reaches it directly, and the proxy."""

    def __init__(self, place: Place, healthy: Client, proxy: Proxy) -> None:
        self.place = place
        self.healthy = healthy
        self.proxy = proxy
        self.chunk_id = healthy.chunk()
        healthy.commit(put_group("/"), put_array("/a", 4, 4), message="first")
        session_id = begun(healthy)
        document = json.dumps(array_document((2 * NBYTES,), (NBYTES,))).encode()
        for key, data in {"b/zarr.json": document, "b/c/1": b"\x07" * NBYTES}.items():
            assert put(healthy, session_id, key, data).is_success
        assert asked(healthy, session_id, message="b").is_success

    @contextmanager
    def behind_proxy(self, **environ: str) -> Generator[tuple[Gateway, Client]]:
        """Run a gateway behind the proxy that has already probed the store."""
        self.proxy.spoil([], Mishap.ERROR)
        told = configured(self.place, self.proxy.url)
        with forked(told | environ) as made, client_of(made, self.place) as client:
            tried = client.api.send("POST", "/tags", {"name": "t", "snapshot_id": NOWHERE})
            assert tried.status_code == 404, tried.text
            yield made, client


class Commit:
    """A commit by one request, with a message and an idempotency key of its own."""

    steps = 7
    """Least number of requests: reads, manifest, snapshot, log, backup, swap."""
    kind = "commit"

    def __init__(self, site: RepositorySite, number: int) -> None:
        self.site = site
        self.number = number
        self.message = f"{self.kind} {number}"

    def ask(self, client: Client) -> httpx.Response:
        """Send the request to commit."""
        chunk = put_chunks("/a", self.site.chunk_id, [self.number % 2, self.number // 2 % 2])
        return client.ask(chunk, key=f"k{self.number}", message=self.message)

    def commit(self, client: Client) -> str:
        """Commit, and return the snapshot's id."""
        answer = self.ask(client)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["snapshot_id"])

    def demand(self, *, acknowledged: str | None) -> None:
        """Repeat the commit; assert that it is made once, and that all it wrote can be read."""
        made = self.commit(self.site.healthy)
        assert acknowledged in (None, made)
        messages = self.site.healthy.messages()
        assert (messages.count(self.message), messages[0]) == (1, self.message)
        self.demand_values()

    def demand_values(self) -> None:
        """Assert that what the commit wrote can be read."""
        values = self.site.healthy.values("a")
        assert values[self.number % 2 * 2][self.number // 2 % 2 * 2] == 1


class Move(Commit):
    """A commit that moves a group back or forth, beside the chunk."""

    kind = "move"

    def __init__(self, site: RepositorySite, number: int) -> None:
        super().__init__(site, number)
        tree: Any = zarr.open_group(site.healthy.repo.readonly_session("main").store, mode="r")
        there = "there" in tree
        self._target = "here" if there else "there"
        self._source = "/there" if there else "/here"
        if not there and "here" not in tree:
            site.healthy.commit(put_group("/here"), message=f"for {self.message}")

    def ask(self, client: Client) -> httpx.Response:
        """Send the request to commit."""
        move = {"op": "move_node", "path": self._source, "to": f"/{self._target}"}
        chunk = put_chunks("/a", self.site.chunk_id, [self.number % 2, self.number // 2 % 2])
        return client.ask(move, chunk, key=f"k{self.number}", message=self.message)

    def demand_values(self) -> None:
        """Assert that what the commit wrote can be read."""
        super().demand_values()
        store = self.site.healthy.repo.readonly_session("main").store
        tree: Any = zarr.open_group(store, mode="r")
        assert self._target in tree
        assert self._source[1:] not in tree


class Detached(Commit):
    """A commit without a branch."""

    kind = "detached"

    def __init__(self, site: RepositorySite, number: int) -> None:
        super().__init__(site, number)
        self._tip = site.healthy.tip

    def ask(self, client: Client) -> httpx.Response:
        """Send the request to commit."""
        chunk = put_chunks("/a", self.site.chunk_id, [self.number % 2, self.number // 2 % 2])
        more: dict[str, Any] = {"branch": None, "parent_id": self._tip, "allow_empty": True}
        return client.ask(chunk, key=f"k{self.number}", message=self.message, **more)

    def demand(self, *, acknowledged: str | None) -> None:
        """Repeat the commit; assert that it is made once, and that no branch has moved."""
        made = self.commit(self.site.healthy)
        assert acknowledged in (None, made)
        repo = self.site.healthy.repo
        listed = [each["id"] for each in repo.inspect_repo_info()["snapshots"]]
        assert listed.count(made) == 1
        operations = [str(each.kind) for each in repo.ops_log()]
        assert sum(made in each for each in operations) == 1
        assert self.site.healthy.tip == self._tip
        array = zarr.open_array(repo.readonly_session(snapshot_id=made).store, path="a", mode="r")
        assert array[self.number % 2 * 2, self.number // 2 % 2 * 2] == 1


class Setting(Commit):
    """A change of the metadata of the repository."""

    steps = 3
    """Least number of requests: reads, backup, swap."""
    kind = "setting"

    def __init__(self, site: RepositorySite, number: int) -> None:
        super().__init__(site, number)
        self._before = self._count()

    def ask(self, client: Client) -> httpx.Response:
        """Send the request to replace the metadata."""
        body = {"metadata": {"n": self.number}}
        return client.api.send("PUT", "/metadata", body, if_match="*")

    def commit(self, client: Client) -> str:
        """Replace the metadata, and return the entity tag."""
        answer = self.ask(client)
        assert answer.status_code == 200, answer.text
        return answer.headers["etag"]

    def demand(self, *, acknowledged: str | None) -> None:
        """Repeat the change; assert that it is made once."""
        made = self.commit(self.site.healthy)
        assert acknowledged in (None, made)
        assert self.site.healthy.repo.metadata == {"n": self.number}
        assert self._count() == self._before + 1

    def _count(self) -> int:
        operations = self.site.healthy.repo.ops_log()
        return sum("MetadataChanged" in str(each.kind) for each in operations)


class Session(Commit):
    """A session with changes of each kind, whose values no other session writes."""

    steps = 14
    """Least number of requests: seal, list, read, check, commit, mark."""
    kind = "session"

    def __init__(self, site: RepositorySite, number: int) -> None:
        super().__init__(site, number)
        self.session_id = begun(site.healthy)
        changes = {
            "a/c/0/0": self._value * 4,
            "b/c/0": self._value * NBYTES,
            f"g{number}/zarr.json": GROUP,
            "b/c/1": None if number % 2 else b"\x07" * NBYTES,
        }
        for key, data in changes.items():
            assert put(site.healthy, self.session_id, key, data).is_success

    def ask(self, client: Client) -> httpx.Response:
        """Send the request to commit the session."""
        return asked(client, self.session_id, message=self.message)

    def demand_values(self) -> None:
        """Assert that what the commit wrote can be read."""
        store = self.site.healthy.repo.readonly_session("main").store
        group: Any = zarr.open_group(store, mode="r")
        assert f"g{self.number}" in group
        assert np.all(group["a"][:2, :2] == self._value[0])
        values = group["b"][:].reshape(2, NBYTES)
        assert np.all(values[0] == self._value[0])
        assert np.all(values[1] == (0 if self.number % 2 else 7))

    @property
    def _value(self) -> bytes:
        return bytes([1 + self.number % 250])


def configured(place: Place, endpoint_url: str | None = None) -> dict[str, str]:
    """Return the environment of a gateway whose dataset is the repository."""
    server = place.seaweedfs
    url = place.folder.as_uri() if server is None else f"s3://{server.bucket}/{place.folder.name}"
    told = of_dataset(url, server, endpoint_url=endpoint_url)
    told["SHARDGATE_DATASETS__DATA__ADMIN"] = '["public"]'
    return {name.replace("__DATA__", "__REPO__"): value for name, value in told.items()}


@contextmanager
def client_of(gateway: Gateway, place: Place) -> Generator[Client]:
    """Open a client that writes through *gateway*."""
    with httpx.Client(base_url=gateway.url, timeout=DEADLINE_S) as client:
        yield Client(Api(client), place)


@contextmanager
def opened_repository(seaweedfs: SeaweedFS, folder: Path) -> Generator[RepositorySite]:
    """Start the direct gateway, its client and the proxy before a new repository."""
    place = new_place(folder, seaweedfs)
    place.create()
    with (
        forked(configured(place)) as healthy,
        client_of(healthy, place) as client,
        Proxy(seaweedfs.endpoint_url).running() as proxy,
    ):
        yield RepositorySite(place, client, proxy)


def begun(client: Client) -> str:
    """Begin a session and return its id."""
    return str(client.api.do("POST", "/sessions", {}).json()["session_id"])


def put(client: Client, session_id: str, key: str, data: bytes | None) -> httpx.Response:
    """Put *data* under a key of a session, or delete the key if *data* is None."""
    method = "DELETE" if data is None else "PUT"
    url = f"/repo/@session.{session_id}/{key}"
    return client.api.client.request(method, url, content=data)


def asked(client: Client, session_id: str, **body: Any) -> httpx.Response:
    """Send the request to commit a session."""
    return client.api.send("POST", f"/sessions/{session_id}/commit", body)
