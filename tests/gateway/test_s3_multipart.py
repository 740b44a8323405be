"""`shardgate.gateway.s3_multipart`: multipart uploads, request by request."""

# ruff: noqa: S314  what is parsed here we wrote

import base64
import hashlib
import zlib
from collections.abc import Generator
from xml.etree import ElementTree as ET

import httpx
import pytest

from shardgate.errors import BadBodyError, BadPartError, PartOrderError
from shardgate.gateway.s3_multipart import parse_part_number, parse_parts
from tests.support.gateway.s3_uploads import NS, S3, begin, complete, create, put
from tests.support.server.taking import MAX, NEW, get, taking


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Generator[httpx.Client]:
    """Serve an array and other objects, writable and read-only."""
    with taking(tmp_path_factory.mktemp("uploading")) as opened:
        yield opened


def code(answer: httpx.Response) -> tuple[int, str | None]:
    """Return the status and S3's error code."""
    return answer.status_code, ET.fromstring(answer.content).findtext("Code")


@pytest.mark.parametrize("path", ["/em/c/0/1", "/any/a%20b/c"])
def test_completed_upload_is_stored(client: httpx.Client, path: str) -> None:
    """An upload is stored when it is completed, under the returned ETag, and not before."""
    upload = create(client, path)
    second = put(client, path, upload, 2, NEW[5:])
    first = put(client, path, upload, 1, NEW[:5])
    before = get(client, path)

    done = complete(client, path, upload, (1, first.headers["etag"]), (2, second.headers["etag"]))

    assert before != NEW
    assert first.headers["etag"] == f'"{hashlib.md5(NEW[:5]).hexdigest()}"'  # noqa: S324
    assert (first.status_code, first.content) == (200, b"")
    assert first.headers["cache-control"] == "no-store"
    told = {each.tag.removeprefix(NS): each.text for each in ET.fromstring(done.content)}
    got = client.get(path)
    assert got.content == NEW
    assert told == {
        "Location": path,
        "Bucket": path.split("/")[1],
        "Key": "a b/c" if "any" in path else "c/0/1",
        "ETag": got.headers["etag"],
    }


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-md5": base64.b64encode(hashlib.md5(b"x").digest()).decode()}, 400),  # noqa: S324
        ({"x-amz-checksum-crc32": "AAAAAA=="}, 400),
        ({"x-amz-content-sha256": hashlib.sha256(b"x").hexdigest()}, 400),
        ({"content-range": "bytes 0-1/2"}, 400),
        ({"x-amz-copy-source": "/any/b"}, 404),
        ({"x-amz-checksum-crc32": base64.b64encode(zlib.crc32(NEW).to_bytes(4)).decode()}, 200),
    ],
)
def test_invalid_part_is_refused(
    client: httpx.Client, headers: dict[str, str], status: int
) -> None:
    """A part with a wrong checksum or an unserved header is 400 or 404, and is not stored."""
    upload = create(client, "/any/checked")
    md5 = hashlib.md5(NEW).hexdigest()  # noqa: S324

    assert put(client, "/any/checked", upload, 1, NEW, **headers).status_code == status
    done = complete(client, "/any/checked", upload, (1, md5))
    assert done.status_code == (200 if status == 200 else 400)


def test_upload_conditions_are_checked_at_completion(client: httpx.Client) -> None:
    """If-Match and If-None-Match of a completion fail with 412, and leave the object unchanged."""
    etag = client.put("/any/there", content=b"1").headers["etag"]
    upload, part = begin(client, "/any/there")

    for headers in ({"if-none-match": "*"}, {"if-match": '"x"'}):
        refused = complete(client, "/any/there", upload, part, **headers)
        assert code(refused) == (412, "PreconditionFailed")
    assert get(client, "/any/there") == b"1"
    assert complete(client, "/any/there", upload, part, **{"if-match": etag}).status_code == 200
    assert get(client, "/any/there") == NEW


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-amz-checksum-crc32": "AAAAAA=="}, 400),
        ({"x-amz-checksum-crc32": "AAAAAA==-1", "x-amz-checksum-type": "COMPOSITE"}, 200),
        ({"x-amz-checksum-crc32": base64.b64encode(zlib.crc32(NEW).to_bytes(4)).decode()}, 200),
        ({"x-amz-mp-object-size": "1"}, 400),
        ({"x-amz-mp-object-size": str(len(NEW))}, 200),
        ({"content-md5": "x"}, 400),
    ],
)
def test_completion_checks_whole_object_checksums(
    client: httpx.Client, headers: dict[str, str], status: int
) -> None:
    """A completion's checksum and size are those of the object, and its Content-MD5 of the body."""
    client.delete("/any/whole")
    upload, part = begin(client, "/any/whole")

    assert complete(client, "/any/whole", upload, part, **headers).status_code == status
    assert get(client, "/any/whole") == (NEW if status == 200 else None)


