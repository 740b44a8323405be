"""Arrays whose shard index has transposes or several checksums, which other libraries read too."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
import pytest
import tensorstore
import zarr
from zarr.codecs import BytesCodec, Crc32cCodec, ShardingCodec, TransposeCodec

from shardgate.settings import DatasetSettings, Settings
from tests.support.serving import client_of

_SHAPE = (12, 8, 8)
_INNER = (2, 4, 2)
_VALUES = np.arange(1, 1 + 12 * 8 * 8, dtype="u2").reshape(_SHAPE)
_CRC = Crc32cCodec()
_LITTLE = BytesCodec()
_BIG = BytesCodec(endian="big")
_NESTED = ShardingCodec(
    chunk_shape=_INNER,
    codecs=[_LITTLE],
    index_codecs=[TransposeCodec(order=(3, 2, 0, 1)), _BIG, _CRC],
)
_CHAINS: dict[str, Sequence[Any]] = {
    "axes swapped": [TransposeCodec(order=(1, 0, 2, 3)), _LITTLE, _CRC],
    "last axis first": [TransposeCodec(order=(3, 0, 1, 2)), _BIG],
    "last axis inside": [TransposeCodec(order=(2, 3, 1, 0)), _LITTLE, _CRC],
    "two transposes": [
        TransposeCodec(order=(1, 2, 3, 0)),
        TransposeCodec(order=(0, 2, 1, 3)),
        _LITTLE,
        _CRC,
    ],
    "transposes that cancel": [
        TransposeCodec(order=(1, 2, 3, 0)),
        TransposeCodec(order=(3, 0, 1, 2)),
        _LITTLE,
        _CRC,
    ],
    "three checksums": [_BIG, _CRC, _CRC, _CRC],
}


def _create(folder: Path, codec: ShardingCodec, filters: Sequence[Any] = ()) -> None:
    array = zarr.create_array(
        folder,
        shape=_SHAPE,
        chunks=(6, 8, 4),
        dtype="u2",
        serializer=codec,
        compressors=None,
        filters=list(filters),
        fill_value=0,
    )
    array[:] = _VALUES


def _served(client: httpx.Client) -> np.ndarray[Any, Any]:
    """Read all inner chunks, and put them together."""
    read = np.zeros(_SHAPE, "<u2")
    counts = [size // inner for size, inner in zip(_SHAPE, _INNER, strict=True)]
    for at in np.ndindex(*counts):
        answer = client.get(f"/d/c/{'/'.join(map(str, at))}")
        assert answer.status_code == 200, answer.text
        place = tuple(slice(n * size, (n + 1) * size) for n, size in zip(at, _INNER, strict=True))
        read[place] = np.frombuffer(answer.content, "<u2").reshape(_INNER)
    return read


def _check_round_trip(folder: Path) -> None:
    """Read by the service; write and delete by it; read by both libraries."""
    expected = _VALUES.copy()
    settings = Settings(datasets={"d": DatasetSettings(url=folder.as_uri(), writable=True)})
    with client_of(settings) as client:
        assert (_served(client) == _VALUES).all()
        chunk = np.full(_INNER, 9, "<u2")
        assert client.put("/d/c/4/1/3", content=chunk.tobytes()).status_code == 200
        assert client.delete("/d/c/2/0/1").status_code == 204
        assert client.get("/d/c/2/0/1").status_code == 404
    expected[8:10, 4:8, 6:8] = 9
    expected[4:6, 0:4, 2:4] = 0
    assert np.array_equal(np.asarray(zarr.open_array(folder, mode="r")[:]), expected)
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{folder}/"}}
    assert (tensorstore.open(spec).result().read().result() == expected).all()


@pytest.mark.parametrize("location", ["start", "end"])
@pytest.mark.parametrize("name", _CHAINS)
def test_index_of_fixed_size_codecs_is_read_and_written(
    name: str, location: Literal["start", "end"], tmp_path: Path
) -> None:
    """Inner chunks are served, and written for both libraries, whatever the index codecs."""
    codec = ShardingCodec(
        chunk_shape=_INNER,
        codecs=[_LITTLE],
        index_codecs=_CHAINS[name],
        index_location=location,
    )
    _create(tmp_path, codec)
    _check_round_trip(tmp_path)


def test_transposed_index_in_a_nested_shard_is_read_and_written(tmp_path: Path) -> None:
    """Inner chunks of nested shards whose indexes are transposed are served and written."""
    codec = ShardingCodec(
        chunk_shape=(6, 4, 4), codecs=[_NESTED], index_codecs=_CHAINS["two transposes"]
    )
    _create(tmp_path, codec)
    _check_round_trip(tmp_path)


def test_array_with_a_transposed_index_is_listed(tmp_path: Path) -> None:
    """An array with a transposed index is listed by the chunks that its shards hold."""
    codec = ShardingCodec(
        chunk_shape=_INNER, codecs=[_LITTLE], index_codecs=_CHAINS["last axis inside"]
    )
    _create(tmp_path, codec)
    settings = Settings(datasets={"d": DatasetSettings(url=tmp_path.as_uri(), writable=True)})
    with client_of(settings) as client:
        assert client.delete("/d/c/5/1/3").status_code == 204
        keys = client.get("/d", params={"list-type": "2", "prefix": "c/5/1/"}).text
        assert [f"c/5/1/{n}<" in keys for n in range(4)] == [True, True, True, False]
