"""`shardgate.formats.zarr.array_spec`: the shards of inner chunks."""

from hypothesis import given

from shardgate.formats.zarr.metadata import parse_array
from tests.support.formats.zarr.building import array_metadata, rectilinear, sharding
from tests.support.formats.zarr.nesting import Nesting, nestings


@given(nestings())
def test_each_inner_chunk_has_an_entry_of_its_own_in_its_shard(nesting: Nesting) -> None:
    """Each inner chunk lies in its shard, where no other chunk has its entry."""
    array = parse_array(nesting.document)
    origins = [origin for at in nesting.coords() if (origin := array.origin(at)) is not None]
    shards = [array.shard(origin) for origin in origins]

    assert len({(shard.coords, shard.entry) for shard in shards}) == len(origins)
    for origin, shard in zip(origins, shards, strict=True):
        starts = array.shard_origin(shard.coords)
        lengths = [edges[at] for edges, at in zip(nesting.edges, shard.coords, strict=True)]
        places = zip(starts, origin, lengths, strict=True)
        assert all(start <= at < start + length for start, at, length in places)
    assert array.shard_counts == tuple(
        1 + max(at) for at in zip(*(shard.coords for shard in shards), strict=True)
    )


def test_shards_of_one_size_share_a_codec() -> None:
    """Shards of each size share a codec with an entry for each of their chunks; the array names the
    largest.
    """
    document = array_metadata([20], [], [sharding([2])], chunk_grid=rectilinear([4, 10, 4, 2]))
    array = parse_array(document)

    first, second, third = (array.shard((at,)).levels[0] for at in (0, 4, 14))
    assert first is third
    assert first.index.entry_count == 2
    assert second.index.entry_count == array.indexes[0].entry_count == 5


def test_memory_of_an_array_includes_the_sizes_of_its_shards() -> None:
    """An array of many sizes of shards weighs more than a regular one."""
    lengths = [2, 4] * 1000
    document = array_metadata([6000], [4], [sharding([2])])

    assert parse_array(document).nbytes == 0
    assert parse_array({**document, "chunk_grid": rectilinear(lengths)}).nbytes >= 8 * 2000
