"""A repository in SeaweedFS, gateways before it, and the proxy that one of them goes through."""

from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

import httpx

from tests.committing import Client, put_array, put_chunks, put_group
from tests.faults.sites import DEADLINE_S
from tests.gateways import Gateway, Start, of_dataset
from tests.seaweedfs import SeaweedFS
from tests.storage.proxy import Mishap, Proxy
from tests.writable_repositories import Api, Place, new_place

NOWHERE: Final = "0" * 20
"""No snapshot has this id."""
LIMITS: Final = {"SHARDGATE_LIMITS__TIMEOUT_S": "3", "SHARDGATE_LIMITS__DEADLINE_S": "3"}


class Site:
    """A repository in SeaweedFS, a gateway that nothing happens to, and the proxy."""

    def __init__(self, place: Place, healthy: Client, proxy: Proxy, start: Start) -> None:
        self.place = place
        self.healthy = healthy
        self.proxy = proxy
        self._start = start
        self.chunk_id = healthy.chunk()
        healthy.commit(put_group("/"), put_array("/a", 4, 4), message="first")

    def change(self, number: int) -> dict[str, Any]:
        """Make a body of a commit, unlike others."""
        chunk = put_chunks("/a", self.chunk_id, [number % 2, number // 2 % 2])
        return {"message": f"commit {number}", "changes": [chunk]}

    @contextmanager
    def behind_proxy(self, **more: str) -> Generator[tuple[Gateway, Client]]:
        """Run a gateway that has found out already what the store can do."""
        self.proxy.spoil([], Mishap.ERROR)
        environ = configured(self.place, self.proxy.url)
        with (
            closing(self._start(environ | LIMITS | more)) as made,
            client_of(made, self.place) as client,
        ):
            tried = client.api.send("POST", "/tags", {"name": "t", "snapshot_id": NOWHERE})
            assert tried.status_code == 404, tried.text
            yield made, client

    def demand(self, number: int, *, acknowledged: str | None) -> str:
        """Ask once more with the same key, and be sure that there is one such commit."""
        self.proxy.spoil([], Mishap.ERROR)
        made = self.healthy.commit(**self.change(number), key=f"k{number}")
        assert acknowledged in (None, made)
        assert self.healthy.messages().count(f"commit {number}") == 1
        assert self.healthy.messages()[0] == f"commit {number}"
        values = self.healthy.values("a")
        assert values[number % 2 * 2][number // 2 % 2 * 2] == 1
        return made


def configured(place: Place, endpoint_url: str | None = None) -> dict[str, str]:
    """Configure a gateway whose dataset is the repository."""
    server = place.seaweedfs
    url = place.folder.as_uri() if server is None else f"s3://{server.bucket}/{place.folder.name}"
    told = of_dataset(url, server, endpoint_url=endpoint_url)
    return {name.replace("__DATA__", "__REPO__"): value for name, value in told.items()}


@contextmanager
def client_of(gateway: Gateway, place: Place) -> Generator[Client]:
    """Write through a gateway."""
    with httpx.Client(base_url=gateway.url, timeout=DEADLINE_S) as client:
        yield Client(Api(client), place)


@contextmanager
def opened_repository(seaweedfs: SeaweedFS, folder: Path, start: Start) -> Generator[Site]:
    """Start what nothing happens to."""
    place = new_place(folder, seaweedfs)
    place.create()
    with (
        closing(start(configured(place))) as healthy,
        client_of(healthy, place) as client,
        Proxy(seaweedfs.endpoint_url).running() as proxy,
    ):
        yield Site(place, client, proxy, start)
