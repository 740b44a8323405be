"""OpenLayers, a library of web maps, draws a sharded GeoZarr pyramid."""

import shutil
import subprocess
from collections import Counter
from collections.abc import Generator
from typing import Any, Final

import icechunk
import numpy as np
import numpy.typing as npt
import pytest
import zarr
from playwright.sync_api import Browser
from zarr.storage import LocalStore

from shardgate.settings import PUBLIC, DatasetSettings, Settings
from tests.support.auth.people import TOKENS, caller
from tests.support.clients.reading import JS
from tests.support.clients.writing import consolidate
from tests.support.lacking import lack
from tests.support.serving import serving
from tests.support.viewers.viewing import Asked, listen, paging

SHAPE: Final = (96, 128)
INNER: Final = 32
HOLE: Final = (slice(32, 64), slice(64, 96))
"""An inner chunk that no shard holds."""
BBOX: Final = (0.0, 0.0, 1280.0, 960.0)
BANDS: Final = ("red", "green")
CHUNKS: Final = {f"0/{band}/c/{y}/{x}" for band in BANDS for y in range(3) for x in range(4)}
ABSENT: Final = {f"0/{band}/c/1/2" for band in BANDS}
ROOTS: Final = ("folder", f"~{TOKENS['ana']}/private/@tag.v1")
DAMAGED: Final = 424
POLL_MS: Final = 100
LONGEST_POLLS: Final = 600


def band(number: int) -> npt.NDArray[np.float32]:
    """Return distinct values with a hole of NaN."""
    values = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE) + 1 + 100_000 * number
    values[HOLE] = np.nan
    return values


def write(store: Any) -> None:
    """Write two levels of each band, by the conventions `multiscales`, `proj` and `spatial`."""
    layout = [{"asset": str(n), "spatial:shape": [size >> n for size in SHAPE]} for n in (0, 1)]
    attributes = {
        "multiscales": {"layout": layout},
        "proj:code": "EPSG:3857",
        "spatial:dimensions": ["y", "x"],
        "spatial:bbox": list(BBOX),
    }
    group = zarr.create_group(store, attributes=attributes)
    for level in (0, 1):
        for number, name in enumerate(BANDS):
            group.create_array(
                f"{level}/{name}",
                data=band(number)[:: 1 << level, :: 1 << level],
                chunks=(INNER, INNER),
                shards=(2 * INNER, 2 * INNER),
                dimension_names=["y", "x"],
                fill_value=np.nan,
            )


@pytest.fixture(scope="module")
def page_url(tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """Bundle and serve the page of the map."""
    bundler = JS / "node_modules/.bin/esbuild"
    if shutil.which("node") is None or not (JS / "node_modules/ol").is_dir():
        lack("OpenLayers is not installed: npm install --prefix tests/clients/js")
    folder = tmp_path_factory.mktemp("map")
    options = ("--bundle", "--log-level=error", f"--outfile={folder}/map.js")
    subprocess.run([bundler, JS / "openlayers.mjs", *options], check=True)
    (folder / "index.html").write_text(
        '<!doctype html><meta charset="utf-8"><style>body { margin: 0 }</style><body>'
        '<script src="map.js"></script>'
    )
    with paging(folder) as url:
        yield url


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """Serve the group from a folder with consolidated metadata, damaged, and as a private tag."""
    root = tmp_path_factory.mktemp("groups")
    write(LocalStore(root / "folder"))
    consolidate(root / "folder")
    shutil.copytree(root / "folder", root / "damaged")
    shard = root / "damaged/0/red/c/0/0"
    *rest, last = shard.read_bytes()
    shard.write_bytes(bytes([*rest, last ^ 1]))
    storage = icechunk.local_filesystem_storage(str(root / "private"))
    repository = icechunk.Repository.create(storage)
    session = repository.writable_session("main")
    write(session.store)
    repository.create_tag("v1", snapshot_id=session.commit("bands"))
    datasets = {
        name: DatasetSettings(url=str(root / name), read=(reader,))
        for name, reader in {"folder": PUBLIC, "damaged": PUBLIC, "private": "ana"}.items()
    }
    callers = {"ana": caller(TOKENS["ana"])}
    with serving(Settings(callers=callers, datasets=datasets)) as url:
        yield url


type Drawn = tuple[npt.NDArray[np.float32], list[str], list[Asked]]
"""Values of each pixel and band, errors of tiles, and requests."""


def draw(browser: Browser, page_url: str, url: str, damaged: int = 0) -> Drawn:
    """Draw the group at *url* with a pixel for each value of its finest level, and wait for the
    answers of *damaged* chunks: a tile fails with the first of them.
    """
    with browser.new_context() as context:
        page = context.new_page()
        asked, faults = listen(page, page_url)
        page.goto(page_url)
        drawn = page.evaluate("given => draw(...given)", [url, BANDS, SHAPE, BBOX])
        for _ in range(LONGEST_POLLS):
            if sum(each.status == DAMAGED for each in asked) >= damaged:
                break
            page.wait_for_timeout(POLL_MS)
        assert not faults
    return np.array(drawn["values"], np.float32).reshape(*SHAPE, -1), drawn["errors"], asked


@pytest.fixture(scope="module", params=ROOTS)
def root(request: pytest.FixtureRequest, service: str) -> str:
    """Return the URL of the group in one of its places."""
    return f"{service}/{request.param}"


@pytest.fixture(scope="module")
def drawn(browser: Browser, page_url: str, root: str) -> Drawn:
    """Draw the group."""
    return draw(browser, page_url, root)


def test_pixels_of_the_map_have_the_stored_values(drawn: Drawn) -> None:
    """Pixels of the map have the stored values, and are transparent where no chunk is stored."""
    values, errors, _ = drawn
    expected = np.stack([band(0), band(1)], axis=-1)

    assert not errors
    np.testing.assert_array_equal(values[..., :2], np.nan_to_num(expected))
    np.testing.assert_array_equal(values[..., 2] > 0, ~np.isnan(expected[..., 0]))


def test_map_asks_for_each_chunk_once(drawn: Drawn, root: str) -> None:
    """The map asks once, without a range, for the metadata and for each chunk of the level."""
    _, _, asked = drawn
    found = Counter((each.url.removeprefix(f"{root}/"), each.range, each.status) for each in asked)

    keys = {"zarr.json"} | CHUNKS
    assert found == Counter((key, None, 404 if key in ABSENT else 200) for key in keys)


def test_map_asks_once_for_damaged_chunks(browser: Browser, page_url: str, service: str) -> None:
    """The map asks once for each chunk of a damaged shard, and reports the tile that lacks them."""
    _, errors, asked = draw(browser, page_url, f"{service}/damaged", damaged=4)
    refused = [each.url for each in asked if each.status == DAMAGED]
    damaged = Counter(url.removeprefix(f"{service}/") for url in refused)

    assert damaged == Counter(f"damaged/0/red/c/{y}/{x}" for y in (0, 1) for x in (0, 1))
    assert errors == ["Error: Unexpected response status 424 Failed Dependency"]
