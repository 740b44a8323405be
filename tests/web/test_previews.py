"""`shardgate.web.previews`: pictures of arrays that real writers have written."""

import asyncio
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final

import httpx
import icechunk
import numpy as np
import pytest
import tensorstore
import zarr
from numpy.typing import NDArray
from PIL import Image

from shardgate.errors import StorageTimeoutError
from shardgate.model import ObjectRef
from shardgate.read.budget import ByteBudget
from shardgate.read.containers import Dataset
from shardgate.storage.local import LocalStore
from shardgate.storage.wrappers import StoreWrapper
from shardgate.web.preview_worker import MOST_MEMORY_NBYTES
from shardgate.web.previews import PENDING, PLACEHOLDER, Preview, Previews, worker_command
from tests.support.auth.people import TOKENS
from tests.support.clocks import Clock
from tests.support.resolving import ROOT, reading
from tests.support.web.pictures import (
    BYTES,
    COLOURS,
    DIAGONAL,
    HOLED,
    IDS,
    LEVEL,
    VOLUME,
    WIDE,
    write_repository,
)

MEASURING: Final = """
import resource, subprocess, sys
status = subprocess.run(sys.argv[1:], stderr=subprocess.DEVNULL, check=False).returncode
print(status, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""
"""Program that prints the status and the most memory in KiB of another one: a child of a large
process counts with all memory that it had before it began another program.
"""


def get(client: httpx.Client, dataset: str, **query: str) -> httpx.Response:
    """Request a preview."""
    return client.get(f"/api/datasets/{dataset}/preview.png", params=query)


def pixels(client: httpx.Client, dataset: str, **query: str) -> NDArray[np.uint8]:
    """Return the pixels of a preview that is no placeholder."""
    answer = get(client, dataset, **query)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "image/png"
    assert answer.headers["cache-control"] == "public, max-age=60, must-revalidate"
    assert answer.content != PLACEHOLDER.png
    return np.asarray(Image.open(io.BytesIO(answer.content)))


def grey(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Stretch the values between the percentiles 1 and 99 to all shades; NaN is black."""
    finite = np.sort(values[np.isfinite(values)].astype(np.float64))
    low, high = (
        np.interp(at * (finite.size - 1), range(finite.size), finite) for at in (0.01, 0.99)
    )
    shades = np.minimum(np.maximum((values.astype(np.float64) - low) / (high - low), 0), 1) * 255
    return np.where(np.isfinite(values), np.floor(shades + 0.5), 0).astype(np.uint8)


@pytest.mark.parametrize(
    ("dataset", "query", "expected"),
    [
        pytest.param("data", {"path": "bytes"}, grey(BYTES), id="the only section"),
        pytest.param("data", {"path": "wide"}, grey(WIDE[3]), id="the middle section"),
        pytest.param("data", {"path": "wide", "at.dim_0": "5"}, grey(WIDE[5]), id="another one"),
        pytest.param("data", {"path": "weather", "at.time": "2"}, grey(WIDE[2]), id="another time"),
        pytest.param("data", {"path": "weather"}, grey(WIDE[0]), id="the first time"),
        pytest.param(
            "data",
            {"path": "masked"},
            np.where(DIAGONAL, 255, grey(np.where(DIAGONAL, np.nan, HOLED).astype(np.float32))),
            id="a fill value beyond the others is white, and NaN is black",
        ),
        pytest.param("data", {"path": "colours"}, COLOURS, id="three bytes are a colour"),
        pytest.param("data", {"path": "namesakes"}, grey(BYTES), id="two axes of one name"),
        pytest.param("data", {"path": "constant"}, np.full((9, 9), 128), id="constants are grey"),
        pytest.param("volumes", {"path": "em"}, grey(VOLUME[..., 4].T), id="a volume has x right"),
        pytest.param("volumes", {"path": "em", "at.z": "8"}, grey(VOLUME[..., 8].T), id="its end"),
        pytest.param("volumes", {"path": "em/4_4_40"}, grey(VOLUME[..., 4].T), id="a scale"),
        pytest.param("repo", {"path": "a", "ref": "tag.v1"}, grey(BYTES), id="a tag"),
        pytest.param("repo", {"path": "a", "ref": "branch.main"}, grey(255 - BYTES), id="a branch"),
        pytest.param("repo", {}, grey(255 - BYTES), id="the first array of the branch main"),
    ],
)
def test_picture_has_the_shades_of_a_section(
    client: httpx.Client, dataset: str, query: dict[str, str], expected: NDArray[Any]
) -> None:
    """Values between the percentiles become shades; the first time is shown, else the middle."""
    np.testing.assert_array_equal(pixels(client, dataset, **query), expected)


