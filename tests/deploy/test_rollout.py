"""Two versions of the service take turns behind nginx while clients read and write."""

import asyncio
import io
import os
import random
import shutil
import subprocess
import tarfile
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from hashlib import md5, sha256
from pathlib import Path
from typing import Any, Final

import httpx
import icechunk
import numpy as np
import pytest
import zarr

from tests.support.deploy.balancer import TOKEN, Balancer, balancing
from tests.support.gateways import Environ, Gateway, gateway, of_dataset
from tests.support.labs import SMALL, Lab, value
from tests.support.processes import ROOT, free_ports, wait_until
from tests.support.seaweedfs import SeaweedFS
from tests.support.writable_repositories import in_seaweedfs

MERGES: Final = 50
"""How many merges before this version the other one is, unless BEFORE names a commit."""
WORKERS: Final = 3
"""Clients of each kind."""
ROUNDS: Final = 30
"""Requests of each kind in each state of the replicas."""
LENGTH: Final = 1024
"""Bytes of a chunk in the repository, which has a file of its own."""
CHUNKS: Final = 2048
SESSION_CHUNKS: Final = 300
"""Chunks of the session that is open all the time; others commit the last ones."""
BEARER: Final = {"authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the package as it was before; skip without the history of git."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    git = ["git", "-C", str(ROOT)]
    named = os.environ.get("BEFORE")
    found = ["rev-list", "--merges", "--max-count=1", f"--skip={MERGES - 1}", "HEAD"]
    listed = subprocess.run([*git, *found], capture_output=True, text=True, check=False)
    commit = named or listed.stdout.strip()
    if not commit:
        pytest.skip(f"the history of git has no {MERGES} merges")
    archive = subprocess.run([*git, "archive", commit, "app"], capture_output=True, check=True)
    folder = tmp_path_factory.mktemp("before")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as members:
        members.extractall(folder, filter="data")
    return folder / "app"


class Replica:
    """A place where one of the versions runs, always at the same port."""

    def __init__(self, environ: Environ, port: int) -> None:
        self._environ = {**environ, "SHARDGATE_SERVER__PORT": str(port)}
        self._stack = ExitStack()
        self._running: Gateway | None = None
        self.url = f"http://127.0.0.1:{port}"

    def start(self, code: Path) -> None:
        """Start the version whose package is in the folder *code*."""
        self._running = self._stack.enter_context(
            gateway({**self._environ, "PYTHONPATH": str(code)})
        )

    def stop(self) -> None:
        """End it by SIGTERM."""
        if self._running is not None:
            self._running.terminate()
            assert self._running.wait(60)
        self._stack.close()


class Clients:
    """Clients of nginx; each answer is checked."""

    def __init__(self, balancer: Balancer, name: str, expected: Any) -> None:
        self.http = httpx.AsyncClient(base_url=balancer.url, verify=balancer.tls(), timeout=90)
        self.name = name
        self.expected = expected
        self.kinds = (self.read, self.write, self.write_in_session, self.upload, self.commit)
        self.done = Counter[str]()
        self.faults: list[str] = []
        self.repeated: list[str] = []
        self.state = ["old", "old"]
        """The version of each replica."""
        self.written: dict[str, bytes] = {}
        """Last answered bytes of each key."""
        self.tokens: list[dict[str, Any]] = []
        self.revoked: list[dict[str, Any]] = []
        self.session_id = ""
        self.in_session: dict[int, bytes] = {}
        """Answered chunks of the session that is open all the time."""
        self.committed: dict[int, bytes] = {}

    async def send(
        self, method: str, path: str, expected: int = 200, **options: Any
    ) -> httpx.Response:
        """Send a request, and note a failure."""
        what = f"{method} {path}"
        try:
            answer = await self.http.request(method, path, **options)
        except httpx.TransportError as error:
            self.faults.append(f"{self.state}: {what}: {error!r}")
            return httpx.Response(599)
        if answer.status_code == 503 and "old stops" in self.state:
            # It did not tell nginx beforehand; clients repeat what got 503.
            self.repeated.append(what)
            await asyncio.sleep(0.1)
            return await self.send(method, path, expected, **options)
        if answer.status_code != expected:
            self.faults.append(f"{self.state}: {what}: {answer.status_code} {answer.text[:300]}")
        return answer

    def check(self, answer: httpx.Response, body: bytes, what: str) -> None:
        """Note other bytes than *body*."""
        if answer.is_success and answer.content != body:
            self.faults.append(f"{self.state}: {what}: other bytes")

    async def read(self, number: int) -> None:
        """Read a chunk, plainly or by a token."""
        row, column = random.Random(number).choices(range(16), k=2)
        token = self.tokens[-1 - number // 2 % 2]["token"]
        lead = f"/~{token}/private" if number % 2 else "/data"
        answer = await self.send("GET", f"{lead}/array/c/{row}/{column}")
        chunk = self.expected[4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
        self.check(answer, chunk.tobytes(), "a chunk")

    async def write(self, number: int) -> None:
        """Write an inner chunk."""
        key = f"{self.name}/c/{number % (SMALL.chunks - SMALL.chunks % WORKERS)}"
        body = value(SMALL, 1, number)
        if (await self.send("PUT", f"/data/{key}", content=body)).is_success:
            self.written[key] = body

    async def write_in_session(self, number: int) -> None:
        """Write a chunk of the open session, and read it."""
        place = f"/lab/@session.{self.session_id}/array/c/{number % SESSION_CHUNKS}"
        body = sha256(b"%d" % number).digest() * (LENGTH // 32)
        if (await self.send("PUT", place, content=body)).is_success:
            self.in_session[number % SESSION_CHUNKS] = body
        self.check(await self.send("GET", place), body, "a chunk of the session")

    async def upload(self, number: int) -> None:
        """Upload an object in parts."""
        path = f"/data/objects/{number}"
        begun = await self.send("POST", f"{path}?uploads")
        upload_id = begun.text.partition("<UploadId>")[2].partition("<")[0]
        await self.send("PUT", f"{path}?partNumber=1&uploadId={upload_id}", content=b"part")
        part = f"<Part><PartNumber>1</PartNumber><ETag>{md5(b'part').hexdigest()}</ETag></Part>"  # noqa: S324
        body = f"<CompleteMultipartUpload>{part}</CompleteMultipartUpload>"
        await self.send("POST", f"{path}?uploadId={upload_id}", content=body)
        self.check(await self.send("GET", path), b"part", "an uploaded object")

    async def commit(self, number: int) -> None:
        """Begin a session, write a chunk, and commit."""
        begun = await self.begin()
        body = sha256(b"of its own %d" % number).digest() * (LENGTH // 32)
        key = CHUNKS - 1 - number
        await self.send("PUT", f"/lab/@session.{begun}/array/c/{key}", content=body)
        if (await self.end(begun, f"commit {number}")).is_success:
            self.committed[key] = body

    async def begin(self) -> str:
        """Begin a session."""
        answer = await self.send("POST", "/api/datasets/lab/sessions", 201, json={"branch": "main"})
        return str(answer.json()["session_id"]) if answer.is_success else ""

    async def end(self, session_id: str, message: str) -> httpx.Response:
        """Commit a session."""
        path = f"/api/datasets/lab/sessions/{session_id}/commit"
        return await self.send("POST", path, 201, json={"message": message})

    async def make_token(self) -> None:
        """Make a token."""
        answer = await self.send(
            "POST", "/api/tokens", 201, headers=BEARER, json={"dataset": "private"}
        )
        if answer.is_success:
            self.tokens.append(answer.json())

    async def revoke_token(self) -> None:
        """Revoke the oldest token, which no reader uses."""
        token = self.tokens.pop(0)
        await self.send("DELETE", f"/api/tokens/{token['token_id']}", 204, headers=BEARER)
        self.revoked.append(token)

    @asynccontextmanager
    async def working(self) -> AsyncGenerator[None]:
        """Send requests of all kinds during the block; each worker has numbers of its own."""
        is_over = False

        async def repeat(send: Callable[[int], Awaitable[None]], worker: int) -> None:
            number = worker
            while not is_over:
                await send(number)
                number += WORKERS
                self.done[send.__name__] += 1

        async with asyncio.TaskGroup() as group:
            for send in self.kinds:
                for worker in range(WORKERS):
                    group.create_task(repeat(send, worker))
            try:
                yield
            finally:
                is_over = True

    async def some(self) -> None:
        """Wait until each kind of request was sent some times more."""
        wanted = {send.__name__: self.done[send.__name__] + ROUNDS for send in self.kinds}
        while any(self.done[kind] < count for kind, count in wanted.items()):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, seaweedfs: SeaweedFS) -> Lab:
    """Upload the array that is read, of distinct chunks."""
    folder = tmp_path_factory.mktemp("rollout")
    values = np.arange(64 * 64, dtype="<u8").reshape(64, 64)
    zarr.create_array(
        folder / "array", data=values, chunks=(4, 4), shards=(16, 16), compressors=None
    )
    seaweedfs.upload_folder(folder, folder.name)
    return Lab(folder, seaweedfs)


def new_repository(seaweedfs: SeaweedFS, prefix: str) -> icechunk.Repository:
    """Create a repository with an array of chunks that have files of their own."""
    repo = icechunk.Repository.create(in_seaweedfs(seaweedfs, prefix))
    session = repo.writable_session("main")
    options: Any = {"chunks": (LENGTH,), "dtype": "u1", "compressors": None, "fill_value": 0}
    zarr.create_array(session.store, name="array", shape=(LENGTH * CHUNKS,), **options)
    session.commit("an empty array")
    return repo


def environ_of(lab: Lab, seaweedfs: SeaweedFS, name: str) -> dict[str, str]:
    """Return the environment of all replicas, which share the folder *name* of the bucket."""
    place = f"s3://{seaweedfs.bucket}/{name}"
    return of_dataset(lab.url, seaweedfs, ttl_s=1) | {
        "SHARDGATE_DATASETS__PRIVATE__URL": lab.url,
        "SHARDGATE_DATASETS__PRIVATE__READ": '["viewer"]',
        "SHARDGATE_DATASETS__LAB__URL": f"{place}-repository",
        "SHARDGATE_DATASETS__LAB__WRITABLE": "true",
        "SHARDGATE_CALLERS__VIEWER__TOKEN_SHA256": f'["{sha256(TOKEN.encode()).hexdigest()}"]',
        "SHARDGATE_TOKENS__SECRET": "a secret that all replicas share",
        "SHARDGATE_TOKENS__URL": f"{place}-records",
        "SHARDGATE_SERVER__TRUSTED_PROXIES": '["127.0.0.0/8"]',
    }


def demand_tokens(replica: Replica, clients: Clients) -> None:
    """Assert that *replica* takes all tokens that are valid, and soon none that were revoked."""

    def statuses(tokens: list[dict[str, Any]]) -> set[int]:
        urls = [f"{replica.url}{each['paths']['private']}array/zarr.json" for each in tokens]
        return {httpx.get(url, timeout=60).status_code for url in urls}

    assert statuses(clients.tokens) == {200}
    wait_until(lambda: statuses(clients.revoked) == {401})


async def change(replicas: list[Replica], clients: Clients, version: str, code: Path) -> None:
    """Let each replica become *version*, one after the other, while *clients* work."""
    for number, replica in enumerate(replicas):
        clients.state[number] += " stops"
        await asyncio.to_thread(replica.stop)
        clients.state[number] = f"{version} starts"
        await asyncio.to_thread(replica.start, code)
        clients.state[number] = version
        await clients.make_token()
        await clients.revoke_token()
        await clients.some()
        for each in replicas:
            await asyncio.to_thread(demand_tokens, each, clients)


@pytest.mark.soak
async def test_roll_out_and_back_fails_no_request(
    before: Path, lab: Lab, seaweedfs: SeaweedFS, tmp_path: Path
) -> None:
    """Replicas that change their version one by one, and back, fail and lose nothing.

    Sessions, uploads and tokens of one version go on in the other.
    """
    name = lab.new_array()
    repo = new_repository(seaweedfs, f"{tmp_path.name}-repository")
    environ = environ_of(lab, seaweedfs, tmp_path.name)
    with ExitStack() as stack:
        replicas = [Replica(environ, port) for port in free_ports(2)]
        for each in replicas:
            stack.callback(each.stop)
            each.start(before)
        balancer = stack.enter_context(balancing(tmp_path, [each.url for each in replicas]))
        clients = Clients(balancer, name, zarr.open_array(lab.folder / "array")[:])
        async with clients.http:
            for _ in range(3):
                await clients.make_token()
            clients.session_id = await clients.begin()
            async with clients.working():
                await clients.some()
                await change(replicas, clients, "new", ROOT / "app")
                await change(replicas, clients, "old", before)
            await clients.end(clients.session_id, "the session that was open all the time")

    assert clients.faults == [], "\n".join([str(clients.done), *clients.repeated, *clients.faults])
    found = lab.read(name)
    assert {key: found[key] for key in clients.written} == clients.written
    array: Any = zarr.open_group(repo.readonly_session("main").store, mode="r")["array"]
    rows = array[:].reshape(CHUNKS, LENGTH)
    written = clients.in_session | clients.committed
    assert {at: rows[at].tobytes() for at in written} == written
    messages = [each.message for each in repo.ancestry(branch="main")]
    assert max(Counter(messages).values()) == 1
