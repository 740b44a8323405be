"""`shardgate.web.pictures`: planes of arrays, with the values and the chunks in them."""

import asyncio
import io
import re
from pathlib import Path
from typing import Any, Final
from xml.etree.ElementTree import Element  # a tree that html5lib made, no XML from elsewhere

import httpx
import numpy as np
import pytest
import zarr
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from shardgate.errors import BadParameterError, BusyError
from shardgate.model import ObjectRef
from shardgate.settings import DatasetSettings, Settings
from shardgate.storage.local import LocalStore
from shardgate.web.chunk_grids import ChunkGrids, draw_grid
from shardgate.web.histograms import draw_histogram
from shardgate.web.looks import read_indices
from shardgate.web.previews import Histogram, PlaneValues
from tests.support.auth.people import TOKENS
from tests.support.gates import Gate
from tests.support.pages import open_page, parse
from tests.support.resolving import reading
from tests.support.serving import client_of
from tests.support.viewers.images import ball
from tests.support.web.pictures import WIDE, write_sparse

FIRST: Final = {"at.dim_0": "0"}
NAMES: Final = ("preview.png", "histogram.svg")
INNER: Final = "inner chunks stored, in"


def get(client: httpx.Client, dataset: str, name: str, **query: str) -> httpx.Response:
    """Request a picture."""
    return client.get(f"/api/datasets/{dataset}/{name}", params=query)


def pixels(client: httpx.Client, dataset: str, **query: str) -> NDArray[np.uint8]:
    """Return the pixels of a preview."""
    return np.asarray(Image.open(io.BytesIO(get(client, dataset, "preview.png", **query).content)))


