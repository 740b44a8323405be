"""`shardgate.gateway.write`: bodies on sockets, preconditions, and error messages.

Writes by the names of shard objects lose no chunk.
"""

import base64
import json
import re
import time
import zlib
from collections.abc import Generator, Iterable
from secrets import token_hex
from typing import Final, NamedTuple

import httpx
import pytest

from shardgate.settings import DatasetSettings, Settings
from tests.support.formats.case import Case
from tests.support.formats.neuroglancer_precomputed.case import CASES as PRECOMPUTED
from tests.support.formats.zarr.case import CASES as ZARR
from tests.support.server.taking import MAX, NEW, get, taking, wire
from tests.support.serving import client_of


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Generator[httpx.Client]:
    """Serve an array and other objects, writable and read-only."""
    with taking(tmp_path_factory.mktemp("writing")) as opened:
        yield opened


@pytest.mark.parametrize("path", ["/em/c/0/1", "/any/a/b"])
def test_written_object_is_read_and_deleted(client: httpx.Client, path: str) -> None:
    """A PUT is read back under its returned ETag, and 404 after a DELETE.

    Repeated reads have the same headers, and are not served from memory after a write.
    """
    client.put(path, content=NEW[::-1])
    read = [client.get(path) for _ in range(4)]
    assert {answer.content for answer in read} == {NEW[::-1]}
    for answer in read:
        del answer.headers["date"], answer.headers["x-request-id"]
    assert len({frozenset(answer.headers.items()) for answer in read}) == 1
    put = client.put(path, content=NEW)
    got = client.get(path)

    assert (put.status_code, put.content, put.headers["content-length"]) == (200, b"", "0")
    assert (put.headers["etag"], put.headers["cache-control"]) == (got.headers["etag"], "no-store")
    assert got.content == NEW
    for _ in range(2):
        gone = client.delete(path)
        assert (gone.status_code, gone.content) == (204, b"")
        assert get(client, path) is None


@pytest.mark.parametrize("path", ["/em/c/1/1", "/any/conditions"])
def test_write_with_an_unmet_condition_is_refused(client: httpx.Client, path: str) -> None:
    """A PUT or DELETE whose If-Match or If-None-Match is not met is 412 and changes nothing."""
    etag = client.put(path, content=NEW).headers["etag"]
    for method in ("PUT", "DELETE"):
        listed = {"if-none-match": f'"x", {etag}'}
        for headers in ({"if-match": '"x"'}, {"if-none-match": "*"}, listed):
            answer = client.request(method, path, headers=headers, content=NEW[::-1])
            assert (answer.status_code, get(client, path)) == (412, NEW)

    assert client.put(path, headers={"if-match": etag}, content=NEW[::-1]).status_code == 200
    assert client.delete(path, headers={"if-match": etag}).status_code == 412
    assert client.delete(path, headers={"if-match": "*"}).status_code == 204
    assert client.put(path, headers={"if-match": "*"}, content=NEW).status_code == 412
    assert client.put(path, headers={"if-none-match": "*"}, content=NEW).status_code == 200


def test_large_body_with_expect_is_refused(client: httpx.Client) -> None:
    """A body above the limit with `Expect: 100-continue` is 413, and the connection is closed."""
    with wire(client) as line:
        line.say(f"PUT /any/large HTTP/1.1\nContent-Length: {MAX + 1}\nExpect: 100-continue")
        status, headers, body = line.hear()

        assert (status, headers["connection"]) == (413, "close")
        assert "larger" in json.loads(body)["detail"]
        assert line.hears_the_end()


def test_expect_is_answered_with_100(client: httpx.Client) -> None:
    """`Expect: 100-continue` is answered with 100, for an empty body too, but not in HTTP/1.0."""
    head = "PUT /any/a HTTP/1.%d\nContent-Length: 0\nExpect: 100-continue"
    with wire(client) as line:
        for _ in range(2):
            line.say("PUT /any/a HTTP/1.1\nContent-Length: 3\nExpect: 100-continue")
            assert line.hear()[0] == 100
            line.connection.sendall(b"abc")
            assert line.hear()[0] == 200
        line.say(head % 1)
        line.say(head % 1)
        assert [line.hear()[0] for _ in range(4)] == [100, 200, 100, 200]
        line.say(head % 0)
        assert line.hear()[0] == 200


