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

PYTEST: Final = (
    sys.executable, "-m", "pytest", "-q", "-m", "not soak", "--hypothesis-seed=0",
)  # fmt: skip
"""Begins each run of tests, which thus use the same random data."""
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
    told = tests_environ(root, **{PARTS: str(parts)})
    if bare:
        told[BARE] = "yes"
    command = [*PYTEST, "-p", "tests.power.recording", "-n", str(workers), "--dist", "loadfile"]
    code = subprocess.run([*command, *folders], env=told, cwd=root, check=False).returncode
    measured = Measured.load(root / "app", home / "measured.json")
    if not bare:
        measured.forget(folders)
    measured.fold(parts)
    measured.save(home / "measured.json")
    shutil.rmtree(parts)
    return code


def tests_environ(root: Path, **more: str) -> dict[str, str]:
    """Return the environment of tests of *root*, with the plugins beside and with bytecode."""
    path = os.pathsep.join(map(str, (root / "app", root, ROOT)))
    return environ(PYTHONPATH=path, PYTHONDONTWRITEBYTECODE="", **more)
