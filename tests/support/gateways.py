"""The service in processes of its own, which tests may kill."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, Any, Final
from urllib.parse import urljoin

from tests.support.commands import start
from tests.support.processes import environ as clean_environ
from tests.support.processes import wait_until
from tests.support.seaweedfs import SeaweedFS

_COMMAND: Final = [sys.executable, "-m", "shardgate", "serve"]
_STDERR: Final = 2
type Environ = Mapping[str, str]


class Gateway:
    """A running service, which is the first process of a group."""

    def __init__(self, pid: int, url: str, output: IO[str]) -> None:
        self.pid = pid
        self._output = output
        """Standard output, kept open while the service may write to it."""
        self._descriptor = os.pidfd_open(pid)
        self.url = url

    @property
    def resident_nbytes(self) -> int:
        """Resident memory of the process."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def kill(self) -> None:
        """Kill the process group."""
        self._signal(signal.SIGKILL)
        self.wait(30)

    def stop(self) -> None:
        """Stop the process, and wait until all its threads have."""
        self._signal(signal.SIGSTOP)
        wait_until(self._is_stopped)

    def go_on(self) -> None:
        """Continue a stopped process."""
        self._signal(signal.SIGCONT)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._signal(signal.SIGTERM)

    def jump(self) -> None:
        """Set its clock to the next of `JUMPS_S`."""
        self._signal(signal.SIGUSR1)

    def wait(self, longest_s: float) -> bool:
        """Return whether it ended in time."""
        return bool(select.select([self._descriptor], [], [], longest_s)[0])

    def close(self) -> None:
        """Kill it, and release its descriptors."""
        self.kill()
        os.close(self._descriptor)
        self._output.close()

    def _is_stopped(self) -> bool:
        """Return whether all threads are stopped, which a signal alone does not ensure."""
        threads = Path(f"/proc/{self.pid}/task").glob("*/stat")
        try:
            return all(each.read_text().rpartition(") ")[2].startswith("T") for each in threads)
        except (FileNotFoundError, ProcessLookupError):  # one has just ended
            return False

    def _signal(self, number: int) -> None:
        if not self.wait(0):
            os.killpg(self.pid, number)


def of_dataset(
    url: str,
    seaweedfs: SeaweedFS | None = None,
    *,
    ttl_s: float = 60,
    endpoint_url: str | None = None,
) -> dict[str, str]:
    """Return the variables of the writable dataset ``data`` at *url*."""
    environ = {
        "SHARDGATE_DATASETS__DATA__URL": url,
        "SHARDGATE_DATASETS__DATA__WRITABLE": "true",
        "SHARDGATE_CACHE__TTL_S": str(ttl_s),
        "SHARDGATE_SERVER__PORT": "0",
    }
    endpoint = {} if endpoint_url is None else {"AWS_ENDPOINT_URL": endpoint_url}
    return environ | (seaweedfs.environ if seaweedfs else {}) | endpoint


@contextmanager
def gateway(environ: Environ) -> Generator[Gateway]:
    """Run the service by its command, configured by *environ* alone."""
    with gateway_process(environ) as (process, url):
        assert process.stdout is not None
        with closing(Gateway(process.pid, url, process.stdout)) as running:
            yield running


@contextmanager
def gateway_process(
    environ: Environ, *arguments: str, **options: Any
) -> Generator[tuple[subprocess.Popen[str], str]]:
    """Run the service by its command until the end of the context, and yield its URL."""
    with subprocess.Popen(
        [*_COMMAND, *arguments],
        env=clean_environ(**environ),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    ) as process:
        assert process.stdout is not None
        try:
            yield process, _url(process.stdout.readline())
        finally:
            process.kill()


@contextmanager
def forked(environ: Environ) -> Generator[Gateway]:
    """Run the service, configured by *environ* alone, in a forked process."""
    with closing(start_gateway(environ)) as running:
        yield running


def start_gateway(environ: Environ) -> Gateway:
    """Start the service, configured by *environ* alone, in a process that is there at once."""
    read, write = os.pipe()
    output = os.fdopen(read)
    pid, ended = start(["serve"], clean_environ(**environ), write, _STDERR)
    ended.close()
    os.close(write)
    return Gateway(pid, _url(output.readline()), output)


def _url(line: str) -> str:
    """Return the service's URL from its first line, which has that of a dataset."""
    found = next((word for word in line.split() if word.startswith("http://")), None)
    if found is None:
        raise RuntimeError(f"the service does not start: {line}")
    return urljoin(found, "/").rstrip("/")
