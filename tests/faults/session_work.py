"""Sessions that are written to through a gateway which nothing happens to, to be committed."""

import json
from typing import Any, Final

import httpx
import numpy as np
import zarr
import zstandard

from tests.committing import Client
from tests.faults.repository_sites import Site
from tests.seaweedfs import SeaweedFS
from tests.sessions import GROUP, array_document

NBYTES: Final = 600
"""Of a chunk that is too large to be kept in a manifest."""


class Session:
    """A session with changes of every kind in it, which tell it from all others."""

    def __init__(self, site: Site, number: int) -> None:
        self._site = site
        self.number = number
        self.message = f"session {number}"
        self.session_id = begun(site.healthy)
        changes = {
            "a/c/0/0": self._value * 4,
            "b/c/0": self._value * NBYTES,
            f"g{number}/zarr.json": GROUP,
        }
        for key, data in changes.items():
            assert self.put(site.healthy, key, data).is_success
        assert self.put(site.healthy, "b/c/1", None if number % 2 else b"\x07" * NBYTES).is_success

    def put(self, client: Client, key: str, data: bytes | None) -> httpx.Response:
        """Write a key, or take it away."""
        return put(client, self.session_id, key, data)

    def get(self, client: Client, key: str) -> bytes | None:
        """Read a key."""
        answer = client.api.client.get(f"/repo/@session.{self.session_id}/{key}")
        assert answer.status_code in {200, 404}, answer.text
        return answer.content if answer.is_success else None

    def ask(self, client: Client, **more: Any) -> httpx.Response:
        """Ask for the commit."""
        return asked(client, self.session_id, message=self.message, **more)

    def commit(self, client: Client) -> str:
        """Commit, and give the id of the snapshot."""
        answer = self.ask(client)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["snapshot_id"])

    def release(self) -> None:
        """Let time pass until nobody holds the session any more, who does nothing meanwhile."""
        server, name = self._site.place.seaweedfs, self._site.place.folder.name
        assert server is not None
        expire_lease(server, f"{name}/sessions/{self.session_id}.session")

    def demand(self, *, acknowledged: str | None) -> None:
        """Ask once more, and be sure that there is one such commit, with all that was written."""
        client = self._site.healthy
        made = self.commit(client)
        assert acknowledged in (None, made)
        messages = client.messages()
        assert (messages.count(self.message), messages[0]) == (1, self.message)
        group: Any = zarr.open_group(client.repo.readonly_session("main").store, mode="r")
        assert f"g{self.number}" in group
        assert np.all(group["a"][:2, :2] == self._value[0])
        values = group["b"][:].reshape(2, NBYTES)
        assert np.all(values[0] == self._value[0])
        assert np.all(values[1] == (0 if self.number % 2 else 7))

    @property
    def _value(self) -> bytes:
        return bytes([1 + self.number % 250])


def make_array(site: Site) -> None:
    """Add the array whose chunks have files of their own, both of which are there."""
    session_id = begun(site.healthy)
    document = json.dumps(array_document((2 * NBYTES,), (NBYTES,))).encode()
    for key, data in {"b/zarr.json": document, "b/c/1": b"\x07" * NBYTES}.items():
        assert put(site.healthy, session_id, key, data).is_success
    assert asked(site.healthy, session_id, message="b").is_success


def begun(client: Client) -> str:
    """Begin a session."""
    return str(client.api.do("POST", "/sessions", {}).json()["session_id"])


def put(client: Client, session_id: str, key: str, data: bytes | None) -> httpx.Response:
    """Write a key of a session, or take it away."""
    method = "DELETE" if data is None else "PUT"
    url = f"/repo/@session.{session_id}/{key}"
    return client.api.client.request(method, url, content=data)


def asked(client: Client, session_id: str, **body: Any) -> httpx.Response:
    """Ask for the commit of a session."""
    return client.api.send("POST", f"/sessions/{session_id}/commit", body)


def expire_lease(server: SeaweedFS, key: str) -> None:
    """Write into the document of a session that whoever has sealed it has had his time."""
    found = server.client.get_object(Bucket=server.bucket, Key=key)["Body"].read()
    document = json.loads(zstandard.decompress(found))
    if document["state"]["is"] == "sealed":
        document["state"]["until_s"] = 0
        server.put(key, zstandard.compress(json.dumps(document).encode()))
