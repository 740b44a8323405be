"""`app.http.api`: datasets, health and errors, over the running service."""

from collections.abc import Generator
from pathlib import Path

import httpx
import pytest
import zarr

from app.settings import DatasetSettings, Settings
from tests.serving import serving


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Generator[httpx.Client]:
    """Serve a folder of arrays, and a folder that is not there."""
    folder = tmp_path_factory.mktemp("arrays")
    for name in ("a", "group/b"):
        zarr.create_array(
            folder / name,
            shape=(8, 6),
            shards=(4, 6),
            chunks=(2, 3),
            dtype="uint8",
            dimension_names=["y", "x"],
        )
    (folder / "broken").mkdir()
    (folder / "broken/zarr.json").write_text("{")
    datasets = {
        "em": DatasetSettings(url=folder.as_uri()),
        "away": DatasetSettings(url=Path(folder / "nothing").as_uri()),
    }
    with (
        serving(Settings(datasets=datasets)) as url,
        httpx.Client(base_url=url, timeout=20) as opened,
    ):
        yield opened


def test_datasets_are_listed(client: httpx.Client) -> None:
    """Programs learn what is served and where its keys begin."""
    assert client.get("/api/datasets").json() == {
        "datasets": [
            {"name": "em", "path": "/em/", "format": "auto", "writable": False},
            {"name": "away", "path": "/away/", "format": "auto", "writable": False},
        ]
    }


def test_a_dataset_is_described(client: httpx.Client) -> None:
    """Arrays are told with their shape, inner chunks and shards."""
    arrays = client.get("/api/datasets/em").json()["arrays"]

    assert [array["path"] for array in arrays] == ["a", "group/b"]
    assert (arrays[0]["shape"], arrays[0]["data_type"]) == ([8, 6], "uint8")
    assert (arrays[0]["inner_chunk_shape"], arrays[0]["shard_shape"]) == ([2, 3], [4, 6])
    assert arrays[0]["dimension_names"] == ["y", "x"]


def test_damage_is_told(client: httpx.Client) -> None:
    """Metadata that cannot be read is named, and hides no other array."""
    (damaged,) = client.get("/api/datasets/em").json()["damaged"]

    assert damaged["path"] == "broken"


def test_description_comes_in_pages(client: httpx.Client) -> None:
    """A page says where the next begins, and the last that there is none."""
    first = client.get("/api/datasets/em?limit=2").json()
    second = client.get(f"/api/datasets/em?limit=2&after={first['next']}").json()

    assert [a["path"] for a in first["arrays"] + second["arrays"]] == ["a", "group/b"]
    assert second["next"] is None


def test_unknown_dataset(client: httpx.Client) -> None:
    """A dataset that is not configured is a problem, 404."""
    answer = client.get("/api/datasets/nothing")

    assert (answer.status_code, answer.headers["content-type"]) == (404, "application/problem+json")


def test_unreachable_dataset(client: httpx.Client) -> None:
    """A root that is not there is 503, not an empty dataset."""
    answer = client.get("/api/datasets/away")

    assert (answer.status_code, "retry-after" in answer.headers) == (503, True)


def test_not_ready(client: httpx.Client) -> None:
    """Readiness fails with one root, and says which."""
    answer = client.get("/readyz")

    assert answer.status_code == 503
    assert answer.json()["datasets"]["em"] == "ok"
    assert "nothing" in answer.json()["datasets"]["away"]


def test_an_unreachable_dataset_is_never_absent(client: httpx.Client) -> None:
    """Keys of a root that is not there are 503: an unmounted disk is no fill value."""
    assert client.get("/away/c/0/0").status_code == 503


def test_documentation(client: httpx.Client) -> None:
    """The API describes itself."""
    paths = client.get("/openapi.json").json()["paths"]

    assert {"/api/datasets", "/api/datasets/{dataset}", "/healthz", "/readyz"} < set(paths)
    assert client.get("/docs").status_code == 200


def test_start_page_for_programs(client: httpx.Client) -> None:
    """Others get JSON."""
    assert client.get("/").json() == client.get("/api/datasets").json()


@pytest.mark.parametrize("path", ["/", "/api/datasets", "/api/nothing", "/healthz", "/docs"])
def test_every_answer_carries_cors_and_an_id(client: httpx.Client, path: str) -> None:
    """Pages may read our answers, errors too."""
    headers = client.get(path).headers

    assert headers["access-control-allow-origin"] == "*"
    assert headers["x-request-id"]
    assert headers["cache-control"]


def test_method(client: httpx.Client) -> None:
    """What cannot be done is a problem, 405."""
    answer = client.post("/api/datasets/any")

    assert (answer.status_code, answer.headers["content-type"]) == (405, "application/problem+json")


def test_limit_is_checked(client: httpx.Client) -> None:
    """A parameter out of bounds is named."""
    answer = client.get("/api/datasets/em?limit=0")

    assert answer.status_code == 400
    assert "limit" in answer.json()["detail"]
