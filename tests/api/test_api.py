"""`shardgate.api.api`: datasets, health and errors, over the running service."""

import base64
import hashlib
import re
from collections.abc import Generator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
import pytest
import zarr

from shardgate.settings import DatasetSettings, Settings
from tests.support.serving import client_of


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Generator[httpx.Client]:
    """Serve a folder of arrays, and a dataset whose folder does not exist."""
    folder = tmp_path_factory.mktemp("arrays")
    options: Any = {"shards": (4, 6), "chunks": (2, 3), "dimension_names": ["y", "x"]}
    for name in ("a", "group/b"):
        zarr.create_array(folder / name, shape=(8, 6), dtype="uint8", **options)
    (folder / "broken").mkdir()
    (folder / "broken/zarr.json").write_text("{")
    datasets = {
        "em": DatasetSettings(url=folder.as_uri()),
        "away": DatasetSettings(url=Path(folder / "nothing").as_uri()),
    }
    with client_of(Settings(datasets=datasets)) as opened:
        yield opened


def test_datasets_are_listed(client: httpx.Client) -> None:
    """`/api/datasets` and `/` list each dataset with its path, format and writability."""
    assert client.get("/api/datasets").json() == {
        "datasets": [
            {"name": "em", "path": "/em/", "format": "auto", "writable": False},
            {"name": "away", "path": "/away/", "format": "auto", "writable": False},
        ]
    }
    assert client.get("/").json() == client.get("/api/datasets").json()


@pytest.mark.parametrize(
    "path", ["/", "/healthz", "/readyz", "/metrics", "/docs", "/api/datasets", "/api/datasets/em"]
)
def test_head_equals_get_without_a_body(client: httpx.Client, path: str) -> None:
    """HEAD of a route that has GET returns its status, type and length."""
    head, got = client.head(path), client.get(path)

    assert (head.status_code, head.content) == (got.status_code, b"")
    assert head.headers["content-type"] == got.headers["content-type"]
    assert path == "/metrics" or head.headers["content-length"] == got.headers["content-length"]


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/", "GET, HEAD, OPTIONS"),
        ("/api/datasets/em", "GET, HEAD, OPTIONS"),
        ("/api/datasets", "GET, HEAD, OPTIONS, POST"),
        ("/api/datasets/em/branches/main", "DELETE, OPTIONS, PUT"),
        ("/viewer/v/page/index.html", "GET, HEAD, OPTIONS"),
    ],
)
def test_unsupported_method_gets_405_with_those_of_the_path(
    client: httpx.Client, path: str, methods: str
) -> None:
    """A method that a path lacks gets 405 with the methods of all routes of the path."""
    answer = client.patch(path)

    assert (answer.status_code, answer.headers["allow"]) == (405, methods)


def test_a_dataset_is_described_in_pages(client: httpx.Client) -> None:
    """A dataset is described by its arrays and damaged nodes; pages equal the whole list."""
    told = client.get("/api/datasets/em").json()
    first = client.get("/api/datasets/em?limit=2").json()
    second = client.get(f"/api/datasets/em?limit=2&after={first['next']}").json()
    array, other = told["arrays"]

    assert (array["path"], other["path"]) == ("a", "group/b")
    assert (array["shape"], array["data_type"]) == ([8, 6], "uint8")
    assert (array["inner_chunk_shape"], array["shard_shape"]) == ([2, 3], [4, 6])
    assert array["dimension_names"] == ["y", "x"]
    assert [each["path"] for each in told["damaged"]] == ["broken"]
    assert first["arrays"] + second["arrays"] == told["arrays"]
    assert second["next"] is None
    assert (told["is_all"], told["next"], told["reason"]) == (True, None, "")
    assert (first["is_all"], first["reason"]) == (False, "")


@pytest.mark.parametrize(
    ("method", "path", "status", "said"),
    [
        ("GET", "/api/datasets/nothing", 404, "nothing"),
        ("GET", "/api/datasets/away", 503, ""),
        ("GET", "/away/c/0/0", 503, ""),
        ("POST", "/api/datasets/any", 405, ""),
        ("GET", "/api/datasets/em?limit=0", 400, "limit"),
    ],
)
def test_errors_are_problem_documents(
    client: httpx.Client, method: str, path: str, status: int, said: str
) -> None:
    """Errors are problem documents (RFC 9457), 503 with Retry-After for a root that is missing."""
    answer = client.request(method, path)

    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    told = answer.json()
    assert (told["type"], told["status"]) == ("about:blank", status)
    assert told["title"] == HTTPStatus(status).phrase
    assert ("retry-after" in answer.headers) is (status == 503)
    assert said in told["detail"]


def test_service_with_an_unreachable_root_is_not_ready(client: httpx.Client) -> None:
    """`/readyz` answers 503 if one root is unreachable, and names that dataset."""
    answer = client.get("/readyz")

    assert answer.status_code == 503
    assert answer.json()["datasets"]["em"] == "ok"
    assert "nothing" in answer.json()["datasets"]["away"]


def test_openapi_describes_each_route(client: httpx.Client) -> None:
    """Each route in OpenAPI has a section, a summary, a description, a model and problems."""
    paths = client.get("/openapi.json").json()["paths"]
    routes = [
        operation
        for path, operations in paths.items()
        for operation in operations.values()
        if path.startswith("/api/datasets")
    ]

    assert len(routes) >= 16
    for operation in routes:
        assert operation["summary"]
        assert operation["description"]
        for status, answer in operation["responses"].items():
            assert status != "422"
            if status in {"200", "201"}:
                content = answer["content"]
                is_picture = all(kind.startswith("image/") for kind in content)
                assert is_picture or "$ref" in content["application/json"]["schema"]
            elif status not in {"204", "304", "307"}:
                assert list(answer["content"]) == ["application/problem+json"]
    assert all(each["tags"] for operations in paths.values() for each in operations.values())
    assert client.get("/docs").status_code == 200


def test_docs_need_no_other_server(client: httpx.Client) -> None:
    """`/docs` loads and runs what the service itself has, and no page can frame it."""
    page = client.get("/docs")
    [script] = re.findall("<script>(.*?)</script>", page.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = page.headers["content-security-policy"].split("; ")
    loaded = re.findall(r'(?:src|href)="([^"]+)"', page.text)

    assert loaded == ["./docs/swagger-ui.css", "data:,", "./docs/swagger-ui-bundle.js"]
    for path in ("docs/swagger-ui.css", "docs/swagger-ui-bundle.js", "openapi.json"):
        assert client.get(f"/{path}").status_code == 200
    assert f"script-src 'self' 'sha256-{digest}'" in policy
    assert "frame-ancestors 'none'" in policy
