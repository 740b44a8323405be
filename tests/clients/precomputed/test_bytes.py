"""The service gives, byte for byte, the files that an unsharded volume would be made of."""

import gzip
import json
from pathlib import Path

import httpx
import pytest

from tests.clients.asking import ask, raw_body
from tests.clients.precomputed.annotations import COLLECTIONS
from tests.clients.precomputed.cases import BY_NAME, CASES, SHAPE
from tests.clients.precomputed.conftest import Written, from_each_store
from tests.clients.precomputed.segments import RESHARDED
from tests.clients.precomputed.volumes import Volume, by_tensorstore, document
from tests.clients.writing import Json

DOCUMENTS = [
    *(volume.name for volume in CASES),
    *(f"annotations/{name}" for name in COLLECTIONS),
    *(
        f"segments/{name}{part}"
        for name in ("sharded", "gzip_manifests", "legacy")
        for part in ("", "/mesh", "/properties")
    ),
    "segments/sharded/skeletons_mip_0",
    *(f"segments/{name}/skeletons_mip_0" for name in RESHARDED),
]
BY_TENSORSTORE = [v.name for v in CASES if v.write is by_tensorstore and not v.edit]
IN_GZIP = [name for name in BY_NAME if name.startswith("shards/") and name.endswith("data_gzip")]


def unsharded(stored: Json) -> Json:
    """Take the member *sharding* out of the places where the documents allow it."""
    found: Json = json.loads(json.dumps(stored))
    parts = [found, *found.get("scales", []), *found.get("spatial", [])]
    parts += [*found.get("relationships", []), found.get("by_id", {})]
    for part in parts:
        part.pop("sharding", None)
    return found


def test_chunks_are_the_files_of_the_twin(
    client: httpx.Client, written: Written, volume: Volume
) -> None:
    """Each chunk is the twin's file, and where the twin has none there is no chunk."""
    for scale in volume.scales:
        folder = written.twins / volume.name / scale.path
        names = {name for name, _ in scale.chunks()} | {file.name for file in _files(folder)}
        for name in names:
            answer = ask(client, f"/bucket/{volume.name}/{scale.path}/{name}")
            twin = folder / name
            expected = (200, twin.read_bytes()) if twin.exists() else (404, None)

            assert "content-encoding" not in answer.headers
            assert answer.status_code == expected[0], name
            assert expected[1] in {None, answer.content}, name


def _files(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.exists() else []


@from_each_store
@pytest.mark.parametrize("name", DOCUMENTS)
def test_info_loses_its_sharding_and_nothing_else(
    client: httpx.Client, written: Written, name: str
) -> None:
    """The document that is served is the stored one, but for the members *sharding*."""
    answer = ask(client, f"/bucket/{name}/info")
    stored = document(written.bucket / name)

    assert answer.status_code == 200
    assert answer.json() == unsharded(stored)


@from_each_store
@pytest.mark.parametrize(
    "name", [v.name for v in CASES if v.write is by_tensorstore and not v.edit]
)
def test_info_is_that_of_the_twin(client: httpx.Client, written: Written, name: str) -> None:
    """The document is what TensorStore itself writes without shards."""
    assert ask(client, f"/bucket/{name}/info").json() == document(written.twins / name)


@pytest.mark.parametrize("name", IN_GZIP)
def test_gzip_goes_to_those_who_accept_it(
    client: httpx.Client, written: Written, name: str
) -> None:
    """The stored bytes go out as gzip if that is accepted, else decoded, with an ETag each."""
    path = f"/bucket/{name}/8_8_8/4-8_0-4_0-4"
    expected = (written.twins / name / "8_8_8/4-8_0-4_0-4").read_bytes()
    plain = ask(client, path)
    compressed = ask(client, path, accept_encoding="gzip")
    sent = raw_body(client, "GET", path, accept_encoding="gzip")

    assert (plain.content, compressed.content) == (expected, expected)
    assert compressed.headers["content-encoding"] == "gzip"
    assert gzip.decompress(sent) == expected
    assert compressed.headers["content-length"] == str(len(sent))
    assert plain.headers["content-length"] == str(len(expected))
    assert plain.headers["etag"] != compressed.headers["etag"]
    for answer in (plain, compressed):
        assert "accept-encoding" in answer.headers["vary"].lower()


@from_each_store
@pytest.mark.parametrize("name", IN_GZIP)
def test_range_of_a_chunk_in_gzip_is_decoded(
    client: httpx.Client, written: Written, name: str
) -> None:
    """A range counts the decoded bytes, and has no content encoding."""
    path = f"/bucket/{name}/8_8_8/4-8_0-4_0-4"
    expected = (written.twins / name / "8_8_8/4-8_0-4_0-4").read_bytes()
    answer = ask(client, path, range="bytes=5-20", accept_encoding="gzip")

    assert (answer.status_code, answer.content) == (206, expected[5:21])
    assert "content-encoding" not in answer.headers
    assert answer.headers["content-range"] == f"bytes 5-20/{len(expected)}"


@from_each_store
@pytest.mark.parametrize("name", ["bits/identity_1_2_3", "holes/everything", *IN_GZIP[:1]])
@pytest.mark.parametrize(
    "key",
    [
        "18-22_0-4_0-4",
        "16-20_0-4_0-4",
        "0-4_0-4_4-8",
        "1-5_0-4_0-4",
        "00-4_0-4_0-4",
        "+0-4_0-4_0-4",
        "-4-0_0-4_0-4",
        "0-4_0-4",
        "0-4_0-4_0-4_0-1",
        "0-4_0-4_0-4.gz",
        "0-0_0-0_0-0",
        "99999999999999999999-99999999999999999999_0-4_0-4",
    ],
)
def test_what_names_no_chunk_is_absent(client: httpx.Client, name: str, key: str) -> None:
    """Chunks beyond the bounds, off the grid, or spelled in another way, are absent."""
    assert SHAPE == (18, 10, 7)
    assert ask(client, f"/bucket/{name}/8_8_8/{key}").status_code == 404


@pytest.mark.parametrize("name", COLLECTIONS)
def test_annotations_are_the_files_of_the_twin(
    client: httpx.Client, written: Written, name: str
) -> None:
    """Each annotation, relationship and spatial cell is the file that `neuroglancer` wrote."""
    twin = written.twins / f"annotations/{name}"
    files = [file for file in twin.rglob("*") if file.is_file() and file.name != "info"]
    for file in files:
        answer = ask(client, f"/bucket/annotations/{name}/{file.relative_to(twin)}")
        assert (answer.status_code, answer.content) == (200, file.read_bytes()), file.name
    assert len(files) > 40


@from_each_store
@pytest.mark.parametrize(
    "key",
    [
        "by_id/2",
        "by_id/01",
        "by_id/-1",
        "by_id/18446744073709551616",
        "rel_cells/4",
        "spatial1/9_9_9",
        "spatial1/0_0",
        "spatial1/00_0_0",
        "spatial1/0_0_0_0",
        "spatial9/0_0_0",
    ],
)
def test_what_names_no_annotation_is_absent(client: httpx.Client, key: str) -> None:
    """Ids nobody gave, cells off the grid, and other spellings, are absent."""
    assert ask(client, f"/bucket/annotations/points/{key}").status_code == 404
