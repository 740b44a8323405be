"""Three replicas before SeaweedFS, behind nginx, deployed as an operator would."""

import asyncio
import itertools
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack
from hashlib import sha256
from math import inf
from pathlib import Path
from typing import Any, Final

import fsspec
import httpx
import icechunk
import numpy as np
import pytest
import zarr
from zarr.storage import FsspecStore

from tests.benchmarks.data import chunk_key, many_keys, write_many_shards
from tests.support.clients.precomputed.volumes import Scale, sharding, write_scale
from tests.support.crowds import Step, impossible, play
from tests.support.deploy.balancer import TOKEN, Balancer, balancing
from tests.support.gateways import Environ, Gateway, forked, of_dataset
from tests.support.labs import SMALL, Lab
from tests.support.processes import free_ports, wait_until
from tests.support.seaweedfs import SeaweedFS

SHAPE: Final = (64, 64)
SHARD: Final = 16
CHUNK: Final = 4
ARRAY: Final[dict[str, Any]] = {"shards": (SHARD,) * 2, "chunks": (CHUNK,) * 2, "compressors": None}
MANY: Final = (4, 4, 4)
"""Shards of the array ``many`` in each dimension; each index has 512 KiB."""


def write_containers(root: Path) -> None:
    """Write ``array``, ``many``, ``volume``, and ``array`` in ``repository``."""
    values = np.random.default_rng(7).integers(1, 256, SHAPE, dtype="u1")
    zarr.create_array(root / "array", data=values, **ARRAY)
    write_many_shards(root / "many", MANY)
    _write_volume(root / "volume")
    _write_repository(root / "repository", values)


def _write_volume(path: Path) -> None:
    how = sharding((2, 1, 3), index="gzip", data="gzip")
    values = np.random.default_rng(8).integers(0, 256, (32, 32, 32, 1), dtype="u1")
    write_scale(Scale(values, how, chunk=(8, 8, 8), resolution=(1, 1, 1)), path)


def _write_repository(path: Path, values: Any) -> None:
    storage = icechunk.local_filesystem_storage(str(path))
    session = icechunk.Repository.create(storage).writable_session("main")
    zarr.create_array(session.store, name="array", data=values, **ARRAY)
    session.commit("written")


