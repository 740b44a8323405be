"""Pages, links and previews of documents with odd, huge and hostile values."""

import itertools
import json
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardgate.settings import DatasetSettings, Settings
from tests.support.files import write_files
from tests.support.formats.neuroglancer_precomputed.case import volume_info
from tests.support.formats.zarr.building import LITTLE, array_metadata
from tests.support.pages import open_page
from tests.support.serving import client_of
from tests.support.web.images import ARRAY, AXES, image

HUGE: Final = 10**400
MANY: Final[list[dict[str, Any]]] = [{}] * 20_000
WIDE: Final = array_metadata([2, 3, 2048, 2048, 2048], [1, 1, 2048, 2048, 2048], [LITTLE])
"""Its chunks are too large for a picture, which would take a process for each document."""


def levelled(path: str = "s0", steps: Any = ()) -> dict[str, Any]:
    """Return an image of one level, at *path* and with transformations *steps*."""
    levels = [{"path": path, "coordinateTransformations": steps}]
    return image(multiscales=[{"axes": AXES, "datasets": levels}])


def scaled(*scales: list[float]) -> dict[str, Any]:
    """Return an image whose level has these scale transformations."""
    return levelled(steps=[{"type": "scale", "scale": scale} for scale in scales])


def windowed(*values: Any) -> dict[str, Any]:
    """Return an image with a channel whose window has these values."""
    start, end = values
    return image(omero={"channels": [{"window": {"start": start, "end": end}}]})


def info(**members: Any) -> dict[str, Any]:
    """Return the ``info`` of a volume with *members* of its scale changed."""
    found = volume_info(None)
    found["scales"][0] |= members
    return found


def nested(depth: int) -> str:
    """Return the document of an array whose attributes are lists in lists."""
    inside = "[" * depth + "]" * depth
    return json.dumps(WIDE | {"attributes": {"x": "INSIDE"}}).replace('"INSIDE"', inside)


DOCUMENTS: Final[dict[str, dict[str, Any]]] = {
    "huge-array": {"zarr.json": ARRAY | {"shape": [10**18] * 5}},
    "huge-shape": {"zarr.json": ARRAY | {"shape": [HUGE] * 5}},
    "negative-shape": {"zarr.json": ARRAY | {"shape": [-1] * 5}},
    "long-type": {"zarr.json": WIDE | {"data_type": "i4," * 200_000}},
    "no-type": {"zarr.json": WIDE | {"data_type": []}},
    "long-name": {"zarr.json": WIDE | {"dimension_names": ["x" * 300_000, *"abcd"]}},
    "surrogate": {"zarr.json": WIDE | {"attributes": {"\ud800": "\ud800\u202e"}}},
    "deep-attributes": {"zarr.json": nested(400)},
    "bottomless-attributes": {"zarr.json": nested(100_000)},
    "many-attributes": {"zarr.json": WIDE | {"attributes": {"x": MANY}}},
    "text": {"info": "no JSON"},
    "deep": {"info": "[" * 100_000},
    "levels-above": {"zarr.json": levelled("../../secret")},
    "level-surrogate": {"zarr.json": levelled("\ud800")},
    "tiny-steps": {"zarr.json": scaled([1e-200] * 5, [1e-200] * 5), "s0/zarr.json": WIDE},
    "opposite-steps": {"zarr.json": scaled(*[[1e29, 1e-29] * 2 + [1]] * 4), "s0/zarr.json": WIDE},
    "many-huge-steps": {"zarr.json": scaled(*[[1e29] * 5] * 60), "s0/zarr.json": WIDE},
    "far-away": {"zarr.json": levelled(steps=[{"translation": [1e308] * 5}]), "s0/zarr.json": WIDE},
    "zero-steps": {"zarr.json": scaled([0] * 5), "s0/zarr.json": ARRAY},
    "infinite-steps": {"zarr.json": scaled([float("inf")] * 5), "s0/zarr.json": WIDE},
    "nan-window": {"zarr.json": windowed(float("nan"), 1), "s0/zarr.json": WIDE},
    "text-window": {"zarr.json": windowed("inf", "nan"), "s0/zarr.json": WIDE},
    "many-channels": {"zarr.json": image(omero={"channels": MANY}), "s0/zarr.json": WIDE},
    "many-images": {"zarr.json": image(multiscales=MANY), "s0/zarr.json": WIDE},
    "many-steps": {"zarr.json": levelled(steps=MANY), "s0/zarr.json": WIDE},
    "zero-resolution": {"info": info(resolution=[0, 0, 0])},
    "negative-resolution": {"info": info(resolution=[-1, 1, 1])},
    "huge-offset": {"info": info(voxel_offset=[HUGE, 0, 0])},
    "huge-size": {"info": info(size=[HUGE, 1, 1])},
    "sound": {"zarr.json": array_metadata([4, 6], [2, 3], [LITTLE])},
    "draft": {"zarr.json": {
        "zarr_format": "https://purl.org/zarr/spec/protocol/core/3.0",
        "metadata_encoding": "https://purl.org/zarr/spec/protocol/core/3.0",
        "metadata_key_suffix": ".json",
        "extensions": []}},
    "many-scales": {"info": volume_info(None) | {"scales": volume_info(None)["scales"] * 3000,
                                                 "junk": MANY}},
}  # fmt: skip


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Generator[httpx.Client]:
    """Serve all documents, each in a folder."""
    root = tmp_path_factory.mktemp("odd")
    for folder, documents in DOCUMENTS.items():
        for name, document in documents.items():
            path = root / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(document if isinstance(document, str) else json.dumps(document))
    datasets = {folder: DatasetSettings(url=str(root / folder)) for folder in DOCUMENTS}
    with client_of(
        Settings(datasets={"all": DatasetSettings(url=str(root)), **datasets})
    ) as opened:
        yield opened


