"""The API of one repository, or of a bucket of them."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from app.settings import CacheSettings, DatasetSettings, Settings
from tests.support.serving import serving


@dataclass(frozen=True)
class Api:
    """The control plane of the dataset ``repo``."""

    client: httpx.Client

    def answer(self, route: str, **query: Any) -> httpx.Response:
        """Ask for a route of the repository."""
        wanted = {name.rstrip("_"): value for name, value in query.items() if value is not None}
        return self.client.get(f"/api/datasets/repo{route}", params=wanted)

    def tell(self, route: str, **query: Any) -> Any:
        """Ask for a route, which must be there."""
        answer = self.answer(route, **query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def pages(self, route: str, member: str, **query: Any) -> list[Any]:
        """Ask for all pages of a list."""
        items, after = [], None
        while True:
            page = self.tell(route, after=after, **query)
            items += page[member]
            if (after := page["next"]) is None:
                return items


@contextmanager
def serve(folder: Path, **more: Any) -> Generator[Api]:
    """Serve *folder*; what can change is asked for anew."""
    datasets = {"repo": DatasetSettings(url=folder.resolve().as_uri(), **more)}
    with (
        serving(Settings(datasets=datasets, cache=CacheSettings(ttl_s=1e-6))) as url,
        httpx.Client(base_url=url, timeout=20) as client,
    ):
        yield Api(client)
