"""Repositories of the conformance suite: arrays of 5 x 7 elements at the path ``g/a``."""

import itertools
from collections.abc import Mapping
from functools import partial
from typing import Any

from tests.support.formats.case import Case
from tests.support.formats.icechunk.building import Ref
from tests.support.formats.icechunk.repositories import Builder
from tests.support.formats.zarr.building import (
    LITTLE,
    array_metadata,
    chunk_bytes,
    encode_shard,
    sharding,
)

PLAIN = array_metadata([5, 7], [2, 2], [LITTLE])
SHARDED = array_metadata([5, 7], [4, 4], [sharding([2, 2])])


def build(
    chunks: Mapping[str, bytes], *, inline: bool = False, sharded: bool = False, version: int = 2
) -> dict[str, bytes]:
    """Return the objects of one array, with chunks or shards in files or inline."""
    builder = Builder(version)
    stored = _shards(chunks) if sharded else _chunks(chunks)
    refs = [
        Ref(index=at, inline=data) if inline else builder.native(at, data, before=b"gap")
        for at, data in stored.items()
    ]
    builder.group("/")
    builder.group("/g")
    builder.array("/g/a", SHARDED if sharded else PLAIN, [2, 2] if sharded else [3, 4], refs)
    return builder.build()


def _chunks(chunks: Mapping[str, bytes]) -> dict[tuple[int, ...], bytes]:
    return {tuple(map(int, key.split("/")[3:])): data for key, data in sorted(chunks.items())}


def _shards(chunks: Mapping[str, bytes]) -> dict[tuple[int, ...], bytes]:
    by_coords = _chunks(chunks)
    shards: dict[tuple[int, ...], bytes] = {}
    for i, j in itertools.product(range(2), range(2)):
        entries = itertools.product(range(2), range(2))
        inner = [by_coords.get((i * 2 + di, j * 2 + dj)) for di, dj in entries]
        if any(data is not None for data in inner):
            shards[i, j] = encode_shard(inner)
    return shards


def _case(name: str, *, checksummed: bool = True, **options: Any) -> Case:
    keys = ["c/0/0", "c/0/1", "c/1/0", "c/2/3", "c/0/3"]
    nothing = ["c/1/1", "c/2/0", "c/3/0", "c/0/4", "c/0/0/0", "c/00/0", "c/0", "c", "x/c/0/0"]
    return Case(
        name,
        partial(build, **options),
        {f"g/a/{key}": chunk_bytes(number) for number, key in enumerate(keys)},
        absent=(
            *(f"g/a/{key}" for key in nothing),
            "a/c/0/0",
            "g/c/0/0",
            *("", "g", "g/a", "g/", "zarr.json/", "g/a/c/0/0/", "repo", "snapshots/x"),
            *("@tag.v1", "@branch.x/g", "@tag.main/g/a/c/0/0"),
            "@branch.v1/zarr.json",
            "@session.x/zarr.json",
            "@1CECHNKREP0F1RSTCMT0/zarr.json",
        ),
        checksummed=checksummed,
        metadata=("repo", "ref.json", "snapshots/", "manifests/"),
        has_shards=False,
    )


CASES = (
    _case("icechunk"),
    _case("icechunk-sharded", sharded=True),
    _case("icechunk-inline", inline=True, checksummed=False),
    _case("icechunk-inline-sharded", inline=True, sharded=True, checksummed=False),
    _case("icechunk-v1", version=1),
    _case("icechunk-v1-sharded", version=1, sharded=True),
)
