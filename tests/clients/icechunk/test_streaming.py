"""A camera that writes slices into shards of a session, while the service is killed."""

from contextlib import closing, suppress
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any, Final

import httpx
import icechunk
import numpy as np
import zarr

from tests.support.gateways import of_dataset, start_gateway
from tests.support.processes import free_ports, wait_until

SLICES: Final = 1000
KILLED_AFTER: Final = 20
OPTIONS: Final[dict[str, Any]] = {
    "shape": (SLICES, 64, 256),
    "chunks": (1, 64, 256),
    "shards": (16, 64, 256),
    "dtype": "u1",
    "compressors": None,
}


def test_acknowledged_slices_survive_the_death_of_the_service(tmp_path: Path) -> None:
    """No slice of a session that was answered is lost if the service is killed, before the commit
    and after it.
    """
    repository = icechunk.Repository.create(icechunk.local_filesystem_storage(str(tmp_path)))
    created = repository.writable_session("main")
    zarr.create_group(created.store).create_array("film", **OPTIONS)
    created.commit("an empty film")
    port = str(free_ports(1)[0])
    configuration = of_dataset(str(tmp_path)) | {"SHARDGATE_SERVER__PORT": port}
    acknowledged: dict[int, bytes] = {}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        with closing(start_gateway(configuration)) as doomed:
            session_id = begin(client)
            camera = Thread(target=write, args=(client, session_id, acknowledged))
            camera.start()
            wait_until(lambda: len(acknowledged) > KILLED_AFTER)
            doomed.kill()
            camera.join()
        with closing(start_gateway(configuration)):
            for number, body in acknowledged.items():
                assert client.get(key(session_id, number)).content == body
            put(client, session_id, SLICES - 1, acknowledged)
            path = f"/api/datasets/data/sessions/{session_id}/commit"
            client.post(path, json={"message": "slices"}).raise_for_status()
    read: Any = zarr.open_array(repository.readonly_session("main").store, path="film", mode="r")
    assert read.shards == OPTIONS["shards"]
    for number, body in acknowledged.items():
        assert np.asarray(read[number]).tobytes() == body


def begin(client: httpx.Client) -> str:
    """Begin a session."""
    answer = client.post("/api/datasets/data/sessions").raise_for_status()
    return str(answer.json()["session_id"])


def key(session_id: str, number: int) -> str:
    """Return the path of a slice."""
    return f"/data/@session.{session_id}/film/c/{number}/0/0"


def put(client: httpx.Client, session_id: str, number: int, acknowledged: dict[int, bytes]) -> None:
    """Write a slice, and note it if that was answered."""
    body = Random(len(acknowledged)).randbytes(64 * 256)
    client.put(key(session_id, number), content=body).raise_for_status()
    acknowledged[number] = body


def write(client: httpx.Client, session_id: str, acknowledged: dict[int, bytes]) -> None:
    """Write one slice after the other, until the connection breaks."""
    with suppress(httpx.TransportError):
        for number in range(SLICES - 1):
            put(client, session_id, number, acknowledged)
