"""The script by which `make` installs packages."""

import subprocess
from pathlib import Path

from tests.support.processes import ROOT

PIP = """#!/bin/sh
cat <<END
Collecting numpy>=2.2 (from shardgate)
  Downloading numpy-2.5.5-cp312-abi3.whl.metadata (6.6 kB)
  Downloading numpy-2.5.5-cp312-abi3.whl (15.7 MB)
END
for number in $(seq 19); do echo "Processing /wheels/h11_$number-0.16.0-py3-none-any.whl"; done
echo "Installing collected packages: numpy, h11"
"""


def install(python: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the script with a *python* of which only pip is called."""
    (folder / "python").write_text(python)
    (folder / "python").chmod(0o755)
    return subprocess.run(
        [ROOT / ".ci/install", folder / "python", "."],
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_installation_says_its_packages_and_megabytes(tmp_path: Path) -> None:
    """An installation prints how many packages of which size are loaded, then installed."""
    done = install(PIP, tmp_path)

    assert done.returncode == 0
    assert done.stdout.splitlines() == ["  20 packages, 15 MB: h11_19", "  installing 2 packages"]


def test_failed_installation_prints_errors_of_pip_alone(tmp_path: Path) -> None:
    """A failed installation prints what pip says of it, without warnings, and fails."""
    done = install("#!/bin/sh\necho WARNING: old >&2; echo ERROR: gone >&2; exit 1\n", tmp_path)

    assert done.returncode == 1
    assert done.stderr == "ERROR: gone\n"
