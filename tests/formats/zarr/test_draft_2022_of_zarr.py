"""Shards that zarr-python wrote: those of the codec without a checksum are the draft's.

zarr-python 2 wrote the draft itself; of that a few bytes are kept here, see `case`.
"""

import gzip
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import zarr

from app.settings import DatasetSettings, Settings
from app.storage.memory import MemoryStore
from tests.clients.writing import GZIP, LITTLE, Json, Shape, Values, sharding
from tests.formats.zarr import draft
from tests.resolving import ROOT, reading
from tests.serving import serving


@dataclass(frozen=True)
class _Array:
    """An array that zarr-python shards, and what the hierarchy calls it."""

    path: str
    separator: str
    shape: Shape
    chunk_shape: Shape
    chunks_per_shard: Shape
    codecs: tuple[Json, ...] = (LITTLE,)
    decode: Callable[[bytes], bytes] = bytes

    @property
    def values(self) -> Values:
        """Elements that all differ, but for a corner of fill value."""
        values = np.arange(1, np.prod(self.shape) + 1, dtype="<u4").reshape(self.shape)
        values[tuple(slice(0, n) for n in self.chunk_shape)] = 0
        return values

    def chunks(self) -> Iterator[tuple[str, bytes | None]]:
        """Name each chunk of the grid, with its elements in bytes; fill value is not stored."""
        values = self.values
        grid = [range(-(-n // size)) for n, size in zip(self.shape, self.chunk_shape, strict=True)]
        for coords in itertools.product(*grid):
            chunk = np.zeros(self.chunk_shape, "<u4")
            box = tuple(
                slice(at * n, at * n + n) for at, n in zip(coords, self.chunk_shape, strict=True)
            )
            part = values[box]
            chunk[tuple(map(slice, part.shape))] = part
            key = f"data/root{self.path}/c{self.separator.join(map(str, coords))}"
            yield key, chunk.tobytes() if chunk.any() else None

    def build(self, folder: Path) -> dict[str, bytes]:
        """Write shards with zarr-python, and lay them out as the draft does."""
        shards = tuple(
            n * size for n, size in zip(self.chunks_per_shard, self.chunk_shape, strict=True)
        )
        array: Any = zarr.create(
            store=folder,
            shape=self.shape,
            dtype="uint32",
            chunks=shards,
            codecs=[sharding(self.chunk_shape, self.codecs, index=[LITTLE], location="end")],
            chunk_key_encoding={"name": "v2", "configuration": {"separator": self.separator}},  # type: ignore[arg-type]  # takes JSON as well
            fill_value=0,
            zarr_format=3,
        )
        array[...] = self.values
        metadata = draft.array_metadata(
            list(self.shape),
            list(self.chunk_shape),
            [draft.sharding(list(self.chunks_per_shard))],
            separator=self.separator,
            data_type="<u4",
        )
        objects = {
            "zarr.json": draft.encode(draft.ENTRY_POINT),
            f"meta/root{self.path}.array.json": draft.encode(metadata),
        }
        for file in folder.rglob("*"):
            if file.is_file() and file.name != "zarr.json":
                key = f"data/root{self.path}/c{file.relative_to(folder).as_posix()}"
                objects[key] = file.read_bytes()
        return objects


_ARRAYS = (
    _Array("/foo/bar", "/", (5, 7), (2, 2), (2, 2)),
    _Array("", "/", (5, 7), (2, 3), (2, 1)),
    _Array("/dot", ".", (9, 9), (2, 2), (3, 2)),
    _Array("/line", ".", (23,), (3,), (4,)),
    _Array("/a/b/cube", "/", (6, 9, 10), (2, 3, 3), (2, 2, 3), (LITTLE, GZIP), gzip.decompress),
)
every_array = pytest.mark.parametrize("array", _ARRAYS, ids=lambda array: array.path or "root")


@every_array
def test_the_service_answers_every_chunk(array: _Array, tmp_path: Path) -> None:
    """A chunk is its bytes, a chunk of fill value 404, and the metadata tell of no shards."""
    served = tmp_path / "served"
    for key, data in array.build(tmp_path / "written").items():
        (served / key).parent.mkdir(parents=True, exist_ok=True)
        (served / key).write_bytes(data)
    settings = Settings(datasets={"old": DatasetSettings(url=str(served))})
    with serving(settings) as url, httpx.Client(base_url=f"{url}/old/") as client:
        for key, expected in array.chunks():
            answer = client.get(key)
            assert answer.status_code == (404 if expected is None else 200)
            assert expected is None or array.decode(answer.content) == expected
        document = client.get(f"meta/root{array.path}.array.json").json()

    assert document == draft.array_metadata(
        list(array.shape), list(array.chunk_shape), separator=array.separator, data_type="<u4"
    )


_WRITTEN_2_18 = {
    "data/root/one/c0": bytes.fromhex(
        "050000000600000001000000020000000300000004000000"
        "08000000000000000800000000000000"
        "10000000000000000800000000000000"
        "00000000000000000800000000000000"
    ),
    "data/root/one/c1": bytes.fromhex(
        "090000000a0000000700000008000000"
        "08000000000000000800000000000000"
        "00000000000000000800000000000000"
        "ffffffffffffffffffffffffffffffff"
    ),
    "data/root/zero/c0": bytes.fromhex("0100000000000000000000000400000000000000"),
}
"""Numbers from 1 on: ten in chunks of two, three to a shard; and one without dimensions."""


async def test_what_zarr_python_2_wrote_is_read() -> None:
    """Each chunk has its numbers; the scalar, of which it counts one dimension, has its one."""
    one = {**draft.array_metadata([10], [2], [draft.sharding([3])]), "data_type": "<i4"}
    zero = {**draft.array_metadata([], [], [draft.sharding([1])]), "data_type": "<i4"}
    store = MemoryStore()
    store.place(ROOT.join("zarr.json"), draft.encode(draft.ENTRY_POINT))
    store.place(ROOT.join("meta/root/one.array.json"), draft.encode(one))
    store.place(ROOT.join("meta/root/zero.array.json"), draft.encode(zero))
    for key, data in _WRITTEN_2_18.items():
        store.place(ROOT.join(key), data)
    hierarchy = reading(store)

    for at in range(5):
        found = await hierarchy.read(f"data/root/one/c{at}")
        assert np.frombuffer(found or b"", "<i4").tolist() == [2 * at + 1, 2 * at + 2]
    assert await hierarchy.read("data/root/one/c5") is None
    assert await hierarchy.read("data/root/zero/c0") == b"\1\0\0\0"
