"""Shards of several sizes: resized, damaged, and in Icechunk; random arrays have them too."""

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import pytest
import zarr

from tests.support.clients.filling import over_obstore
from tests.support.clients.icechunk.repositories import put
from tests.support.clients.reading import OPENERS, open_tensorstore
from tests.support.clients.services import Taker, taking_into_folder
from tests.support.clients.writing import (
    counted,
    read_zarr,
    rectilinear_allowed,
    same,
)
from tests.support.commands import run
from tests.support.sessions import Replicas, listed_keys, replicas
from tests.support.writable_repositories import Place

VALUES: Final = counted((22, 12))
VALUES[4:12, 6:] = 0
VALUES[12:16, :3] = 0
EDGES: Final = [[4, 8, 10], [6, 6]]
INNER: Final = (2, 3)
CHUNKS: Final = {
    f"c/{i}/{j}"
    for i in range(11)
    for j in range(4)
    if VALUES[2 * i : 2 * i + 2, 3 * j : 3 * j + 3].any()
}
"""Keys of the inner chunks that zarr-python stores."""
type Array = Any


def create(store: Any, name: str | None = None) -> Array:
    """Create the array with zarr-python, whose shards have 2 to 5 times 2 inner chunks."""
    with rectilinear_allowed():
        return zarr.create_array(
            store,
            name=name,
            shape=VALUES.shape,
            shards=EDGES,
            chunks=INNER,
            dtype="u2",
            fill_value=0,
            compressors=None,
        )


def fill(array: Array) -> None:
    """Write the values shard by shard."""
    with rectilinear_allowed():
        array[...] = VALUES


@pytest.fixture
def taker(tmp_path: Path) -> Generator[Taker]:
    """Serve a folder with the array."""
    fill(create(tmp_path / "array"))
    with taking_into_folder(tmp_path) as taker:
        yield taker


def test_array_is_resized_within_its_shards(taker: Taker) -> None:
    """An array shrinks and grows within its shards, which its stored metadata keep.

    Growth beyond them is refused with a reason.
    """
    array: Array = zarr.open_array(over_obstore(taker.url, "array"), mode="r+")
    array.attrs["units"] = "nm"
    array.resize((7, 12))
    array.resize((21, 12))
    with rectilinear_allowed():
        stored: Array = zarr.open_array(taker.folder / "array", mode="r")

    assert stored.metadata.chunk_grid.to_dict()["configuration"]["chunk_shapes"] == (
        [4, 8, 10],
        [[6, 2]],
    )
    assert (stored.shape, stored.attrs.asdict()) == ((21, 12), {"units": "nm"})
    same(read_zarr(taker.folder / "array")[:6], VALUES[:6])
    assert not read_zarr(taker.folder / "array")[8:].any()
    with pytest.raises(Exception, match="chunk_shapes covers 22 elements of 23"):
        array.resize((23, 12))


def test_damage_is_found_in_shards_of_any_size(taker: Taker) -> None:
    """A truncated shard and one with a changed index are 424, and `verify` names their chunks."""
    small, large = (taker.folder / "array/c" / name for name in ("0/1", "2/0"))
    small.write_bytes(small.read_bytes()[:60])
    data = bytearray(large.read_bytes())
    data[-6] ^= 1
    large.write_bytes(data)
    statuses = {"0/2": 424, "0/1": 200, "8/1": 424, "7/2": 200, "2/3": 404, "11/0": 404}

    found = {key: taker.client.get(f"/data/array/c/{key}").status_code for key in statuses}
    report = run("verify", "--json", str(taker.folder))
    assert found == statuses
    damages = json.loads(report.stdout)["damages"]
    assert sorted(damage["key"] for damage in damages) == ["array/c/0/2", "array/c/6/0"]


@pytest.fixture
def pair(tmp_path: Path) -> Generator[Replicas]:
    """Serve a repository in which the library wrote the array."""
    with replicas(Place(tmp_path)) as pair:
        session = pair.repo.writable_session("main")
        fill(create(session.store, "g/array"))
        session.commit("shards of several sizes")
        yield pair


def test_array_is_read_listed_and_written_in_a_session(pair: Replicas) -> None:
    """An array that the Icechunk library wrote is read and listed without its shards.

    The library reads the chunks that zarr-python wrote in a session.
    """
    same(open_tensorstore(f"{pair.urls[0]}/data/g/array").read().result(), VALUES)
    listed = listed_keys(pair.clients[0], "data", "@branch.main/g/array/c/")
    assert {key.removeprefix("@branch.main/g/array/") for key in listed} == CHUNKS

    session_id = pair.begin()
    array: Array = zarr.open_array(pair.store(session_id), path="g/array", mode="r+")
    expected = VALUES.copy()
    expected[3:14, 2:7] += 1
    array[3:14, 2:7] = expected[3:14, 2:7]
    pair.committed(session_id)
    with rectilinear_allowed():
        found = zarr.open_array(pair.repo.readonly_session("main").store, path="g/array", mode="r")
        same(found[...], expected)
    same(OPENERS["obstore"](f"{pair.urls[1]}/data/@branch.main/g/array")[...], expected)


def test_shards_behind_a_shrunk_array_are_none_of_it(pair: Replicas, tmp_path: Path) -> None:
    """Shards that a repository keeps behind the end of an array are neither listed nor damage."""
    session = pair.repo.writable_session("main")
    with rectilinear_allowed():
        array: Array = zarr.open_array(session.store, path="g/array", mode="r+")
        document = {**array.metadata.to_dict(), "shape": [3, 12]}
    put(session.store, {"g/array/zarr.json": json.dumps(document, default=vars).encode()})
    session.commit("shrunk")
    listed = listed_keys(pair.clients[0], "data", "@branch.main/g/array/c/")
    report = run("verify", "--chunks", str(tmp_path))

    same(OPENERS["obstore"](f"{pair.urls[0]}/data/@branch.main/g/array")[...], VALUES[:3])
    assert {key.removeprefix("@branch.main/g/array/c/") for key in listed} == {
        f"{i}/{j}" for i in range(2) for j in range(4)
    }
    assert "none damaged" in report.stdout
