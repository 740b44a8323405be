"""Runs of the tests that record what they run."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.power.measured import Measured
from tests.power.recording import BARE, PARTS
from tests.support.processes import ROOT, environ

OPTIONS: Final = ("-m", "not soak", "-p", "no:cacheprovider", "--hypothesis-seed=0")
"""Options of each run of tests, which thus use the same random data."""
_OPTIONS: Final = """\
[run]
branch = true
core = ctrace
data_file = {parts}/data
parallel = true
patch = _exit, fork
plugins = tests.power.inherited
sigterm = true
source_dirs = {app}
"""


def measure(
    folders: Sequence[str], home: Path, root: Path = ROOT, *, workers: int, bare: bool = False
) -> int:
    """Run the tests of *folders* and record them in *home*; if *bare*, their seconds alone."""
    parts = home / "parts"
    shutil.rmtree(parts, ignore_errors=True)
    parts.mkdir(parents=True)
    (parts / "coverage.ini").write_text(_OPTIONS.format(parts=parts, app=root / "app"))
    told = environ(PYTHONPATH=python_path(root), **{PARTS: str(parts)})
    if bare:
        told[BARE] = "yes"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.power.recording", *OPTIONS]
    command += ["-n", str(workers), "--dist", "loadfile", *folders]
    code = subprocess.run(command, env=told, cwd=root, check=False).returncode
    measured = Measured.load(root / "app", home / "measured.json")
    measured.fold(parts)
    measured.save(home / "measured.json")
    shutil.rmtree(parts)
    return code


def python_path(root: Path) -> str:
    """Return the path of a process that runs tests of *root* and has the plugins beside."""
    return os.pathsep.join(map(str, (root / "app", root, ROOT)))
