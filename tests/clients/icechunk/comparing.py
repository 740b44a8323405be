"""How answers of the service are compared with those of the library."""

from typing import Any

import httpx
import numpy as np
import obstore.store
import zarr
import zarr.storage

from tests.clients.arrays import BY_NAME
from tests.clients.icechunk.library import Node
from tests.clients.writing import Json, quiet, same


def compare_nodes(client: httpx.Client, base: str, nodes: list[Node], store: Any) -> None:
    """Ask for all documents and chunks below *base*; read sharded arrays, as the library does."""
    for node in nodes:
        if node.is_sharded:
            compare_values(f"{client.base_url}{base}", store, node.path)
        else:
            compare_chunks(client, base, node)


def compare_documents(client: httpx.Client, base: str, nodes: list[Node]) -> None:
    """Ask for the ``zarr.json`` of every node; that of the root has all others in it."""
    served = {}
    for node in nodes:
        answer = client.get(f"{base}/{node.key('zarr.json')}")
        assert answer.status_code == 200, (base, node.path, answer.text)
        served[node.path] = answer.json()
        if not node.path:
            assert without_members(served[""]) == without_members(node.document), base
        elif not node.is_sharded:
            assert answer.content == node.stored, (base, node.path)
    told = served.pop("")["consolidated_metadata"]

    assert told == {"kind": "inline", "must_understand": False, "metadata": served}


def without_members(document: Json) -> Json:
    """Leave out what the service puts into the root."""
    return {name: value for name, value in document.items() if name != "consolidated_metadata"}


def compare_chunks(client: httpx.Client, base: str, node: Node) -> None:
    """Ask for all chunks of an array that is not sharded."""
    for key, expected in node.chunks.items():
        answer = client.get(f"{base}/{node.key(key)}")
        told = (answer.status_code, answer.content if answer.status_code == 200 else None)
        assert told == (404 if expected is None else 200, expected), (base, node.path, key)


def compare_values(url: str, store: Any, path: str) -> None:
    """Read a sharded array with zarr-python from the service; see what the library gives it.

    Some it cannot read while they are sharded; what those hold is known.
    """
    options: Any = {"allow_http": True}
    over_http = obstore.store.HTTPStore.from_url(f"{url}/{path}", client_options=options)
    with quiet():
        found: Any = zarr.open_array(zarr.storage.ObjectStore(over_http, read_only=True), mode="r")
        if (case := "/".join(path.split("/")[-2:])) in BY_NAME:
            expected = BY_NAME[case].values
        else:
            expected = np.asarray(zarr.open_array(store, path=path, mode="r")[...])
        same(found[...], expected)
