"""Values nested 100,000 deep are refused, or served as they are stored, by every decoder."""

import io
import json
import time
import zipfile
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from shardgate.settings import DatasetSettings, Settings
from tests.support.attacks.documents import ARRAY, info, with_text
from tests.support.formats.zarr import draft
from tests.support.formats.zarr.building import regular, sharding
from tests.support.processor import processor_time_below
from tests.support.serving import client_of
from tests.support.sessions import GROUP, array_document

LEVELS: Final = 100_000
LISTS: Final = "[" * LEVELS + "]" * LEVELS
OBJECTS: Final = '{"a":' * LEVELS + "1" + "}" * LEVELS
MOST_S: Final = 5
ARRAY_2: Final = {
    "zarr_format": 2,
    "shape": [4],
    "chunks": [2],
    "dtype": "|u1",
    "compressor": None,
    "fill_value": 0,
    "order": "C",
    "filters": None,
}
SET: Final = {"version": 1, "refs": {".zgroup": '{"zarr_format": 2}', "a/0": "x"}}


def shards(levels: int) -> bytes:
    """Encode metadata of an array with *levels* sharding codecs inside one another."""
    outer, inner = json.dumps([sharding([2, 2], ["?"])])[1:-1].split('["?"]')
    codecs = f"[{outer}" * levels + '["bytes"]' + f"{inner}]" * levels
    return with_text(ARRAY | {"codecs": "?"}, codecs)


REFUSED: Final[dict[str, tuple[str, bytes]]] = {
    f"{kind}-{name}": (key, with_text(document, text))
    for kind, text in (("lists", LISTS), ("objects", OBJECTS))
    for name, (key, document) in {
        "attributes": ("zarr.json", ARRAY | {"attributes": "?"}),
        "codecs": ("zarr.json", ARRAY | {"codecs": "?"}),
        "a codec": ("zarr.json", ARRAY | {"codecs": [sharding([2, 2], ["?"])]}),
        "index codecs": ("zarr.json", ARRAY | {"codecs": [sharding([2, 2], index_codecs="?")]}),
        "chunk shape": ("zarr.json", ARRAY | {"chunk_grid": regular("?")}),
        "chunk grid": ("zarr.json", ARRAY | {"chunk_grid": "?"}),
        "shape": ("zarr.json", ARRAY | {"shape": "?"}),
        "consolidated": (
            "zarr.json",
            {"zarr_format": 3, "node_type": "group", "consolidated_metadata": "?"},
        ),
        "info": ("info", info() | {"mesh": "?"}),
        "scales": ("info", info() | {"scales": "?"}),
        "scale": ("info", info() | {"scales": ["?"]}),
        "entry point": ("zarr.json", draft.ENTRY_POINT | {"extensions": "?"}),
        "draft": (
            "draft/meta/root.array.json",
            draft.array_metadata([4], [2], [draft.sharding("?")]),
        ),
    }.items()
} | {
    "shards in shards": ("zarr.json", shards(5_000)),
    "shards in 400 shards": ("zarr.json", shards(400)),
}
"""Documents that are decoded, by the names of their folders, with their keys."""
SETS: Final[dict[str, bytes]] = {
    f"{kind}-{name}": with_text(document, text)
    for kind, text in (("lists", LISTS), ("objects", OBJECTS))
    for name, document in {
        "reference": SET | {"refs": {"a/0": "?"}},
        "templates": SET | {"templates": "?"},
        "gen": SET | {"gen": "?"},
        "generated": SET | {"gen": [{"key": "a", "url": "s3://b/x", "dimensions": "?"}]},
        "version": SET | {"version": "?"},
        "version-0": {".zgroup": "?"},
        "catalog": {"metadata": {".zgroup": "?"}, "record_size": 2},
        "records": {"metadata": {".zgroup": {"zarr_format": 2}}, "record_size": "?"},
    }.items()
}
"""Sets of references, by their names."""
CATALOGS: Final = ("catalog", "records")
STORED: Final = {
    f"{name}": with_text(ARRAY_2 | {"attributes": "?"}, LISTS)
    for name in (".zarray", ".zattrs", ".zgroup", ".zmetadata")
}
"""Documents that are served as they are stored."""


