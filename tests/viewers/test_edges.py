"""Neuroglancer's views through shared caches, as a CDN is: what the second viewer costs."""

from collections.abc import Generator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Browser
from zarr.storage import LocalStore

from shardgate.settings import DatasetSettings, Settings
from tests.support.deploy.edges import EDGES, edging
from tests.support.viewers.stripes import SECTIONS, VALUES, state, write
from tests.support.viewers.viewing import Neuroglancer, paging_client


@pytest.fixture(scope="module")
def second_viewer(browser: Browser, pictures: Path) -> Generator[Neuroglancer]:
    """Open a page of somebody else."""
    with paging_client() as url, closing(Neuroglancer(browser, url, pictures)) as viewer:
        yield viewer


@pytest.mark.parametrize("name", EDGES)
def test_second_viewer_reads_from_the_cache(
    neuroglancer: Neuroglancer, second_viewer: Neuroglancer, tmp_path: Path, name: str
) -> None:
    """A second viewer sees the same, by 0.9 of requests from the cache; none is an OPTIONS."""
    write(LocalStore(tmp_path / "root"), VALUES)
    shared = "public, max-age=600, s-maxage=3600"
    dataset = DatasetSettings(url=str(tmp_path / "root"), cache_control=shared)
    with edging(name, tmp_path, Settings(datasets={"em": dataset})) as edge:
        shown = state(f"{edge.url}/em/sharded")
        first = neuroglancer.look(shown, f"edge-{name}-first", {"data": SECTIONS})
        passed = [*edge.passed]
        second = second_viewer.look(shown, f"edge-{name}-second", {"data": SECTIONS})

    assert first.values == second.values == {"data": VALUES[tuple(SECTIONS.T)].tolist()}
    np.testing.assert_array_equal(first.pixels, second.pixels)
    assert len(passed) >= len(first.asked) > 30
    assert len(edge.passed) - len(passed) <= 0.1 * len(second.asked)
    assert {method for method, _ in edge.passed} == {"GET"}