def by_shard(lead: str) -> dict[Any, list[str]]:
    """Return the keys of the inner chunks of the array below *lead*, by shard."""
    per_shard = SHARD // CHUNK
    keys: dict[Any, list[str]] = {}
    for coords in itertools.product(*(range(size // CHUNK) for size in SHAPE)):
        shard = tuple(at // per_shard for at in coords)
        keys.setdefault(shard, []).append(f"{lead}/{chunk_key(coords)}")
    return keys


def by_shard_of_volume() -> dict[Any, list[str]]:
    """Return the keys of the volume's chunks by shard: eight neighbours in Morton order."""
    keys: dict[Any, list[str]] = {}
    for x, y, z in itertools.product(range(4), repeat=3):
        bits = (at >> bit & 1 for bit in range(2) for at in (x, y, z))
        code = sum(value << shift for shift, value in enumerate(bits))
        bounds = (f"{8 * at}-{8 * at + 8}" for at in (x, y, z))
        keys.setdefault(code >> 3, []).append(f"volume/1_1_1/{'_'.join(bounds)}")
    return keys


def keys_of_many() -> list[str]:
    """Return the key of one chunk in each shard of ``many``."""
    return [f"many/{key}" for key in many_keys(MANY)]


_BY_TENSORSTORE: Final = """
import sys, tensorstore
spec = {"driver": "zarr3", "kvstore": {"driver": "http", "base_url": sys.argv[1]}}
sys.stdout.buffer.write(tensorstore.open(spec).result().read().result().tobytes())
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, seaweedfs: SeaweedFS) -> Lab:
    """Write the containers and upload them."""
    folder = tmp_path_factory.mktemp("deployed")
    write_containers(folder)
    seaweedfs.upload_folder(folder, folder.name)
    return Lab(folder, seaweedfs)


@pytest.fixture(scope="module")
def environ(lab: Lab) -> Environ:
    """Return the environment of all replicas, with a private dataset beside ``data``."""
    digest = sha256(TOKEN.encode()).hexdigest()
    return of_dataset(lab.url, lab.seaweedfs) | {
        "SHARDGATE_DATASETS__PRIVATE__URL": lab.url,
        "SHARDGATE_SERVER__TRUSTED_PROXIES": '["127.0.0.0/8"]',
        "SHARDGATE_DATASETS__PRIVATE__READ": '["viewer"]',
        "SHARDGATE_CALLERS__VIEWER__TOKEN_SHA256": f'["{digest}"]',
    }


@pytest.fixture(scope="module")
def replicas(environ: Environ) -> Generator[list[Gateway]]:
    """Start three replicas."""
    with ExitStack() as stack:
        yield [stack.enter_context(forked(environ)) for _ in range(3)]


@pytest.fixture(scope="module")
def balancer(
    tmp_path_factory: pytest.TempPathFactory, replicas: list[Gateway]
) -> Generator[Balancer]:
    """Start nginx before the replicas."""
    folder: Path = tmp_path_factory.mktemp("nginx")
    with balancing(folder, [replica.url for replica in replicas]) as running:
        yield running


def routed(balancer: Balancer, keys: Iterable[str]) -> dict[str, str]:
    """Read *keys* over one connection; return the replica that answered each."""
    before, wanted = len(balancer.logged()), list(keys)
    with balancer.client(http2=True) as client:
        for key in wanted:
            answer = client.get(f"/data/{key}")
            assert answer.status_code == 200, answer.text
    lines = balancer.logged(before, len(wanted))
    return {line["path"].removeprefix("/data/"): line["replica"] for line in lines}


def replicas_of(balancer: Balancer, keys: dict[Any, list[str]]) -> list[set[str]]:
    """Return the replicas that answered some keys of each shard."""
    some = [each[::5] for each in keys.values()]
    found = routed(balancer, (key for each in some for key in each))
    return [{found[key] for key in each} for each in some]


@pytest.mark.parametrize(
    "keys",
    [by_shard("array"), by_shard_of_volume(), by_shard("repository/@branch.main/array")],
    ids=["zarr", "precomputed", "icechunk"],
)
def test_all_chunks_of_a_shard_reach_one_replica(
    balancer: Balancer, keys: dict[Any, list[str]]
) -> None:
    """All chunks of a shard are answered by one replica, and shards by several, in each format."""
    found = replicas_of(balancer, keys)

    assert all(len(replicas) == 1 for replicas in found)
    assert len(set.union(*found)) > 1


def test_token_does_not_change_the_replica_of_a_shard(balancer: Balancer) -> None:
    """Requests for a private chunk reach one replica with a token in path or header, or none."""
    keys = [f"private/{each[0]}" for each in by_shard("array").values()]
    bearer = {"authorization": f"Bearer {TOKEN}"}
    with balancer.client(http2=True) as client:
        before = len(balancer.logged())
        for key in keys:
            assert client.get(f"/{key}").status_code == 401
            assert client.get(f"/{key}", headers=bearer).status_code == 200
            assert client.get(f"/~{TOKEN}/{key}").status_code == 200

    replicas = [line["replica"] for line in balancer.logged(before, 3 * len(keys))]
    assert replicas[::3] == replicas[1::3] == replicas[2::3]
    assert TOKEN not in balancer.output


def test_shards_are_spread_over_all_replicas(balancer: Balancer) -> None:
    """Each of three replicas answers for more than a tenth of 64 shards."""
    found = Counter(routed(balancer, keys_of_many()).values())

    assert len(found) == 3
    assert min(found.values()) > 64 / 10


def test_three_replicas_share_the_memory_of_indexes(tmp_path: Path, environ: Environ) -> None:
    """Each of three replicas holds less than 0.6 of the index memory of a single one."""
    with ExitStack() as stack:
        one, *three = [stack.enter_context(forked(environ)) for _ in range(4)]
        balancer = stack.enter_context(balancing(tmp_path, [one.url]))
        [alone] = held(balancer, [one])
        balancer.send_to([replica.url for replica in three])
        shares = held(balancer, three)

    assert alone > 30 * 2**20  # 64 indexes of 512 KiB
    assert max(shares) < 0.6 * alone
    assert sum(shares) < 1.3 * alone


def held(balancer: Balancer, replicas: Sequence[Gateway]) -> list[int]:
    """Read a chunk of every shard; return by how much each replica's memory grew."""
    for replica in replicas:  # what it takes to speak to the store is no index
        httpx.get(f"{replica.url}/data/many/zarr.json", timeout=20).raise_for_status()
    before = [replica.resident_nbytes for replica in replicas]
    routed(balancer, keys_of_many())
    routed(balancer, keys_of_many())
    return [replica.resident_nbytes - at for replica, at in zip(replicas, before, strict=True)]


def test_killed_replica_loses_no_acknowledged_write(
    environ: Environ, lab: Lab, tmp_path: Path
) -> None:
    """A replica killed under load loses no acknowledged write."""
    name, choice = lab.new_array(), random.Random(7)
    plans = [
        [Step(choice.randrange(SMALL.chunks), is_delete=False, gateway=0) for _ in range(20)]
        for _ in range(6)
    ]
    killed_at = inf
    with ExitStack() as stack:
        replicas = [stack.enter_context(forked(environ)) for _ in range(3)]
        balancer = stack.enter_context(balancing(tmp_path, [each.url for each in replicas]))

        async def kill() -> None:
            nonlocal killed_at
            while len(lines := balancer.logged()) < 60:  # noqa: ASYNC110  it is a file
                await asyncio.sleep(0.01)
            doomed = next(each for each in replicas if each.url.endswith(lines[-1]["replica"]))
            await asyncio.to_thread(doomed.kill)
            killed_at = time.monotonic()
            replicas.remove(doomed)

        urls = [balancer.url]
        writes = asyncio.run(play(urls, name, plans, kill, trusted=balancer.tls()))
        seen = [read_back(each, balancer, name) for each in (*urls, *(r.url for r in replicas))]

    assert len(replicas) == 2
    assert any(write.begin < killed_at < write.end for write in writes)
    for found in (*seen, lab.read(name)):
        assert impossible(writes, found) == []


def test_requests_fail_only_while_no_replica_runs(tmp_path: Path) -> None:
    """While one of two replicas is dead, every request succeeds at the other one.

    The first one that restarts after both have died answers every read; both take writes again.
    """
    root = tmp_path / "data"
    root.mkdir()
    paths = [f"/data/object-{number}" for number in range(50)]
    ports = free_ports(2)
    with ExitStack() as stack:

        def start(port: int) -> Gateway:
            environ = of_dataset(str(root)) | {"SHARDGATE_SERVER__PORT": str(port)}
            return stack.enter_context(forked(environ))

        first, second = map(start, ports)
        balancer = stack.enter_context(balancing(tmp_path, [first.url, second.url]))
        client = stack.enter_context(balancer.client())

        def written() -> tuple[set[int], set[str]]:
            before = len(balancer.logged())
            statuses = {client.put(path, content=b"bytes").status_code for path in paths}
            return statuses, {line["replica"] for line in balancer.logged(before, len(paths))}

        def read() -> set[int]:
            return {client.get(path).status_code for path in paths}

        alive = written()
        first.kill()
        by_second = written()
        assert read() == {200}
        second.kill()
        assert read() == {503}
        start(ports[0])
        assert read() == {200}
        start(ports[1])
        wait_until(lambda: written() == alive)

    hosts = [each.url.removeprefix("http://") for each in (first, second)]
    assert alive == ({200}, set(hosts))
    assert by_second == ({200}, {hosts[1]})


def read_back(url: str, balancer: Balancer, name: str) -> dict[str, bytes | None]:
    """Read all chunks that may have been written."""
    found: dict[str, bytes | None] = {}
    with httpx.Client(base_url=f"{url}/data/", verify=balancer.tls(), timeout=20) as client:
        for key in (f"{name}/c/{number}" for number in range(SMALL.chunks)):
            answer = client.get(key)
            assert answer.status_code in (200, 404), answer.text
            found[key] = answer.content if answer.is_success else None
    return found


def test_zarr_python_reads_through_nginx(balancer: Balancer, lab: Lab) -> None:
    """zarr-python reads the stored values of an array through nginx."""
    files = fsspec.filesystem("https", asynchronous=True, ssl=balancer.tls())
    store = FsspecStore(files, read_only=True, path=f"{balancer.url}/data/array")

    assert np.array_equal(opened(store), opened(lab.folder / "array"))


def opened(store: Any) -> Any:
    """Read an array with zarr-python."""
    return zarr.open_array(store, mode="r")[:]


def test_tensorstore_reads_through_nginx_over_http_2(balancer: Balancer, lab: Lab) -> None:
    """TensorStore reads the stored values of an array through nginx over HTTP/2."""
    before = len(balancer.logged())
    environ = os.environ | {"TENSORSTORE_CA_BUNDLE": str(balancer.ca_file)}
    command = [sys.executable, "-c", _BY_TENSORSTORE, f"{balancer.url}/data/array"]
    found = subprocess.run(command, env=environ, stdout=subprocess.PIPE, check=True).stdout

    assert found == opened(lab.folder / "array").tobytes()
    assert {line["protocol"] for line in balancer.logged(before)} == {"HTTP/2.0"}


def test_boto3_reads_writes_and_lists_through_nginx(balancer: Balancer) -> None:
    """boto3 puts, gets and lists an object of 8 MiB through nginx."""
    client = balancer.s3_client()
    body = os.urandom(8 * 2**20)
    client.put_object(Bucket="data", Key="objects/a b%2Fc/é", Body=body)

    assert client.get_object(Bucket="data", Key="objects/a b%2Fc/é")["Body"].read() == body
    [listed] = client.list_objects_v2(Bucket="data", Prefix="objects/")["Contents"]
    assert (listed["Key"], listed["Size"]) == ("objects/a b%2Fc/é", len(body))


STORED: Final = "/data/array/c/0/0"
GZIP: Final = "/data/volume/1_1_1/0-8_0-8_0-8"


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("GET", STORED, {"origin": "https://viewer.example"}),
        ("HEAD", STORED, {}),
        ("GET", STORED, {"range": "bytes=2-5"}),
        ("GET", STORED, {"range": "bytes=99-"}),
        ("GET", STORED, {"if-none-match": "*"}),
        ("GET", STORED, {"if-match": '"another"'}),
        ("GET", GZIP, {"accept-encoding": "gzip"}),
        ("GET", GZIP, {"accept-encoding": "identity"}),
        ("GET", "/data/array/c/99/99", {}),
        ("GET", "/data/array//c/0/0", {}),
        ("GET", "/data/array/c%2F0%2F0", {}),
        ("GET", "/none/c/0/0", {}),
        ("OPTIONS", STORED, {"access-control-request-headers": "range", "origin": "https://a.b"}),
        ("DELETE", "/data/array/c/99/99", {}),
        ("GET", "/data/", {}),
        ("GET", "/api/datasets", {}),
    ],
)
def test_response_through_nginx_equals_that_of_a_replica(
    balancer: Balancer, replicas: list[Gateway], method: str, path: str, headers: dict[str, str]
) -> None:
    """Status, headers and body of a response through nginx equal those of a replica."""
    with balancer.client(http2=True) as client:
        through = answered(client, method, path, headers)
    with httpx.Client(base_url=replicas[0].url, timeout=20) as client:
        direct = answered(client, method, path, headers)

    assert through == direct


def answered(
    client: httpx.Client, method: str, path: str, headers: dict[str, str]
) -> tuple[int, list[tuple[str, str]], bytes]:
    """Send a request; return its status, body and the headers that do not vary."""
    passing = {"date", "server", "connection", "x-request-id"}
    with client.stream(method, path, headers=headers) as answer:
        body = b"".join(answer.iter_raw())
    kept = [each for each in answer.headers.multi_items() if each[0] not in passing]
    return answer.status_code, sorted(kept), body
