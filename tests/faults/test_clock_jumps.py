"""The clock of a gateway jumps while it runs: it tells no lie, and all is well afterwards."""

import time
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Final

import httpx
import pytest

from tests.gateways import JUMPS_S, Gateway, Start, of_dataset
from tests.labs import SMALL, Lab, value
from tests.seaweedfs import SeaweedFS

HOURS_S: Final = 5 * 3600
OLD: Final = {at: value(SMALL, 1, at) for at in range(SMALL.chunks)}
NEW: Final = value(SMALL, 2, 0)
JUMPED_S: Final = 0.1
TTL_S: Final = 0.3


class Site:
    """An array, and a gateway whose clock jumps ahead or back, and then is right again."""

    def __init__(self, lab: Lab, gateway: Gateway) -> None:
        self.lab = lab
        self.name = lab.new_array(SMALL, OLD)
        self._gateway = gateway
        self._client = httpx.Client(base_url=f"{gateway.url}/data/{self.name}", timeout=30)

    def jump(self) -> None:
        """Let the clock jump."""
        self._gateway.jump()
        time.sleep(JUMPED_S)

    def get(self, chunk: int) -> httpx.Response:
        """Read a chunk."""
        return self._client.get(f"/c/{chunk}")

    def put(self, chunk: int, data: bytes) -> httpx.Response:
        """Write a chunk."""
        return self._client.put(f"/c/{chunk}", content=data)

    def close(self) -> None:
        """Ask no more."""
        self._client.close()


@pytest.fixture(params=[HOURS_S, -HOURS_S], ids=["ahead", "back"])
def jumps(request: pytest.FixtureRequest) -> str:
    """Choose where the clock jumps, and back."""
    return f"{request.param} 0"


@pytest.fixture(params=["folder", "seaweedfs"])
def site(
    request: pytest.FixtureRequest, tmp_path: Path, start: Start, jumps: str
) -> Generator[Site]:
    """Start the gateway, whose caches forget soon."""
    is_remote = request.param == "seaweedfs"
    store: SeaweedFS | None = request.getfixturevalue("seaweedfs") if is_remote else None
    lab = Lab(tmp_path, store)
    environ = of_dataset(lab.url, store, ttl_s=TTL_S) | {JUMPS_S: jumps}
    with (
        closing(start(environ | {"SHARDGATE_CACHE__CHUNK_BYTES": "0"})) as gateway,
        closing(Site(lab, gateway)) as site,
    ):
        yield site


def test_a_jump_makes_no_chunk_absent(site: Site) -> None:
    """A store may refuse signatures that are not of its time; afterwards it takes them again."""
    assert site.get(1).content == OLD[1]
    site.jump()
    during = [site.get(at) for at in (1, 2)]
    written = site.put(0, NEW)
    site.jump()

    assert {answer.status_code for answer in during} <= {200, 403, 503}
    assert all(each.content == OLD[at] for at, each in enumerate(during, 1) if each.is_success)
    assert site.get(2).content == OLD[2]
    assert site.get(0).content == (NEW if written.is_success else OLD[0])
    assert site.put(0, NEW).is_success
    assert site.lab.read(site.name)[f"{site.name}/c/0"] == NEW


@pytest.mark.parametrize("site", ["folder"], indirect=True)
def test_what_is_kept_is_kept_no_longer(site: Site) -> None:
    """The time that answers are kept for does not count by the clock that jumps."""
    site.get(1)
    site.jump()
    other = site.lab.folder / site.name / "c"
    for shard in other.iterdir():
        shard.unlink()
    time.sleep(TTL_S)

    assert site.get(1).status_code == 404