def test_multiscale_shows_the_coarsest_level_with_enough_pixels(client: httpx.Client) -> None:
    """A multiscale shows its first time and channel and middle z, here halved to 130 pixels."""
    shown = pixels(client, "data", path="image")
    shades = grey(LEVEL[0, 0, 2]).astype(float)

    assert shown.shape == (130, 65)
    np.testing.assert_allclose(shown, shades.reshape(130, 2, 65, 2).mean((1, 3)), atol=1)


@pytest.mark.parametrize(
    ("dataset", "path"), [("data", "image/labels/cells"), ("volumes", "cells")]
)
def test_labels_have_a_colour_each(client: httpx.Client, dataset: str, path: str) -> None:
    """Every label has a colour of its own, and 0 is black."""
    shown = pixels(client, dataset, path=path)
    colours = {
        int(label): {tuple(map(int, each)) for each in shown[label == IDS]}
        for label in np.unique(IDS)
    }

    assert colours[0] == {(0, 0, 0)}
    assert {len(each) for each in colours.values()} == {1}
    assert len(set.union(*colours.values())) == len(colours)


@pytest.mark.parametrize(("dataset", "path"), [("volumes", "cells"), ("repo", "a")])
def test_default_is_the_first_array(client: httpx.Client, dataset: str, path: str) -> None:
    """A request without a path gets the first array with two axes."""
    assert get(client, dataset).content == get(client, dataset, path=path).content


@pytest.mark.parametrize(
    ("dataset", "path"),
    [
        *(("undrawable", name) for name in ("damaged", "codec", "huge", "bomb", "uneven")),
        *(("undrawable", name) for name in ("flat", "list", "volume/s0")),
        *(("data", name) for name in ("line", "absent", "image/labels")),
        ("volumes", "em/absent"),
        ("repo", "a&ref=tag.v2"),
    ],
)
def test_undrawable_array_has_a_placeholder(client: httpx.Client, dataset: str, path: str) -> None:
    """Damage, unknown codecs, what is too large, uneven or absent get the same grey picture."""
    answer = client.get(f"/api/datasets/{dataset}/preview.png?path={path}")

    assert answer.status_code == 200
    assert answer.content == PLACEHOLDER.png
    assert answer.headers["cache-control"] == "no-cache"
    assert Image.open(io.BytesIO(answer.content)).getextrema() == (0xDD, 0xDD)


@pytest.mark.parametrize("query", ["?path=a", ""])
def test_picture_of_a_store_that_is_down_is_pending(client: httpx.Client, query: str) -> None:
    """An array, or the first one, of a store that cannot be reached is 503, to be tried again."""
    answer = client.get(f"/api/datasets/down/preview.png{query}")

    assert answer.status_code == 503
    assert "retry-after" in answer.headers


def test_known_picture_is_304(client: httpx.Client) -> None:
    """A client that has the picture gets 304 without a body."""
    first = get(client, "data", path="bytes")
    tag = {"if-none-match": first.headers["etag"]}
    again = client.get("/api/datasets/data/preview.png?path=bytes", headers=tag)

    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]
    assert again.headers["last-modified"] == first.headers["last-modified"]


def test_placeholder_of_a_private_dataset_is_private(client: httpx.Client) -> None:
    """A placeholder for a reader of a private dataset is kept by no shared cache."""
    token = {"authorization": f"Bearer {TOKENS['ana']}"}
    grey = client.get("/api/datasets/private/preview.png?path=absent", headers=token)

    assert grey.headers["cache-control"] == "private, no-cache"


def test_invalid_path_or_ref_is_400(client: httpx.Client) -> None:
    """An invalid path or ref is 400, and a ref outside of a repository, or beside another one."""
    assert get(client, "data", path="a/../b").status_code == 400
    for dataset, path, ref in (
        ("repo", "a", "@/"),
        ("repo", "a", "x" * 2000),
        ("repo", "@tag.v1/a", "tag.v1"),
        ("data", "bytes", "tag.v1"),
    ):
        assert get(client, dataset, path=path, ref=ref).status_code == 400


