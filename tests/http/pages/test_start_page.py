"""`GET /` for browsers: the datasets, and how to read them."""

import io
import json
import shutil
import subprocess
from collections.abc import Generator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urljoin

import httpx
import icechunk
import pytest
import zarr

from shardgate import demo
from shardgate.http.responses import csp_digest
from shardgate.settings import DatasetSettings, Settings
from tests.support.lacking import need
from tests.support.pages import Page, open_page
from tests.support.serving import client_of

HOSTILE: Final = "\"><script>alert(1)<'\u202e&lt;"
TIMES: Final = "\N{MULTIPLICATION SIGN}"
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
def client(tmp_path_factory: pytest.TempPathFactory) -> Generator[httpx.Client]:
    """Serve the examples, hostile names, unreachable datasets and a raw view."""
    written = demo.write(tmp_path_factory.mktemp("examples"))
    hostile = tmp_path_factory.mktemp("hostile")
    write_hostile(hostile)
    empty = tmp_path_factory.mktemp("empty")
    datasets = {name: DatasetSettings(url=str(path)) for name, path in written.items()} | {
        "odd": DatasetSettings(url=str(hostile), writable=True),
        "away": DatasetSettings(url=str(hostile / "nothing")),
        "down": DatasetSettings(url="http://127.0.0.1:9/nothing"),
        "raw": DatasetSettings(url=str(hostile), view="raw"),
        "empty": DatasetSettings(url=str(empty)),
    }
    with client_of(Settings(datasets=datasets)) as opened:
        yield opened


@pytest.fixture(scope="module")
def page(client: httpx.Client) -> Page:
    """Return the start page."""
    return open_page(client)


def test_datasets_are_listed_in_order(page: Page) -> None:
    """Datasets are sorted, each with a heading that links to it; the page has its landmarks."""
    names = page.texts("article/h3")

    assert names == sorted(names)
    assert {"image", "cells", "history", "odd", "away", "down"} < set(names)
    assert page.card("image").links("h3") == ["./image/"]
    assert [len(page.all(each)) for each in ("h1", "main", "header", "nav[@aria-label]")] == [1] * 4
    assert page.tree.attrib["lang"] == "en"
    assert len(page.all("h3")) == len(page.all("article"))
    for table in page.all("table"):
        assert len(table.findall("thead/tr/th[@scope='col']")) == 5


def test_arrays_are_described(page: Page) -> None:
    """The page shows each array's shape, dimensions, type, chunk and shard, or sharding of ids."""
    rows = page.card("image").texts("tbody/tr")
    (row, _) = page.card("cells").texts("tbody/tr")

    assert rows[0].replace(TIMES, "by") == (
        "s0 160 by 256 by 256 z, y, x uint8 32 by 32 by 32 128 by 128 by 128"
    )
    assert len(rows) == 3
    assert "uint64" in row
    assert "by id identity, preshift 3, minishard 1, shard 2 bits" in row


def test_formats_and_writability_are_shown(page: Page) -> None:
    """Each dataset shows its formats and whether it is writable; one without arrays says so."""
    told = {name: page.card(name).texts("p[@class='about']") for name in ("history", "odd", "raw")}

    assert told == {
        "history": ["icechunk · read only"],
        "odd": ["icechunk, zarr · writable"],
        "raw": ["as it is stored · read only"],
    }
    for name in ("empty", "raw"):
        (hint,) = page.card(name).texts("p[@class='hint']")
        assert hint == "No arrays; other objects are served as they are."


def test_refs_are_linked_and_described(page: Page) -> None:
    """Branches and tags have a link, a time and the message of their commit."""
    card = page.card("history")
    main, tag = card.texts("ul[@class='refs']/li")

    assert main.startswith("main branch ")
    assert main.endswith("Turn it into its negative")
    assert tag.startswith("positive tag ")
    links = card.links("ul[@class='refs']")
    assert links == ["./history/@branch.main/", "./history/@tag.positive/"]
    assert len(card.all("time")) == 2


@pytest.mark.parametrize(
    ("name", "reason"), [("away", "No such file"), ("down", "Connection refused")]
)
def test_unreachable_dataset_shows_its_error(page: Page, name: str, reason: str) -> None:
    """A dataset that cannot be read shows the error, and no code to read it."""
    card = page.card(name)

    (told,) = card.texts("p[@class='reason']")
    assert reason in told
    assert not card.snippets()