@pytest.mark.parametrize(("dataset", "status"), [("any", 413), ("fixed", 405), ("nothing", 404)])
def test_refused_body_is_drained(client: httpx.Client, dataset: str, status: int) -> None:
    """A client that sends a refused body can read the response before the connection is closed."""
    with wire(client) as line:
        line.say(f"PUT /{dataset}/a HTTP/1.1\nContent-Length: 60000000", bytes(10_000_000))
        line.connection.sendall(bytes(50_000_000))
        answer = line.hear()

        assert (answer[0], answer[1]["connection"]) == (status, "close")


def test_stalled_body_is_408(client: httpx.Client) -> None:
    """A body that stalls is 408 after the timeout. An incomplete body stores nothing."""
    with wire(client) as line:
        line.say("PUT /any/silent HTTP/1.1\nContent-Length: 10", b"12345")
        began_at = time.monotonic()
        status, headers, _ = line.hear()

        assert (status, headers["connection"]) == (408, "close")
        assert time.monotonic() - began_at > 0.8
        assert line.hears_the_end()
    assert get(client, "/any/silent") is None
    with wire(client) as line:
        line.say("PUT /any/left HTTP/1.1\nContent-Length: 10", b"12345")
    time.sleep(0.2)
    assert get(client, "/any/left") is None


def test_connection_serves_successive_writes(client: httpx.Client) -> None:
    """One connection serves successive and pipelined writes in order, refused ones too."""
    with wire(client) as line:
        for head, body, status in (
            ("PUT /any/k HTTP/1.1\nContent-Length: 2", b"ab", 200),
            ("PUT /any/k HTTP/1.1\nContent-Length: 2\nContent-MD5: x", b"ab", 400),
            ("PUT /any/k HTTP/1.1\nContent-Length: 0", b"", 200),
            ("DELETE /any/k HTTP/1.1", b"", 204),
            ("DELETE /fixed/k HTTP/1.1", b"", 405),
            ("GET /any/k HTTP/1.1", b"", 404),
        ):
            line.say(head, body)
            found, headers, _ = line.hear()

            assert found == status
            assert "connection" not in headers
        for number in range(3):
            line.say("PUT /any/p HTTP/1.1\nContent-Length: 1", b"%d" % number)
        line.say("GET /any/p HTTP/1.1")
        assert [line.hear()[0] for _ in range(3)] == [200] * 3
        assert line.hear()[2] == b"2"


def framed(body: bytes, trailer: bytes) -> bytes:
    """Frame *body* as S3 clients do that compute its checksum while they send it."""
    first, rest = body[:2], body[2:]
    return b"%x\r\n%b\r\n%x\r\n%b\r\n0\r\n%b\r\n" % (len(first), first, len(rest), rest, trailer)


def crc_trailer(body: bytes) -> bytes:
    """Return the trailer with the CRC-32 of *body*."""
    value = base64.b64encode(zlib.crc32(body).to_bytes(4, "big"))
    return b"x-amz-checksum-crc32:%b\r\n" % value


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (framed(NEW, crc_trailer(NEW)), 200),
        (framed(NEW, crc_trailer(NEW[::-1])), 400),
        (framed(NEW, b""), 400),
        (framed(NEW, crc_trailer(NEW))[:-4], 400),
    ],
)
@pytest.mark.parametrize("is_chunked", [False, True])
def test_s3_frames_are_removed(
    client: httpx.Client, body: bytes, status: int, *, is_chunked: bool
) -> None:
    """An aws-chunked body is stored without its frames; a wrong checksum, or none, is 400.

    Its decoded length is required (411) and bounded (413).
    """
    client.delete("/any/framed")
    headers = {
        "content-encoding": "aws-chunked",
        "x-amz-content-sha256": "STREAMING-UNSIGNED-PAYLOAD-TRAILER",
        "x-amz-decoded-content-length": str(len(NEW)),
        "x-amz-trailer": "x-amz-checksum-crc32",
    }

    content = iter([body[:3], body[3:]]) if is_chunked else body
    assert client.put("/any/framed", content=content, headers=headers).status_code == status
    assert get(client, "/any/framed") == (NEW if status == 200 else None)
    for length, refused in ((None, 411), (str(MAX + 1), 413), ("9" * 5000, 411)):
        told = {} if length is None else {"x-amz-decoded-content-length": length}
        told["content-encoding"] = "aws-chunked"
        assert client.put("/any/framed", content=b"", headers=told).status_code == refused


