"""Sessions, as clients of the API begin and commit them."""

import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from html import unescape
from typing import Any

import httpx
import icechunk
import zarr

from tests.support.clients.filling import CLIENTS
from tests.support.formats.zarr.building import array_metadata
from tests.support.serving import client_of
from tests.support.writable_repositories import Place


@dataclass(frozen=True)
class Replicas:
    """Services in front of the repository ``data``, and the library's view of it."""

    clients: tuple[httpx.Client, ...]
    repo: icechunk.Repository

    def begin(self, at: int = 0, **options: Any) -> str:
        """Begin a session, and return its id."""
        answer = self.clients[at].post("/api/datasets/data/sessions", json=options)
        assert answer.status_code == 201, answer.text
        session_id: str = answer.json()["session_id"]
        return session_id

    def commit(self, session_id: str, at: int = 0, key: str = "", **options: Any) -> httpx.Response:
        """Request a commit."""
        path = f"/api/datasets/data/sessions/{session_id}/commit"
        headers = {"idempotency-key": key} if key else {}
        body = {"message": "made in a session"} | options
        return self.clients[at].post(path, json=body, headers=headers)

    def committed(self, session_id: str, at: int = 0, **options: Any) -> str:
        """Commit, and return the snapshot."""
        answer = self.commit(session_id, at, **options)
        assert answer.status_code == 201, answer.text
        snapshot_id: str = answer.json()["snapshot_id"]
        return snapshot_id

    def store(self, session_id: str, at: int = 0, client: str = "obstore") -> Any:
        """Open the store of a session for zarr-python."""
        return CLIENTS[client](self.urls[at], f"@session.{session_id}")

    def put(self, session_id: str, key: str, body: bytes, at: int = 0) -> httpx.Response:
        """Write a key."""
        return self.clients[at].put(f"/data/@session.{session_id}/{key}", content=body)

    def get(self, session_id: str, key: str, at: int = 0) -> httpx.Response:
        """Read a key."""
        return self.clients[at].get(f"/data/@session.{session_id}/{key}")

    def delete(self, session_id: str, key: str, at: int = 0) -> httpx.Response:
        """Delete a key."""
        return self.clients[at].delete(f"/data/@session.{session_id}/{key}")

    def keys(self, session_id: str, prefix: str = "", at: int = 0) -> set[str]:
        """List the keys of a session."""
        lead = f"@session.{session_id}/"
        keys = listed_keys(self.clients[at], "data", lead + prefix)
        return {key.removeprefix(lead) for key in keys}

    def group(self, ref: str = "main") -> Any:
        """Open a branch with the library."""
        return zarr.open_group(self.repo.readonly_session(ref).store, mode="r")

    @property
    def urls(self) -> list[str]:
        """The URLs of the services."""
        return [str(each.base_url).rstrip("/") for each in self.clients]

    @property
    def history(self) -> list[str]:
        """The snapshots of ``main``, newest first, as the library returns them."""
        return [each.id for each in self.repo.ancestry(branch="main")]


def listed_keys(client: httpx.Client, dataset: str, prefix: str, page_keys: int = 7) -> list[str]:
    """List keys as S3 clients do, in pages."""
    found, token = list[str](), ""
    while True:
        query = {"list-type": "2", "prefix": prefix, "max-keys": str(page_keys)}
        query |= {"continuation-token": token} if token else {}
        answer = client.get(f"/{dataset}", params=query)
        assert answer.status_code == 200, answer.text
        found += map(unescape, re.findall("<Key>([^<]*)", answer.text))
        if not (token := answer.text.partition("<NextContinuationToken>")[2].partition("<")[0]):
            return found


@contextmanager
def replicas(place: Place) -> Generator[Replicas]:
    """Create a repository with a root group, and run two services in front of it."""
    repo = place.create()
    session = repo.writable_session("main")
    zarr.create_group(session.store)
    session.commit("the root")
    settings = place.settings("data")
    with client_of(settings) as one, client_of(settings) as other:
        yield Replicas((one, other), repo)


def array_document(shape: tuple[int, ...], chunks: tuple[int, ...], **more: Any) -> dict[str, Any]:
    """Return the metadata of an array of bytes."""
    return array_metadata(list(shape), list(chunks), [{"name": "bytes"}]) | more


GROUP = b'{"zarr_format": 3, "node_type": "group", "attributes": {}}'
