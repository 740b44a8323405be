"""Hostile metadata is reported as damage quickly, and everything else stays readable.

Deeply nested metadata are in test_depth.py.
"""

import json
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from shardgate.icechunk.sessions.document import ChangedNode, decode_session, encode_session
from shardgate.settings import DatasetSettings, Settings
from tests.support.attacks.documents import ARRAY, info, with_text
from tests.support.attacks.mutating import peak_growth
from tests.support.formats.icechunk.building_repo import Repo, ref
from tests.support.formats.neuroglancer_precomputed.case import volume_info
from tests.support.formats.zarr.building import consolidated
from tests.support.processor import processor_time_below
from tests.support.serving import client_of
from tests.support.sessions import GROUP, array_document

MOST_S: Final = 5
MOST_BYTES: Final = 512 * 1024**2
CLIMBING: Final = ["../secret", "/secret", "..", "a/../../secret", "//secret", "%2e%2e/secret"]
UNSPEAKABLE: Final = ["s\r\nSet-Cookie: a=b", "s\0", "\ud800", "a" * 20_000]


def volume(**members: Any) -> bytes:
    """Encode the info of a volume without scales."""
    return json.dumps(volume_info(None) | {"scales": []} | members).encode()


REFUSED: Final = {
    "a long number": with_text(ARRAY | {"shape": "?"}, f"[{'9' * 5_000}, 4]"),
    "no object": b"[]",
    "another encoding": json.dumps(ARRAY).encode("utf-16"),
    "more than may be": with_text(ARRAY | {"attributes": "?"}, json.dumps("a" * 9_000_000)),
}
REFUSED_INFOS: Final = {
    name: with_text(document, "[" * 100_000)
    for name, document in {
        "minishard bits": info(minishard_bits=10**9),
        "shard bits": info(shard_bits=64),
        "negative bits": info(minishard_bits=-1),
        "a size beyond 2^64": info(size=[2**70] * 3),
        "chunks of nothing": info(chunk_sizes=[[0, 0, 0]]),
        "100,000 sizes of chunks": info(chunk_sizes=[[32, 32, 32]] * 100_000),
        "an open list": info() | {"mesh": "?"},
    }.items()
}
SERVED: Final[dict[str, Callable[[], bytes]]] = {
    "no UTF-8": lambda: with_text(ARRAY | {"attributes": "?"}, '"\\ud800"'),
    "lines in names": lambda: json.dumps(
        {**ARRAY, "dimension_names": ["a\r\nb", "\ud800"]}
    ).encode(),
    "one name twice": lambda: json.dumps(ARRAY)[:-1].encode() + b', "shape": [8, 8]}',
    "3,000 consolidated arrays": lambda: json.dumps(
        consolidated({f"a{n}": ARRAY for n in range(3_000)})
    ).encode(),
    "100,000 consolidated nothings": lambda: json.dumps(
        consolidated({f"a{n}": {} for n in range(100_000)})
    ).encode(),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder to serve, beside another with a secret."""
    root = tmp_path_factory.mktemp("beside")
    (root / "secret").mkdir()
    (root / "secret" / "0-32_0-32_0-32").write_bytes(b"secret")
    return root / "served"


@pytest.fixture(scope="module")
def client(folder: Path) -> Generator[httpx.Client]:
    """Serve arrays, groups and volumes with all kinds of hostile metadata."""
    nodes = REFUSED | {name: make() for name, make in SERVED.items()}
    for kind, documents in (("zarr.json", nodes), ("info", REFUSED_INFOS)):
        for name, document in documents.items():
            place(folder / name / kind, document)
    for number, key in enumerate(CLIMBING + UNSPEAKABLE):
        place(folder / f"scale{number}" / "info", json.dumps(info(key=key)).encode())
        mesh = volume(mesh=key, skeletons=key, type="segmentation")
        place(folder / f"mesh{number}" / "info", mesh)
    settings = Settings(datasets={"any": DatasetSettings(url=folder.as_uri())})
    with client_of(settings) as opened:
        yield opened


def place(path: Path, data: bytes) -> None:
    """Write a file and its parent folders."""
    path.parent.mkdir(parents=True)
    path.write_bytes(data)


@pytest.mark.parametrize(
    "key",
    [f"{name}/zarr.json" for name in REFUSED]
    + [f"{name}/c/0/0" for name in REFUSED]
    + ["an open list/info"]
    + [f"{name}/s/0-32_0-32_0-32" for name in REFUSED_INFOS],
)
def test_invalid_metadata_fails_with_424_and_names_the_object(
    client: httpx.Client, key: str
) -> None:
    """Invalid metadata, and chunks below it, fail within 5 s with a 424 that names it."""
    with processor_time_below(MOST_S, time.process_time):
        answer = client.get(f"/any/{key}")

    assert answer.status_code == 424
    assert key.partition("/")[0] in answer.json()["detail"]


@pytest.mark.parametrize("name", SERVED)
def test_unusual_valid_metadata_is_served(client: httpx.Client, name: str) -> None:
    """Unusual but valid metadata is served with 200 within 5 s."""
    with processor_time_below(MOST_S, time.process_time):
        answer = client.get(f"/any/{name}/zarr.json")

    assert answer.status_code == 200
    assert answer.json()["zarr_format"] == 3


@pytest.mark.parametrize("number", range(len(CLIMBING + UNSPEAKABLE)))
def test_climbing_name_in_an_info_reaches_no_other_folder(
    client: httpx.Client, number: int
) -> None:
    """Names in an ``info`` that climb out of the dataset lead to 400, 404 or 431."""
    for kind, key in (("scale", "0-32_0-32_0-32"), ("mesh", "1")):
        name = (CLIMBING + UNSPEAKABLE)[number]
        assert client.get(f"/any/{kind}{number}/info").status_code == 200
        for path in (f"/any/{kind}{number}/secret/{key}", f"/any/{kind}{number}/{name}/{key}"):
            answer = client.get(httpx.URL(str(client.base_url), raw_path=raw(path)))

            assert answer.status_code in (400, 404, 431)
            assert answer.content != b"secret"
            assert "set-cookie" not in answer.headers


def raw(path: str) -> bytes:
    """Percent-encode only the bytes that no path may contain."""
    return b"".join(
        b"%%%02x" % byte if byte <= 32 or byte >= 127 else bytes([byte])
        for byte in path.encode("utf-8", "surrogatepass")
    )


def test_dataset_with_hostile_metadata_is_described_in_bounded_memory(client: httpx.Client) -> None:
    """The description of the dataset lists each damaged path, within 512 MiB of memory."""
    with peak_growth() as growth:
        found = client.get("/api/datasets/any").json()

    assert {each["path"] for each in found["damaged"]} >= REFUSED.keys() | REFUSED_INFOS.keys()
    assert growth() < MOST_BYTES


def writable(folder: Path) -> Settings:
    """Configure the writable dataset ``data``."""
    return Settings(datasets={"data": DatasetSettings(url=folder.as_uri(), writable=True)})


def test_damaged_node_of_a_session_fails_with_424(tmp_path: Path) -> None:
    """All access to a session with a damaged node fails with a 424 that names the session."""
    settings = writable(tmp_path)
    with client_of(settings) as client:
        client.post("/api/datasets", json={"name": "data"})
        damaged, whole = begin(client), begin(client)
    (stored,) = tmp_path.glob(f"sessions/{damaged}.session")
    session = decode_session(stored.read_bytes(), MOST_BYTES)
    nodes = {**session.nodes, "a": ChangedNode(bytes(8), b'{"zarr_format": 4}')}
    stored.write_bytes(encode_session(replace(session, nodes=nodes)))
    with client_of(settings) as client:
        base = f"/data/@session.{damaged}"
        answers = [
            client.get(f"{base}/a/zarr.json"),
            client.get(f"{base}/a/c/0"),
            client.put(f"{base}/a/c/0", content=b"ab"),
            client.get(f"/data?list-type=2&prefix=@session.{damaged}/"),
        ]

        for answer in answers:
            assert answer.status_code == 424, (str(answer.url), answer.text)
            assert f"{damaged}.session" in answer.text
        assert client.get(f"/data/@session.{whole}/a/zarr.json").is_success


def test_session_at_a_damaged_branch_is_refused_with_424(tmp_path: Path) -> None:
    """A session at a branch whose snapshot is not listed fails with a 424 that names `repo`."""
    (tmp_path / "repo").write_bytes(Repo(branches=[ref("main", 9)]).file())
    with client_of(writable(tmp_path)) as client:
        answer = client.post("/api/datasets/data/sessions")

    assert answer.status_code == 424
    assert "repo: there is no snapshot 9" in answer.json()["detail"]


def begin(client: httpx.Client) -> str:
    """Begin a session that contains an array."""
    session_id: str = client.post("/api/datasets/data/sessions").json()["session_id"]
    base = f"/data/@session.{session_id}"
    assert client.put(f"{base}/zarr.json", content=GROUP).is_success
    assert client.put(f"{base}/a/zarr.json", json=array_document((6,), (2,))).is_success
    return session_id
