"""A small S3 server that follows AWS for conditions, also of completed uploads.

It pins its own botocore, and so has an environment of its own.
"""

import fcntl
import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

from botocore.exceptions import BotoCoreError, ClientError

from tests.support.processes import free_ports, store_process
from tests.support.seaweedfs import SeaweedFS

_REQUIREMENT: Final = "ministack==1.5.33"


class MiniStack(SeaweedFS):
    """A MiniStack with the interface of `SeaweedFS`; presigned URLs need a key that it knows."""

    access_key_id = secret_access_key = "test"

    def is_ready(self) -> bool:
        """Create the bucket, and return whether it exists."""
        try:
            self.client.create_bucket(Bucket=self.bucket)
        except (BotoCoreError, ClientError):
            return False
        return True


class NotInstalledError(Exception):
    """The environment could not be made, for the reason in the message."""


def installed(folder: Path) -> Path:
    """Return the Python of the environment in *folder*, which is made once for all processes."""
    python = folder / _REQUIREMENT / "bin" / "python"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (python.parent / "complete").exists():
            for command in (
                [sys.executable, "-m", "venv", str(python.parent.parent)],
                [str(python), "-m", "pip", "install", "--quiet", _REQUIREMENT],
            ):
                made = subprocess.run(command, capture_output=True, text=True, check=False)
                if made.returncode:
                    raise NotInstalledError(f"no {_REQUIREMENT}: {made.stderr[-500:]}")
            (python.parent / "complete").touch()
    return python


@contextmanager
def running(python: Path, folder: Path) -> Generator[MiniStack]:
    """Run it in *folder* until the context ends."""
    (port,) = free_ports(1)
    server = MiniStack(port, "test")
    address = ["-b", f"127.0.0.1:{port}", "--keep-alive", "75", "-w", "0"]
    command = [str(python), "-m", "hypercorn", *address, "ministack.app:app"]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
    environ |= {"SERVICES": "s3", "GATEWAY_PORT": str(port)}
    with closing(server), store_process(command, server.is_ready, folder, environ):
        yield server
