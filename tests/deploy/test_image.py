"""The Dockerfile, and the image that is built from it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.error import URLError
from urllib.request import urlopen

import numpy as np
import pytest
import zarr

from tests.support.deploy.programs import ROOT, Stage, image, stages
from tests.support.processes import free_ports, wait_until

NOT_ROOT: Final = re.compile(r"[1-9]\d*:[1-9]\d*")
soak = pytest.mark.soak


def test_image_copies_only_the_environment_from_the_build() -> None:
    """The image copies only `/venv` from the build stage."""
    assert image().base != "build"
    assert image().values("COPY") == ["--from=build /venv /venv"]


@pytest.mark.parametrize("stage", stages()[1:], ids=lambda stage: stage.name or "image")
def test_user_of_each_stage_is_numeric_and_not_root(stage: Stage) -> None:
    """Each stage runs as a numeric user other than root, which Kubernetes can verify."""
    assert NOT_ROOT.fullmatch(stage.values("USER")[-1])


def test_commands_of_the_image_need_no_shell() -> None:
    """Entry point, command and health check are in exec form, so SIGTERM reaches the service."""
    assert image().command("ENTRYPOINT") == ["shardgate"]
    assert image().command("CMD") == ["serve"]
    assert image().command("HEALTHCHECK")[0] == "python"


PROGRAMS: Final = ("buildah", "debootstrap", "unshare", "setpriv")
_PYTHON: Final = f"{sys.version_info.major}.{sys.version_info.minor}"
_BASE: Final = f"docker.io/library/python:{_PYTHON}-slim"
_PATH: Final = "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_LIBRARIES: Final = (
    "ca-certificates,libbz2-1.0,libexpat1,libffi8,liblzma5,libncursesw6,libreadline8,"
    "libsqlite3-0,libssl3,libuuid1,zlib1g"
)
_LEFT_OUT: Final = shutil.ignore_patterns(
    "*.a", "__pycache__", "_tkinter*", "config-3*", "idlelib", "test", "tests"
)
_CONFINED: Final = """
set -e
root=$1 data=$2 user=$3
shift 3
mount --bind "$root" "$root"
mount -o remount,ro,bind "$root"
mount --bind "$data" "$root/mnt"
mount -o remount,ro,bind "$root/mnt"
mount -t proc proc "$root/proc"
exec chroot --userspec="$user" --groups= "$root" \
  setpriv --no-new-privs --inh-caps=-all --bounding-set=-all "$@"
