"""The commands about commits in `docs/icechunk.md`, run one after the other."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final, NamedTuple

import icechunk
import numpy as np
import zarr

from tests.support.gateways import gateway_process
from tests.support.processes import ROOT, environ

PAGE: Final = (ROOT / "docs/icechunk.md").read_text("utf-8")
CHAPTER: Final = "\n## Committing to Icechunk repositories\n"
URL: Final = "http://127.0.0.1:8000"
ID: Final = re.compile(r"\b[0-9A-HJKMNP-TV-Z]{20}\b")
MOMENT: Final = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z")


class Step(NamedTuple):
    """A command and its output."""

    command: str
    printed: str


def chapter() -> str:
    """Return the text of the chapter."""
    return PAGE.split(CHAPTER, 1)[1].split("\n## ", 1)[0]


def steps() -> list[Step]:
    """Return the commands in their order."""
    consoles = re.findall(r"```console\n(.*?)```", chapter(), re.DOTALL)
    shown = "".join(consoles).removeprefix("$ ").split("\n$ ")
    return [Step(command, printed) for command, _, printed in (s.partition("\n") for s in shown)]


def scripts() -> dict[str, str]:
    """Return the programs by the names in their first lines."""
    found = re.findall(r"```python\n(# (\w+\.py)\n.*?)```", chapter(), re.DOTALL)
    return {name: text for text, name in found}


class Reader:
    """Runs the page's commands with the real ids and address in place of those shown."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self._real = {URL: url}

    def run(self, command: str) -> str:
        """Run a command with this Python, and assert that it succeeds."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        done = subprocess.run(
            ["/bin/bash", "-c", self._really(command)],
            cwd=self.folder,
            env=environ(PATH=path, PYTHONWARNINGS="ignore"),
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        # Threads of obstore and Icechunk can abort a program that has ended.
        is_done = done.returncode == 0 or (
            command.startswith("python ") and done.returncode == -signal.SIGABRT and not done.stderr
        )
        assert is_done, (command, done.returncode, done.stdout, done.stderr)
        return done.stdout

    def write(self, name: str, text: str) -> None:
        """Save a program."""
        (self.folder / name).write_text(self._really(text))

    def compare(self, shown: str, printed: str) -> None:
        """Assert that *printed* is what is *shown* but for ids, and learn the real ids."""
        ids = zip(ID.findall(shown), ID.findall(printed), strict=True)
        self._real |= dict(ids)
        assert MOMENT.sub("TIME", self._really(shown)) == MOMENT.sub("TIME", printed)

    def _really(self, text: str) -> str:
        for shown, real in self._real.items():
            text = text.replace(shown, real)
        return text


def test_documented_commit_commands_print_what_is_shown(tmp_path: Path) -> None:
    """Each command of the chapter prints the output shown below it, and its programs commit."""
    first, serve, *others = steps()
    assert serve.command.endswith(" &")
    Reader(tmp_path, "").run(first.command)
    program, *arguments = serve.command.removesuffix(" &").split()
    assert [program, *arguments[:1]] == ["shardgate", "serve"]
    started = gateway_process({}, *arguments[1:], "--port", "0", cwd=tmp_path)
    with started as (_, url):
        reader = Reader(tmp_path, url)
        for name, text in scripts().items():
            reader.write(name, text)
        for step in others:
            reader.compare(step.printed.rstrip("\n"), reader.run(step.command).rstrip("\n"))
        made = reader.run("python many.py").strip()
    repository = icechunk.Repository.open(icechunk.local_filesystem_storage(str(tmp_path / "lab")))
    tip = next(iter(repository.ancestry(branch="main")))
    assert (tip.id, tip.message) == (made, "16 days")
    mask = zarr.open_array(repository.readonly_session("main").store, path="mask", mode="r")
    assert mask.shards == (32, 32)
    days = zarr.open_array(repository.readonly_session("main").store, path="days", mode="r")
    assert np.array_equal(np.asarray(days[...]), np.repeat(np.arange(16), 100))
