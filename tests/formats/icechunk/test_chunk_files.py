"""`app.formats.icechunk.chunk_files`: which chunk files there are."""

import os
from collections.abc import AsyncIterator

import numpy as np

from app.formats.icechunk.chunk_files import ChunkFiles, list_files
from tests.formats.icechunk.small import spell


async def _listed(files: dict[bytes, int]) -> ChunkFiles:
    async def listing() -> AsyncIterator[tuple[str, int]]:
        yield "chunks/stray", 1
        for chunk_id, size in files.items():
            yield f"chunks/{spell(chunk_id)}", size

    return await list_files(listing())


async def test_files_that_are_missing_or_short_are_found() -> None:
    """Whatever bytes ids are of: each comes with its place, and the size of its file."""
    ids = [os.urandom(12) for _ in range(200)] + [bytes(12), b"\1" + bytes(11), bytes(11) + b"\1"]
    random = np.random.default_rng(1)
    sizes = {each: int(random.integers(1, 9)) for each in ids[::2]}
    files = await _listed(sizes)
    stops = [int(random.integers(0, 9)) for _ in ids]

    assert files.too_short(ids, stops) == [
        (at, sizes.get(each))
        for at, (each, stop) in enumerate(zip(ids, stops, strict=True))
        if sizes.get(each, -1) < stop
    ]


async def test_a_place_past_every_size_is_too_far() -> None:
    """The last byte that can be referred to lies before 2^64."""
    files = await _listed({b"chunk file 1": 5})

    assert files.too_short([b"chunk file 1"], [2**64]) == [(0, 5)]


async def test_what_was_never_looked_up_is_unused() -> None:
    """A file that exists and was looked up is used, even if it is too short."""
    files = await _listed({b"chunk file 1": 5, b"chunk file 2": 5, b"chunk file 3": 5})

    files.too_short([b"chunk file 1", b"chunk file 3", b"chunk file 4"], [1, 9, 1])

    assert files.unused == 1


async def test_without_any_file_all_are_missing() -> None:
    """Nothing that is looked up exists."""
    files = await _listed({})

    assert files.too_short([b"chunk file 1"], [1]) == [(0, None)]
    assert files.too_short([], []) == []
    assert files.unused == 0