@pytest.mark.parametrize("folder", DOCUMENTS)
def test_odd_document_fails_no_page(client: httpx.Client, folder: str) -> None:
    """An odd document has a short page, a state or a problem as link, and pictures or a problem."""
    page = client.get(f"/all/{folder}/", headers={"accept": "text/html"})
    link = client.get(f"/api/datasets/all/viewer?path={folder}")
    preview = client.get(f"/api/datasets/all/preview.png?path={folder}")
    histogram = client.get(f"/api/datasets/all/histogram.svg?path={folder}")
    grid = client.get(f"/api/datasets/all/grid.svg?path={folder}")

    assert histogram.status_code == 200
    assert grid.status_code in {200, 400, 424}
    assert page.status_code == 200
    assert len(page.content) < 300_000
    assert link.status_code in {307, 400, 424}
    assert preview.status_code == 200
    if link.status_code == 307:
        state = unquote(link.headers["location"].partition("#!")[2])
        assert len(state) < 20_000
        json.loads(state, parse_constant=pytest.fail)


HOSTILE: Final = st.sampled_from(
    [
        "</script><script>alert(1)</script>",
        "\"'><img src=x onerror=alert(1)>",
        "</bdi>\u202e\u2066back\x00\x1b[2J",
        "{{ 7 * 7 }}",
        "\ud800",
        "x" * 1000,
    ]
)
JSON: Final = st.recursive(
    HOSTILE | st.none() | st.booleans() | st.integers() | st.floats() | st.just(HUGE),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(HOSTILE, inner, max_size=3),
    max_leaves=8,
)
TEXTS: Final = st.lists(HOSTILE, min_size=5, max_size=5)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Generator[tuple[httpx.Client, Path]]:
    """Serve a folder, and return it."""
    root = tmp_path_factory.mktemp("hostile")
    with client_of(Settings(datasets={"d": DatasetSettings(url=str(root))})) as opened:
        yield opened, root


NUMBERS: Final = itertools.count()


@given(
    attributes=st.fixed_dictionaries(
        {"_ARRAY_DIMENSIONS": JSON, "units": JSON, "scale_factor": JSON, "_FillValue": JSON}
    ),
    names=TEXTS | JSON,
    axes=TEXTS,
    channels=st.lists(st.fixed_dictionaries({"label": HOSTILE, "color": JSON, "window": JSON})),
    steps=st.lists(st.floats() | st.integers() | JSON, min_size=5, max_size=5),
)
@settings(max_examples=15, deadline=None)
def test_hostile_attributes_fail_no_page(
    hostile: tuple[httpx.Client, Path], attributes: Any, names: Any, axes: Any, **members: Any
) -> None:
    """Whatever attributes are, nodes have a page without foreign markup, a link and a picture."""
    client, root = hostile
    number = next(NUMBERS)
    level = {"path": "s0", "coordinateTransformations": [{"scale": members["steps"]}]}
    multiscales = [
        {"axes": [{"name": each, "unit": each} for each in axes], "datasets": [level]},
    ]
    group = image(multiscales=multiscales, omero={"channels": members["channels"]})
    group["attributes"] |= attributes
    array = WIDE | {"dimension_names": names, "attributes": attributes}
    write_files(
        {
            f"{number}/zarr.json": json.dumps(group).encode(),
            f"{number}/s0/zarr.json": json.dumps(array).encode(),
        },
        root,
    )
    for path in (f"{number}", f"{number}/s0"):
        page = open_page(client, f"/d/{path}/")
        assert len(page.all("script")) == 1
        assert not page.all("img[@onerror]")
        assert not set("\u202e\u2066\x1b\x00\ud800") & set(page.answer.text)
        assert client.get(f"/api/datasets/d/viewer?path={path}").status_code == 307
        assert client.get(f"/api/datasets/d/preview.png?path={path}").status_code == 200


def test_odd_documents_leave_the_start_page(client: httpx.Client) -> None:
    """The start page lists all datasets, whatever their documents."""
    page = open_page(client)

    assert len(page.all("tbody/tr")) == len(DOCUMENTS) + 1


def test_first_sound_image_is_shown_after_odd_ones(client: httpx.Client) -> None:
    """The link of a folder leads to a sound array, though damaged ones come before."""
    assert client.get("/api/datasets/all/viewer").status_code == 307


def test_draft_of_2022_has_curl_alone(client: httpx.Client) -> None:
    """The root of a store of the 2022 draft has a page with code for its document by curl alone."""
    snippets = open_page(client, "/draft/").snippets()

    assert list(snippets) == ["curl"]
    assert snippets["curl"].endswith("/draft/zarr.json")


def test_page_of_a_store_that_cannot_list(client: httpx.Client) -> None:
    """A node of an http store, whose keys are unknown, has a page that says so, and its preview."""
    datasets = {"far": DatasetSettings(url=f"{client.base_url}/sound")}
    with client_of(Settings(datasets=datasets)) as opened:
        page = open_page(opened, "/far/")
        preview = opened.get("/api/datasets/far/preview.png")

    assert page.texts("dd")[0].startswith("4 ")
    assert preview.status_code == 200