def drawing(answer: httpx.Response) -> Element:
    """Return a drawing in SVG, which is well formed."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "image/svg+xml"
    (svg,) = parse(f"<!doctype html><title>-</title>{answer.text}").findall(".//{*}svg")
    return svg


def title(client: httpx.Client, dataset: str, name: str, **query: str) -> str:
    """Return what a drawing says."""
    return drawing(get(client, dataset, name, **query)).findtext("{*}title") or ""


def test_channels_are_drawn_in_their_colours(client: httpx.Client) -> None:
    """An image shows its active channels in the colours of its metadata; a chosen one alone."""
    red, green = (ball(shift)[20] * np.uint8(255) for shift in (-16, 0))
    none = np.zeros_like(red)

    np.testing.assert_array_equal(pixels(client, "image"), np.stack([red, green, none], -1))
    alone = np.stack([none, green, none], -1)
    for path in ("", "0"):
        np.testing.assert_array_equal(pixels(client, "image", path=path, **{"at.c": "1"}), alone)


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ({"at.q": "0"}, "at.q: the picture has at.dim_0"),
        ({"at.dim_1": "0"}, "at.dim_1: the picture has at.dim_0"),
        ({"at.dim_0": "6"}, "at.dim_0: 6 is not below 6"),
        ({"at.dim_0": "-1"}, "at.dim_0: -1 is no index"),
        ({"at.dim_0": "01"}, "at.dim_0: 01 is no index"),
        ({"at.dim_0": "9" * 30}, f"at.dim_0: {'9' * 30} is no index"),
    ],
)
def test_unknown_position_is_400(client: httpx.Client, query: dict[str, str], told: str) -> None:
    """A position along an unknown axis, or outside of it, is named, also on the page."""
    answers = [
        get(client, "data", name, path="wide", **query)
        for name in ("preview.png", "histogram.svg", "grid.svg")
    ]
    page = client.get("/data/wide/", params=query, headers={"accept": "text/html"})

    assert [each.status_code for each in (*answers, page)] == [400] * 4
    assert {each.json()["detail"] for each in answers} == {told}
    assert told in page.text


@given(st.text(), st.text())
def test_parameters_are_positions_or_refused(name: str, value: str) -> None:
    """Any text is a position, no position, or refused as a parameter."""
    query = str(httpx.QueryParams({name: value, f"at.{name}": value, "at.z": "3"}))
    try:
        indices = read_indices(query)
    except BadParameterError:
        return

    assert indices["z"] == 3
    assert all(0 <= index < 10**19 for index in indices.values())


def test_histogram_has_the_range_of_the_plane(client: httpx.Client) -> None:
    """A histogram says least and greatest value of the plane, and where most of them lie."""
    low, high = np.percentile(WIDE[5], (1, 99))
    told = title(client, "data", "histogram.svg", path="wide", **{"at.dim_0": "5"})

    assert told.startswith(f"from {WIDE[5].min():,} to {WIDE[5].max():,}, ")
    assert told.endswith("600 values read; logarithmic scale")
    numbers = [float(each) for each in re.findall("between (.+) and (.+?),", told)[0]]
    assert numbers == pytest.approx([low, high], rel=1e-3)


def test_histogram_has_an_etag_of_its_own(client: httpx.Client) -> None:
    """A histogram is 304 for its own ETag only, and not for that of the picture."""
    tags = [get(client, "data", name, path="bytes").headers["etag"] for name in NAMES]
    statuses = [
        client.get(
            "/api/datasets/data/histogram.svg?path=bytes", headers={"if-none-match": tag}
        ).status_code
        for tag in tags
    ]

    assert statuses == [200, 304]


def test_histogram_of_channels_has_their_colours(client: httpx.Client) -> None:
    """A histogram of an image has a curve for each channel that is drawn, in its colour."""
    svg = drawing(get(client, "image", "histogram.svg"))
    curves = svg.findall("{*}path[@class='curve colored']")

    assert [each.attrib["style"] for each in curves] == ["fill: #FF0000", "fill: #00FF00"]


def test_labels_are_counted(client: httpx.Client) -> None:
    """Labels have a number in place of a histogram."""
    told = title(client, "cells", "histogram.svg")

    assert told == "15 labels in the picture, from 1 to 15"


finite = st.floats(allow_nan=False, allow_infinity=False)


@given(finite, finite, st.lists(st.integers(0, 2**40), min_size=1, max_size=64), finite, finite)
@example(0.0, 2.3e-308, [1], 0.0, 1.0)
@example(-1.7e308, 1.7e308, [1], -1.7e308, 1.7e308)
def test_histogram_of_any_values_is_drawn(
    low: float, high: float, counts: list[int], black: float, white: float
) -> None:
    """A histogram has numbers only, whatever the values and the colours are."""
    low, high = sorted((low, high))
    shown = Histogram(low=low, high=high, counts=tuple(counts), shown=(black, white))
    svg = draw_histogram(PlaneValues(histograms=(shown, shown), count=1)).decode()

    assert not re.search("nan|inf", svg.partition("</style>")[2])


@pytest.mark.parametrize(
    ("dataset", "query", "told"),
    [
        (
            "sparse",
            {"path": "sharded", **FIRST},
            f"6 of 15 {INNER} 2 of 6 shards",
        ),
        (
            "sparse",
            {"path": "sharded", "at.dim_0": "1"},
            f"0 of 15 {INNER} 0 of 6 shards",
        ),
        ("sparse", {"path": "plain", **FIRST}, "6 of 15 chunks stored"),
        (
            "zipped",
            {"path": "sparse.zip/sharded", **FIRST},
            f"6 of 15 {INNER} 2 of 6 shards",
        ),
        ("repo", {"path": "a", "ref": "tag.v1"}, "15 of 15 inner chunks stored, in 6 of 6 shards"),
        ("sparse", {"path": "@sharded/sharded", **FIRST}, "2 of 6 chunks stored"),
        ("repo", {"path": "@tag.v1/@sharded/a"}, "6 of 6 chunks stored"),
        ("cells", {}, "4 of 4 inner chunks stored, in 1 of 1 shards, array 4_4_40"),
        ("image", {}, "9 of 12 inner chunks stored, in 1 of 1 shards, array 0"),
        ("undrawable", {"path": "codec"}, "0 of 1 chunks stored"),
    ],
)
def test_grid_tells_stored_chunks_from_others(
    client: httpx.Client, dataset: str, query: dict[str, str], told: str
) -> None:
    """A grid has the chunks and shards of the plane, of every format, also without a picture."""
    assert title(client, dataset, "grid.svg", **query) == told


def cells(svg: Element, state: str) -> int:
    """Return the number of chunks of a state in a grid."""
    drawn = svg.findall(f"{{*}}path[@class='chunks {state}']")
    return sum(each.attrib["d"].count("M") for each in drawn)


def test_grid_shows_chunks_that_cannot_be_read(client: httpx.Client) -> None:
    """Chunks of a shard whose index is damaged are neither stored nor absent."""
    svg = drawing(get(client, "undrawable", "grid.svg", path="cut", **{"at.dim_0": "0"}))

    assert (cells(svg, "stored"), cells(svg, "missing"), cells(svg, "faulty")) == (2, 9, 4)


def test_grid_of_many_chunks_is_cut(client: httpx.Client, tmp_path: Path) -> None:
    """A grid of very many chunks is the part that the picture shows, and says so."""
    zarr.create_array(
        str(tmp_path), shape=(10**6, 10**6), dtype="u1", chunks=(10, 10), shards=(1000, 1000)
    )
    with client_of(Settings(datasets={"large": DatasetSettings(url=str(tmp_path))})) as opened:
        told = title(opened, "large", "grid.svg")

    assert told.startswith("0 of 1,024 inner chunks stored, in 0 of 4 shards")
    assert told.endswith("the middle of 100,000 × 100,000 inner chunks")


@pytest.mark.parametrize("path", ["line", "absent", "image/labels"])
def test_grid_without_a_plane_is_400(client: httpx.Client, path: str) -> None:
    """What has no two axes has no grid."""
    assert get(client, "data", "grid.svg", path=path).status_code == 400


async def test_grid_of_a_slow_store_is_filled_in(tmp_path: Path) -> None:
    """A grid whose store hangs shows chunks that are not read yet, later with the others."""
    write_sparse(tmp_path)
    gate = Gate(part="/c/1/2/")
    read = reading(gate.wrap(LocalStore()), root=ObjectRef(tmp_path.as_uri(), ""))
    grids = ChunkGrids(read.resolver, wait_s=0.2)
    try:
        async with asyncio.timeout(60):
            while (partial := await _try(grids, read.dataset)) is None or not partial.states:
                pass
            assert b"not read yet" in draw_grid(partial)
            gate.open()
            while not (grid := await grids.get(read.dataset, "plain", None, {})).is_complete:
                pass
    finally:
        await grids.aclose()

    assert b"not read yet" not in draw_grid(grid)


async def _try(grids: ChunkGrids, dataset: Any) -> Any:
    try:
        return await grids.get(dataset, "plain", None, {})
    except BusyError:  # the metadata are not read yet
        return None


@pytest.mark.parametrize("name", [*NAMES, "grid.svg"])
def test_pictures_are_for_readers_only(client: httpx.Client, name: str) -> None:
    """Pictures of a private dataset are those of no dataset to others, and private to readers."""
    token = {"authorization": f"Bearer {TOKENS['ana']}"}
    strangers = [get(client, dataset, name, path="bytes") for dataset in ("private", "nothing")]
    shown = client.get(f"/api/datasets/private/{name}?path=bytes", headers=token)

    assert [each.status_code for each in strangers] == [401, 401]
    assert strangers[0].text.replace("private", "nothing") == strangers[1].text
    assert shown.content == get(client, "data", name, path="bytes").content
    assert shown.headers["cache-control"] == "private, max-age=60, must-revalidate"
    assert shown.headers["vary"] == "Authorization, Cookie"


def test_page_has_a_slider_for_each_other_axis(client: httpx.Client) -> None:
    """A page has a slider or a choice for each other axis, at the position of its query."""
    page = open_page(client, "/image/?at.t=1&at.c=2")
    sliders = {each.attrib["name"]: each.attrib for each in page.all("form//input")}
    (chosen,) = page.all("option[@selected]")

    assert {name: (each["value"], each["max"]) for name, each in sliders.items()} == {
        "at.t": ("1", "1"),
        "at.z": ("20", "39"),
    }
    assert page.texts("option") == ["all, in their colours", "0 red", "1 green", "2 hidden"]
    assert chosen.attrib["value"] == "2"
    pictures = [each.attrib["src"] for each in page.all("img[@class='plane']")]
    assert [each.rpartition("/")[2] for each in pictures] == [
        f"{name}?path=&at.t=1&at.c=2" for name in ("preview.png", "histogram.svg", "grid.svg")
    ]
    for each in pictures:
        assert client.get(f"/image/{each}").status_code == 200
    assert open_page(client, "/data/bytes/").all("form") == []
    assert open_page(client, "/data/colours/").all("form") == []
    assert open_page(client, "/data/line/").all("img") == []
