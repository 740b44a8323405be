"""nginx with the configuration in `deploy/` and folders that it cannot write."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.deploy.balancer import command, configured
from tests.support.lacking import need
from tests.support.processes import wait_until


@pytest.mark.parametrize("name", ["cache", "shard-names"])
def test_folder_that_cannot_be_written_ends_the_start(tmp_path: Path, name: str) -> None:
    """If nginx cannot open a file in one of its folders it does not start, and names the file."""
    configured(tmp_path, ["http://127.0.0.1:9"], cached=True)
    (tmp_path / name / "writable").mkdir(parents=True)  # which root cannot open either
    ended = subprocess.run(
        command(need("nginx"), tmp_path), capture_output=True, timeout=20, check=False
    )

    assert ended.returncode == 1
    assert f'open() "{tmp_path}/{name}/writable" failed' in ended.stderr.decode()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, whose workers are another user")
def test_workers_that_cannot_reach_the_prefix_say_so(tmp_path: Path) -> None:
    """Workers of another user than root's end with a line that names a prefix of root's alone."""
    configured(tmp_path, ["http://127.0.0.1:9"])
    tmp_path.chmod(0o700)
    run = command(need("nginx"), tmp_path)[:-1]
    options = f"daemon off; user nobody nogroup; working_directory {tmp_path};"
    with (tmp_path / "output").open("wb") as output:
        process = subprocess.Popen([*run, options], stdout=output, stderr=output)
    try:
        expected = f'chdir("{tmp_path}") failed (13: Permission denied)'
        wait_until(lambda: expected in (tmp_path / "output").read_text())
    finally:
        process.terminate()
        process.wait()
