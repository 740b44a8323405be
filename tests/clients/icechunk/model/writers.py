"""Those who make the edits of a commit: sessions, single requests, and the real library."""

import asyncio
import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx
import icechunk
from zarr.core.buffer import default_buffer_prototype

from tests.clients.icechunk.model.trees import (
    Delete,
    Edit,
    Move,
    Put,
    Write,
    chunk_key,
    key_of,
    spelled,
)


@dataclass(frozen=True)
class Replica:
    """A service in front of the repository *path* of the dataset ``data``."""

    client: httpx.Client
    path: str

    def send(self, method: str, route: str, body: Any = None, **headers: str) -> httpx.Response:
        """Send a request for a route of the repository."""
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        url, query = f"/api/datasets/data{route}", {"path": self.path}
        return self.client.request(method, url, json=body, headers=given, params=query)

    def tell(self, route: str, **query: Any) -> Any:
        """GET a route, and return the answer."""
        wanted = {name.rstrip("_"): value for name, value in query.items() if value is not None}
        answer = self.client.get(f"/api/datasets/data{route}", params=wanted | {"path": self.path})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def pages(self, route: str, member: str, **query: Any) -> list[Any]:
        """GET all pages of a list."""
        items, after = [], None
        while True:
            page = self.tell(route, after=after, **query)
            items += page[member]
            if (after := page["next"]) is None:
                return items

    def key(self, ref: str, key: str) -> str:
        """Return the path of a key of a ref."""
        return f"/data/{self.path}/{ref}/{quote(key)}"

    def begin(self, branch: str) -> dict[str, Any]:
        """Begin a session."""
        answer = self.send("POST", "/sessions", {"branch": branch})
        assert answer.status_code == 201, answer.text
        told: dict[str, Any] = answer.json()
        return told

    def edit_session(self, session_id: str, edits: Sequence[Edit]) -> None:
        """Make *edits* in a session, key by key."""
        for edit in edits:
            answer = self._edit(f"@session.{session_id}", edit)
            assert answer.is_success, (edit, answer.status_code, answer.text)

    def _edit(self, ref: str, edit: Edit) -> httpx.Response:
        match edit:
            case Put(path, document):
                key = self.key(ref, key_of(path, "zarr.json"))
                return self.client.put(key, content=spelled(document))
            case Delete(path):
                return self.client.delete(self.key(ref, key_of(path, "zarr.json")))
            case Write(path, _, coords, None):
                return self.client.delete(self.key(ref, chunk_key(path, coords)))
            case Write(path, _, coords, data):
                return self.client.put(self.key(ref, chunk_key(path, coords)), content=data)
            case Move():
                raise ValueError(edit)

    def commit_session(self, session_id: str, **options: Any) -> httpx.Response:
        """POST the commit of a session."""
        return self.send("POST", f"/sessions/{session_id}/commit", options)

    def commit(self, edits: Sequence[Edit], *, inline: int, **options: Any) -> httpx.Response:
        """POST a commit of *edits* without a session."""
        changes = [self._change(edit, inline) for edit in edits]
        return self.send("POST", "/commits", {"changes": changes} | options)

    def _change(self, edit: Edit, inline: int) -> dict[str, Any]:
        match edit:
            case Put(path, document):
                return {"op": "put_node", "path": path, "metadata": document}
            case Delete(path):
                return {"op": "delete_node", "path": path}
            case Move():
                raise ValueError(edit)
            case Write(path, _, coords, None):
                return {"op": "delete_chunks", "path": path, "coords": [coords]}
            case Write(path, _, coords, data):
                chunk = {"coords": coords} | self._payload(data or b"", inline)
                return {"op": "put_chunks", "path": path, "chunks": [chunk]}

    def _payload(self, data: bytes, inline: int) -> dict[str, Any]:
        """Write a chunk, or put it into the request; some with bytes around them."""
        if len(data) <= inline:
            return {"inline": in_base64(data)}
        offset = len(data) % 3
        url = "/api/datasets/data/chunks"
        body = b"!" * offset + data + b"?"
        answer = self.client.post(url, content=body, params={"path": self.path})
        assert answer.status_code == 201, answer.text
        return {"chunk_id": answer.json()["chunk_id"], "offset": offset, "length": len(data)}


def in_base64(data: bytes) -> str:
    """Encode bytes for JSON."""
    return base64.b64encode(data).decode()


def edit_by_library(session: icechunk.Session, edits: Sequence[Edit]) -> None:
    """Make *edits* in a session of the library."""
    if any(isinstance(edit, Move) for edit in edits):
        for edit in edits:
            assert isinstance(edit, Move)
            session.move(edit.source, edit.target)
        return
    asyncio.run(_edit_store(session.store, edits))


async def _edit_store(store: Any, edits: Sequence[Edit]) -> None:
    buffer = default_buffer_prototype().buffer
    for edit in edits:
        match edit:
            case Put(path, document):
                key = key_of(path, "zarr.json")
                await store.set(key, buffer.from_bytes(spelled(document)))
            case Delete(path):
                await store.delete_dir(path.strip("/"))
            case Write(path, _, coords, None):
                await store.delete(chunk_key(path, coords))
            case Write(path, _, coords, data) if data is not None:
                await store.set(chunk_key(path, coords), buffer.from_bytes(data))
            case _:
                raise ValueError(edit)
