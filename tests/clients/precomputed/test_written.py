"""The written data holds what its names say, seen before any service stands before it."""

import struct

import numpy as np
import pytest
import tensorstore

from tests.clients.precomputed.annotations import COLLECTIONS
from tests.clients.precomputed.cases import BITS, BY_NAME, CASES, HASHES
from tests.clients.precomputed.conftest import Written
from tests.clients.precomputed.segments import IDS, mesh_parts
from tests.clients.precomputed.volumes import (
    IDENTITY,
    by_tensorstore,
    chunk_id,
    document,
    read_cloudvolume,
    read_tensorstore,
)
from tests.clients.writing import same
from tests.zipped import zipped

OLDER = [volume.name for volume in CASES if volume.name.startswith("older/")]


def test_every_case_has_a_name_of_its_own() -> None:
    """No two volumes are written to one place."""
    assert len(BY_NAME) == len(CASES)


@pytest.mark.parametrize("name", [name for name in BY_NAME if name not in OLDER])
def test_each_shard_holds_the_files_of_the_twin(written: Written, name: str) -> None:
    """What TensorStore finds by the chunks' ids are the files of the unsharded twin."""
    volume = BY_NAME[name]
    info = document(written.bucket / volume.name)
    for scale, found in zip(volume.scales, info["scales"], strict=True):
        if "sharding" not in found:
            continue
        spec = {
            "driver": "neuroglancer_uint64_sharded",
            "base": f"file://{written.bucket / volume.name / scale.path}/",
            "metadata": found["sharding"],
        }
        store = tensorstore.KvStore.open(spec).result()
        folder = written.twins / volume.name / scale.path
        for chunk, _ in scale.chunks():
            stored = store.read(struct.pack(">Q", chunk_id(scale, chunk))).result()
            twin = folder / chunk
            assert stored.state == ("value" if twin.exists() else "missing")
            assert stored.state == "missing" or stored.value == twin.read_bytes()


@pytest.mark.parametrize("name", [n for n in BY_NAME if n.startswith(("shards/", "holes/"))])
def test_both_readers_find_the_same_in_shards(written: Written, name: str) -> None:
    """cloud-volume, which is slow at it, agrees with TensorStore on the sharded volume."""
    url = f"file://{written.bucket / name}"

    same(read_cloudvolume(url), read_tensorstore(f"{url}/"))


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


def test_manifests_in_gzip_are_those_of_the_others(written: Written) -> None:
    """The two kinds differ in how the manifest is stored, and in nothing else."""
    for segment in IDS:
        plain, compressed = (
            mesh_parts(written.bucket / "segments" / name, segment)
            for name in ("sharded", "gzip_manifests")
        )
        assert plain == compressed
        files = (written.bucket / "segments/gzip_manifests/mesh").glob("*.shard")
        stored = b"".join(file.read_bytes() for file in files)
        assert plain[0] not in stored
        assert plain[1] + zipped(plain[0])[:4] in stored


@pytest.mark.parametrize("name", COLLECTIONS)
def test_every_spatial_level_has_annotations(written: Written, name: str) -> None:
    """Each level has cells; the finer ones have several, and lack some."""
    for level, grid in enumerate(COLLECTIONS[name].grids):
        cells = len(list((written.twins / f"annotations/{name}/spatial{level}").iterdir()))
        assert (1 if level == 0 else 2) <= cells <= int(np.prod(grid))
