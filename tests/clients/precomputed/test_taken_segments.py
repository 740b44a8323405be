"""Meshes, skeletons and annotations are put over HTTP; others read the shards themselves."""

import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from cloudvolume.exceptions import EmptyFileException
from neuroglancer.read_precomputed_annotations import AnnotationReader

from tests.clients.precomputed.annotations import COLLECTIONS
from tests.clients.precomputed.conftest import Written
from tests.clients.precomputed.segments import IDS, LARGE_IDS, skeleton_bytes
from tests.clients.precomputed.test_annotations import said
from tests.clients.precomputed.test_segments import SKELETONS, opened
from tests.clients.taking import Taker, chunks_in, lay_out

NEW_ID: Final = 2**63 + 5


@pytest.mark.parametrize("name", ["sharded", "identity_64", "murmur_64", "one_shard"])
def test_skeletons(written: Written, taker: Taker, name: str) -> None:
    """Two skeletons are exchanged, one is added and one taken away, with single requests."""
    source, target = written.bucket / "segments" / name, f"skeletons/{name}"
    taker.place(source, target)
    first, second, third = IDS if name == "sharded" else LARGE_IDS[-3:]
    old = {segment: skeleton_bytes(source, segment) for segment in (first, second, third)}
    before = {f"{SKELETONS}/{segment}": body for segment, body in old.items()}
    placed = {first: old[second], second: old[first], NEW_ID: old[third]}
    after = {f"{SKELETONS}/{segment}": body for segment, body in placed.items()}
    taker.push(target, before, after)

    path = taker.folder / target
    found, expected = (opened(f"file://{each}").skeleton for each in (path, source))
    assert {segment: skeleton_bytes(path, segment) for segment in placed} == placed
    for segment, former in ((first, second), (second, first), (NEW_ID, third)):
        np.testing.assert_array_equal(found.get(segment).vertices, expected.get(former).vertices)
        np.testing.assert_array_equal(found.get(segment).edges, expected.get(former).edges)
    with pytest.raises(EmptyFileException):
        found.get(third)


@pytest.mark.parametrize("name", COLLECTIONS)
def test_annotations(written: Written, taker: Taker, tmp_path: Path, name: str) -> None:
    """Files of each index are exchanged, added and taken away; `neuroglancer` reads them so."""
    path = f"annotations/{name}"
    taker.place(written.bucket / path, path)
    twin = tmp_path / "twin"
    shutil.copytree(written.twins / path, twin)
    before = chunks_in(twin)
    after = exchanged(before)
    lay_out(twin, before, after)
    taker.push(path, before, after)

    assert len(before) > len(after) > 10
    found = read(taker.folder / path, before)
    assert {key for key, value in found.items() if value is not None} == set(after)
    assert found == read(twin, before)
    taker.push(path, after, {})
    assert taker.stored(path) == set()


def read(path: Path, keys: Iterable[str]) -> Mapping[str, Sequence[str] | None]:
    """Read what the files *keys* hold of the annotations at *path*, `None` for what is absent."""
    reader = AnnotationReader(f"file://{path}/")
    found: dict[str, Sequence[str] | None] = {}
    for key in keys:
        folder, name = key.split("/")
        try:
            if folder == "by_id":
                found[key] = [said(reader.by_id[int(name)])]
            elif folder.startswith("spatial"):
                level = reader.spatial[int(folder.removeprefix("spatial"))]
                found[key] = [said(each) for each in level[tuple(map(int, name.split("_")))]]
            else:
                related = reader.relationships[folder.removeprefix("rel_")]
                found[key] = [said(each) for each in related[int(name)]]
        except KeyError:
            found[key] = None
    return found


def exchanged(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Exchange the first two of every four files of a folder, and take the third away."""
    found: dict[str, bytes] = {}
    for folder in {key.rpartition("/")[0] for key in files}:
        keys = sorted(key for key in files if key.rpartition("/")[0] == folder)
        for at in range(0, len(keys), 4):
            some = keys[at : at + 4]
            sources = [*some[1::-1], None, *some[3:]]
            found |= {k: files[s] for k, s in zip(some, sources, strict=False) if s is not None}
    return found