@dataclass
class Drawing:
    """Previews of the array ``a`` in a folder."""

    previews: Previews
    dataset: Dataset
    clock: Clock

    async def get(self) -> Preview:
        """Return the preview."""
        return await self.previews.get(self.dataset, "a", None)


class Interrupted(StoreWrapper):
    """A store that does something after each read of a chunk, after which caches are outdated."""

    def __init__(self) -> None:
        super().__init__(LocalStore())
        self.clock = Clock(0.0)
        self.interrupt: Callable[[], object] = lambda: None

    async def get(self, ref: ObjectRef, *args: Any, **options: Any) -> Any:
        """Read, and interrupt."""
        found = await super().get(ref, *args, **options)
        if any(part in ref.key for part in ("/c/", "chunks/", "manifests/")):
            self.interrupt()
            self.clock.now += 2
        return found


def drawing(
    folder: Path,
    worker: Sequence[str] | None = worker_command(),
    objects: Interrupted | None = None,
    longest_s: float = 300,
) -> Drawing:
    """Return previews of *folder*, made by *worker*."""
    objects = objects or Interrupted()
    root = ObjectRef(folder.as_uri(), "")
    read = reading(objects, root=root, clock=objects.clock, ttl_s=1)
    budget = ByteBudget(2**20, wait_s=1)
    previews = Previews(read.resolver, budget, worker, longest_s=longest_s, clock=objects.clock)
    return Drawing(previews, read.dataset, objects.clock)


def store(folder: Path, values: NDArray[np.uint8]) -> None:
    """Write the array ``a``."""
    zarr.create_array(str(folder / "a"), data=values, chunks=(8, 8), overwrite=True)


@pytest.mark.parametrize("data_type", ["bfloat16", "int4", "float8_e4m3fn"])
async def test_numbers_that_numpy_lacks_are_drawn(tmp_path: Path, data_type: str) -> None:
    """Arrays of Zarr v3 have a picture whatever numbers they have."""
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(tmp_path / "a")}}
    values = np.arange(64).reshape(8, 8) % 8
    array = tensorstore.open(spec, dtype=data_type, shape=(8, 8), create=True).result()
    array.write(values.astype(array.dtype.numpy_dtype)).result()

    drawn = await drawing(tmp_path).get()
    assert np.asarray(Image.open(io.BytesIO(drawn.png))).tolist() == grey(values).tolist()


def contrast_of(values: NDArray[Any]) -> Any:
    """Return the contrast of a picture of *values*."""
    return pytest.approx(np.percentile(values, (1, 99)))


async def test_picture_is_made_again_of_changed_values(tmp_path: Path) -> None:
    """An old picture is made again of changed values; it stays while the store fails for a time."""
    store(tmp_path, BYTES)
    objects = Interrupted()
    drawn = drawing(tmp_path, objects=objects)
    first = await drawn.get()
    assert first.values.contrast == contrast_of(BYTES)
    drawn.clock.now += 100
    assert await drawn.get() is first

    store(tmp_path, 255 - BYTES)
    assert await drawn.get() is first

    def fail() -> None:
        raise StorageTimeoutError(ROOT, "is slow")

    objects.interrupt = fail
    drawn.clock.now += 100
    assert await drawn.get() is first

    objects.interrupt = lambda: None
    drawn.clock.now += 3
    second = await drawn.get()
    assert second.etag != first.etag
    assert second.values.contrast == contrast_of(255 - BYTES)


async def test_array_that_is_written_has_a_picture(tmp_path: Path) -> None:
    """A picture comes amid writes and says that it is mixed; after them it is that of the array."""
    numbers = count(1)
    objects = Interrupted()
    drawn = drawing(tmp_path, objects=objects)

    def write() -> None:
        store(tmp_path, BYTES + np.uint8(next(numbers)))

    write()
    objects.interrupt = write
    first = await drawn.get()
    objects.interrupt = lambda: None
    drawn.clock.now += 100
    second = await drawn.get()

    assert (first.is_mixed, first is PLACEHOLDER) == (True, False)
    assert (second.is_mixed, second is PLACEHOLDER) == (False, False)
    assert second.values.contrast == contrast_of(
        np.asarray(zarr.open_array(str(tmp_path / "a"))[...])
    )


