"""Commits through the API, and reads of them with the icechunk library."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import httpx
import icechunk
import numpy as np
import zarr

from tests.support.sessions import GROUP, array_document
from tests.support.writable_repositories import Api, Place

ONES: Final = bytes((1, 1, 1, 1))


def put_array(path: str, *shape: int, **more: Any) -> dict[str, Any]:
    """Return a change that adds an array."""
    metadata = array_document(shape, (2,) * len(shape), **more)
    return {"op": "put_node", "path": path, "metadata": metadata}


def put_group(path: str, **attributes: Any) -> dict[str, Any]:
    """Return a change that adds a group."""
    metadata = json.loads(GROUP) | {"attributes": attributes}
    return {"op": "put_node", "path": path, "metadata": metadata}


def put_chunks(path: str, chunk_id: str, *coords: list[int], length: int = 4) -> dict[str, Any]:
    """Return a change that refers to chunks in one file."""
    chunks = [{"coords": at, "chunk_id": chunk_id, "length": length} for at in coords]
    return {"op": "put_chunks", "path": path, "chunks": chunks}


def delete_chunks(path: str, *coords: list[int]) -> dict[str, Any]:
    """Return a change that deletes chunks."""
    return {"op": "delete_chunks", "path": path, "coords": list(coords)}


@dataclass(frozen=True)
class Client:
    """Writes to one repository, and reads it with the library."""

    api: Api
    place: Place

    @property
    def repo(self) -> icechunk.Repository:
        """Open the repository as it is now."""
        return self.place.open()

    @property
    def tip(self) -> str:
        """The id of the snapshot of ``main``, as the library returns it."""
        return self.repo.lookup_branch("main")

    def chunk(self, data: bytes = ONES) -> str:
        """Write a chunk, and return its id."""
        answer = self.post("/chunks", content=data)
        assert answer.status_code == 201, answer.text
        assert answer.json()["length"] == len(data)
        return str(answer.json()["chunk_id"])

    def ask(
        self, *changes: Mapping[str, Any], key: str | None = None, **more: Any
    ) -> httpx.Response:
        """Request a commit."""
        headers = {} if key is None else {"idempotency_key": key}
        body = {"message": "a commit", "changes": list(changes)} | more
        return self.api.send("POST", "/commits", body, **headers)

    def ask_in_lines(self, *lines: Any) -> httpx.Response:
        """Request a commit whose options and changes are on lines of their own."""
        content = "\n".join(map(json.dumps, lines)).encode()
        headers = {"Content-Type": "application/x-ndjson"}
        return self.post("/commits", content=content, headers=headers)

    def post(self, route: str, **options: Any) -> httpx.Response:
        """Send a body to a route of the repository."""
        url = f"/api/datasets/{self.api.dataset}{route}"
        params = {"path": self.api.path} if self.api.path else None
        return self.api.client.post(url, params=params, **options)

    def commit(self, *changes: Mapping[str, Any], key: str | None = None, **more: Any) -> str:
        """Commit, and return the id of the snapshot."""
        answer = self.ask(*changes, key=key, **more)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["snapshot_id"])

    def values(self, path: str) -> list[Any]:
        """Read a whole array with the library."""
        store = self.repo.readonly_session("main").store
        values: list[Any] = np.asarray(zarr.open_array(store, path=path, mode="r")[...]).tolist()
        return values

    def messages(self) -> list[str]:
        """Return the messages as the library does, newest first, without the initial commit."""
        return [each.message for each in self.repo.ancestry(branch="main")][:-1]

    def library_commit(self, message: str, path: str, value: int) -> str:
        """Write an array with the library, and commit."""
        session = self.repo.writable_session("main")
        zarr.open_array(session.store, path=path)[...] = value
        return session.commit(message)