def test_links_are_relative_and_can_be_requested(client: httpx.Client, page: Page) -> None:
    """Links are relative, and answer 200 unless their dataset is unreachable or empty.

    A link to a node whose name is no valid key is 400.
    """
    links = {link.partition("#")[0] for link in page.links()}
    statuses = {link: client.get(urljoin("/", link)).status_code for link in links}

    assert all(link.startswith("./") for link in links)
    failed = {link: status for link, status in statuses.items() if status != 200}
    unread = {"./away/": 503, "./down/": 503, "./empty/": 404}
    assert failed == unread | {"./odd/new%0Aline/zarr.json": 400}


def test_hostile_names_are_escaped(client: httpx.Client, page: Page) -> None:
    """Markup and control characters in names and messages are escaped, and their links work."""
    card = page.card("odd")
    shown = HOSTILE.replace("\u202e", "\\u202e")
    (array, other), refs = card.texts("tbody/tr"), card.texts("ul[@class='refs']/li")

    assert other.startswith("new\\nline 4 ")
    assert array.startswith(f"{shown} 4 <b>\\ud800 uint8")
    assert [ref.split(" ")[0] for ref in refs] == [shown, "main", "a/b%"]
    assert "</bdi><script>alert(2)</script>\\nsecond line \\u202eback long" in refs[1]
    assert refs[1].endswith("…")
    assert page.all("script") == []
    links = card.links("ul[@class='refs']")
    assert {unquote(link) for link in links} >= {f"./odd/repository/@branch.{HOSTILE}/"}
    assert {client.get(urljoin("/", f"{link}zarr.json")).status_code for link in links} == {200}


def test_security_policy_allows_no_other_resources(client: httpx.Client, page: Page) -> None:
    """The start page's policy allows only its own style, by digest, and no script.

    Listing pages allow nothing.
    """
    policy = page.answer.headers["content-security-policy"]
    (style,) = page.all("style")

    assert f"style-src '{csp_digest(style.text or '')}'" in policy
    assert "script-src" not in policy
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    assert page.answer.headers["referrer-policy"] == "no-referrer"
    assert page.answer.headers["x-content-type-options"] == "nosniff"
    assert page.answer.headers["cache-control"] == "no-store"
    for path in ("/image/", "/odd/"):
        headers = client.get(path).headers
        assert headers["content-security-policy"].startswith("default-src 'none';")
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["x-content-type-options"] == "nosniff"


def test_colours_have_enough_contrast() -> None:
    """Text has a contrast of at least 4.5 in the light and the dark scheme (WCAG 1.4.3)."""
    style = (Path(demo.__file__).parent / "http/pages/templates/start.css").read_text()
    for scheme in style.split("prefers-color-scheme"):
        colours = dict(
            pair.strip().removeprefix("--").split(": ")
            for pair in scheme.split(":root {")[1].split("}")[0].split(";")
            if pair.strip()
        )
        for behind in ("ground", "card"):
            for text in ("text", "soft", "link", "bad"):
                assert _contrast(colours[text], colours[behind]) >= 4.5, (text, behind)
        assert _contrast(colours["on-button"], colours["button"]) >= 4.5


def _contrast(one: str, other: str) -> float:
    bright, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(digit * 2 for digit in colour[1:])
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


SNIPPETS: Final = {
    **dict.fromkeys(
        ("image", "history", "nested"), frozenset({"curl", "zarr-python", "xarray", "TensorStore"})
    ),
    "cells": frozenset({"curl", "TensorStore, precomputed"}),
}


@pytest.mark.parametrize("name", [*SNIPPETS, "odd"])
def test_curl_snippet_reads_a_document(page: Page, name: str) -> None:
    """A dataset's curl command returns a metadata document.

    Each dataset has the snippets for its formats.
    """
    assert name not in SNIPPETS or page.card(name).snippets().keys() == SNIPPETS[name]
    need("curl")
    command = page.card(name).snippets()["curl"]
    done = subprocess.run(["sh", "-c", command], capture_output=True, check=True)

    assert {"zarr_format", "@type"} & set(json.loads(done.stdout))


@pytest.mark.parametrize(
    ("name", "title"),
    [(name, title) for name, titles in SNIPPETS.items() for title in sorted(titles - {"curl"})],
)
def test_python_snippet_opens_the_array(page: Page, name: str, title: str) -> None:
    """A dataset's Python snippets open the array that the page shows, and print it."""
    found: dict[str, Any] = {}
    with redirect_stdout(io.StringIO()) as printed:
        exec(page.card(name).snippets()[title], found)  # noqa: S102 - as a user would
    opened = found["array"] if "array" in found else next(iter(found["dataset"].values()))
    sizes = page.card(name).texts("tbody/tr/td[1]")[0].split(f" {TIMES} ")

    assert [str(size) for size in opened.shape][:2] == sizes[:2]
    assert printed.getvalue()
