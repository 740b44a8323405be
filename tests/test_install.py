"""The script by which `make` installs packages."""

import subprocess
import sys
from pathlib import Path

from tests.support.processes import ROOT

LOADING = """
print("Collecting numpy>=2.2 (from shardgate)")
print("  Downloading numpy-2.5.5-cp312-abi3.whl.metadata (6.6 kB)")
print("  Downloading numpy-2.5.5-cp312-abi3.whl (15.7 MB)")
for number in range(19):
    print(f"Processing /wheels/h{number}-0.16.0-py3-none-any.whl")
print("Installing collected packages: numpy, h11")
"""
FAILING = """
import sys
print("WARNING: old", file=sys.stderr)
print("ERROR: gone", file=sys.stderr)
sys.exit(1)
"""


def install(pip: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the script with a program in place of pip."""
    (folder / "pip.py").write_text(pip)
    return subprocess.run(
        [sys.executable, ROOT / ".ci/install.py", "."],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_installation_says_its_packages_and_megabytes(tmp_path: Path) -> None:
    """An installation prints how many packages of which size are loaded, then installed."""
    done = install(LOADING, tmp_path)

    assert done.returncode == 0
    assert done.stdout.splitlines() == ["  20 packages, 16 MB: h18", "  installing 2 packages"]


def test_failed_installation_prints_errors_of_pip_alone(tmp_path: Path) -> None:
    """A failed installation prints what pip says of it, without warnings, and fails."""
    done = install(FAILING, tmp_path)

    assert done.returncode == 1
    assert done.stderr == "ERROR: gone\n"
