"""Where keys are written, and what is taken for a chunk."""

from typing import Any

import pytest

from app.errors import (
    BadBodyError,
    BadKeyError,
    UnknownCodingError,
)
from app.formats.writing import Document
from app.model import VirtualKey, Whole
from tests.formats.zarr_sharding_indexed.case import (
    LITTLE,
    array_metadata,
    sharding,
)
from tests.formats.zarr_sharding_indexed.writing import WrittenArray, one_dimension
from tests.resolving import ROOT, known_formats


@pytest.mark.parametrize("key", ["c/3", "c/03", "c/0/0", "c", "c/x", "c/-1"])
async def test_what_is_no_chunk_of_the_grid_is_refused(key: str) -> None:
    """It would be an object that nobody finds, or one in the place of a shard."""
    array = one_dimension(3)
    with pytest.raises(BadKeyError, match=rf"{key} is no chunk of an array of shape \[3\]"):
        await array.slot(key)


@pytest.mark.parametrize("key", ["zarr.json", "notes.txt", "d/0", ".zattrs"])
async def test_other_keys_are_objects(key: str) -> None:
    """Beside the chunks of the array."""
    fetch = one_dimension(3).fetch()
    layout = await known_formats()[0].open(ROOT, fetch)
    assert layout is not None

    target = await layout.target(VirtualKey(key), fetch)

    assert isinstance(target, Whole | Document)
    assert target.ref == ROOT.join(key)


@pytest.mark.parametrize("codecs", [[LITTLE], [sharding([1]), {"name": "gzip"}]])
async def test_chunks_of_other_arrays_are_objects(codecs: list[Any]) -> None:
    """Not sharded, or served with the shards."""
    fetch = WrittenArray(array_metadata([3], [3], codecs)).fetch()
    layout = await known_formats()[0].open(ROOT, fetch)
    assert layout is not None

    assert await layout.target(VirtualKey("c/0"), fetch) == Whole(ROOT.join("c/0"))


async def test_a_body_in_a_coding_is_refused() -> None:
    """The codecs of the array tell how chunks are compressed."""
    slot = await one_dimension(3).slot("c/0")

    with pytest.raises(UnknownCodingError):
        slot.shard.encode(slot.entry, b"any", is_gzip=True)
    assert slot.shard.encode(slot.entry, b"any", is_gzip=False) == b"any"


async def test_a_body_that_is_no_chunk_is_refused() -> None:
    """An array of bytes tells how long each is."""
    slot = await WrittenArray(array_metadata([4], [4], [sharding([2])])).slot("c/1")

    with pytest.raises(BadBodyError, match="3 bytes instead of 2"):
        slot.shard.encode(slot.entry, b"abc", is_gzip=False)