def test_upload_errors_have_s3_codes(client: httpx.Client) -> None:
    """Unknown uploads, invalid numbers, parts and orders, and large objects have S3's error codes.

    An aborted upload stores nothing.
    """
    upload, part = begin(client, "/any/wrong")
    other = create(client, "/any/other")

    def completed(*parts: tuple[int, str]) -> tuple[int, str | None]:
        return code(complete(client, "/any/wrong", upload, *parts))

    for name in (other, "0" * 32, "nothing", f"{upload}A", f"{upload}/../x", ""):
        assert code(put(client, "/any/wrong", name, 1, NEW)) == (404, "NoSuchUpload")
        assert code(complete(client, "/any/wrong", name, part)) == (404, "NoSuchUpload")
        gone = client.delete("/any/wrong", params={"uploadId": name}, headers=S3)
        assert code(gone) == (404, "NoSuchUpload")
    for number in (0, 10_001, "x", ""):
        assert code(put(client, "/any/wrong", upload, number, NEW)) == (400, "InvalidArgument")
    assert client.put(f"/any/wrong?uploadId={upload}", content=NEW).status_code == 400
    assert code(put(client, "/any/wrong", upload, 1, bytes(MAX + 1))) == (413, "EntityTooLarge")
    assert completed((1, "0" * 32)) == (400, "InvalidPart")
    assert completed((2, part[1])) == (400, "InvalidPart")
    assert completed(part, part) == (400, "InvalidPartOrder")
    assert completed() == (400, "InvalidRequest")
    large = [
        (n, put(client, "/any/other", other, n, bytes([n]) * size).headers.get("etag", ""))
        for n, size in ((1, MAX - 1), (2, MAX - 1), (3, 2))
    ]
    assert [etag == "" for _, etag in large] == [False, True, False]
    whole = complete(client, "/any/other", other, large[0], large[2])
    assert code(whole) == (413, "EntityTooLarge")
    assert client.delete("/any/wrong", params={"uploadId": upload}).status_code == 204
    assert completed(part) == (404, "NoSuchUpload")
    assert get(client, "/any/wrong") is None


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/em/c/9/9", {}, 400),
        ("/fixed/c/0/0", {}, 405),
        ("/nothing/a", {}, 404),
        ("/any/folder/", {}, 400),
        ("/any", {}, 501),
        ("/em/zarr.json", {"content-encoding": "compress"}, 415),
    ],
)
def test_upload_that_cannot_complete_is_refused(
    client: httpx.Client, path: str, headers: dict[str, str], status: int
) -> None:
    """Creating an upload fails for a key that cannot be written."""
    assert client.post(f"{path}?uploads", headers=headers).status_code == status


A = "a" * 32
B = "b" * 32


def part(number: object, etag: str, more: str = "") -> str:
    """Return a `Part` element."""
    return f"<Part><PartNumber>{number}</PartNumber><ETag>{etag}</ETag>{more}</Part>"


def listing(inside: str, start: str = "") -> bytes:
    """Return a `CompleteMultipartUpload` document."""
    return f"<CompleteMultipartUpload{start}>{inside}</CompleteMultipartUpload>".encode()


@pytest.mark.parametrize(
    "inside",
    [
        part(1, f'"{A}"') + part(3, B),
        part(1, f"&quot;{A}&quot;") + "\n " + part(3, f"\n{B}\n "),
        part(1, A, "<ChecksumCRC32>AAAAAA==</ChecksumCRC32>") + part("03", B),
        f"<Part><ETag>{A}</ETag><PartNumber>1</PartNumber></Part>" + part(3, B),
    ],
)
@pytest.mark.parametrize("start", ["", ' xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'])
def test_part_list_is_parsed(inside: str, start: str) -> None:
    """A list of parts is parsed with or without quotes, checksums and namespace.

    Part numbers are from 1 to 10,000.
    """
    assert parse_parts(listing(inside, start)) == [(1, A), (3, B)]
    assert [parse_part_number(text) for text in ("1", "10000")] == [1, 10_000]
    for text in ("0", "10001", "", "-1", "1.0", " 1"):
        assert parse_part_number(text) is None


@pytest.mark.parametrize(
    ("inside", "error"),
    [
        ("", BadBodyError),
        ("<Part/>", BadBodyError),
        ("<Other/>", BadBodyError),
        (part(0, A), BadBodyError),
        (part(10_001, A), BadBodyError),
        (part("+1", A), BadBodyError),
        (part("٣", A), BadBodyError),
        (part("9" * 5000, A), BadBodyError),
        (f"<Part><ETag>{A}</ETag></Part>", BadBodyError),
        (part(1, A, "<a><b/></a>"), BadBodyError),
        ("<Part><PartNumber>1</PartNumber></Part>", BadPartError),
        (part(1, "../" + A), BadPartError),
        (part(1, f'"{A}-2"'), BadPartError),
        (part(1, A.upper()), BadPartError),
        (part(2, A) + part(1, B), PartOrderError),
        (part(1, A) + part(1, A), PartOrderError),
    ],
)
def test_invalid_part_list_is_refused(inside: str, error: type[Exception]) -> None:
    """A list with other elements, invalid numbers or ETags, or in another order is refused."""
    with pytest.raises(error):
        parse_parts(listing(inside))
