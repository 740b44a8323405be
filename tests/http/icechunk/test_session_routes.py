"""What a newcomer meets at the routes of sessions, commits and the status."""

from base64 import b64encode
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.committing import ONES, Client, put_array, put_group
from tests.writable_repositories import api, new_place

LOCKED = {"availability": "read_only", "reason": "moving"}
WRITING = {"post", "put", "delete"}


@pytest.fixture
def client(tmp_path: Path) -> Generator[Client]:
    """Serve a repository that has an array without chunks."""
    place = new_place(tmp_path)
    place.create()
    with api(place) as served:
        made = Client(served, place)
        made.commit(put_group("/"), put_array("/a", 4, 4), message="first")
        yield made


def begin(client: Client) -> str:
    """Begin a session on ``main``."""
    return str(client.api.do("POST", "/sessions").json()["session_id"])


def put(client: Client, session_id: str) -> int:
    """Write a chunk into a session, and give the status."""
    key = f"/repo/@session.{session_id}/a/c/0/0"
    return client.api.client.put(key, content=ONES).status_code


def test_a_session_begins_without_a_body(client: Client) -> None:
    """Nobody has to say that it is ``main``."""
    bare = client.api.client.build_request("POST", "/api/datasets/repo/sessions")
    del bare.headers["content-length"]

    for answer in (client.api.client.send(bare), client.api.send("POST", "/sessions", {})):
        assert (answer.status_code, answer.json()["branch"]) == (201, "main")


def test_what_has_to_be_said_is_named(client: Client) -> None:
    """A body that is missing is one that says nothing."""
    answer = client.api.send("POST", f"/sessions/{begin(client)}/commit")

    assert (answer.status_code, answer.json()["detail"]) == (400, "message: Field required")


def test_nothing_begins_in_a_locked_repository(client: Client) -> None:
    """What could not be committed is refused at once; what was begun goes on afterwards."""
    session_id = begin(client)
    assert put(client, session_id) == 200
    client.api.do("PUT", "/status", LOCKED)

    refused = [
        client.api.send("POST", "/sessions"),
        client.api.client.post("/api/datasets/repo/chunks", content=ONES),
        client.api.send("POST", f"/sessions/{session_id}/commit", {"message": "m"}),
    ]
    assert [answer.status_code for answer in refused] == [423] * 3
    assert all("moving" in answer.json()["detail"] for answer in refused)
    assert client.api.do("GET", f"/sessions/{session_id}").json()["state"] == "open"

    client.api.do("PUT", "/status", {"availability": "online"})
    assert put(client, session_id) == 200
    client.api.do("POST", f"/sessions/{session_id}/commit", {"message": "m"})
    assert client.messages() == ["m", "first"]


def test_the_status_can_be_read(client: Client) -> None:
    """It is what was set last, by whom ever."""
    assert client.api.do("GET", "/status").json()["availability"] == "online"

    client.api.do("PUT", "/status", LOCKED)

    told = client.api.do("GET", "/status").json()
    assert (told["availability"], told["reason"]) == ("read_only", "moving")
    assert told["set_at"].endswith("Z")


def test_a_conflict_says_in_words_what_it_is(client: Client) -> None:
    """Who sees only the text knows which node it is about."""
    session_id = begin(client)
    put(client, session_id)
    inline = {"coords": [0, 0], "inline": b64encode(ONES).decode()}
    client.commit({"op": "put_chunks", "path": "/a", "chunks": [inline]})

    answer = client.api.send("POST", f"/sessions/{session_id}/commit", {"message": "m"})

    assert answer.status_code == 409
    assert "chunk_double_update at /a" in answer.json()["detail"]
    assert answer.json()["conflicts"][0]["chunks"] == [[0, 0]]


def test_who_writes_outside_of_a_session_hears_of_them(client: Client) -> None:
    """The answer names the route that begins one."""
    answer = client.api.client.put("/repo/a/c/0/0", content=ONES)

    assert answer.status_code == 405
    assert "/sessions" in answer.json()["detail"]


def test_every_route_that_writes_tells_its_answers(client: Client) -> None:
    """In OpenAPI each has a summary, a description, and why it may refuse."""
    paths: dict[str, dict[str, Any]] = client.api.client.get("/openapi.json").json()["paths"]
    routes = [
        (path, operation)
        for path, operations in paths.items()
        for method, operation in operations.items()
        if "/datasets" in path and (method in WRITING or "/sessions" in path)
    ]

    assert len(routes) >= 14
    for path, operation in routes:
        answers = operation["responses"]
        assert operation["summary"], path
        assert operation["description"], path
        assert {"404", "405"} <= answers.keys(), path
        assert "422" not in answers, path
        for status in answers.keys() - {"200", "201", "204"}:
            assert list(answers[status]["content"]) == ["application/problem+json"], path
