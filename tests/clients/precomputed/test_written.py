"""The written data holds what its names say, seen before any service stands before it."""

import numpy as np
import pytest

from tests.clients.precomputed.cases import BITS, BY_NAME, CASES, HASHES
from tests.clients.precomputed.conftest import Written
from tests.clients.precomputed.segments import IDS, mesh_parts
from tests.clients.precomputed.volumes import (
    IDENTITY,
    by_tensorstore,
    document,
)

OLDER = [volume.name for volume in CASES if volume.name.startswith("older/")]


@pytest.mark.parametrize("name", [v.name for v in CASES if v.write is by_tensorstore])
def test_the_writer_kept_the_sharding(written: Written, name: str) -> None:
    """``info`` names what the case says."""
    info = document(written.bucket / name)

    expected = [scale.sharding for scale in BY_NAME[name].scales]
    assert [scale.get("sharding") for scale in info["scales"]] == expected


@pytest.mark.parametrize("name", HASHES)
@pytest.mark.parametrize("bits", BITS)
def test_shards_are_as_many_as_their_bits_allow(
    written: Written, bits: tuple[int, int, int], name: str
) -> None:
    """Names have a digit for four bits; the table holds one shard, several, and one a chunk."""
    folder = written.bucket / f"bits/{name}_{'_'.join(map(str, bits))}" / "8_8_8"
    names = [shard.stem for shard in folder.glob("*.shard")]
    most = min(30, 2 ** bits[2])

    assert {len(stem) for stem in names} == {max(1, -(-bits[2] // 4))}
    assert 1 <= len(names) <= most
    if name == IDENTITY and bits[2] + bits[1] + bits[0] == 6:
        assert len(names) > most / 2


def test_volumes_with_holes_lack_chunks_and_shards(written: Written) -> None:
    """Of 64 chunks three are there, in two of sixteen shards; or none, and no shard."""
    for name in (name for name in BY_NAME if name.startswith("holes/")):
        chunks = list((written.twins / name / "8_8_8").glob("*"))
        shards = list((written.bucket / name / "8_8_8").glob("*.shard"))
        assert (len(chunks), len(shards)) == ((0, 0) if name.endswith("thing") else (3, 2))


@pytest.mark.parametrize("name", OLDER)
def test_older_volumes_are_pairs(written: Written, name: str) -> None:
    """Each shard is an index, of as many entries as there are minishards, and its data."""
    folder = written.bucket / name / "8_8_8"
    indexes = list(folder.glob("*.index"))

    assert {file.suffix for file in folder.iterdir()} == {".index", ".data"}
    assert {file.stat().st_size for file in indexes} == {16 * 2**2}


def test_meshes_have_levels_and_fragments(written: Written) -> None:
    """There is a mesh of several levels and one of a single level, in two shards."""
    path = written.bucket / "segments/sharded"
    counts = [np.frombuffer(mesh_parts(path, segment)[0][24:28], "<u4")[0] for segment in IDS]

    assert set(counts) == {1, 2}
    assert len(list((path / "mesh").glob("*.shard"))) == 2