SIGNED: Final = {"authorization": "AWS4-HMAC-SHA256 x"}
UNSERVED_HEADERS: Final = (
    *("x-amz-write-offset-bytes", "x-amz-server-side-encryption-customer-algorithm"),
    *("x-amz-object-lock-mode", "if-unmodified-since", "x-amz-if-match-size", "x-amz-tagging"),
    *("x-amz-acl", "x-amz-grant-read"),
)


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("PUT", "/em/c/0/0?x-amz-acl=public-read", {}),
        ("POST", "/em/c/0/0?uploads", {"x-amz-grant-read": 'id="a"'}),
        ("POST", "/em?uploads", {}),
        ("DELETE", "/em/c/0/0?versionId=v", {}),
        ("DELETE", "/em/c/0/0", {"if-unmodified-since": "Thu, 01 Jan 1970 00:00:00 GMT"}),
        *(("PUT", "/em/c/0/0", {name: "x"}) for name in UNSERVED_HEADERS),
        *(
            (method, path, SIGNED)
            for method, path in (("DELETE", "/em"), ("DELETE", "/em/"), ("POST", "/em"))
        ),
    ],
)
def test_unserved_s3_operation_is_501(
    client: httpx.Client, method: str, path: str, headers: dict[str, str]
) -> None:
    """A request for an unserved S3 operation is 501 and writes nothing; a GET ignores headers.

    The access lists that rclone 1.60 sends with each object are accepted.
    """
    before = get(client, "/em/c/0/0")
    answer = client.request(method, path, headers=headers, content=b"")

    assert answer.status_code == 501
    assert get(client, "/em/c/0/0") == before
    assert client.get("/em/c/0/0", headers=headers).status_code in {200, 412}
    for value in ("private", "bucket-owner-full-control"):
        usual = client.put("/em/c/0/0", content=NEW, headers={"x-amz-acl": value})
        assert usual.status_code == 200


@pytest.mark.parametrize(
    ("method", "of_key", "query", "unserved"),
    [
        ("PUT", True, "", None),
        ("PUT", True, "acl", "acl"),
        ("PUT", True, "%61cl", "acl"),
        ("PUT", True, "partNumber=1", "partNumber"),
        ("PUT", True, "partNumber=1&uploadId=u", None),
        ("PUT", True, "partNumber=1&uploadId=u&acl", "acl"),
        ("PUT", False, "partNumber=1&uploadId=u", "partNumber"),
        ("PUT", True, "uploads", "uploads"),
        ("POST", True, "uploads", None),
        ("POST", False, "uploads", "uploads"),
        ("POST", True, "uploadId=u", None),
        ("DELETE", True, "uploadId=u", None),
        ("GET", True, "uploadId=u", "uploadId"),
        ("GET", True, "tagging", None),
        ("GET", False, "tagging", "tagging"),
        ("DELETE", True, "versionId=v", "versionId"),
        ("GET", True, "versionId=v", "versionId"),
        ("GET", True, "v=1&%76ersionId=v", "versionId"),
        ("GET", True, "partNumber=1", "partNumber"),
        ("GET", True, "acl", "acl"),
        ("GET", False, "location", None),
        ("GET", False, "versioning", None),
        ("PUT", False, "versioning", "versioning"),
        ("GET", True, "versioning", "versioning"),
        ("GET", False, "uploads", "uploads"),
        ("POST", False, "delete", None),
        ("GET", False, "list-type=2&prefix=acl", None),
        ("GET", True, "response-content-type=text/html", "response-content-type"),
        ("GET", True, "token=t&v=3&response=1", None),
    ],
)
def test_parameter_of_another_operation_is_501(
    client: httpx.Client, method: str, query: str, unserved: str | None, *, of_key: bool
) -> None:
    """A parameter that makes another S3 operation is named; unknown parameters are ignored.

    A signed request has the same status, and the same body if it is a GET that succeeds.
    """
    url = f"/em/c/0/0?{query}" if of_key else f"/em?{query}"
    answer = client.request(method, url, content=NEW)
    signed = client.request(method, url, content=NEW, headers=SIGNED)

    assert signed.status_code == answer.status_code
    assert method != "GET" or answer.is_error or signed.content == answer.content
    if unserved is None:
        assert answer.status_code != 501
    else:
        assert answer.status_code == 501
        assert answer.json()["detail"] == f"{method} with {unserved} is not served"


