"""`shardgate.web.viewer`: links into Neuroglancer, and its files."""

import json
import re
from collections.abc import Generator
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import httpx
import pytest
import zarr

from shardgate.auth.access import ServedDataset
from shardgate.model import ObjectRef
from shardgate.read.containers import Containers
from shardgate.server.address import Address
from shardgate.server.responses import csp_digest
from shardgate.settings import PUBLIC, DatasetSettings, Settings
from shardgate.web.nodes import MOST_NBYTES
from shardgate.web.viewer import PUBLIC_VIEWER, VIEWER, signing_viewer_of, viewer_of
from tests.support.examples import datasets_of
from tests.support.pages import parse
from tests.support.serving import client_of


@pytest.fixture(scope="module")
def client() -> Generator[httpx.Client]:
    """Serve the viewer without datasets."""
    with client_of(Settings()) as opened:
        yield opened


@pytest.fixture(scope="module")
def page(client: httpx.Client) -> httpx.Response:
    """Return the viewer's page."""
    return client.get(f"/{VIEWER}")


def test_short_viewer_paths_redirect(client: httpx.Client) -> None:
    """Short paths redirect to the viewer's page, and unknown files are 404."""
    for path in ("/viewer", "/viewer/", f"/{VIEWER}".rstrip("/")):
        answer = client.get(path)
        assert answer.status_code == 307
        assert urlsplit(answer.headers["location"]).path == f"/{VIEWER}"
    absent = client.get(f"/{VIEWER}nothing.js")
    assert absent.status_code == 404
    assert absent.headers["content-type"] == "application/problem+json"


def test_viewer_page_allows_its_own_scripts_only(page: httpx.Response) -> None:
    """The viewer's Content-Security-Policy allows its own files and its inline script's digest."""
    policy = page.headers["content-security-policy"]
    first = next(parse(page.text).iter("script"))

    assert first.text
    assert "EventSource" in first.text
    assert f"script-src 'self' '{csp_digest(first.text)}' 'wasm-unsafe-eval' blob:;" in policy
    assert page.headers["referrer-policy"] == "no-referrer"
    assert page.headers["cache-control"] == "no-cache"


