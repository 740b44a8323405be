"""An Icechunk repository that both the service and the icechunk library write."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import icechunk

from shardgate.settings import CacheSettings, DatasetSettings, Settings
from tests.support.seaweedfs import SeaweedFS, stored_in
from tests.support.serving import client_of


def in_seaweedfs(seaweedfs: SeaweedFS, prefix: str) -> icechunk.Storage:
    """Return the library's storage at a prefix of the bucket."""
    return icechunk.s3_storage(
        bucket=seaweedfs.bucket,
        prefix=prefix,
        region=seaweedfs.region,
        endpoint_url=seaweedfs.endpoint_url,
        allow_http=True,
        force_path_style=True,
        access_key_id=seaweedfs.access_key_id,
        secret_access_key=seaweedfs.secret_access_key,
    )


@dataclass(frozen=True)
class Place:
    """The place of a repository: a folder, or a prefix of SeaweedFS."""

    folder: Path
    seaweedfs: SeaweedFS | None = None

    @property
    def storage(self) -> icechunk.Storage:
        """The library's storage of the repository."""
        if (server := self.seaweedfs) is None:
            return icechunk.local_filesystem_storage(str(self.folder))
        return in_seaweedfs(server, self.folder.name)

    def create(self, **config: Any) -> icechunk.Repository:
        """Create the repository with the library."""
        return icechunk.Repository.create(
            self.storage, config=icechunk.RepositoryConfig(**config) if config else None
        )

    def open(self) -> icechunk.Repository:
        """Open the repository with the library."""
        return icechunk.Repository.open(self.storage)

    def settings(self, name: str = "repo", *, writable: bool = True, **more: Any) -> Settings:
        """Return settings of the dataset *name* there, with a cache of a minute."""
        where = self.folder, self.seaweedfs, self.folder.name
        stores, dataset = stored_in(*where, writable=writable)
        cache = CacheSettings(ttl_s=60)
        return Settings(stores=stores, datasets={name: dataset}, cache=cache, **more)


def new_place(folder: Path, seaweedfs: SeaweedFS | None = None) -> Place:
    """Return an empty place."""
    place = folder / f"repo-{uuid4().hex}"
    if seaweedfs is None:
        place.mkdir()
    return Place(place, seaweedfs)


@dataclass(frozen=True)
class Api:
    """The control plane of the repository *path* of a dataset."""

    client: httpx.Client
    path: str = ""
    dataset: str = "repo"

    def send(
        self, method: str, route: str, body: Any = None, *, query: Any = None, **headers: str
    ) -> httpx.Response:
        """Send a request for a route of the repository."""
        wanted = {"path": self.path or None} | (query or {})
        return self.client.request(
            method,
            f"/api/datasets/{self.dataset}{route}",
            json=body,
            params={name: value for name, value in wanted.items() if value is not None} or None,
            headers={name.replace("_", "-"): value for name, value in headers.items()},
        )

    def do(self, method: str, route: str, body: Any = None, **headers: str) -> httpx.Response:
        """Send a request, and assert that it succeeds."""
        answer = self.send(method, route, body, **headers)
        assert answer.is_success, answer.text
        return answer

    def answer(self, route: str, **query: Any) -> httpx.Response:
        """Request a route."""
        return self.send("GET", route, query=query)

    def tell(self, route: str, **query: Any) -> Any:
        """Request a route, and return its document."""
        answer = self.answer(route, **query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def pages(self, route: str, member: str, **query: Any) -> list[Any]:
        """Request all pages of a list."""
        items, after = [], None
        while True:
            page = self.tell(route, after=after, **query)
            items += page[member]
            if (after := page["next"]) is None:
                return items

    def names(self, kind: str) -> dict[str, str]:
        """Return the snapshots of branches or tags by name."""
        return {each["name"]: each["snapshot_id"] for each in self.tell(f"/{kind}")[kind]}


@contextmanager
def serve(folder: Path, **more: Any) -> Generator[Api]:
    """Serve *folder* with a cache that expires at once."""
    datasets = {"repo": DatasetSettings(url=folder.resolve().as_uri(), **more)}
    with client_of(Settings(datasets=datasets, cache=CacheSettings(ttl_s=1e-6))) as client:
        yield Api(client)


@contextmanager
def api(place: Place, **more: Any) -> Generator[Api]:
    """Serve the repository at *place*.

    The first request builds the routes with pydantic's warnings off. Two services in one process
    may switch them on for each other, so they are built one after the other.
    """
    with client_of(place.settings(**more)) as client:
        client.get("/openapi.json").raise_for_status()
        yield Api(client)
