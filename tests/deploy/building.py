"""The image, built by buildah without an engine, and programs that run in it as in a container.

The image that the Dockerfile begins with is made of Debian's packages and this Python.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.deploy.dockerfile import ROOT

PROGRAMS: Final = ("buildah", "debootstrap", "unshare", "setpriv")
_BASE: Final = "docker.io/library/python:3.12-slim"
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
    """An image: what its configuration says, and where its root file system is."""

    root: Path
    config: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        told = subprocess.run(
            ["du", "-sbx", self.root], check=True, capture_output=True, text=True
        ).stdout
        return int(told.split()[0])

    def start(self, command: Sequence[str], data: Path, **environ: str) -> subprocess.Popen[bytes]:
        """Run *command* in it as its user, with nothing to write to and *data* at ``/mnt``."""
        own = dict(each.split("=", 1) for each in self.config["Env"])
        confine = ["unshare", "--mount", "sh", "-c", _CONFINED, "sh", str(self.root), str(data)]
        return subprocess.Popen(
            [*confine, self.config["User"], *command],
            env=own | environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def run(self, command: Sequence[str], data: Path, **environ: str) -> int:
        """Run *command* to its end."""
        process = self.start(command, data, **environ)
        process.communicate(timeout=60)
        return process.returncode


class Builder:
    """buildah with all that it keeps in *folder*."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def build(self) -> Image:
        """Build what the Dockerfile describes."""
        self._make_base()
        mounts = [f"--volume={source}:{target}:ro" for source, target in self._pip_files().items()]
        self._buildah(
            "build", "--isolation=chroot", "--format=docker", "--pull-never", *mounts,
            "--tag=shardgate", str(ROOT),
        )  # fmt: skip
        container = self._buildah("from", "--pull-never", "localhost/shardgate")
        docker = json.loads(self._buildah("inspect", "--type=image", "localhost/shardgate"))
        return Image(Path(self._buildah("mount", container)), docker["Docker"]["config"])

    def close(self) -> None:
        """Remove everything."""
        self._buildah("rm", "--all")
        self._buildah("rmi", "--all", "--force")

    def _make_base(self) -> None:
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
        """Write down how pip is configured here, and tell what it needs beside that."""
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
