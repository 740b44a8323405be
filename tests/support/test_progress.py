"""The plugin of pytest that reports progress."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import environ


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a test that fails where there is a file ``bad``, and one that passes."""
    (tmp_path / "test_sample.py").write_text(
        "from pathlib import Path\n"
        "def test_first():\n    assert not Path('bad').exists()\n"
        "def test_second():\n    pass\n"
    )
    return tmp_path


def _run(folder: Path) -> str:
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.progress"]
    options = ["-pno:schemathesis", "-pno:asyncio", "-o", "console_output_style=classic"]
    run = subprocess.run(
        [*command, *options], cwd=folder, env=environ(), capture_output=True, text=True, check=False
    )
    return run.stdout


def test_run_begins_with_the_duration_of_the_last_one(folder: Path) -> None:
    """A run says first how long the last one with the same arguments took, if that passed."""
    first = _run(folder)
    second = _run(folder)

    assert "for all tests on two quiet cores" in first
    assert re.search(r"\nduration: 0 min \d\d s when these tests were run last\n", second)


def test_failure_is_named_at_once(folder: Path) -> None:
    """A failed test is named before the summary, and passed tests print nothing."""
    (folder / "bad").touch()
    before, _, _ = _run(folder).partition("= FAILURES =")

    assert "FAILED test_sample.py::test_first (call)" in before
    assert "test_second" not in before