def test_cors_allows_writes(client: httpx.Client) -> None:
    """A preflight names the allowed methods and headers, and POST for the steps of an upload.

    Responses to writes have CORS headers.
    """
    asked = {
        "origin": "https://a.example",
        "access-control-request-method": "PUT",
        "access-control-request-headers": "content-type, x-amz-content-sha256,x-bad header",
    }
    told = client.options("/em/c/0/0", headers=asked).headers
    allowed = told["access-control-allow-headers"].split(", ")

    assert told["access-control-allow-methods"] == "GET, HEAD, PUT, DELETE, OPTIONS"
    assert {"If-Match", "If-None-Match", "Content-Encoding", "x-amz-content-sha256"} < set(allowed)
    assert not any("bad" in name for name in allowed)
    for path, methods in (
        ("/any/a?uploads", "GET, HEAD, PUT, DELETE, POST, OPTIONS"),
        ("/any/a?uploadId=u", "GET, HEAD, PUT, DELETE, POST, OPTIONS"),
        ("/fixed/a?uploads", "GET, HEAD, OPTIONS"),
    ):
        step = client.options(path, headers=asked | {"access-control-request-method": "POST"})
        assert step.headers["access-control-allow-methods"] == methods
    for method, path in (("PUT", "/any/a"), ("PUT", "/fixed/a"), ("DELETE", "/any/a")):
        headers = client.request(method, path, headers={"x-request-id": "mine"}).headers
        assert headers["x-request-id"] == "mine"
        assert headers["access-control-allow-origin"] == "*"
        assert headers["cache-control"] == "no-store"


def test_prefix_is_deleted(client: httpx.Client) -> None:
    """`DELETE ?prefix=` deletes the objects below a folder and returns their number.

    A prefix without a final slash is 400. Writing or deleting a key with one changes no object.
    """
    for key in ("tree/a/1", "tree/a/2/3", "tree/ab", "kept"):
        client.put(f"/any/{key}", content=NEW)
    answer = client.delete("/any", params={"prefix": "tree/a/"})

    assert (answer.status_code, answer.json()) == (200, {"deleted": 2})
    assert client.delete("/em?prefix=c/9/").json() == {"deleted": 0}
    assert get(client, "/any/tree/ab") == NEW
    assert get(client, "/any/tree/a/1") is None
    for path in (
        *(f"/any?prefix={prefix}" for prefix in ("", "k", "/", "../", "%ff/")),
        "/any/kept?prefix=kept/",
    ):
        assert client.delete(path).status_code == 400
    assert get(client, "/any/kept") == NEW
    assert client.put("/any/tree/", content=b"").status_code == 200
    assert client.delete("/any/tree/").status_code == 204
    assert get(client, "/any/tree/ab") == NEW


CHUNK = "/em/c/0/0"
GRID = r"an array of shape \[.*\]: it has \d+×\d+ chunks, c/0/0 to c/\d+/\d+"
READ_ONLY = (
    "fixed is not writable; set datasets.fixed.writable = true, or serve its root with --writable"
)
CHUNK_IN_SHARD = r"c/0/0, an inner chunk of the shard file://\S+/em/c/0/0"
UNMATCHED = rf'{CHUNK_IN_SHARD}: precondition failed: If-Match does not match "x": found "\S+"'
MATCHED = rf'{CHUNK_IN_SHARD}: precondition failed: If-None-Match matches \*: found "\S+"'