def test_viewer_files_are_immutable(client: httpx.Client, page: httpx.Response) -> None:
    """Each file of the viewer has its type, an ETag and an immutable Cache-Control."""
    types = {"js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8"}
    for name in re.findall(r'(?:src|href)="([^"]+)"', page.text):
        answer = client.get(f"/{VIEWER}{name}")
        headers = answer.headers

        assert answer.status_code == 200
        assert headers["content-type"] == types[name.rpartition(".")[2]]
        assert headers["cache-control"] == "public, max-age=31536000, immutable"
        again = client.get(f"/{VIEWER}{name}", headers={"if-none-match": headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    "path",
    [
        *("../__init__.py", "../../__init__.py", "%2e%2e/__init__.py", "..%2f..%2f__init__.py"),
        *("....//__init__.py", "..%5c__init__.py", "%00", "//etc/passwd", "%2fetc%2fpasswd"),
    ],
)
def test_paths_outside_of_the_viewer_are_refused(client: httpx.Client, path: str) -> None:
    """A path that leads out of the viewer's folder is 400 or 404."""
    connection = HTTPConnection(client.base_url.host, client.base_url.port or 80, timeout=60)
    connection.request("GET", f"/{VIEWER}{path}")
    answer = connection.getresponse()
    body = answer.read()
    connection.close()

    assert answer.status in {400, 404}
    assert b"import" not in body
    assert b"root:" not in body


@pytest.fixture(scope="module")
def examples(
    demo_paths: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Generator[httpx.Client]:
    """Serve the examples, and a folder of them all."""
    datasets = datasets_of(demo_paths)
    datasets["all"] = DatasetSettings(url=str(demo_paths["image"].parent))
    datasets["empty"] = DatasetSettings(url=str(tmp_path_factory.mktemp("empty")))
    with client_of(Settings(datasets=datasets)) as opened:
        yield opened


def state_of_link(client: httpx.Client, url: str) -> dict[str, Any]:
    """Return the state of Neuroglancer that *url* redirects to."""
    answer = client.get(url)
    assert answer.status_code == 307, answer.text
    page, _, state = answer.headers["location"].partition("#!")
    assert page == f"{client.base_url}/{VIEWER}"
    parsed: dict[str, Any] = json.loads(unquote(state))
    return parsed


@pytest.mark.parametrize(
    ("dataset", "path", "source"),
    [
        ("image", "", "image/|zarr3:"),
        ("all", "image.zarr/s1", "all/image.zarr/s1/|zarr3:"),
        ("history", "", "history/|zarr3:"),
        ("history", "@tag.landfall/s1", "history/@tag.landfall/s1/|zarr3:"),
    ],
)
def test_viewer_link_opens_a_node(
    examples: httpx.Client, dataset: str, path: str, source: str
) -> None:
    """The link of a path opens its node, that of a folder the first one below."""
    state = state_of_link(examples, f"/api/datasets/{dataset}/viewer?path={path}")

    (layer,) = state["layers"]
    opened = layer["source"]
    url = opened if isinstance(opened, str) else opened["url"]  # that of a level has a scale
    assert url.removeprefix("precomputed://") == f"{examples.base_url}/{source}"


@pytest.mark.parametrize(
    ("dataset", "root"), [("cells", "cells"), ("all", "all/cells.precomputed")]
)
def test_viewer_link_of_a_segmentation_shows_its_surroundings(
    examples: httpx.Client, dataset: str, root: str
) -> None:
    """The link of a segmentation has its image and annotations, and its first segments."""
    state = state_of_link(examples, f"/api/datasets/{dataset}/viewer")
    ids = examples.get(f"/{root}/properties/info").json()["inline"]["ids"]

    image, segments, lines = state["layers"]
    assert [each["type"] for each in state["layers"]] == ["image", "segmentation", "annotation"]
    url = f"precomputed://{examples.base_url}/{root}"
    assert [image["source"], segments["source"]] == [f"{url}/em", url]
    assert lines["source"] == f"{url}/synapses"
    assert segments["segments"] == ids[:16]
    assert image["shaderControls"]["contrast"]["range"][0] > 0
    assert not state["showSlices"]


def test_viewer_link_of_a_folder_opens_the_first_readable_node(tmp_path: Path) -> None:
    """The link of a folder passes over a node that cannot be shown, whose own link is an error."""
    root = zarr.create_group(tmp_path)
    long: Any = {"text": "x" * MOST_NBYTES}
    for name, attributes in (("group/a", long), ("group/b", {})):
        root.create_array(name, shape=(4, 4), dtype="u1", attributes=attributes)
    with client_of(Settings(datasets={"data": DatasetSettings(url=str(tmp_path))})) as opened:
        for folder in ("", "group"):
            state = state_of_link(opened, f"/api/datasets/data/viewer?path={folder}")
            (layer,) = state["layers"]
            assert layer["source"] == f"{opened.base_url}/data/group/b/|zarr3:"
        named = opened.get("/api/datasets/data/viewer?path=group/a")

    assert (named.status_code, str(MOST_NBYTES) in named.json()["detail"]) == (424, True)


def test_viewer_link_has_the_contrast_of_the_data(examples: httpx.Client) -> None:
    """The link of an image without windows has the 1st and 99th percentile of its middle."""
    (layer,) = state_of_link(examples, "/api/datasets/image/viewer")["layers"]

    low, high = layer["shaderControls"]["contrast"]["range"]
    assert 0 <= low < high <= 255


def test_nothing_to_view_is_a_problem(examples: httpx.Client) -> None:
    """The link of an empty dataset, an unknown one and an invalid path are problems."""
    statuses = [
        examples.get(f"/api/datasets/{path}").status_code
        for path in ("empty/viewer", "unknown/viewer", "image/viewer?path=../x")
    ]

    assert statuses == [400, 404, 400]


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        (("lab.example:8000", ""), "http://lab.example:8000"),
        (("[::1]:80", ""), "http://[::1]:80"),
        (("lab.example", "https"), "https://lab.example"),
        (("lab.example", "javascript"), "http://lab.example"),
        (('x"><script>', ""), "http://localhost"),
        (("lab.example/path", ""), "http://localhost"),
        (("user@lab.example", ""), "http://localhost"),
        (("", ""), "http://localhost"),
    ],
)
def test_address_follows_the_host_header(headers: tuple[str, str], expected: str) -> None:
    """The address has a valid Host and the token of its path; that of the viewer has no token."""
    plain, below = Address.of(*headers, "/at", None), Address.of(*headers, "/at", "ab%2Fc")

    assert (plain.base, below.base) == (f"{expected}/at", f"{expected}/at/~ab%2Fc")
    assert viewer_of(below, is_installed=True) == f"{expected}/at/{VIEWER}"


@pytest.mark.parametrize(
    ("host", "proto", "expected"),
    [
        ("lab.example", "https", PUBLIC_VIEWER),
        ("localhost:8000", "http", PUBLIC_VIEWER),
        ("127.0.0.1:8000", "http", PUBLIC_VIEWER),
        ("lab.example", "http", None),
        ("127.0.0.1.example", "http", None),
    ],
)
def test_public_viewer_needs_https_or_localhost(
    host: str, proto: str, expected: str | None
) -> None:
    """A service without the viewer links the public one, if it has https or is localhost."""
    assert viewer_of(Address.of(host, proto, "", None), is_installed=False) == expected


PRIVATE = ServedDataset(
    "em", ObjectRef("memory://em", ""), Containers([]), "zarr", readers=frozenset({"lab:em"})
)


@pytest.mark.parametrize(
    ("address", "dataset", "viewer"),
    [
        (Address("https://a.example", ""), PRIVATE, "https://viewer.example/"),
        (Address("https://a.example", ""), replace(PRIVATE, readers=frozenset({PUBLIC})), None),
        (Address("http://127.0.0.1:8000", ""), PRIVATE, None),
        (Address("https://a.example", "/below"), PRIVATE, "https://viewer.example/"),
        (Address("https://a.example", "", "token"), PRIVATE, None),
    ],
)
def test_private_dataset_opens_where_people_sign_in(
    address: Address, dataset: ServedDataset, viewer: str | None
) -> None:
    """A private dataset is opened in a viewer that signs people in, where its protocol works."""
    viewers = ["https://viewer.example", "https://other.example"]

    assert signing_viewer_of(address, dataset, viewers) == viewer
    assert signing_viewer_of(address, dataset, []) is None
