"""`shardgate inspect` and `verify` of a repository with virtual references."""

import json
import re
from pathlib import Path

import pytest

from tests.support.commands import run
from tests.support.files import write_files
from tests.support.survey.virtual import VirtualLab, virtual_lab


@pytest.fixture
def lab(tmp_path: Path) -> VirtualLab:
    """Write a repository with a virtual reference to the object ``x`` beside it."""
    return virtual_lab(tmp_path)


def test_verify_follows_allowed_virtual_references(lab: VirtualLab) -> None:
    """`verify` follows virtual references that are allowed, and names missing objects.

    Others are reported as not checked, with the setting that would allow them.
    """
    allowed = ("--allow-virtual", lab.prefix)
    refused = run("verify", str(lab.folder), "--json")
    followed = run("verify", str(lab.folder), "--json", *allowed)

    assert (refused.returncode, followed.returncode) == (0, 0)
    assert "virtual_chunk_prefixes" in str(json.loads(refused.stdout)["not_checked"])
    assert json.loads(followed.stdout)["not_checked"] == {}
    assert json.loads(followed.stdout)["counts"]["references"] == 4
    lab.source.unlink()
    damaged = run("verify", str(lab.folder), *allowed)
    assert damaged.returncode == 1
    assert f"{lab.source}: @" in damaged.stdout


def test_inspect_shows_refs_beside_arrays(lab: VirtualLab) -> None:
    """`inspect` lists branches and tags beside the arrays, as JSON and as a table."""
    document = json.loads(run("inspect", str(lab.folder), "--json").stdout)

    assert [each["ref"] for each in document["refs"]] == ["@branch.main", "@tag.v 1"]
    assert [array["path"] for array in document["arrays"]] == ["a", "s"]
    assert "@tag.v 1" in run("inspect", str(lab.folder)).stdout


def test_inspect_locates_allowed_virtual_chunks(lab: VirtualLab) -> None:
    """`inspect` of a virtual chunk prints its place if it is allowed, and otherwise "refused"."""
    command = ("inspect", str(lab.folder), "@tag.v 1/a/c/0")
    chunk = json.loads(run(*command, "--json", "--allow-virtual", lab.prefix).stdout)

    assert (chunk["state"], chunk["reference"], chunk["start"]) == ("stored", "virtual", 3)
    assert re.search(r"state +refused", run(*command).stdout)


def _reference_set(folder: Path, nbytes: int) -> str:
    """Write a set of two plain chunks, the second of which ends at byte 9 of an object of *nbytes*,
    and return its location.
    """
    url = (folder / "sources" / "data.bin").as_uri()
    write_files({"sources/data.bin": bytes(nbytes)}, folder)
    array = {"zarr_format": 2, "shape": [12], "chunks": [4], "dtype": "|u1", "order": "C"}
    references = {
        "a/.zarray": json.dumps(array),
        "a/0": [url, 0, 4],
        "a/1": [url, 4, 5],
        "a/2": "inline",
    }
    write_files({"set.json": json.dumps({"version": 1, "refs": references}).encode()}, folder)
    return str(folder / "set.json")


def test_verify_follows_references_to_plain_chunks(tmp_path: Path) -> None:
    """`verify` of a reference set exits 1 for a source of plain chunks that is missing or too
    short, and names object and key; references that are not allowed are not checked.
    """
    allowed = ("--allow-virtual", (tmp_path / "sources").as_uri())
    refused = run("verify", _reference_set(tmp_path, 9), "--json")
    sound = run("verify", _reference_set(tmp_path, 9), "--json", *allowed)
    short = run("verify", _reference_set(tmp_path, 8), "--json", *allowed)
    (tmp_path / "sources" / "data.bin").unlink()
    missing = run("verify", str(tmp_path / "set.json"), "--json", *allowed)

    assert (refused.returncode, sound.returncode) == (0, 0)
    assert "virtual_chunk_prefixes" in str(json.loads(refused.stdout)["not_checked"])
    assert json.loads(sound.stdout)["counts"] == {"references": 4}
    for damaged, reason in ((short, "has 8 bytes"), (missing, "does not exist")):
        (damage,) = json.loads(damaged.stdout)["damages"]
        assert (damaged.returncode, damage["key"]) == (1, "a/1")
        assert damage["object"].endswith("data.bin")
        assert reason in damage["reason"]