@pytest.mark.parametrize(
    ("request_line", "body", "status", "detail"),
    [
        ("PUT /em/c/9/9", NEW, 400, rf"c/9/9 is no chunk of {GRID}"),
        ("PUT /em/c/00/0", NEW, 400, rf"c/00/0 is no chunk of {GRID}"),
        (f"PUT {CHUNK}", b"", 400, "the inner chunk is empty"),
        ("PUT /em/zarr.json", b"{", 400, "the document is no JSON: .* line 1 .*"),
        ("PUT /em/zarr.json", b"[]", 400, "the document is no JSON object"),
        ("PUT /any/a%2F%2Fb", NEW, 400, r"'a//b' has a control character or an empty, .* segment"),
        ("PUT /any/a%00b", NEW, 400, r"'a\\x00b' has a control character or an empty, .* segment"),
        (
            "PUT /any/a.shardgate-b",
            NEW,
            400,
            r"'a\.shardgate-b' is no key: \.shardgate- is reserved .*",
        ),
        (f"PUT /any/{'a' * 1025}", NEW, 400, "the key 'a{40}'… is longer than 1024 bytes"),
        ("PUT /any/a/", NEW, 400, "a key that ends in a slash is a folder: its body must be empty"),
        ("PUT /any/a", bytes(MAX + 1), 413, f"the body is larger than {MAX} bytes"),
        ("PUT /fixed/c/0/0", NEW, 405, f"PUT is not served here: {READ_ONLY}"),
        ("PUT /none/c/0/0", NEW, 404, "there is no dataset none"),
        ("PUT /em", NEW, 400, "PUT of a whole dataset needs a key"),
        ("POST /em/", NEW, 400, r"POST of a whole dataset needs \?delete"),
        ("DELETE /em", b"", 400, r"DELETE of a whole dataset needs a key, or \?prefix= of .*"),
        ("DELETE /em?prefix=c", b"", 400, "prefix must end in a slash, found 'c'"),
        ("DELETE /em/c?prefix=c/", b"", 400, "prefix goes with a dataset, not with a key"),
        ("PUT /em/a?tagging", b"", 501, "PUT with tagging is not served"),
        ("POST /em?delete", b"<Delete/>", 400, "the body names 0 keys, not 1 to 1000"),
    ],
)
def test_write_error_has_a_detail(
    client: httpx.Client, request_line: str, body: bytes, status: int, detail: str
) -> None:
    """An invalid write has its status, and a detail that names the mistake."""
    method, path = request_line.split()
    answer = client.request(method, path, content=body)

    assert (answer.status_code, answer.json()["status"]) == (status, status)
    assert re.fullmatch(detail, answer.json()["detail"])


@pytest.mark.parametrize(
    ("headers", "status", "detail"),
    [
        ({"content-encoding": "b r"}, 415, "Content-Encoding: 'b r' is no list of codings"),
        ({"content-encoding": "br"}, 415, "inner chunks have no content coding, only codecs"),
        ({"content-encoding": "x-y"}, 415, ".*: Content-Encoding: x-y can be neither kept nor .*"),
        ({"content-encoding": "gzip"}, 415, "inner chunks have no content coding, only codecs"),
        ({"content-md5": "x"}, 400, "the body does not match content-md5"),
        ({"if-match": '"x'}, 400, "If-Match is no list of entity tags"),
        ({"if-match": '"x"'}, 412, UNMATCHED),
        ({"if-none-match": "*"}, 412, MATCHED),
        ({"content-range": "bytes 0-1/2"}, 400, "a PUT with Content-Range is not served: .*"),
        ({"x-amz-copy-source": "em/a?versionId=1"}, 501, "copying .* is not served"),
        ({"x-amz-copy-source": "em/%ff"}, 400, "x-amz-copy-source is not percent-encoded UTF-8"),
        (
            {"x-amz-copy-source": "em/zarr.json", "x-amz-metadata-directive": "KEEP"},
            *(400, "x-amz-metadata-directive is COPY or REPLACE"),
        ),
        ({"if-unmodified-since": "x"}, 501, "PUT with if-unmodified-since is not served"),
    ],
)
def test_write_header_error_has_a_detail(
    client: httpx.Client, headers: dict[str, str], status: int, detail: str
) -> None:
    """An unmet or unserved header has a detail that names it, and the chunk stays unchanged.

    Metadata that would misread chunks are 409.
    """
    client.put(CHUNK, content=NEW[::-1])
    answer = client.put(CHUNK, content=NEW, headers=headers)

    assert answer.status_code == status
    assert re.fullmatch(detail, answer.json()["detail"])
    assert get(client, CHUNK) == NEW[::-1]
    document = client.get("/em/zarr.json").json() | {"fill_value": 7}
    misread = client.put("/em/zarr.json", content=json.dumps(document))
    assert misread.status_code == 409
    assert misread.json()["detail"].startswith("fill_value cannot change: ")
    assert "delete it with all its chunks first" in misread.json()["detail"]