def zips(levels: int) -> bytes:
    """Return an archive within *levels* others, each the member ``a.zip`` of the next."""
    name, data = "x", b"content"
    for _ in range(levels + 1):
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as written:
            written.writestr(zipfile.ZipInfo(name), data)
        name, data = "a.zip", file.getvalue()
    return data


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Store all documents, each in a folder of its own."""
    folder = tmp_path_factory.mktemp("deep")
    stored = {f"{name}/{key}": data for name, (key, data) in REFUSED.items()}
    stored |= {f"v2/{name}": data for name, data in STORED.items()}
    stored |= {"zips/a.zip": zips(30), "300/zarr.json": shards(300)}
    for kind in ("lists", "objects"):
        stored[f"{kind}-draft/draft/zarr.json"] = draft.encode(draft.ENTRY_POINT)
    for name, data in SETS.items():
        stored[f"{name}/.zmetadata" if name.endswith(CATALOGS) else f"{name}.json"] = data
    for key, data in stored.items():
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key).write_bytes(data)
    return folder


@pytest.fixture(scope="module")
def client(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[httpx.Client]:
    """Serve the documents, an empty writable folder, and a writable repository."""
    written = tmp_path_factory.mktemp("written")
    (written / "a").mkdir()
    (written / "a/zarr.json").write_text(json.dumps(ARRAY))
    repository = tmp_path_factory.mktemp("repository")
    datasets = {
        "any": DatasetSettings(url=folder.as_uri()),
        "written": DatasetSettings(url=written.as_uri(), writable=True),
        "repo": DatasetSettings(url=repository.as_uri(), writable=True),
    }
    for name in SETS:
        url = f"{folder.as_uri()}/{name}" + ("" if name.endswith(CATALOGS) else ".json")
        datasets[name] = DatasetSettings(url=url, format="kerchunk")
    with client_of(Settings(datasets=datasets)) as opened:
        assert opened.post("/api/datasets", json={"name": "repo"}).is_success
        yield opened


@pytest.mark.parametrize("name", REFUSED)
def test_deep_document_fails_with_424(client: httpx.Client, name: str) -> None:
    """A deep document, and keys below it, fail within 5 s with a 424 that names the document."""
    key, _ = REFUSED[name]
    below = "draft/data/root/c0" if "draft" in key else "c/0/0"
    with processor_time_below(MOST_S, time.process_time):
        answers = [client.get(f"/any/{name}/{path}") for path in (key, below)]

    assert [each.status_code for each in answers] == [424, 424]
    assert all(name in each.json()["detail"] for each in answers)


@pytest.mark.parametrize("name", SETS)
def test_deep_set_of_references_fails_with_424(client: httpx.Client, name: str) -> None:
    """Keys, pages and listings of a set of references nested 100,000 deep fail with 424."""
    with processor_time_below(MOST_S, time.process_time):
        found = [client.get(f"/{name}{end}") for end in ("/a/0", "/.zgroup", "?list-type=2")]

    assert [each.status_code for each in found] == [424] * 3


@pytest.mark.parametrize("name", STORED)
def test_deep_document_of_zarr_v2_is_served_as_it_is_stored(
    client: httpx.Client, name: str
) -> None:
    """A document of Zarr v2 nested 100,000 deep is served as it is stored."""
    assert client.get(f"/any/v2/{name}").content == STORED[name]


@pytest.mark.parametrize("name", [*REFUSED, "v2", "300", "zips"])
def test_pages_and_descriptions_of_deep_documents_do_not_fail(
    client: httpx.Client, name: str
) -> None:
    """Listings and pages of folders with documents nested 100,000 deep say what is wrong."""
    with processor_time_below(MOST_S, time.process_time):
        page = client.get(f"/any/{name}/", headers={"accept": "text/html"})
        listing = client.get("/any", params={"list-type": "2", "prefix": f"{name}/"})

    assert page.status_code in (200, 424)
    assert listing.status_code in (200, 424)


def test_300_shards_in_shards_are_unsharded(client: httpx.Client) -> None:
    """The metadata of an array with 300 sharding codecs inside one another have none of them."""
    served = client.get("/any/300/zarr.json").json()

    assert served["codecs"] == ["bytes"]


def test_archives_in_archives_are_members(client: httpx.Client) -> None:
    """An archive in another one is a member; of 30 in one another no key is read too deep."""
    inner = client.get("/any/zips/a.zip/a.zip")
    found = [client.get("/any/zips/" + "a.zip/" * n + "x").status_code for n in (1, 2, 20, 31, 100)]

    assert inner.content == zips(29)
    assert set(found) <= {200, 404, 424}


BODIES: Final = {
    "objects": OBJECTS.encode(),
    "attributes": with_text(ARRAY | {"attributes": "?"}, LISTS),
    "shards": shards(10_000),
    "codecs": with_text(ARRAY | {"codecs": "?"}, OBJECTS),
    "info": with_text(info() | {"mesh": "?"}, LISTS),
}


@pytest.mark.parametrize("name", BODIES)
def test_deep_document_that_is_sent_is_refused_with_400(client: httpx.Client, name: str) -> None:
    """Metadata nested 100,000 deep are refused with 400 in folders, sharded arrays and sessions."""
    session = client.post("/api/datasets/repo/sessions").json()["session_id"]
    assert client.put(f"/repo/@session.{session}/zarr.json", content=GROUP).is_success
    paths = [f"/repo/@session.{session}/zarr.json", f"/repo/@session.{session}/a/zarr.json"]
    paths += ["/written/zarr.json", "/written/a/zarr.json", "/written/info", "/written/new/info"]
    with processor_time_below(MOST_S, time.process_time):
        found = {path: client.put(path, content=BODIES[name]).status_code for path in paths}

    assert set(found.values()) == {400}


@pytest.mark.parametrize(
    "document",
    [
        {"branch": "main", "message": "x", "changes": "?"},
        {"branch": "main", "message": "x", "changes": ["?"]},
        {"branch": "main", "message": "x", "changes": [], "metadata": {"a": "?"}},
        {"branch": "main", "message": "?", "changes": []},
        {
            "branch": "main",
            "message": "x",
            "changes": [{"op": "put_node", "path": "/a", "metadata": {"node_type": "?"}}],
        },
        {
            "branch": "main",
            "message": "x",
            "changes": [{"op": "put_chunks", "path": "/a", "coords": ["?"], "inlines": ["AAAA"]}],
        },
    ],
)
def test_deep_commit_is_refused_with_400(client: httpx.Client, document: Any) -> None:
    """Bodies of commits and sessions with a value nested too deeply are refused with 400, or with
    413 if they are long.
    """
    kind = {"content-type": "application/json"}
    for levels in (200, 1000, LEVELS):
        body = with_text(document, "[" * levels + "]" * levels)
        for path in ("commits", "sessions"):
            answer = client.post(f"/api/datasets/repo/{path}", content=body, headers=kind)

            assert answer.status_code in (400, 413)


@pytest.mark.parametrize("name", [b"Delete", b"CompleteMultipartUpload"])
@pytest.mark.parametrize("is_member", [False, True])
def test_deep_xml_is_refused_with_400(
    client: httpx.Client, name: bytes, *, is_member: bool
) -> None:
    """XML of elements nested 10,000 deep is refused with 400."""
    tag = {b"Delete": b"Object", b"CompleteMultipartUpload": b"Part"}[name] if is_member else name
    nested = b"<%b>" % tag * 10_000 + b"</%b>" % tag * 10_000
    body = b"<%b>%b</%b>" % (name, nested, name)
    query = "/written?delete" if name == b"Delete" else "/written/x?uploadId=0123456789abcdef"

    assert client.post(query, content=body).status_code in (400, 404)


def test_deep_attributes_are_written_and_committed(client: httpx.Client) -> None:
    """Attributes nested 1,000 deep are stored in folders, and committed in either way."""
    deep = with_text(array_document((6,), (2,), attributes={"a": "?"}), "[" * 1000 + "]" * 1000)
    assert client.put("/written/deep/zarr.json", content=deep).is_success
    assert client.get("/written/deep/zarr.json").content == deep
    session = client.post("/api/datasets/repo/sessions").json()["session_id"]
    base = f"/repo/@session.{session}"
    assert client.put(f"{base}/zarr.json", content=GROUP).is_success
    assert client.put(f"{base}/deep/zarr.json", content=deep).is_success
    made = client.post(f"/api/datasets/repo/sessions/{session}/commit", json={"message": "x"})
    assert made.is_success, made.text
    change = {"op": "put_node", "path": "/other", "metadata": json.loads(deep)}
    commit = {"branch": "main", "message": "x", "changes": [change]}
    assert client.post("/api/datasets/repo/commits", json=commit).is_success

    for name in ("deep", "other"):
        assert client.get(f"/repo/{name}/zarr.json").json() == json.loads(deep)
        assert client.get(f"/repo/{name}/", headers={"accept": "text/html"}).status_code == 200
    assert client.get("/repo/zarr.json").status_code == 200
    assert client.get("/api/datasets/repo").status_code == 200
