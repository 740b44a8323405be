"""Reports of `verify` about one ref of a repository."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shardgate.cli import app
from shardgate.errors import UnknownRefError
from tests.support.files import write_files
from tests.support.formats.icechunk.building import Ref
from tests.support.formats.icechunk.building_repo import NOON, U8, U64, ref, snapshot
from tests.support.formats.icechunk.repositories import Builder, digest, lab, spell
from tests.support.formats.zarr.building import CRC, LITTLE, array_metadata, checksum, sharding

INLINE = Ref(index=[0], inline=b"xy")


def verify(folder: Path, *options: str) -> tuple[int, Any]:
    """Run the command; return its exit code and its report."""
    done = CliRunner().invoke(app, ["verify", str(folder), "--json", *options])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, json.loads(done.stdout)


def _beside(path: str, document: dict[str, Any], grid: list[int], at: int = 0) -> Builder:
    """Return the lab with one more array, which has an inline chunk."""
    builder = lab(INLINE)
    builder.array(path, document, grid, [Ref(index=[at], inline=b"xy")])
    return builder


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
        (lab(Ref(index=[0], inline=b"xy", chunk_id=bytes(12))), ("manifests/0", b""), "/a/c/0",
         "damaged"),
        (_beside("/off", array_metadata([8], [4], [sharding([1])]), [2], 5), ("manifests/2", b""),
         "/off/c/20", "it is out of the chunk grid [2]"),
        (_beside("/none/b", array_metadata([2], [2], [LITTLE]), [1]), ("snapshots/0", b""),
         "/none/b", "group"),
        *((_beside("/bad", array_metadata([2], [2], codecs) | {"dimension_names": 3}, [1]),
           ("snapshots/0", b""), "/bad", "dimension_names is no list of names: 3")
          for codecs in ([LITTLE], [sharding([1], [LITTLE, {"name": "unknown"}])])),
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


def damages(folder: Path, *options: str) -> list[tuple[str, str, str]]:
    """Return object, key and reason of each damage, with names below *folder*."""
    found = verify(folder, *options)[1]["damages"]
    lead = f"{folder.as_uri()}/"
    return [(each["object"].removeprefix(lead), each["key"], each["reason"]) for each in found]


def test_chunks_without_a_checksum_are_not_checked(tmp_path: Path) -> None:
    """Chunks whose codecs have no checksum are counted as not checked, with the reason."""
    builder = Builder()
    builder.group("/")
    document = array_metadata([2], [2], [LITTLE, {"name": "unknown"}])
    builder.array("/a", document, [1], [builder.native([0], b"xy")])
    write_files(builder.build(), tmp_path)

    (reason,) = verify(tmp_path, "--chunks")[1]["not_checked"].values()
    assert "unknown" in reason
    assert verify(tmp_path)[1]["not_checked"] == {}


def virtual(tmp_path: Path, data: bytes | None, **more: Any) -> tuple[str, ...]:
    """Write a repository whose array has a virtual chunk, in an object of *data*; return options
    that allow the reference.
    """
    beside = tmp_path / "beside"
    write_files({} if data is None else {"x": data}, beside)
    beside.mkdir(exist_ok=True)
    builder = Builder()
    builder.group("/")
    place = Ref(index=[0], location=f"{beside.as_uri()}/x", offset=1, length=6, **more)
    builder.array("/a", array_metadata([2], [2], [LITTLE, CRC]), [1], [place])
    write_files(builder.build(), tmp_path / "repo")
    return "--allow-virtual", beside.as_uri()


@pytest.mark.parametrize(
    ("data", "reasons"),
    [
        (b"." + b"ab" + checksum(b"ab"), []),
        (b"." + b"aB" + checksum(b"ab"), ["the checksum of the inner chunk does not match"]),
        (b".ab", ["the inner chunk has 2 bytes instead of 6"]),
        (None, ["does not exist, though it is referred to"]),
        (b"", ["0 bytes are too few for its chunk"]),
    ],
)
def test_virtual_chunks_are_checked_by_their_checksum(
    tmp_path: Path, data: bytes | None, reasons: list[str]
) -> None:
    """A virtual chunk with a checksum is checked in the object that its reference names."""
    options = virtual(tmp_path, data)

    found = damages(tmp_path / "repo", "--chunks", *options)
    where = (f"{(tmp_path / 'beside').as_uri()}/x", "@branch.main/a/c/0")
    assert found == [(*where, reason) for reason in reasons]


def test_object_changed_since_it_was_referred_to_is_reported(tmp_path: Path) -> None:
    """An object that is newer than its virtual reference allows is damage, without `--chunks`."""
    options = virtual(tmp_path, b".abcdef", checksum_last_modified=1)

    ((_, key, reason),) = damages(tmp_path / "repo", *options)
    assert key == "@branch.main/a/c/0"
    assert reason == "is missing, or not as it was when it was referred to"


def test_offline_repository_is_not_checked(tmp_path: Path) -> None:
    """An offline repository is reported as not checked, with the reason that its owner gave."""
    status = {0: U8(2), 1: U64(NOON), 2: "under repair"}
    write_files(lab(INLINE).build(status=status), tmp_path)

    code, report = verify(tmp_path)
    assert (code, report["damages"]) == (0, [])
    assert "under repair" in report["not_checked"][""]


@pytest.mark.parametrize("folder", ["repo", "snapshots"])
def test_damaged_file_of_a_whole_ref_is_reported(tmp_path: Path, folder: str) -> None:
    """A damaged ``repo``, or snapshot of the ref, is reported once with its name as the key."""
    objects = lab(INLINE).build()
    (name,) = (name for name in objects if name.startswith(folder))
    objects[name] = objects[name][:-9]
    write_files(objects, tmp_path)

    ((file, key, _),) = damages(tmp_path)
    assert (file, key) == (name, name)
