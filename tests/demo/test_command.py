"""The command `shardgate demo`, run in a process of its own."""

import io
import json
import re
import shlex
import shutil
import subprocess
import urllib.request
from collections.abc import Generator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorstore

from shardgate import demo
from tests.support.commands import Running, running


class Demo(NamedTuple):
    """The demo, which runs."""

    process: Running
    lines: list[str]
    """Lines that it has printed."""
    folder: Path
    """The folder of the examples that it has written."""


def get(url: str) -> bytes:
    """Read the body of *url*."""
    with urllib.request.urlopen(url, timeout=60) as answer:  # noqa: S310 - of our own server
        return bytes(answer.read())


def in_shell(line: str) -> str:
    """Run a *line*, and return what it prints."""
    return subprocess.run(  # noqa: S602 - a shell is what the line is for
        line, shell=True, capture_output=True, text=True, timeout=60, check=True
    ).stdout


def in_python(line: str) -> str:
    """Run the script in a *line* for the shell without a process of its own."""
    _, _, script = shlex.split(line)
    with redirect_stdout(io.StringIO()) as printed:
        exec(script, {})  # noqa: S102 - as the shell would
    return printed.getvalue()


@pytest.fixture(scope="module")
def started(
    demo_paths: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Generator[Demo]:
    """Run the demo in a folder that lacks an example: to write them all takes long."""
    folder = tmp_path_factory.mktemp("demo") / "data"
    shutil.copytree(demo_paths["nested"].parent, folder)
    shutil.rmtree(folder / demo.ROOTS["nested"])
    count = demo.guide("").count("\n") + 1
    with running("demo", "--port", "0", "--dir", str(folder), lines=count) as (process, lines):
        yield Demo(process, lines, folder)


def test_lines_of_the_demo_work_verbatim(started: Demo) -> None:
    """The commands that the demo prints run in a shell, and show three states of a repository."""
    shown = [get(line) for line in started.lines if line.startswith("http://")]
    curls = [in_shell(line) for line in started.lines if "curl " in line]
    first, *others = [line for line in started.lines if "import zarr" in line]
    pythons = [in_shell(first), *map(in_python, others)]

    assert [curl.splitlines()[0] for curl in curls] == ["HTTP/1.1 200 OK"] * 4
    assert len(shown) == len(demo.ROOTS) + 1 + 2 + 3 + 3  # the viewer is installed
    image, weather, *states = ([*map(float, re.findall(r"[\d.]+", line))] for line in pythons)
    assert [len(image), len(weather)] == [8, 4]
    assert min(map(min, (image, weather))) > 0
    assert len({*map(tuple, states)}) == len(states) == 3


def test_demo_prints_nothing_to_stderr(started: Demo) -> None:
    """The demo prints nothing to standard error while it writes the examples."""
    assert started.process.said() == ""


def cells(url: str, scale: int) -> Any:
    """Read a *scale* of the cells below *url* with TensorStore."""
    spec = {"driver": "neuroglancer_precomputed", "kvstore": url, "scale_index": scale}
    return tensorstore.open(spec).result().read().result()


def test_the_demo_serves_cells_without_shards(started: Demo) -> None:
    """Two scales of the cells read like their shards, with more than 50 labels each."""
    data = (started.folder / "cells.precomputed").as_uri() + "/"
    (url,) = (line for line in started.lines if line.endswith("/cells/"))
    served = [cells(url, scale) for scale in (0, 1)]
    info = json.loads(get(f"{url}info"))

    assert ["sharding" in scale for scale in info["scales"]] == [False] * 3
    for scale, found in enumerate(served):
        np.testing.assert_array_equal(found, cells(data, scale), strict=True)
        assert len(np.unique(found)) > 50


def test_the_demo_writes_once(started: Demo) -> None:
    """A second start of the demo leaves the files unchanged; they take less than 32 MiB."""
    before = {path: path.stat().st_mtime_ns for path in started.folder.rglob("*")}
    demo.write(started.folder)

    assert {path: path.stat().st_mtime_ns for path in started.folder.rglob("*")} == before
    assert sum(path.stat().st_size for path in before) < 32 * 1024**2
    assert {path.name for path in started.folder.iterdir()} == {*demo.ROOTS.values(), demo.FIELD}
