"""The commands of `docs/running.md` that check a dataset in parts, and the example of a part."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from shardgate.survey.key_part import KeyPart
from tests.support.commands import run
from tests.support.documents import ROOT
from tests.support.files import write_files
from tests.support.formats.zarr.building import build
from tests.support.lacking import need
from tests.support.processes import environ

_PAGE: Final = (ROOT / "docs/running.md").read_text("utf-8")
_CHAPTER: Final = _PAGE.split("\n## Checking a large dataset\n", 1)[1].split("\n## ", 1)[0]
_URL: Final = "s3://bucket/em.zarr"


def block(containing: str) -> str:
    """Return the block of commands that contains a text."""
    blocks = re.findall(r"```sh\n(.*?)```", _CHAPTER, re.DOTALL)
    (found,) = [each for each in blocks if containing in each]
    return str(found)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Write a group of sharded arrays, one shard of which is damaged."""
    for name in "abc":
        objects = build({"c/0/0": b"first", "c/2/3": b"second!"})
        write_files({f"{name}/{key}": found for key, found in objects.items()}, tmp_path / "data")
    write_files({"b/c/1/1": b"no shard"}, tmp_path / "data")
    return tmp_path / "data"


def shell(command: str, folder: Path, **more: str) -> "subprocess.CompletedProcess[str]":
    """Run commands of the page in *folder*, with the program of this Python."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["/bin/sh", "-c", command],
        cwd=folder,
        env=environ(PATH=path, **more),
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )


def put_together(folder: Path) -> dict[str, Any]:
    """Run the command that puts lines together."""
    need("jq")
    found: dict[str, Any] = json.loads(shell(block("jq -s"), folder).stdout)
    return found


def test_lines_of_xargs_are_the_whole_report(data: Path, tmp_path: Path) -> None:
    """The lines that `xargs` collects, a later one of a part too, make the whole report."""
    done = shell(block("xargs").replace("parts=8", "parts=2").replace(_URL, str(data)), tmp_path)
    assert (done.returncode, done.stderr) == (123, "")  # as xargs has it: a part found damage
    later = json.loads((tmp_path / "part-0.json").read_text()) | {"shards": 99}
    (tmp_path / "part-again.json").write_text(json.dumps(later))

    whole = json.loads(run("verify", "--chunks", "--json", str(data)).stdout)
    assert len(whole["damages"]) == 1
    assert put_together(tmp_path) | {"reads_chunks": True} == whole | {"parts": 2}


def test_task_of_slurm_runs_its_part(tmp_path: Path) -> None:
    """A task of the array of Slurm runs the part of its number into a file of its own."""
    script = block("SBATCH").replace("shardgate", "echo")

    shell(script, tmp_path, SLURM_ARRAY_TASK_ID="17")

    told = (tmp_path / "part-17.json").read_text()
    assert told == f"verify --chunks --json --part 17/256 {_URL}\n"


def test_references_of_parts_are_put_together(data: Path, tmp_path: Path) -> None:
    """The command for reference sets makes the whole of the sets of all parts."""
    need("jq")
    for part in range(2):
        options = ("--references", "--part", f"{part}/2")
        found = run("inspect", str(data / "a"), *options).stdout
        (tmp_path / f"refs-{part}.json").write_text(found)
    (command,) = re.findall(r"`(jq [^`]*)`", _CHAPTER)

    told = shell(f"{command} refs-*.json", tmp_path).stdout

    assert json.loads(told) == json.loads(run("inspect", str(data / "a"), "--references").stdout)


def test_example_of_a_part_is_true() -> None:
    """The hash and the part of the key that `docs/command-line.md` names are those of the key."""
    page = (ROOT / "docs/command-line.md").read_text("utf-8")
    ((key, digits, number),) = re.findall(
        r"`(\S+)` has the hash `([0-9a-f]{16})`, and is of part (\d+) of 8\.", page
    )

    assert shell(f"printf %s {key} | sha256sum", ROOT).stdout.startswith(digits)
    assert KeyPart(int(number), 8).holds(key)
