"""`app.http.read`: a chunk that was sent from memory is sent so again, by all rules."""

from collections.abc import Generator

import httpx
import pytest

from tests.http.taking import CHUNKS, NEW, taking

KEY = "c/0/1"
PATH = f"/em/{KEY}"


@pytest.fixture
def client(tmp_path_factory: pytest.TempPathFactory) -> Generator[httpx.Client]:
    """Serve an array that may be written, and make a chunk of it hot."""
    with taking(tmp_path_factory.mktemp("hot")) as opened:
        answers = [opened.get(PATH) for _ in range(4)]
        assert [answer.content for answer in answers] == [CHUNKS[KEY]] * 4
        assert len({_lasting(answer) for answer in answers}) == 1
        yield opened


def _lasting(answer: httpx.Response) -> frozenset[tuple[str, str]]:
    own = {"date", "x-request-id"}
    return frozenset(each for each in answer.headers.items() if each[0] not in own)


def test_a_write_is_seen_at_once(client: httpx.Client) -> None:
    """Neither the old bytes nor the old ETag are sent again, nor bytes of a deleted chunk."""
    put = client.put(PATH, content=NEW)
    got = client.get(PATH)
    client.delete(PATH)

    assert (got.content, got.headers["etag"]) == (NEW, put.headers["etag"])
    assert client.get(PATH).status_code == 404


def test_conditions_and_ranges_hold(client: httpx.Client) -> None:
    """A hot chunk is no answer to a request with preconditions or a range."""
    etag = client.get(PATH).headers["etag"]
    part = client.get(PATH, headers={"range": "bytes=1-2"})
    known = client.get(PATH, headers={"if-none-match": etag})
    other = client.get(PATH, headers={"if-match": '"other"'})

    assert (part.status_code, part.content) == (206, CHUNKS[KEY][1:3])
    assert (known.status_code, known.content, other.status_code) == (304, b"", 412)


def test_what_depends_on_the_request_is_made_anew(client: httpx.Client) -> None:
    """The request id is that of the request, and each gets another one without."""
    named = client.get(PATH, headers={"x-request-id": "mine", "origin": "https://a.example"})
    ids = {client.get(PATH).headers["x-request-id"] for _ in range(2)}

    assert named.headers["x-request-id"] == "mine"
    assert named.headers["access-control-allow-origin"] == "*"
    assert len(ids) == 2
    assert client.get(f"{PATH}?versionId=1").content == CHUNKS[KEY]
