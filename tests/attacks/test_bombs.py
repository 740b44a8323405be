"""Small bodies and objects that hold much are inflated as far as is allowed, and no further.

What is stored as gzip, and files of Icechunk, have tests of their own beside their formats.
"""

import gzip
import tracemalloc
from collections.abc import Callable, Generator
from functools import cache
from pathlib import Path
from typing import Final

import httpx
import pytest
import zstandard
from pydantic import ByteSize

from app.settings import DatasetSettings, LimitSettings, Settings
from tests.formats.neuroglancer_precomputed.case import GZIP_DATA, build
from tests.serving import serving

ALLOWED: Final = ByteSize(2**20)
HELD: Final = bytes(256 * 2**20)
MOST_BYTES: Final = 32 * 2**20
CHUNK: Final = "s0/-1-2_5-8_0-1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Store a volume whose chunks are gzip, and leave a place for a repository."""
    folder = tmp_path_factory.mktemp("bombs")
    (folder / "repo").mkdir()
    for key, data in build({CHUNK: b"123456789"}, sharding=GZIP_DATA).items():
        (folder / "volume" / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / "volume" / key).write_bytes(data)
    return folder


@pytest.fixture(scope="module")
def client(folder: Path) -> Generator[httpx.Client]:
    """Serve both."""
    datasets = {
        name: DatasetSettings(url=(folder / name).as_uri(), writable=True)
        for name in ("volume", "repo")
    }
    limits = LimitSettings(decoded_bytes=ALLOWED, repository_file_bytes=ALLOWED)
    with (
        serving(Settings(datasets=datasets, limits=limits)) as url,
        httpx.Client(base_url=url, timeout=20) as opened,
    ):
        opened.headers["accept-encoding"] = "identity"
        yield opened


@pytest.fixture
def _little() -> Generator[None]:
    """Be sure that little memory is taken."""
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MOST_BYTES


@cache
def zipped() -> bytes:
    """Make the first bomb."""
    return gzip.compress(HELD, 9, mtime=0)


BOMBS: Final[dict[str, Callable[[], bytes]]] = {
    "gzip": zipped,
    "many members": lambda: gzip.compress(HELD[: 2**24], 9, mtime=0) * 64,
    "gzip in gzip": lambda: gzip.compress(zipped(), mtime=0) * 2_000,
}


@pytest.fixture(scope="module", params=BOMBS)
def bomb(request: pytest.FixtureRequest) -> bytes:
    """Make each of them, before memory is counted."""
    return BOMBS[request.param]()


@pytest.fixture(scope="module")
def sessions() -> list[bytes]:
    """Make bombs of zstd, which tell their size or not."""
    told = (True, False)
    return [zstandard.ZstdCompressor(write_content_size=tells).compress(HELD) for tells in told]


@pytest.mark.parametrize("key", [CHUNK, "info", "other"])
@pytest.mark.usefixtures("_little")
def test_a_body_that_is_a_bomb_is_refused(client: httpx.Client, key: str, bomb: bytes) -> None:
    """Whatever it is to become; what was there stays."""
    before = client.get(f"/volume/{key}")
    written = client.put(f"/volume/{key}", content=bomb, headers={"content-encoding": "gzip"})
    after = client.get(f"/volume/{key}")

    assert written.status_code in (400, 413, 415)
    assert (before.status_code, before.content) == (after.status_code, after.content)


@pytest.mark.usefixtures("_little")
def test_a_session_that_is_a_bomb_is_damaged(
    client: httpx.Client, folder: Path, sessions: list[bytes]
) -> None:
    """Its object is named, whether it tells its size or not."""
    client.post("/api/datasets", json={"name": "repo"})
    session_id = client.post("/api/datasets/repo/sessions").json()["session_id"]
    stored = folder / "repo" / "sessions" / f"{session_id}.session"
    for bomb in sessions:
        stored.write_bytes(bomb)
        answer = client.get(f"/repo/@session.{session_id}/zarr.json")

        assert answer.status_code == 502
        assert f"{session_id}.session" in answer.json()["detail"]
