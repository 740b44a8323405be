"""`app.http.bulk`: many keys in one request."""

import json
import urllib.request
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import httpx
import pytest

from tests.http.taking import CHUNKS, MAX, NEW, get, taking, wire


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Generator[httpx.Client]:
    """Serve an array and more, which may be written."""
    with taking(tmp_path_factory.mktemp("writing")) as opened:
        yield opened


def test_everything_below_a_prefix_is_taken_away(client: httpx.Client) -> None:
    """And nothing beside it."""
    for key in ("tree/a/1", "tree/a/2/3", "tree/ab"):
        client.put(f"/any/{key}", content=NEW)
    answer = client.delete("/any", params={"prefix": "tree/a/"})

    assert (answer.status_code, answer.json()) == (200, {"deleted": 2})
    assert get(client, "/any/tree/ab") == NEW
    assert get(client, "/any/tree/a/1") is None


@pytest.mark.parametrize("query", ["prefix=", "prefix=a", "prefix=/", "prefix=../", "prefix=%ff/"])
def test_a_prefix_is_a_folder(client: httpx.Client, query: str) -> None:
    """Neither everything nor the beginning of a name can be taken away."""
    client.put("/any/kept", content=NEW)

    assert client.delete(f"/any?{query}").status_code == 400
    assert client.delete("/any/kept?prefix=kept/").status_code == 400
    assert get(client, "/any/kept") == NEW


def read_batch(url: str, keys: Sequence[Any]) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Read many keys: what is told of each, and its bytes."""
    body = json.dumps({"keys": keys}).encode()
    with urllib.request.urlopen(f"{url}?batch", data=body) as answer:  # noqa: S310  our own
        while line := answer.readline():
            told = json.loads(line)
            yield told, answer.read(told["length"])


def test_a_batch_is_read_in_order(client: httpx.Client) -> None:
    """Keys with and without ranges, absent ones marked, from one service that need not write."""
    wanted = [
        {"key": "c/1/1"},
        {"key": "c/0/0", "range": "bytes=1-2"},
        {"key": "c/1/0"},
        {"key": "c/0/0", "range": "bytes=99999-"},
        {"key": "c/0/0", "range": "bytes=x"},
        {"key": "c/0/0"},
        *({"key": f"c/0/{number % 2}"} for number in range(50)),
    ]
    answer = client.post("/fixed?batch", json={"keys": wanted})
    read = list(read_batch(f"{client.base_url}/fixed", wanted))
    told = [each["status"] for each, _ in read]

    assert answer.headers["content-type"] == "application/vnd.shardgate.batch"
    assert [each["key"] for each, _ in read] == [each["key"] for each in wanted]
    assert told[:6] == [200, 206, 404, 416, 400, 200]
    first = get(client, "/fixed/c/0/0")
    assert first is not None
    assert (read[1][1], read[5][1]) == (first[1:3], first)
    assert read[1][0]["content_range"] == f"bytes 1-2/{len(first)}"
    assert read[5][0]["etag"] == client.head("/fixed/c/0/0").headers["etag"]
    for each, data in read[6:]:
        assert data == (get(client, f"/fixed/{each['key']}") or b"")


def test_damage_fails_no_other_key_of_a_batch(client: httpx.Client) -> None:
    """It is told where it is, and never as absence; large bodies come whole."""
    large = bytes(range(256)) * 300
    for number in range(20):
        client.put(f"/any/batch/{number}", content=large[number:])
    wanted = [{"key": f"batch/{number}"} for number in range(20)]
    read = list(read_batch(f"{client.base_url}/any", wanted))
    torn = list(
        read_batch(f"{client.base_url}/torn", [{"key": key} for key in ("c/0/0", "zarr.json")])
    )

    assert [data for _, data in read] == [large[number:] for number in range(20)]
    assert [(told["status"], told["length"] > 0) for told, _ in torn] == [(502, False), (200, True)]
    assert "c/0/0" in torn[0][0]["detail"]


@pytest.mark.parametrize("body", [b"", b"{}", b'{"keys": [{"key": "../a"}]}'])
def test_a_batch_that_cannot_be_read_is_refused(client: httpx.Client, body: bytes) -> None:
    """As a whole."""
    assert client.post("/em?batch", content=body).status_code == 400


def test_a_batch_is_written_and_each_key_told_of(client: httpx.Client) -> None:
    """In one request: bodies, deletions, demands; what fails fails alone."""
    client.put("/em/c/0/0", content=CHUNKS["c/0/0"])
    size = len(NEW)
    lines: list[tuple[dict[str, Any], bytes]] = [
        ({"key": "c/0/0", "delete": True}, b""),
        ({"key": "c/0/1", "length": size}, NEW),
        ({"key": "c/1/0", "length": size, "if_match": '"x"'}, NEW),
        ({"key": "notes.txt", "length": 2}, b"hi"),
        ({"key": "c/99/99", "length": size}, NEW),
    ]
    body = b"".join(json.dumps(line).encode() + b"\n" + data for line, data in lines)
    results = client.put("/em?batch", content=body).json()["results"]

    assert [each["key"] for each in results] == [line["key"] for line, _ in lines]
    assert [each["status"] for each in results] == [204, 200, 412, 200, 400]
    assert results[1]["etag"] == client.head("/em/c/0/1").headers["etag"]
    assert get(client, "/em/c/0/0") is None
    assert get(client, "/em/c/0/1") == NEW
    assert get(client, "/em/notes.txt") == b"hi"


@pytest.mark.parametrize(
    ("cut", "headers", "status"),
    [(1, {}, 400), (0, {"content-encoding": "gzip"}, 415)],
)
def test_a_wrong_batch_writes_nothing(
    client: httpx.Client, cut: int, headers: dict[str, str], status: int
) -> None:
    """A truncated one, or one that is wrapped."""
    body = b'{"key": "b1", "length": 3}\nabc{"key": "b2", "length": 3}\nabc'
    answer = client.put("/any?batch", content=body[: len(body) - cut], headers=headers)

    assert answer.status_code == status
    assert get(client, "/any/b1") is None


def test_a_large_batch_is_refused_before_it_is_sent(client: httpx.Client) -> None:
    """By its length as a whole, or by that of one key once its line is there."""
    with wire(client) as line:
        length = 2 * MAX + 1
        line.say(f"PUT /any?batch HTTP/1.1\nContent-Length: {length}\nExpect: 100-continue")
        assert line.hear()[0] == 413
    with wire(client) as line:
        head = b'{"key": "a", "length": %d}\n' % (MAX + 1)
        line.say(f"PUT /any?batch HTTP/1.1\nContent-Length: {MAX + 1 + len(head)}", head)
        assert line.hear()[0] == 413


def test_a_part_of_an_array_is_taken_away(client: httpx.Client) -> None:
    """The chunks in one folder, then all; the array stays."""
    for key in ("c/0/0", "c/0/1", "c/1/1"):
        client.put(f"/em/{key}", content=NEW)

    assert client.delete("/em?prefix=c/0/").json() == {"deleted": 2}
    assert [get(client, f"/em/{key}") for key in ("c/0/0", "c/0/1", "c/1/1")] == [None, None, NEW]
    assert client.delete("/em?prefix=c/9/").json() == {"deleted": 0}
    assert client.delete("/em?prefix=c/").json() == {"deleted": 1}
    assert get(client, "/em/c/1/1") is None
    assert get(client, "/em/zarr.json") is not None
