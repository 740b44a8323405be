"""Whatever is written in a session is as in a dictionary, and so is the commit."""

import asyncio
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.core.buffer import default_buffer_prototype

from app.errors import BadKeyError, ConflictError
from tests.resolve.sessions import (
    Replica,
    contents,
    document,
    files_of_repository,
    opened_by_library,
    ref,
    stored,
)

PATHS = ["a", "g", "g/b", "g/c", "h", "h/d", ""]
SHAPES: list[tuple[int, ...]] = [(), (4,), (6,), (9,), (3, 3)]
CHUNKS = ["c/0", "c/1", "c/2", "c/4", "c/0/1", "c/1/1"]

steps = st.lists(
    st.one_of(
        st.tuples(st.just("node"), st.sampled_from(PATHS), st.sampled_from(SHAPES)),
        st.tuples(st.just("gone"), st.sampled_from(PATHS)),
        st.tuples(
            st.just("put"),
            st.sampled_from(PATHS),
            st.sampled_from(CHUNKS),
            st.binary(min_size=2, max_size=2) | st.just(bytes(600)),
        ),
        st.tuples(st.just("drop"), st.sampled_from(PATHS), st.sampled_from(CHUNKS)),
    ),
    max_size=25,
)


class Model:
    """Keys and bytes; what is out of an array's grid is kept, and not seen."""

    def __init__(self, keys: Mapping[str, bytes]) -> None:
        self.keys = dict(keys)

    def shape(self, path: str) -> tuple[int, ...] | None:
        """Give the shape of an array, nothing for a group, `None` where no node is."""
        data = self.keys.get(f"{path}/zarr.json".lstrip("/"))
        return None if data is None else tuple(json.loads(data).get("shape", ()))

    def put_node(self, path: str, shape: tuple[int, ...]) -> bool:
        """Put a node; tell whether it can be there."""
        above = path
        while above:
            above = above.rpartition("/")[0]
            if self.shape(above):
                return False
        old = self.shape(path)
        if old is None and shape and any(self._below(path)):
            return False
        if old is not None and len(old) != len(shape):
            self.drop_node(path)
        self.keys[f"{path}/zarr.json".lstrip("/")] = document(*shape)
        return True

    def drop_node(self, path: str) -> None:
        """Take a node and all below away."""
        if self.shape(path) is not None:
            for key in self._below(path):
                del self.keys[key]

    def has_room(self, path: str, chunk: str) -> bool:
        """Tell whether there can be such a chunk."""
        shape, coords = self.shape(path), list(map(int, chunk.split("/")[1:]))
        if not shape or len(coords) != len(shape):
            return False
        return all(at * 2 < size for at, size in zip(coords, shape, strict=True))

    @property
    def seen(self) -> dict[str, bytes]:
        """What can be read."""
        return {key: data for key, data in self.keys.items() if self._is_seen(key)}

    def _is_seen(self, key: str) -> bool:
        if key.endswith("zarr.json"):
            return True
        path, _, chunk = f"/{key}".rpartition("/c/")
        path = path.removeprefix("/")
        return self.has_room(path, f"c/{chunk}")

    def _below(self, path: str) -> list[str]:
        return [key for key in self.keys if not path or key.startswith(f"{path}/")]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, bytes]:
    """Write the repository that all runs begin with."""
    return files_of_repository(tmp_path_factory.mktemp("model") / "repo")


@settings(max_examples=60)
@given(steps=steps)
def test_a_session_is_like_a_dictionary(files: Mapping[str, bytes], steps: list[Any]) -> None:
    """Through two replicas by turns; what is refused changes nothing."""
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(play(files, steps, Path(folder)))


async def play(files: Mapping[str, bytes], steps: list[Any], folder: Path) -> None:
    """Do all *steps* to a session and to the model, and compare."""
    memory = stored(files)
    replicas = [await Replica.of(memory) for _ in range(2)]
    session_id = await replicas[0].begin()
    model = Model(await contents(await replicas[0].enter(session_id)))
    for number, step in enumerate(steps):
        store = await replicas[number % 2].enter(session_id)
        await do(store, model, step)
    for replica in replicas:
        assert await contents(await replica.enter(session_id)) == model.seen
    orphans = [path for path in PATHS if path and is_orphan(model, path)]
    if orphans:
        with pytest.raises(ConflictError):
            await replicas[0].commit(session_id)
        return
    made = await replicas[1].commit(session_id)
    assert await contents(await replicas[0].enter(session_id)) == model.seen
    repo = await opened_by_library(memory, folder)
    zarr_store = repo.readonly_session(snapshot_id=made.snapshot_id).store
    listed = [key async for key in zarr_store.list()]
    assert sorted(listed) == sorted(model.seen)
    for key, data in model.seen.items():
        found = await zarr_store.get(key, default_buffer_prototype())
        assert found is not None
        assert found.to_bytes() == data


def is_orphan(model: Model, path: str) -> bool:
    """Tell whether the node at *path* is in no group."""
    return model.shape(path) is not None and model.shape(path.rpartition("/")[0]) is None


async def do(store: Any, model: Model, step: Any) -> None:
    """Do one *step*."""
    match step:
        case ("node", path, shape):
            key = f"{path}/zarr.json".lstrip("/")
            if model.put_node(path, shape):
                await store.put(ref(key), [document(*shape)], expected=None)
            else:
                with pytest.raises(ConflictError):
                    await store.put(ref(key), [document(*shape)], expected=None)
        case ("gone", path):
            model.drop_node(path)
            assert await store.delete(ref(f"{path}/zarr.json".lstrip("/")), expected=None) is True
        case ("put", path, chunk, data):
            key = f"{path}/{chunk}".lstrip("/")
            if model.has_room(path, chunk):
                model.keys[key] = data
                await store.put(ref(key), [data], expected=None)
            else:
                with pytest.raises((BadKeyError, ConflictError)):
                    await store.put(ref(key), [data], expected=None)
        case ("drop", path, chunk):
            if model.has_room(path, chunk):
                model.keys.pop(f"{path}/{chunk}".lstrip("/"), None)
            assert await store.delete(ref(f"{path}/{chunk}".lstrip("/")), expected=None) is True
