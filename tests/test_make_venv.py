"""The script by which `make` finds a Python."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.processes import ROOT

OLD = '#!/bin/sh\ncase "$*" in *print*) echo 3.11 ;; *) exit 1 ;; esac\n'
BROKEN = '#!/bin/sh\necho "pyenv: python3.12: command not found" >&2\nexit 127\n'


@pytest.mark.parametrize(
    ("programs", "said"),
    [
        ({}, ["no Python 3 was found"]),
        (
            {"python3.12": BROKEN, "python3": OLD},
            [
                "python3.12 does not run: pyenv: python3.12: command not found",
                "python3 is 3.11; 3.12 or newer is needed",
                "Installing uv into .uv, to download Python 3.12 ...",
                "uv could not be installed, or could not download Python 3.12, as said above",
            ],
        ),
    ],
)
def test_unusable_pythons_are_named(
    programs: dict[str, str], said: list[str], tmp_path: Path
) -> None:
    """Each Python that cannot be used is named with the reason, and the last line advises."""
    found = shutil.which("head")
    assert found is not None
    (tmp_path / "head").symlink_to(found)
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    done = subprocess.run(
        [ROOT / ".ci/make-venv", "new"],
        cwd=tmp_path,
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )

    *lines, advice = done.stderr.splitlines()
    assert done.returncode == 1
    assert lines == said
    assert advice.startswith("Install Python 3.12 or newer")
    assert not (tmp_path / "new").exists()
