"""What a release makes: workflows that are valid, and a chart that can be copied."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.support.deploy.programs import CHART
from tests.support.processes import ROOT

WORKFLOWS: Final = sorted(ROOT.glob(".github/workflows/*.yml"))


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_are_valid(workflow: Path) -> None:
    """A workflow has the form that GitHub's schema gives."""
    schema = ("--builtin-schema", "vendor.github-workflows")
    command = [sys.executable, "-m", "check_jsonschema", *schema, str(workflow)]

    checked = subprocess.run(command, capture_output=True, text=True, check=False)

    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_what_exists(workflow: Path) -> None:
    """Each target of make and each script of the checkout that a workflow runs exists."""
    text = workflow.read_text("utf-8")
    targets = re.findall(r"run: make (\w+)", text)
    scripts = re.findall(r"(?<= )\.ci/\S+", text)
    makefile = (ROOT / "Makefile").read_text("utf-8")

    assert targets or scripts
    assert all(f"\n{target}:" in makefile for target in targets)
    assert all((ROOT / script).is_file() for script in scripts)


def test_chart_can_be_copied() -> None:
    """The chart is a folder without links, which lead nowhere once it is copied."""
    assert not [path for path in CHART.rglob("*") if path.is_symlink()]
