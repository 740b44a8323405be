"""`GET /{dataset}/…/` for browsers: groups, arrays, repositories, and code that reads them."""

import io
import json
import shutil
import subprocess
from collections.abc import Generator
from contextlib import redirect_stdout
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urljoin

import httpx
import icechunk
import pytest
import zarr

from shardgate.settings import DatasetSettings, Settings
from tests.support.auth.people import TOKENS, caller
from tests.support.examples import datasets_of
from tests.support.files import write_files
from tests.support.formats.zarr.building import LITTLE, array_metadata, rectilinear
from tests.support.lacking import need
from tests.support.pages import Page, open_page, parse
from tests.support.serving import client_of

TIMES: Final = " \N{MULTIPLICATION SIGN} "
HOSTILE: Final = "\"><script>alert(1)<'\u202e&lt;"
MESSAGE: Final = "</bdi><script>alert(2)</script>\nsecond line \u202eback " + "long " * 100


def write_hostile(folder: Path) -> None:
    """Write an array and a repository whose names and messages contain markup."""
    metadata = json.loads(json.dumps(zarr.create_array({}, shape=4, dtype="u1").metadata.to_dict()))
    metadata |= {"dimension_names": ["<b>\ud800"], "attributes": {"<i>": "</script>"}}
    (folder / HOSTILE).mkdir(parents=True)
    (folder / HOSTILE / "zarr.json").write_text(json.dumps(metadata))
    shutil.copytree(folder / HOSTILE, folder / "new\nline")
    storage = icechunk.local_filesystem_storage(str(folder / "repository"))
    repository = icechunk.Repository.create(storage)
    session = repository.writable_session("main")
    zarr.create_group(session.store)
    tip = session.commit(MESSAGE)
    repository.create_branch(HOSTILE, tip)
    repository.create_tag("a/b%", tip)


