"""The model of replicas hashes as nginx does, and reads what the service reads."""

import re
import shlex
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path

import pytest

from tests.benchmarks.scaling import main
from tests.benchmarks.simulated import Catalogue, Page, Replica, Ring, serve
from tests.support.deploy.balancer import Balancer, Received, Recorder, balancing, recording
from tests.support.documents import ROOT

_SHARDS = 200
_MANY = 10**9
"""Bytes of a cache that is never full."""


class _Naming(Recorder):
    """A replica that names the shard of a key by the last segment of its path."""

    def answer(self, request: Received) -> bytes | None:
        if request.target.startswith("/_shard/"):
            name = request.target.rpartition("/")[2]
            return f"HTTP/1.1 204 No Content\r\nX-Shard: {name}\r\n\r\n".encode()
        return super().answer(request)


def _owners(balancer: Balancer) -> list[str]:
    """Return the replica that answers for each shard."""
    before = len(balancer.logged())
    with balancer.client() as client:
        for number in range(_SHARDS):
            assert client.get(f"/data/{number}").status_code == 200
    return [line["replica"].split(", ")[-1] for line in balancer.logged(before, _SHARDS)]


def test_shards_move_as_in_nginx(tmp_path: Path) -> None:
    """The model sends each shard to nginx's replica, and so with one more, or one that died."""
    with ExitStack() as stack:
        replicas = [stack.enter_context(recording(_Naming())) for _ in range(2)]
        balancer = stack.enter_context(balancing(tmp_path, [each.url for each in replicas]))
        with recording(_Naming()) as third:
            urls = [each.url for each in (*replicas, third)]
            before = _owners(balancer)
            balancer.send_to(urls)
            with_third = _owners(balancer)
        when_dead = _owners(balancer)

    addresses = [url.removeprefix("http://") for url in urls]
    assert before == when_dead == _simulated(addresses[:2])
    assert with_third == _simulated(addresses)


def _simulated(servers: Sequence[str]) -> list[str]:
    ring = Ring(servers)
    return [ring.server_of(f"{number}") for number in range(_SHARDS)]


def test_ample_memory_reads_each_index_and_chunk_once() -> None:
    """A replica with ample memory reads each index and chunk once, and nothing a second time."""
    catalogue = Catalogue(arrays=2, shards=2, chunks=2, chunk_nbytes=10, exponent=1.0)
    sides = (range(4),) * 3
    page: Page = [(1, x, y, z) for x, y, z in product(*sides)]
    replicas = {"a:1": Replica(catalogue, _MANY, _MANY, ttl_s=60)}

    first, second, late = (_read(catalogue, replicas, page, now) for now in (0, 1, 61))

    assert first == Counter(request=64, index=8, chunk=64, span=64, metadata=6)
    assert second == Counter(request=64)
    assert late == Counter(request=64, index=8, metadata=6)


def _read(
    catalogue: Catalogue, replicas: dict[str, Replica], page: Page, now: float
) -> Counter[str]:
    return serve(catalogue, replicas, [(now, page)])["a:1"]


def test_full_cache_drops_what_was_used_least_recently() -> None:
    """A cache of one chunk holds the last one."""
    catalogue = Catalogue(arrays=1, shards=1, chunks=2, chunk_nbytes=0, exponent=1.0)
    replica = Replica(catalogue, _MANY, 1024, ttl_s=60)
    chunks = [(0, 0, 0, 0), (0, 0, 0, 1)]

    missed = [replica.answer(chunks[number], "shard", 0) for number in (0, 0, 1, 1, 0)]

    assert missed == [True, False, True, False, True]


def test_views_request_planes_of_64_to_256_chunks() -> None:
    """The first page of a view is a square plane, and each pan half of it, in one array."""
    catalogue = Catalogue(arrays=10**5, shards=22, chunks=16, chunk_nbytes=0, exponent=1.0)
    pages = catalogue.pages(seed=1, pans=2)

    for _ in range(50):
        first, *pans = (next(pages) for _ in range(3))
        edge = round(len(first) ** 0.5)
        assert 8 <= edge <= 16
        assert [len(pan) // edge for pan in pans] == [edge // 2, -(-edge // 2)]
        assert len({*first, *pans[0], *pans[1]}) == sum(map(len, (first, *pans)))
        assert len({(array, z) for array, _, _, z in (*first, *pans[0], *pans[1])}) == 1


def test_documented_command_answers(capsys: pytest.CaptureFixture[str]) -> None:
    """The command of `docs/scaling.md`, with few views, prints the phases and the bounds."""
    page = (ROOT / "docs/scaling.md").read_text("utf-8")
    (command,) = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    _, _, arguments = command.replace("\\\n", "").partition("tests.benchmarks.scaling")

    main([*shlex.split(arguments), "--fill", "0", "--views", "1"])

    printed = capsys.readouterr().out
    phases = re.findall(r"^(all|one dead|one more) ", printed, re.MULTILINE)
    assert phases == ["all", "one dead", "one more"]
    assert printed.count("views a second") == 3