async def test_picture_of_a_repository_is_of_one_snapshot(tmp_path: Path) -> None:
    """A picture of a branch that moves while it is made is of the snapshot that it began with."""
    write_repository(tmp_path)
    repository = icechunk.Repository.open(icechunk.local_filesystem_storage(str(tmp_path)))
    objects = Interrupted()
    numbers = count(1)

    def commit() -> None:
        session = repository.writable_session("main")
        zarr.open_array(session.store, path="a")[...] = BYTES // np.uint8(next(numbers))
        session.commit("Write")

    objects.interrupt = commit
    made = await drawing(tmp_path, objects=objects).get()

    assert next(numbers) > 1
    assert not made.is_mixed
    assert made.values.contrast == contrast_of(255 - BYTES)


@pytest.fixture
def hanging(tmp_path: Path) -> tuple[Sequence[str], Path]:
    """Return a worker that never ends, and the file in which it puts its process id."""
    store(tmp_path, BYTES)
    file = tmp_path / "pid"
    return ("sh", "-c", f"echo $$ > {file}.new; mv {file}.new {file}; exec sleep 600"), file


def is_running(file: Path) -> bool:
    """Return whether the process whose id is in *file* is running."""
    try:
        os.kill(int(file.read_text()), 0)
    except ProcessLookupError:
        return False
    return True


async def test_worker_that_hangs_is_killed(
    tmp_path: Path, hanging: tuple[Sequence[str], Path]
) -> None:
    """A worker that does not end in time is killed, and its picture is pending."""
    worker, file = hanging

    assert await drawing(tmp_path, worker, longest_s=5).get() is PENDING
    assert not is_running(file)


async def test_worker_is_killed_when_its_clients_leave(
    tmp_path: Path, hanging: tuple[Sequence[str], Path]
) -> None:
    """A worker whose picture nobody waits for any more is killed."""
    worker, file = hanging
    client = asyncio.create_task(drawing(tmp_path, worker).get())
    async with asyncio.timeout(60):
        while not file.exists():  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(0.05)
        client.cancel()
        while is_running(file):  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.05)

    assert client.cancelled()


def test_worker_has_bounded_memory() -> None:
    """The worker ends with an error where it would need more memory than its limit."""
    side = 2**16
    document = zarr.create_array({}, shape=(side, side), dtype="u1").metadata.to_dict()
    data = json.dumps(document).encode()
    request = {
        "driver": "zarr3",
        "ranges": [(0, side), (0, side)],
        "order": [0, 1],
        "is_rgb": False,
        "is_labels": False,
        "decoders": [],
        "channels": [],
        "objects": [("zarr.json", len(data))],
    }
    sent = json.dumps(request).encode() + b"\n" + data
    measuring = [sys.executable, "-c", MEASURING, *(worker_command() or ())]
    done = subprocess.run(measuring, input=sent, capture_output=True, check=True)
    status, most_kib = map(int, done.stdout.split())

    assert status != 0
    assert most_kib * 1024 < MOST_MEMORY_NBYTES


@pytest.mark.parametrize(
    "worker", [None, ("sh", "-c", "kill -9 $$"), ("echo", "[]"), ("/no/such/program",)], ids=str
)
async def test_failing_worker_leaves_a_placeholder(
    tmp_path: Path, worker: Sequence[str] | None
) -> None:
    """A worker that is not installed, killed, or answers nonsense leaves the placeholder."""
    store(tmp_path, BYTES)

    assert await drawing(tmp_path, worker).get() is PLACEHOLDER


async def test_concurrent_requests_share_one_worker(tmp_path: Path) -> None:
    """Requests for the same picture at the same time run one worker."""
    store(tmp_path, BYTES)
    log = tmp_path / "log"
    code = f"""open({str(log)!r}, "a").write("."); print('{{"contrast": null}}\\npng')"""
    drawn = drawing(tmp_path, (sys.executable, "-c", code))
    made = await asyncio.gather(*(drawn.get() for _ in range(5)))

    assert {each.png for each in made} == {b"png\n"}
    assert log.read_text() == "."
