"""TensorStore's `neuroglancer_precomputed` driver reads the service, and sees no shards."""

from typing import Any

import tensorstore

from tests.clients.conftest import from_each_store
from tests.clients.precomputed.cases import SHAPE, VALUES, pyramid
from tests.clients.precomputed.conftest import Written
from tests.clients.precomputed.volumes import LOSSY, Volume, read_tensorstore
from tests.clients.writing import same


def open_volume(url: str, **more: Any) -> Any:
    """Open the volume at *url*, the first scale if no other is described."""
    spec = {"driver": "neuroglancer_precomputed", "kvstore": f"{url}/"}
    return tensorstore.open(spec | more, open=True).result()


@from_each_store
def test_reads_values_in_chunks(service: str, written: Written, volume: Volume) -> None:
    """Each scale reads as it was written, absent chunks as zeros, and its chunks are no shards."""
    for index, scale in enumerate(volume.scales):
        array = open_volume(f"{service}/bucket/{volume.name}", scale_index=index)
        expected = scale.values
        if scale.encoding in LOSSY:
            expected = read_tensorstore(f"file://{written.twins / volume.name}/", index)
        same(array.read().result(), expected)
        layout = array.chunk_layout
        channels = scale.values.shape[3]
        shapes = [tuple(chunk.shape or ()) for chunk in (layout.read_chunk, layout.write_chunk)]

        assert shapes == [(*scale.chunk, channels)] * 2


def test_finds_the_format_by_itself(service: str) -> None:
    """Without a driver, the probes for other formats find nothing and ``info`` wins."""
    array = tensorstore.open(f"{service}/bucket/bits/identity_1_2_3/").result()

    same(array.read().result(), VALUES)


def test_scale_is_found_by_its_resolution(service: str) -> None:
    """A scale that was sharded, and one that was not, are named by what they show."""
    for scale in pyramid():
        array = open_volume(
            f"{service}/bucket/scales/all",
            scale_metadata={"resolution": scale.resolution},
        )
        same(array.read().result(), scale.values)


def test_other_chunk_size_of_a_scale_reads(service: str) -> None:
    """Where a scale is stored in chunks of two sizes, each of them reads."""
    for size in ([4, 4, 4], [5, 10, 3]):
        url = f"{service}/bucket/plain/in_two_chunk_sizes"
        array = open_volume(url, scale_metadata={"chunk_size": size})

        assert list(array.chunk_layout.read_chunk.shape or ())[:3] == size
        same(array.read().result(), VALUES)


def test_reads_again_after_revalidation(service: str) -> None:
    """A second read through TensorStore's cache, which sends If-None-Match, is equal."""
    for data in ("raw", "gzip"):
        array = open_volume(
            f"{service}/bucket/shards/identity_index_gzip_data_{data}",
            context={"cache_pool": {"total_bytes_limit": 10_000_000}},
            recheck_cached_data=True,
        )
        for _ in range(2):
            same(array.read().result(), VALUES)


def test_reads_the_shards_themselves_where_they_are_shown(local: str) -> None:
    """The raw view gives ``info`` and shards as they are stored."""
    array = open_volume(f"{local}/raw/bits/identity_1_2_3")

    assert tuple(array.chunk_layout.write_chunk.shape) != (4, 4, 4, 1)
    assert tuple(array.shape) == (*SHAPE, 1)
    same(array.read().result(), VALUES)