@pytest.fixture(scope="module")
def client(
    demo_paths: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Generator[httpx.Client]:
    """Serve the examples, all of them in one folder too, hostile names, and unequal chunks."""
    history = tmp_path_factory.mktemp("examples") / "history"
    shutil.copytree(demo_paths["history"], history)
    hostile = tmp_path_factory.mktemp("hostile")
    write_hostile(hostile)
    unequal = tmp_path_factory.mktemp("unequal")
    array = array_metadata([5, 7], [], [LITTLE], chunk_grid=rectilinear([2, 3], [3, 4]))
    write_files({"array/zarr.json": json.dumps(array).encode()}, unequal)
    weather = tmp_path_factory.mktemp("weather")
    group = zarr.create_group(str(weather))
    for name, shape in {"crs": (), "lat": (4,), "t2m": (3, 4, 5), "time": (3,)}.items():
        group.create_array(name, shape=shape, dtype="f4")
    paths = {"all": demo_paths["image"].parent, "odd": hostile, "unequal": unequal}
    paths["weather"] = weather
    datasets = datasets_of(demo_paths)
    datasets |= {name: DatasetSettings(url=str(path)) for name, path in paths.items()}
    datasets["history"] = DatasetSettings(url=str(history), writable=True)
    with client_of(Settings(datasets=datasets)) as opened:
        yield opened


def test_array_page_describes_chunks_and_shards(client: httpx.Client) -> None:
    """The page of an array has its shape, type, inner chunk, shard, codecs and stored chunks."""
    page = open_page(client, "/image/s0/")

    assert page.texts("h1") == ["s0"]
    stored = page.properties()
    assert stored.pop("Stored").startswith("320 chunks, ")
    assert stored == {
        "Shape": TIMES.join(["160", "256", "256"]),
        "Type": "uint8",
        "Inner chunk": TIMES.join(["32"] * 3),
        "Shard": TIMES.join(["128"] * 3),
        "Codecs": "bytes, zstd",
    }
    assert page.texts("tbody/tr/th") == ["z", "y", "x"]


def test_array_of_unequal_chunks_has_no_inner_chunk(client: httpx.Client) -> None:
    """The page and the summary of an array whose chunks differ in size name no inner chunk."""
    (summary,) = client.get("/api/datasets/unequal").json()["arrays"]

    assert open_page(client, "/unequal/array/").properties()["Inner chunk"] == "\N{EN DASH}"
    assert summary["inner_chunk_shape"] is None


def test_image_page_has_axes_and_levels(client: httpx.Client) -> None:
    """The page of an OME-Zarr image has its axes with steps and units, and links to its levels."""
    page = open_page(client, "/image/")

    assert page.texts("p[@class='about']") == ["OME-Zarr image"]
    axes, levels = page.all("table")
    rows = [
        " ".join(cell.text or "" for cell in row if cell.tag == "td") for row in axes.iter("tr")
    ]
    assert rows[1:] == [
        "space 160 40 nanometer",
        "space 256 20 nanometer",
        "space 256 20 nanometer",
    ]
    links = [link.attrib["href"] for link in levels.iter("a")]
    assert links == ["./s0/", "./s1/", "./s2/"]


def test_coordinates_follow_the_data(client: httpx.Client) -> None:
    """Arrays of one axis or none are listed behind those of several."""
    assert open_page(client, "/weather/").texts("tbody/tr/th") == ["t2m", "crs", "lat", "time"]


def test_repository_page_has_refs_and_history(client: httpx.Client) -> None:
    """The page of a repository links its refs and snapshots; that of a tag has its own history."""
    page = open_page(client, "/all/history.icechunk/")
    refs, history = page.all("ul[@class='plain']")[0], page.all("ol")[0]

    links = [link.attrib["href"] for link in refs.iter("a")]
    assert links == ["./@branch.forecast/", "./@branch.main/", "./@tag.landfall/"]
    snapshots = [link.attrib["href"] for link in history.iter("a")]
    assert len(snapshots) == 7
    assert page.texts("ol/li")[0].endswith("Picture at 30:00")
    tagged = open_page(client, "/all/history.icechunk/@tag.landfall/")
    assert tagged.links("ol") == [f".{link}" for link in snapshots[2:]]
    assert client.get(urljoin(str(tagged.answer.url), tagged.links("ol")[0])).status_code == 200


def test_repository_page_without_a_ref_links_its_arrays(client: httpx.Client) -> None:
    """The page of a key without a ref, which means main, describes its array and links to it."""
    page = open_page(client, "/history/s0/")

    assert page.properties()["Inner chunk"] == TIMES.join(["64"] * 2)
    assert page.links("table") == []
    first = open_page(client, "/history/").links("ol")[-1]
    assert open_page(client, f"/history/{first.removeprefix('./')}").texts("h1")


def test_volume_page_links_to_itself(client: httpx.Client) -> None:
    """Rows of scales on the page of a volume lead to that page, wherever the volume lies."""
    for path in ("/cells/em/", "/all/cells.precomputed/em/"):
        links = set(open_page(client, path).links("table[@role='table']"))
        assert {urljoin(path, link) for link in links} == {path}


def test_folder_page_links_arrays_of_every_format(client: httpx.Client) -> None:
    """The page of a folder links the arrays, volumes and repositories below it."""
    page = open_page(client, "/all/")
    links = page.links("table")

    found = {"./image.zarr/s0/", "./cells.precomputed/", "./history.icechunk/@branch.main/s0/"}
    assert found <= set(links)
    for link in links:
        assert client.get(urljoin("/all/", link)).status_code == 200


@pytest.mark.parametrize(
    "path", ["/image/", "/all/image.zarr/s0/", "/all/history.icechunk/@tag.landfall/s0/"]
)
def test_breadcrumbs_lead_to_every_folder_above(client: httpx.Client, path: str) -> None:
    """Breadcrumbs lead to the start page and all folders above, and a dataset's description."""
    found = open_page(client, path).links("nav[@class='crumbs']")
    links = [urljoin(path, link) for link in found]
    parts = path.strip("/").split("/")

    above = ["/", *(f"/{'/'.join(parts[:at])}/" for at in range(1, len(parts)))]
    assert links == [*above, *(["/api/datasets/image"] if path == "/image/" else [])]
    assert {client.get(link).status_code for link in links} == {200}


def test_volume_page_lists_scales_by_their_sharding(client: httpx.Client) -> None:
    """The page of a precomputed volume has its scales, with the mapping of chunks to shards."""
    page = open_page(client, "/cells/")

    assert page.texts("p[@class='about']") == ["Precomputed volume of labels"]
    rows = page.texts("table[2]/tbody/tr") or page.texts("tbody/tr")
    assert any("by id identity, preshift 3, minishard 1, shard 2 bits" in row for row in rows)


def test_hostile_names_are_escaped(client: httpx.Client) -> None:
    """Markup and control characters in names and messages are escaped, and their links work."""
    page = open_page(client, "/odd/")
    shown = HOSTILE.replace("\u202e", "\\u202e")
    array, other = page.texts("tbody/tr")

    assert other.startswith("new\\nline 4 ")
    assert array.startswith(f"{shown} 4 <b>\\ud800 uint8")
    repository = open_page(client, "/odd/repository/")
    refs = repository.texts("ul[@class='plain'][1]/li")
    assert [ref.split(" ")[0] for ref in refs] == [shown, "main", "a/b%"]
    assert "</bdi><script>alert(2)</script>\\nsecond line \\u202eback long" in refs[1]
    assert refs[1].endswith("…")
    links = repository.links("ul[@class='plain'][1]")
    assert {unquote(link) for link in links} >= {f"./@branch.{HOSTILE}/"}
    for link in links:
        assert client.get(urljoin("/odd/repository/", link) + "zarr.json").status_code == 200


@pytest.mark.parametrize(
    ("title", "heading"), [("An Icechunk repository", "Refs"), ("A Zarr array", "Arrays")]
)
def test_empty_dataset_shows_requests_that_begin_it(
    tmp_path: Path, title: str, heading: str
) -> None:
    """The page of an empty dataset has, for who may write, a request for each way to begin."""
    need("curl")
    datasets = {
        "ours": DatasetSettings(url=str(tmp_path), writable=True),
        "others": DatasetSettings(url=str(tmp_path), writable=True, write=("ana",)),
        "read-only": DatasetSettings(url=str(tmp_path)),
    }
    callers = {"ana": caller(TOKENS["ana"])}
    with client_of(Settings(datasets=datasets, callers=callers)) as served:
        page = open_page(served, "/ours/")
        code = dict(zip(page.texts("h3"), page.all("pre/code"), strict=True))
        for name in ("others", "read-only"):
            assert not open_page(served, f"/{name}/").all("pre")
        subprocess.run(["sh", "-c", code[title].text or ""], check=True)
        begun = open_page(served, "/ours/")

    assert heading in begun.texts("h2")
    assert not begun.all("h3")


@pytest.mark.parametrize("path", ["/", "/image/", "/image/s0/", "/odd/repository/", "/nothing/"])
def test_every_page_has_a_header_and_a_footer(client: httpx.Client, path: str) -> None:
    """Each page, also of an error, has name and version, and leads to datasets, API and docs."""
    answer = client.get(path, headers={"accept": "text/html"})
    page = Page(answer, parse(answer.text))

    for part in ("header", "footer"):
        assert version("shardgate") in page.texts(part)[0]
    links = [urljoin(path, link) for link in page.links("header")][:3]
    assert links == ["/", "/api/datasets", "/docs"]
    assert [client.get(link).status_code for link in links] == [200] * 3


def test_page_of_nothing_is_404(client: httpx.Client) -> None:
    """A folder in which nothing is found is 404, for browsers with a link to its dataset."""
    told = "there are no keys below all/none/"
    problem = client.get("/all/none/")
    page = client.get("/all/none/", headers={"Accept": "text/html"})

    assert (problem.status_code, page.status_code) == (404, 404)
    assert problem.json()["detail"] == told
    assert told in page.text
    assert 'href="/all/"' in page.text


def test_page_keeps_the_links_of_a_listing(client: httpx.Client) -> None:
    """Each link of the plain listing is in one list of the page; both vary by Accept."""
    for path in ("/image/", "/all/", "/history/@tag.landfall/"):
        plain = client.get(path)
        page = open_page(client, path)
        assert plain.headers["vary"] == page.answer.headers["vary"] == "Accept"
        assert plain.text.startswith("<!doctype html>\n<html><head><title>/")
        links = [line.partition('href="')[2].partition('"')[0] for line in plain.text.splitlines()]
        keys = set(page.links("ul[@class='plain keys']"))
        others = set(page.links("table")) | set(page.links("ul[@class='plain'][1]"))
        assert keys | others >= {link for link in links if link}
        assert not keys & others


def test_session_page_links_its_keys(client: httpx.Client) -> None:
    """The page of a session has its arrays and keys below it, and no link to the viewer."""
    begun = client.post("/api/datasets/history/sessions", json={"branch": "main"}).json()
    path = f"/history/@session.{begun['session_id']}/"
    page = open_page(client, path)

    assert page.texts("h1") == [f"@session.{begun['session_id']}"]
    assert page.texts("nav[@class='crumbs']/a") == ["Datasets", "history"]
    assert unquote(page.snippets()["curl"]).endswith(f"{path}zarr.json")
    assert "./zarr.json" in page.links("ul[@class='plain keys']")
    for link in (*page.links("table"), "./s1/"):
        assert client.get(urljoin(path, link)).status_code == 200
    assert page.links("article") == []


def test_page_is_not_stored_by_caches(client: httpx.Client) -> None:
    """A page, which has the Host of its request in code, is not stored; a plain listing may be."""
    page = open_page(client, "/image/")

    assert page.answer.headers["cache-control"] == "no-store"
    assert page.answer.headers["content-security-policy"].startswith("default-src 'none';")
    assert page.answer.headers["referrer-policy"] == "no-referrer"
    assert client.get("/image/").headers["cache-control"] == "public, max-age=60, must-revalidate"


def test_dataset_without_a_slash_redirects(client: httpx.Client) -> None:
    """A plain GET of a dataset redirects to its page; one with a range is 404."""
    answer = client.get("/image")

    assert (answer.status_code, answer.headers["location"]) == (307, "./image/")
    assert client.get("/image", headers={"range": "bytes=0-31"}).status_code == 404
    assert client.head("/image").status_code == 404


OF_ARRAY: Final = frozenset({"curl", "zarr-python", "xarray", "TensorStore", "dask"})
SNIPPETS: Final = {
    "/image/": frozenset({"curl", "zarr-python", "xarray"}),
    "/image/s0/": OF_ARRAY,
    "/nested/a/": OF_ARRAY,
    "/history/@tag.landfall/s0/": OF_ARRAY,
    "/cells/": frozenset({"curl", "TensorStore"}),
    "/unequal/array/": frozenset({"curl", "zarr-python"}),
}
AGAIN: Final = {
    (path, title)
    for path in ("/nested/a/", "/history/@tag.landfall/s0/")
    for title in ("zarr-python", "xarray", "dask")
}
"""Code that equals that for another array: TensorStore's is enough outside of soak runs."""


@pytest.mark.parametrize("path", SNIPPETS)
def test_curl_snippet_reads_a_document(client: httpx.Client, path: str) -> None:
    """A page has the snippets of its kind of node; that of curl prints its document."""
    snippets = open_page(client, path).snippets()
    assert snippets.keys() == SNIPPETS[path]
    need("curl")
    done = subprocess.run(["sh", "-c", snippets["curl"]], capture_output=True, check=True)

    assert {"zarr_format", "@type"} & set(json.loads(done.stdout))


@pytest.mark.parametrize("path", ["/image/", "/image/s0/", "/history/@tag.landfall/s0/", "/cells/"])
def test_snippets_of_libraries_read_shards(client: httpx.Client, path: str) -> None:
    """The snippets of libraries read shards of one size, and that of curl an inner chunk's face."""
    snippets = {title: unquote(code) for title, code in open_page(client, path).snippets().items()}
    curl = snippets.pop("curl")

    assert "@sharded" not in curl
    assert all("/@sharded" in code for code in snippets.values())
    assert "@sharded" not in str(open_page(client, "/unequal/array/").snippets())


def test_page_below_sharded_lists_stored_names(client: httpx.Client) -> None:
    """The page of an array as it is stored has its keys, and neither a picture nor code."""
    page = open_page(client, "/image/@sharded/s0/")

    assert "./zarr.json" in page.links("ul[@class='plain keys']")
    assert page.snippets() == {}
    assert page.all("img") == []


@pytest.mark.parametrize(
    ("path", "title"),
    [
        pytest.param(path, title, marks=pytest.mark.soak if (path, title) in AGAIN else ())
        for path, titles in SNIPPETS.items()
        for title in sorted(titles - {"curl"})
    ],
)
def test_python_snippet_opens_the_node(client: httpx.Client, path: str, title: str) -> None:
    """A page's Python snippets open the array or group that it shows, and print it."""
    page, found = open_page(client, path), dict[str, Any]()
    with redirect_stdout(io.StringIO()) as printed:
        exec(page.snippets()[title], found)  # noqa: S102 - as a user would
    opened = found.get("array")
    if opened is None:
        opened = found["group"]["s0"] if "group" in found else found["dataset"]["s0"]
    shape = page.properties()["Shape"].split(TIMES)

    assert [str(size) for size in opened.shape][:2] == shape[:2]
    assert printed.getvalue()
    if title == "dask":
        assert TIMES.join(map(str, opened.chunksize)) == page.properties()["Shard"]
