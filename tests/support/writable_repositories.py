"""An Icechunk repository that the service and the real library both write."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import icechunk

from shardgate.settings import CacheSettings, DatasetSettings, Settings
from tests.support.seaweedfs import SeaweedFS
from tests.support.serving import client_of


def in_seaweedfs(seaweedfs: SeaweedFS, prefix: str) -> icechunk.Storage:
    """Name a prefix of the bucket to the library."""
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
    """Where a repository is to be: a folder, or below a prefix of SeaweedFS."""

    folder: Path
    seaweedfs: SeaweedFS | None = None

    @property
    def storage(self) -> icechunk.Storage:
        """Give what the library reads and writes it with."""
        if (server := self.seaweedfs) is None:
            return icechunk.local_filesystem_storage(str(self.folder))
        return in_seaweedfs(server, self.folder.name)

    def create(self, **config: Any) -> icechunk.Repository:
        """Let the library make a repository."""
        return icechunk.Repository.create(
            self.storage, config=icechunk.RepositoryConfig(**config) if config else None
        )

    def open(self) -> icechunk.Repository:
        """Let the library open the repository."""
        return icechunk.Repository.open(self.storage)

    def settings(self, *, writable: bool = True, **more: Any) -> Settings:
        """Configure the dataset ``repo`` there; what can change is known for a minute."""
        cache = CacheSettings(ttl_s=60)
        if (server := self.seaweedfs) is None:
            url = self.folder.resolve().as_uri()
            datasets = {"repo": DatasetSettings(url=url, writable=writable)}
            return Settings(datasets=datasets, cache=cache, **more)
        url = f"s3://{server.bucket}/{self.folder.name}"
        datasets = {"repo": DatasetSettings(url=url, store="lab", writable=writable)}
        return Settings(datasets=datasets, stores={"lab": server.settings}, cache=cache, **more)


def new_place(folder: Path, seaweedfs: SeaweedFS | None = None) -> Place:
    """Find a place where nothing is."""
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
        """Send a request that must be done."""
        answer = self.send(method, route, body, **headers)
        assert answer.is_success, answer.text
        return answer

    def answer(self, route: str, **query: Any) -> httpx.Response:
        """Ask for a route."""
        return self.send("GET", route, query=query)

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

    def names(self, kind: str) -> dict[str, str]:
        """List branches or tags."""
        return {each["name"]: each["snapshot_id"] for each in self.tell(f"/{kind}")[kind]}


@contextmanager
def serve(folder: Path, **more: Any) -> Generator[Api]:
    """Serve *folder*; what can change is asked for anew."""
    datasets = {"repo": DatasetSettings(url=folder.resolve().as_uri(), **more)}
    with client_of(Settings(datasets=datasets, cache=CacheSettings(ttl_s=1e-6))) as client:
        yield Api(client)


@contextmanager
def api(place: Place, **more: Any) -> Generator[Api]:
    """Serve what is at *place*.

    Routes are built when they are first asked for, with warnings of pydantic off: of two services
    in one process each may have them switched on again by the other, so it is done one by one.
    """
    with client_of(place.settings(**more)) as client:
        client.get("/openapi.json").raise_for_status()
        yield Api(client)