class Served(NamedTuple):
    """A container behind the service."""

    client: httpx.Client
    name: str
    objects: dict[str, bytes]
    shards: list[str]
    """Names of the objects that contain chunks."""

    def chunks(self, keys: Iterable[str]) -> dict[str, bytes | None]:
        """Read chunks."""
        return {key: get(self.client, f"/new/{self.name}/{key}") for key in keys}


@pytest.fixture(scope="module")
def stores() -> Generator[httpx.Client]:
    """Serve a writable bucket, and a raw view of it."""
    datasets = {
        "new": DatasetSettings(url="memory://shards", writable=True),
        "raw": DatasetSettings(url="memory://shards", writable=True, view="raw"),
    }
    with client_of(Settings(datasets=datasets)) as opened:
        yield opened


def serve(stores: httpx.Client, case: Case) -> Served:
    """Store a container."""
    objects = case.build(case.chunks)
    name = token_hex(4)
    for key, data in objects.items():
        stores.put(f"/raw/{name}/{key}", content=data).raise_for_status()
    shards = [key for key in objects if not case.is_metadata(key)]
    assert shards
    return Served(stores, name, objects, shards)


@pytest.mark.parametrize("case", ZARR, ids=str)
def test_write_by_a_shard_name_loses_no_chunk(stores: httpx.Client, case: Case) -> None:
    """A PUT or DELETE by a shard's name is refused, or changes the one chunk of that name."""
    served = serve(stores, case)
    before = served.chunks(case.chunks)
    assert before == case.chunks
    for shard in served.shards:
        for body in (served.objects[shard], None):
            url = f"/new/{served.name}/{shard}"
            stores.request("DELETE" if body is None else "PUT", url, content=body)
            after = served.chunks(case.chunks)

            assert [key for key in before if after[key] != before[key]] in ([], [shard])
            before = after


@pytest.mark.parametrize("case", PRECOMPUTED, ids=str)
def test_write_of_a_named_shard_is_refused(stores: httpx.Client, case: Case) -> None:
    """A PUT, DELETE, upload or copy to the name of a shard object is 409 and says what to do.

    The object can be read, and written through a raw view.
    """
    served = serve(stores, case)
    for shard in served.shards:
        path = f"/new/{served.name}/{shard}"
        source = {"x-amz-copy-source": f"new/{served.name}/info"}
        answers = [
            stores.put(path, content=b"new"),
            stores.delete(path),
            stores.post(f"{path}?uploads"),
            stores.put(path, headers=source),
        ]
        assert [answer.status_code for answer in answers] == [409] * 4
        expected = (
            f"{shard} is a shard: its chunks are written by their own keys, and the whole object "
            'below @sharded/, or through a dataset with view = "raw"'
        )
        assert answers[0].json()["detail"] == answers[1].json()["detail"] == expected
        assert stores.get(path).content == served.objects[shard]
        assert stores.put(path.replace("/new/", "/raw/"), content=b"new").is_success
