"""All precomputed data, its unsharded twins, and the service in front of it."""

import time
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import httpx
import pytest

from tests.support.clients.precomputed.cases import BY_NAME, CASES
from tests.support.clients.precomputed.segments import (
    COLLECTIONS,
    RESHARDED,
    compress_manifests,
    reshard_skeletons,
    write_annotations,
    write_legacy,
    write_segments,
)
from tests.support.clients.precomputed.volumes import Volume, Written, write
from tests.support.clients.services import Taker, connect, served_fixtures, taking_into_folder

_NAP_S: Final = 0.002


@pytest.fixture(scope="session", autouse=True)
def _wakeful() -> Generator[None]:
    """Shorten the pauses in which cloud-files waits for its threads."""
    with pytest.MonkeyPatch.context() as patch:
        clock = SimpleNamespace(sleep=lambda rest_s: time.sleep(min(rest_s, _NAP_S)))
        patch.setattr("cloudfiles.threaded_queue.time", clock)
        yield


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Write every volume, mesh, skeleton and annotation once."""
    root = tmp_path_factory.mktemp("precomputed")
    found = Written(root / "bucket", root / "twins")
    for volume in CASES:
        write(volume, found.bucket / volume.name, found.twins / volume.name)
    for name, collection in COLLECTIONS.items():
        path = f"annotations/{name}"
        write_annotations(collection, found.bucket / path, found.twins / path)
    segments = found.bucket / "segments"
    write_segments(segments / "sharded")
    compress_manifests(segments / "sharded", segments / "gzip_manifests")
    write_legacy(segments / "legacy")
    for name, how in RESHARDED.items():
        reshard_skeletons(segments / "sharded", segments / name, how)
    return found


@pytest.fixture(scope="session")
def bucket(written: Written) -> Path:
    """Return the served folder."""
    return written.bucket


local, remote, service = served_fixtures("precomputed")


@pytest.fixture(params=[volume.name for volume in CASES])
def volume(request: pytest.FixtureRequest) -> Volume:
    """Return each volume of the table."""
    return BY_NAME[request.param]


@pytest.fixture(scope="module")
def client(service: str) -> Generator[httpx.Client]:
    """Open a client that sends no default headers."""
    with connect(service) as opened:
        yield opened


@pytest.fixture(scope="module")
def taker(tmp_path_factory: pytest.TempPathFactory) -> Generator[Taker]:
    """Serve a writable dataset in a folder."""
    with taking_into_folder(tmp_path_factory.mktemp("taken")) as taker:
        yield taker
