"""Reports of `verify` about one ref of a repository."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shardgate.cli import app
from shardgate.errors import UnknownRefError
from tests.formats.icechunk.building import Ref
from tests.formats.icechunk.building_repo import ref, snapshot
from tests.formats.icechunk.repositories import Builder, digest, lab, spell
from tests.support.files import write_files

INLINE = Ref(index=[0], inline=b"xy")


def verify(folder: Path, *options: str) -> tuple[int, Any]:
    """Run the command; return its exit code and its report."""
    done = CliRunner().invoke(app, ["verify", str(folder), "--json", *options])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, json.loads(done.stdout)


def test_undamaged_repository_has_an_empty_report(tmp_path: Path) -> None:
    """Verifying an undamaged repository exits with 0 and counts all manifests and references."""
    write_files(lab(INLINE).build(), tmp_path)
    code, report = verify(tmp_path, "--chunks")

    assert (code, report["damages"]) == (0, [])
    assert report["counts"] == {"manifests": 2, "references": 4}
    assert (report["arrays"], report["shards"]) == (2, 2)


@pytest.mark.parametrize(
    ("builder", "file", "key", "reason"),
    [
        (lab(INLINE), ("chunks/0", None), "/a/c/1", "does not exist, though it is referred to"),
        (lab(INLINE), ("chunks/0", b".x"), "/a/c/1",
         "has 2 bytes, and bytes up to 3 are referred to"),
        (lab(INLINE), ("chunks/1", b"x" * 999), "/s/c/4", "checksum"),
        (lab(INLINE), ("manifests/0", None), "/a", "does not exist, but a snapshot refers to it"),
        (lab(INLINE), ("manifests/1", b"?"), "/s", "Icechunk"),
        (lab(Ref(index=[3], inline=b"xy")), ("manifests/0", b""), "/a/c/3",
         "it is out of the chunk grid [3]"),
        (lab(Ref(index=[0, 1], inline=b"xy")), ("manifests/0", b""), "/a",
         "references with 2 coordinates to an array of 1 dimensions"),
        (lab(INLINE, document=b"?"), ("snapshots/0", b""), "/a", ""),
    ],
)  # fmt: skip
def test_damage_is_reported_once_with_file_key_and_reason(
    tmp_path: Path, builder: Builder, file: tuple[str, bytes | None], key: str, reason: str
) -> None:
    """One damaged file is reported once, with its URL, the affected key and the reason.

    *file* is numbered in its folder, and deleted, replaced or kept.
    """
    objects = builder.build()
    (folder, number), change = file[0].split("/"), file[1]
    name = [name for name in objects if name.startswith(folder)][int(number)]
    if change is None:
        del objects[name]
    else:
        objects[name] = change or objects[name]
    write_files(objects, tmp_path)
    _, report = verify(tmp_path, "--chunks")
    (damage,) = report["damages"]

    assert damage["object"] == f"{tmp_path.as_uri()}/{name}"
    assert damage["key"] == f"@branch.main{key}"
    assert reason in damage["reason"]


def test_only_the_given_ref_is_verified(tmp_path: Path) -> None:
    """A given ref, ``main`` by default, is verified and no other; an unknown one is an error."""
    empty, builder = Builder(), lab(INLINE)
    empty.group("/")
    first, second = empty.snapshot(), builder.snapshot()
    objects = {
        **empty.objects,
        **builder.build(
            branches=[ref("main", 0), ref("dev", 1)],
            tags=[ref("v 1", 1)],
            snapshots=[snapshot(first), snapshot(second, 0)],
        ),
    }
    del objects[f"chunks/{spell(digest(b'.xy'))}"]
    write_files(objects, tmp_path)

    assert verify(tmp_path) == (0, verify(tmp_path, "--ref", "main")[1])
    for spelled in ("dev", "@branch.dev", "@tag.v 1"):
        assert verify(tmp_path, "--ref", spelled)[0] == 1
    assert verify(tmp_path, "--ref", spell(first))[0] == 0
    with pytest.raises(UnknownRefError, match="there is no ref none"):
        verify(tmp_path, "--ref", "none")
