"""Findings of `verify` in one ref of a repository."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import icechunk
import pytest
import zarr
from typer.testing import CliRunner

from app.cli import app
from app.errors import UnknownRefError
from tests.formats.icechunk.building import Ref
from tests.formats.icechunk.building_repo import FIRST, ref
from tests.formats.icechunk.small import SHARD, C, D, M, N, Small, name, repo

SOUND = Small(references=Small().references[:2])


def verify(folder: Path, *options: str) -> tuple[int, Any]:
    """Run the command; give its exit code and what it reports."""
    done = CliRunner().invoke(app, ["verify", str(folder), "--json", *options])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, json.loads(done.stdout)


def write(objects: Mapping[str, bytes], folder: Path) -> None:
    """Write files."""
    for key, data in objects.items():
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key).write_bytes(data)


def found(small: Small, folder: Path) -> list[tuple[str, str, str]]:
    """Verify a repository; give file, key and reason of each damage."""
    write(small.objects(), folder)
    _, report = verify(folder, "--chunks")
    start = f"{folder.as_uri()}/"
    return [
        (each["object"].removeprefix(start), each["key"], each["reason"])
        for each in report["damages"]
    ]


def test_a_sound_repository_has_no_damage(tmp_path: Path) -> None:
    """All references are followed, those of the manifest's own bytes too."""
    assert found(SOUND, tmp_path) == []
    code, report = verify(tmp_path)
    assert code == 0
    assert report["counts"] == {"manifests": 2, "references": 4}
    assert (report["arrays"], report["shards"]) == (2, 2)


@pytest.mark.parametrize(
    ("small", "file", "key", "reason"),
    [
        (replace(SOUND, more={name("chunks", C): None}), name("chunks", C), "/a/c/1",
         "does not exist, though it is referred to"),
        (replace(SOUND, more={name("chunks", C): b".x"}), name("chunks", C), "/a/c/1",
         "has 2 bytes, and bytes up to 3 are referred to"),
        (replace(SOUND, more={name("chunks", D): b".." + SHARD[:-1] + b"!"}), name("chunks", D),
         "/s/c/4", "checksum"),
        (replace(SOUND, more={name("manifests", M): None}), name("manifests", M), "/a",
         "does not exist, but a snapshot refers to it"),
        (replace(SOUND, more={name("manifests", N): b"?"}), name("manifests", N), "/s", "Icechunk"),
        (replace(SOUND, references=[Ref(index=[3], inline=b"xy")]), name("manifests", M),
         "/a/c/3", "it is out of the chunk grid [3]"),
        (replace(SOUND, references=[Ref(index=[0, 1], inline=b"xy")]), name("manifests", M), "/a",
         "references with 2 coordinates to an array of 1 dimensions"),
        (replace(SOUND, document=b"?"), "snapshots/", "/a", ""),
    ],
)  # fmt: skip
def test_damage_names_the_file_the_key_and_the_reason(
    tmp_path: Path, small: Small, file: str, key: str, reason: str
) -> None:
    """Once, whatever else is sound."""
    ((damaged, at, why),) = found(small, tmp_path)

    assert damaged.startswith(file)
    assert at == f"@branch.main{key}"
    assert reason in why


def test_other_refs_are_not_looked_at(tmp_path: Path) -> None:
    """Each has to be named: a branch, a tag, or a snapshot."""
    branches = [ref("main", 0), ref("dev", 1)]
    small = replace(SOUND, repo=repo(branches=branches), more={name("chunks", C): None})
    write(small.objects(), tmp_path)

    assert verify(tmp_path) == (0, verify(tmp_path, "--ref", "main")[1])
    for spelled in ("dev", "@branch.dev", "@tag.v 1"):
        assert verify(tmp_path, "--ref", spelled)[0] == 1
    first = name("snapshots", FIRST).removeprefix("snapshots/")
    assert verify(tmp_path, "--ref", first)[0] == 0
    with pytest.raises(UnknownRefError, match="there is no ref none"):
        verify(tmp_path, "--ref", "none")


def test_references_that_may_not_be_followed_are_reported(tmp_path: Path) -> None:
    """They are no damage."""
    write(Small().objects(), tmp_path)
    code, report = verify(tmp_path)

    assert code == 0
    assert "1 of its chunks: " in report["not_checked"]["@branch.main/a"]


def test_damage_in_what_the_library_wrote_is_found(tmp_path: Path) -> None:
    """Wherever a byte of a shard's index flips."""
    storage = icechunk.local_filesystem_storage(str(tmp_path))
    repository = icechunk.Repository.create(storage)
    session = repository.writable_session("main")
    array = zarr.create_array(
        session.store,
        name="a",
        shape=(640,),
        shards=(640,),
        chunks=(8,),
        dtype="u4",
        compressors=None,
    )
    array[:] = 1
    session.commit("one")
    assert verify(tmp_path, "--chunks")[0] == 0
    (shard,) = (tmp_path / "chunks").iterdir()
    data = bytearray(shard.read_bytes())
    data[-9] ^= 1
    shard.write_bytes(data)

    code, report = verify(tmp_path)

    assert code == 1
    assert report["damages"][0]["object"] == shard.as_uri()
