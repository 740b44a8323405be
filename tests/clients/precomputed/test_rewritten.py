"""Readers of volumes find in shards that were planned anew what was put there."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.errors import ConflictError
from tests.clients.precomputed.cases import CASES
from tests.clients.precomputed.conftest import Written
from tests.clients.precomputed.rewriting import rewrite
from tests.clients.precomputed.volumes import (
    Scale,
    Volume,
    document,
    read_cloudvolume,
    read_tensorstore,
)
from tests.clients.writing import same

SHARDED = [
    volume for volume in CASES if not volume.name.startswith(("older/", "plain/", "scales/not"))
]
BY_BOTH = ("shards/", "holes/", "cloudvolume/", "igneous/", "scales/all", "grid/")
"""Volumes that cloud-volume reads as well, which is slow at it."""


SELDOM = ("dtype/", "encoding/")
"""What shards know nothing of."""
LARGE_SELDOM = (*SELDOM, "bits/")
CHANGED = [
    pytest.param(
        volume,
        is_large,
        id=f"{volume.name}-{is_large}",
        marks=pytest.mark.soak
        if volume.name.startswith(LARGE_SELDOM if is_large else SELDOM)
        else (),
    )
    for volume in SHARDED
    for is_large in (False, True)
]


@pytest.fixture(params=SHARDED, ids=lambda volume: volume.name)
def volume(request: pytest.FixtureRequest) -> Volume:
    """Give each volume that has shards."""
    found: Volume = request.param
    return found


def chunks(twin: Path, scale: Scale) -> dict[str, bytes]:
    """Give the chunks of *scale* that the unsharded twin has, by their keys."""
    names = (name for name, _ in scale.chunks())
    paths = {f"{scale.path}/{name}": twin / scale.path / name for name in names}
    return {key: path.read_bytes() for key, path in paths.items() if path.exists()}


def scales(volume: Volume, path: Path) -> Iterator[tuple[Scale, bool]]:
    """Give the scales of *volume*, and whether they are sharded: igneous decides for itself."""
    info = document(path)
    for scale, found in zip(volume.scales, info["scales"], strict=True):
        yield scale, "sharding" in found


def compare(volume: Volume, path: Path, twin: Path) -> None:
    """See that readers find the same in shards and in files."""
    for index, _ in enumerate(volume.scales):
        expected = read_tensorstore(f"file://{twin}/", index)
        same(read_tensorstore(f"file://{path}/", index), expected)
        if volume.name.startswith(BY_BOTH):
            same(read_cloudvolume(f"file://{path}", index), expected)


async def test_volumes_made_of_nothing_but_chunks(
    written: Written, tmp_path: Path, volume: Volume
) -> None:
    """All chunks of an empty volume are put, and all voxels read."""
    twin, path = written.twins / volume.name, tmp_path / "made"
    path.mkdir()
    shutil.copy(written.bucket / volume.name / "info", path)
    for scale, is_sharded in scales(volume, path):
        if is_sharded:
            await rewrite(path, chunks(twin, scale))
        elif (twin / scale.path).exists():
            shutil.copytree(twin / scale.path, path / scale.path)

    compare(volume, path, twin)


@pytest.mark.parametrize(("volume", "is_large"), CHANGED, indirect=["volume"])
async def test_volumes_of_which_chunks_change(
    written: Written, tmp_path: Path, volume: Volume, *, is_large: bool
) -> None:
    """Two chunks change places, and one goes; all else stays, whoever wrote it."""
    path = shutil.copytree(written.bucket / volume.name, tmp_path / "changed")
    twin = shutil.copytree(written.twins / volume.name, tmp_path / "twin")
    for scale, is_sharded in scales(volume, path):
        found = chunks(twin, scale)
        if not is_sharded or not found:
            continue
        whole = [key for key in found if _is_whole(key, scale)] or list(found)
        first, last = whole[0], whole[-1]
        changes: dict[str, bytes | None] = {first: found[last], last: found[first]}
        changes[next(key for key in reversed(found))] = None
        await rewrite(path, changes, is_large=is_large)
        for key, body in changes.items():
            (twin / key).unlink() if body is None else (twin / key).write_bytes(body)

    compare(volume, path, twin)


def _is_whole(key: str, scale: Scale) -> bool:
    bounds = re.findall(r"(-?\d+)-(-?\d+)(?:_|$)", key.rpartition("/")[2])
    return [int(end) - int(begin) for begin, end in bounds] == list(scale.chunk)


@pytest.mark.parametrize("name", ["older/pairs_raw", "older/pairs_gzip"])
async def test_older_volumes_are_not_written(written: Written, name: str) -> None:
    """Their shards are two objects each."""
    volume = next(volume for volume in CASES if volume.name == name)
    found = chunks(written.twins / name, volume.scales[0])

    with pytest.raises(ConflictError, match="in two objects"):
        await rewrite(written.bucket / name, found)


async def test_a_chunk_put_again_leaves_the_shard_of_cloudvolume_as_it_is(
    written: Written, tmp_path: Path
) -> None:
    """Its layout is ours."""
    name = "cloudvolume/identity_index_raw_data_raw"
    volume = next(volume for volume in CASES if volume.name == name)
    path = shutil.copytree(written.bucket / name, tmp_path / "volume")
    await rewrite(path, chunks(written.twins / name, volume.scales[0]))

    shards = list(path.rglob("*.shard"))
    assert shards
    for shard in shards:
        assert shard.read_bytes() == (written.bucket / name / shard.relative_to(path)).read_bytes()
