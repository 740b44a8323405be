"""What is answered to who made a mistake: the thing and the reason, in one sentence."""

import json
import re
from collections.abc import Generator

import httpx
import pytest

from tests.http.taking import MAX, NEW, get, taking

CHUNK = "/em/c/0/0"
UNMET = r"c/0/0: the inner chunk of the shard file://\S+/em/c/0/0 is not as the request demands"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Generator[httpx.Client]:
    """Serve an array and more, which may be written."""
    with taking(tmp_path_factory.mktemp("refusals")) as opened:
        yield opened


@pytest.mark.parametrize(
    ("request_line", "body", "status", "detail"),
    [
        ("PUT /em/c/9/9", NEW, 400, r"c/9/9 is no chunk of an array of shape \[.*\]"),
        ("PUT /em/c/00/0", NEW, 400, r"c/00/0 is no chunk of an array of shape \[.*\]"),
        (f"PUT {CHUNK}", b"", 400, "the inner chunk is empty"),
        ("PUT /em/zarr.json", b"{", 400, "the document is no JSON: .* line 1 .*"),
        ("PUT /em/zarr.json", b"[]", 400, "the document is no JSON object"),
        ("PUT /any/a%2F%2Fb", NEW, 400, r"'a//b' has a control character or an empty, .* segment"),
        ("PUT /any/a%00b", NEW, 400, r"'a\\x00b' has a control character or an empty, .* segment"),
        ("PUT /any/a.shardgate-b", NEW, 400, r"'a\.shardgate-b' is no key: unfinished objects .*"),
        (f"PUT /any/{'a' * 1025}", NEW, 400, "the key 'a{40}'… is longer than 1024 bytes"),
        ("PUT /any/a/", NEW, 400, "a key that ends in a slash names a folder: it has no bytes"),
        ("PUT /any/a", bytes(MAX + 1), 413, f"the body is larger than {MAX} bytes"),
        ("PUT /fixed/c/0/0", NEW, 405, "PUT is not served here: fixed is not writable"),
        ("PUT /none/c/0/0", NEW, 404, "there is no dataset none"),
        ("PUT /em", NEW, 400, "PUT of a whole dataset needs a key"),
        ("POST /em/", NEW, 400, r"POST of a whole dataset needs \?delete"),
        ("DELETE /em", b"", 400, r"DELETE of a whole dataset needs a key, or \?prefix= of .*"),
        ("DELETE /em?prefix=c", b"", 400, "prefix ends in a slash, and 'c' does not"),
        ("DELETE /em/c?prefix=c/", b"", 400, "prefix goes with a dataset, not with a key"),
        ("PUT /em/a?tagging", b"", 501, "PutObjectTagging is not served"),
        ("POST /em?delete", b"<Delete/>", 400, "the body names no key"),
    ],
)
def test_a_mistake_is_named(
    client: httpx.Client, request_line: str, body: bytes, status: int, detail: str
) -> None:
    """So that nobody has to read the code."""
    method, path = request_line.split()
    answer = client.request(method, path, content=body)

    assert (answer.status_code, answer.json()["status"]) == (status, status)
    assert re.fullmatch(detail, answer.json()["detail"])


@pytest.mark.parametrize(
    ("headers", "status", "detail"),
    [
        ({"content-encoding": "br"}, 415, "a body may come with Content-Encoding: gzip, or none"),
        ({"content-encoding": "gzip"}, 415, "inner chunks have no content coding, only codecs"),
        ({"content-md5": "x"}, 400, "the body is not what content-md5 says"),
        ({"if-match": '"x'}, 400, "If-Match is no list of entity tags"),
        ({"if-match": '"x"'}, 412, UNMET),
        ({"if-none-match": "*"}, 412, UNMET),
        ({"content-range": "bytes 0-1/2"}, 400, "a part of a body, .* Content-Range .*"),
        ({"x-amz-copy-source": "em/a?versionId=1"}, 501, "copying .* is not served"),
        ({"if-unmodified-since": "x"}, 501, "If-Unmodified-Since is not served"),
    ],
)
def test_a_header_that_is_not_met_is_named(
    client: httpx.Client, headers: dict[str, str], status: int, detail: str
) -> None:
    """The chunk stays as it was."""
    before = get(client, CHUNK)
    answer = client.put(CHUNK, content=NEW, headers=headers)

    assert answer.status_code == status
    assert re.fullmatch(detail, answer.json()["detail"])
    assert get(client, CHUNK) == before


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("codecs", [{"name": "bytes"}]),
        ("data_type", "int8"),
        ("fill_value", 7),
        ("chunk_key_encoding", {"name": "v2"}),
    ],
)
def test_metadata_that_would_misread_chunks_are_told(
    client: httpx.Client, member: str, value: object
) -> None:
    """With the member that is wrong, and what to do."""
    document = client.get("/em/zarr.json").json() | {member: value}
    answer = client.put("/em/zarr.json", content=json.dumps(document))

    assert answer.status_code == 409
    assert answer.json()["detail"].startswith(f"{member} cannot change: ")
    assert "delete this one with all its chunks first" in answer.json()["detail"]


def test_what_is_ours_names_its_methods(client: httpx.Client) -> None:
    """405 has to (RFC 9110 §15.5.6)."""
    answer = client.put("/", content=b"x")

    assert (answer.status_code, answer.headers["allow"]) == (405, "GET")
