"""A store that is reached directly by one gateway, and by others through a proxy that spoils."""

from collections.abc import Generator
from contextlib import ExitStack, closing, contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Final

import httpx

from tests.gateways import Gateway, Start, of_dataset
from tests.labs import SMALL, Lab, value
from tests.seaweedfs import SeaweedFS
from tests.storage.proxy import Mishap, Proxy

DEADLINE_S: Final = 60
"""Nothing hangs: all is answered by then."""


class Site:
    """A store with arrays in it, a gateway that nothing happens to, and the proxy."""

    def __init__(
        self, lab: Lab, healthy: Gateway, proxy: Proxy, start: Start, client: httpx.Client
    ) -> None:
        self.lab = lab
        self.healthy = healthy
        self.proxy = proxy
        self._start = start
        self._client = client
        self._warm = lab.new_array()

    @contextmanager
    def behind_proxy(self, **environ: str) -> Generator[Gateway]:
        """Run a gateway that has found out already what the store can do."""
        self.proxy.spoil([], Mishap.ERROR)
        told = of_dataset(self.lab.url, self.lab.seaweedfs, endpoint_url=self.proxy.url)
        with closing(self._start(told | environ)) as made:
            assert self.put(made, f"{self._warm}/c/0", value(SMALL, 0, 0)).is_success
            yield made

    def put(self, gateway: Gateway, key: str, data: bytes | None) -> httpx.Response:
        """Put *data* under *key*, or take the key away."""
        method = "DELETE" if data is None else "PUT"
        return self._client.request(method, f"{gateway.url}/data/{key}", content=data)

    def get(self, gateway: Gateway, key: str) -> bytes | None:
        """Read what is under *key*."""
        answer = self._client.get(f"{gateway.url}/data/{key}")
        assert answer.status_code in {HTTPStatus.OK, HTTPStatus.NOT_FOUND}, answer.text
        return answer.content if answer.is_success else None


@contextmanager
def opened(seaweedfs: SeaweedFS, folder: Path, start: Start) -> Generator[Site]:
    """Start the gateway and the proxy."""
    lab = Lab(folder, seaweedfs)
    with ExitStack() as stack:
        healthy = stack.enter_context(closing(start(of_dataset(lab.url, seaweedfs))))
        proxy = stack.enter_context(Proxy(seaweedfs.endpoint_url).running())
        client = stack.enter_context(httpx.Client(timeout=DEADLINE_S))
        yield Site(lab, healthy, proxy, start, client)