"""


@dataclass(frozen=True)
class Image:
    """A built image: its root file system and its configuration."""

    root: Path
    config: Mapping[str, Any]

    def start(self, command: Sequence[str], data: Path, **environ: str) -> subprocess.Popen[bytes]:
        """Run *command* as the image's user, all read-only, with *data* at ``/mnt``."""
        own = dict(each.split("=", 1) for each in self.config["Env"])
        confine = ["unshare", "--mount", "sh", "-c", _CONFINED, "sh", str(self.root), str(data)]
        return subprocess.Popen(
            [*confine, self.config["User"], *command],
            env=own | environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def run(self, command: Sequence[str], data: Path, **environ: str) -> int:
        """Run *command* to completion; return its exit status."""
        process = self.start(command, data, **environ)
        process.communicate(timeout=60)
        return process.returncode


class Builder:
    """Builds the image by buildah on a base image of Debian's packages and this Python."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def build(self, *options: str) -> Image:
        """Build the image of the Dockerfile, or with *options* another one."""
        mounts = [f"--volume={source}:{target}:ro" for source, target in self._pip_files().items()]
        name = self._buildah(
            "build", "--isolation=chroot", "--format=docker", "--pull-never", "--quiet", *mounts,
            f"--build-arg=PYTHON={_PYTHON}", *options, str(ROOT),
        )  # fmt: skip
        container = self._buildah("from", "--pull-never", name)
        docker = json.loads(self._buildah("inspect", "--type=image", name))
        return Image(Path(self._buildah("mount", container)), docker["Docker"]["config"])

    def close(self) -> None:
        """Remove all containers and images."""
        self._buildah("rm", "--all")
        self._buildah("rmi", "--all", "--force")

    def make_base(self) -> None:
        """Make the base image."""
        tree = self._folder / "tree"
        subprocess.run(
            ["debootstrap", "--variant=minbase", f"--include={_LIBRARIES}", "bookworm", tree],
            check=True,
            capture_output=True,
        )
        for part in ("bin", "lib"):
            shutil.copytree(
                Path(sys.base_prefix) / part,
                tree / "usr/local" / part,
                symlinks=True,
                ignore=_LEFT_OUT,
                dirs_exist_ok=True,
            )
        subprocess.run(["chroot", tree, "/sbin/ldconfig"], check=True)
        container = self._buildah("from", "scratch")
        self._buildah("add", "--quiet", container, str(tree), "/")
        self._buildah("config", f"--env=PATH={_PATH}", container)
        self._buildah("commit", "--quiet", "--rm", container, _BASE)
        shutil.rmtree(tree)

    def _pip_files(self) -> dict[Path, str]:
        """Write pip's configuration of this machine; return the files to mount for it."""
        lines = ["[global]"]
        for name in ("index-url", "cert"):
            command = [sys.executable, "-m", "pip", "config", "get", f"global.{name}"]
            got = subprocess.run(command, capture_output=True, text=True, check=False)
            if got.returncode == 0:
                lines.append(f"{name} = {got.stdout.strip()}")
        file = self._folder / "pip.conf"
        file.write_text("\n".join(lines))
        return {file: "/etc/pip.conf", Path("/etc/ssl/certs"): "/etc/ssl/certs"}

    def _buildah(self, *arguments: str) -> str:
        places = [f"--root={self._folder}/storage", f"--runroot={self._folder}/run"]
        command = ["buildah", *places, "--storage-driver=vfs", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
        if done.returncode:
            raise RuntimeError(f"{arguments[0]}: {done.stderr[-3000:]}")
        return done.stdout.strip()


IMPORTED: Final = """
import os, sys
import shardgate.__main__, shardgate.cli, shardgate.processes
import uvicorn.lifespan.on, uvicorn.loops.uvloop
files = [getattr(each, "__cached__", None) for each in list(sys.modules.values())]
sys.exit(any(file and not os.path.exists(file) for file in files))
"""
"""Exits with 1 if an imported module has no bytecode file."""


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Generator[Builder]:
    """Make the base of images."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing or os.geteuid() != 0 or sys.base_prefix == "/usr":
        pytest.skip(f"needs root, a Python apart from the system's, and {', '.join(PROGRAMS)}")
    builder = Builder(tmp_path_factory.mktemp("image"))
    builder.make_base()
    yield builder
    builder.close()


@pytest.fixture(scope="module")
def built(builder: Builder) -> Image:
    """Build the image, which takes minutes."""
    return builder.build()


@pytest.fixture(scope="module")
def array(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a sharded array that every user may read."""
    path = tmp_path_factory.mktemp("data", numbered=True)
    for each in (path, *path.parents[:1]):
        each.chmod(0o755)
    values = np.arange(64, dtype="u1").reshape(8, 8)
    zarr.create_array(path / "a.zarr", data=values, shards=(4, 4), chunks=(2, 2), compressors=None)
    return path


@contextmanager
def serving(built: Image, data: Path) -> Generator[tuple[subprocess.Popen[bytes], int]]:
    """Run the image's own command until it answers."""
    (port,) = free_ports(1)
    command = [*built.config["Entrypoint"], *built.config["Cmd"]]
    process = built.start(
        command, data, SHARDGATE_SERVER__PORT=str(port), SHARDGATE_DATASETS__A__URL="/mnt/a.zarr"
    )
    try:
        wait_until(lambda: process.poll() is not None or _answers(port))
        assert process.poll() is None
        yield process, port
    finally:
        process.kill()
        process.communicate()


def _answers(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/healthz"):
            return True
    except URLError:
        return False


@soak
def test_container_serves_a_mounted_array(built: Image, array: Path) -> None:
    """A read-only container serves a mounted array as user 65532 without capabilities."""
    with serving(built, array) as (process, port):
        with urlopen(f"http://127.0.0.1:{port}/a/c/1/2") as answer:
            body = answer.read()
        status = Path(f"/proc/{process.pid}/status").read_text()

    assert body == bytes([20, 21, 28, 29])
    assert "\nUid:\t65532\t65532\t65532\t65532\n" in status
    assert "\nCapEff:\t0000000000000000\n" in status


@soak
def test_health_check_fails_once_the_service_is_gone(built: Image, array: Path) -> None:
    """The health check succeeds while the service runs, and fails after it has ended."""
    _, *check = built.config["Healthcheck"]["Test"]
    with serving(built, array) as (_, port):
        here = [word.replace("8000", str(port)) for word in check]
        assert built.run(here, array) == 0
    assert built.run(here, array) != 0


@soak
def test_sigterm_ends_the_container_with_status_0(built: Image, array: Path) -> None:
    """The container exits with 0 within 5 s of SIGTERM."""
    with serving(built, array) as (process, _):
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 0


@soak
@pytest.mark.parametrize("tool", ["cc", "gcc", "g++", "ld", "make", "pip", "pip3"])
def test_image_has_no_build_tools(built: Image, tool: str) -> None:
    """The image has no compiler, linker, make or pip in its program folders."""
    folders = ("venv/bin", "usr/local/bin", "usr/bin", "usr/sbin", "bin", "sbin")
    assert [each for each in folders if os.path.lexists(built.root / each / tool)] == []


@soak
@pytest.mark.parametrize("module", ["pip", "ensurepip"])
def test_python_of_the_image_has_no_installer(built: Image, array: Path, module: str) -> None:
    """Both Pythons of the image fail to import pip and ensurepip."""
    for python in ("/venv/bin/python", "/usr/local/bin/python3"):
        assert built.run([python, "-c", "import sys"], array) == 0
        assert built.run([python, "-c", f"import {module}"], array) == 1


@soak
def test_imported_modules_are_precompiled(built: Image, array: Path) -> None:
    """Every module that the service imports has its bytecode file in the image."""
    assert built.run(["python", "-c", IMPORTED], array) == 0


@soak
def test_virtual_environment_without_the_viewer_is_below_256_megabytes(builder: Builder) -> None:
    """The virtual environment of an image without the viewer takes less than 256 MB."""
    lean = builder.build("--build-arg=EXTRAS=gcs,azure")
    added = subprocess.run(
        ["du", "-sb", lean.root / "venv"], check=True, capture_output=True, text=True
    ).stdout

    assert int(added.split()[0]) < 256e6, sys.version
