"""The service below a path of its host: `server.root_path`, and X-Forwarded-Prefix of proxies."""

import html
import json
from collections.abc import Generator
from contextlib import ExitStack
from ipaddress import ip_network
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from shardgate import Settings, create_app
from shardgate.server.request import PathPrefix
from shardgate.settings import CallerSettings, DatasetSettings, ServerSettings, path_prefix
from tests.support.auth.people import KEY_ID, SECRET, TOKENS, caller
from tests.support.clients.filling import open_boto3
from tests.support.files import write_files
from tests.support.formats.zarr.building import build
from tests.support.proxies import PREFIX, locations, proxying
from tests.support.serving import client_of, serving

IMAGE: Final = {
    "zarr_format": 3,
    "node_type": "array",
    "shape": [4, 4],
    "data_type": "uint8",
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4, 4]}},
    "chunk_key_encoding": {"name": "default"},
    "fill_value": 0,
    "codecs": [{"name": "bytes"}],
}
CHUNKS: Final = {"c/0/0": b"0123456789", "c/0/1": b"another"}
ANA: Final = {"authorization": f"Bearer {TOKENS['ana']}"}
HTML: Final = {"accept": "text/html"}
PROXIES: Final = (ip_network("127.0.0.0/8"),)
LOCAL: Final = b"127.0.0.1"


def settings(folder: Path, *names: str, **server: Any) -> Settings:
    """Return settings of the datasets *names*, each of which Ann may write to."""
    write_files(build(CHUNKS), folder / "array")
    write_files({"zarr.json": json.dumps(IMAGE).encode()}, folder / "image")
    (folder / "lab").mkdir(exist_ok=True)
    key = CallerSettings(access_key_id=KEY_ID, secret_access_key=SecretStr(SECRET))
    array = DatasetSettings(url=str(folder / "array"), writable=True)
    private = {"read": ("ana", "ann"), "writable": True, "write": ("ann",)}
    return Settings(
        server=ServerSettings(trusted_proxies=PROXIES, **server),
        callers={"ana": caller(TOKENS["ana"]), "ann": key},
        datasets={
            **dict.fromkeys(names or ("em",), array),
            "image": DatasetSettings(url=str(folder / "image")),
            "private": DatasetSettings(url=str(folder / "array"), **private),
            "lab": DatasetSettings(url=str(folder / "lab"), **private),
        },
    )


class Site(NamedTuple):
    """A proxy whose paths below the prefix are those of a gateway."""

    url: str
    """URL of the service for clients."""
    gateway: str
    """URL of the gateway behind the proxy."""

    def get(self, path: str, **options: Any) -> httpx.Response:
        """Get a path below the prefix."""
        return httpx.get(self.url + path, timeout=60, **options)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((False, False), id="kept, by the setting"),
        pytest.param((True, True), id="stripped, by the header"),
        pytest.param((True, False), id="stripped, by the setting", marks=pytest.mark.soak),
        pytest.param((False, True), id="kept, by the header", marks=pytest.mark.soak),
    ],
)
def site(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Generator[Site]:
    """Run the service behind nginx, which strips the prefix or not."""
    is_stripped, is_told = request.param
    server = {} if is_told else {"root_path": PREFIX}
    with ExitStack() as stack:
        folder = tmp_path_factory.mktemp("site")
        gateway = stack.enter_context(serving(settings(folder, **server)))
        text = locations(is_stripped=is_stripped, is_told=is_told)
        nginx = stack.enter_context(proxying(folder, gateway, text))
        yield Site(nginx + PREFIX, gateway)


@pytest.fixture(scope="module")
def s3(site: Site) -> Any:
    """Open boto3 for the URL of the service."""
    style = {"addressing_style": "path"}
    return open_boto3(site.url, KEY_ID, SECRET, signature_version="s3v4", s3=style)


def test_everything_is_below_the_prefix(site: Site) -> None:
    """Chunks, pages, files of the docs, writes and health are below the prefix."""
    for _ in range(2):  # the second one is answered from memory
        assert site.get("/em/c/0/0").content == CHUNKS["c/0/0"]
    assert site.get("/em/c/0/1?v=1").content == CHUNKS["c/0/1"]
    assert httpx.put(f"{site.url}/em/c/0/1", content=CHUNKS["c/0/1"]).status_code == 200
    assert site.get("/em/c/0/0", headers={"connection": "close"}).content == CHUNKS["c/0/0"]
    assert b'href="./c/"' in site.get("/em/").content
    assert site.get("/em/", headers=HTML).status_code == 200
    assert site.get("/docs/swagger-ui.css").is_success
    assert site.get("/healthz").json() == {"status": "ok"}
    assert site.get("/em/c/5/5").status_code == 404


def test_gateway_itself_is_asked_without_the_prefix(site: Site) -> None:
    """Probes, and clients of the gateway itself, send and sign paths without the prefix."""
    for path in ("/healthz", "/readyz"):
        assert httpx.get(site.gateway + path).is_success
    s3 = open_boto3(site.gateway, KEY_ID, SECRET, s3={"addressing_style": "path"})
    assert s3.get_object(Bucket="private", Key="c/0/0")["Body"].read() == CHUNKS["c/0/0"]


def test_paths_of_the_api_begin_with_the_prefix(site: Site) -> None:
    """Paths of datasets, of tokens, and the server of OpenAPI lead through the prefix."""
    listed = site.get("/api/datasets", headers=ANA).json()["datasets"]
    described = site.get("/api/datasets/em").json()
    body = {"dataset": "private"}
    minted = httpx.post(f"{site.url}/api/tokens", json=body, headers=ANA).json()
    origin = site.url.removesuffix(PREFIX)

    assert [each["path"] for each in listed] == [
        f"{PREFIX}/{name}/" for name in ("em", "image", "private", "lab")
    ]
    assert described["path"] == f"{PREFIX}/em/"
    assert httpx.get(f"{origin}{minted['paths']['private']}c/0/0").content == CHUNKS["c/0/0"]
    assert site.get("/openapi.json").json()["servers"] == [{"url": PREFIX}]
    below = site.get(f"/~{minted['token']}/api/datasets").json()["datasets"]
    assert minted["paths"]["private"] in [each["path"] for each in below]


def test_code_and_links_of_pages_lead_through_the_prefix(site: Site) -> None:
    """The code on a page has the URL of clients, and the link to the viewer too."""
    page = site.get("/image/", headers=HTML).text
    link = unquote(site.get("/api/datasets/image/viewer").headers["location"])

    assert f"curl -sS {site.url}/image/zarr.json" in page
    assert f'"{site.url}/image"' in html.unescape(page)
    assert f"{site.url}/image" in link
    assert link.startswith((f"{site.url}/viewer/", "https://neuroglancer-demo.appspot.com/"))


def test_start_page_works_without_a_final_slash(site: Site) -> None:
    """Links of the start page lead below the prefix, also where a proxy drops its final slash."""
    for path in ("/", ""):
        page = site.get(path, headers=HTML, follow_redirects=True)
        assert f'href="{PREFIX}/em/"' in page.text
        assert f'href="{PREFIX}/docs"' in page.text
        assert 'href="./' not in page.text


@pytest.mark.parametrize("path", ["/em", "/viewer", ""])
def test_redirects_stay_below_the_prefix(site: Site, path: str) -> None:
    """Redirects to a page with its final slash lead to a page below the prefix."""
    page = site.get(path, headers=HTML, follow_redirects=True)

    assert page.is_success
    assert f"{page.url}/".startswith(f"{site.url}/")


def test_boto3_signs_paths_with_the_prefix(s3: Any) -> None:
    """boto3 writes, lists, copies and reads below the prefix, also in parts."""
    key = "a b/c%2F"
    s3.put_object(Bucket="lab", Key=key, Body=b"data")
    s3.copy_object(Bucket="lab", Key="copy", CopySource={"Bucket": "lab", "Key": key})
    listed = s3.list_objects_v2(Bucket="lab", Prefix="a b/")
    upload = s3.create_multipart_upload(Bucket="lab", Key="parts")
    named = {"Bucket": "lab", "Key": "parts", "UploadId": upload["UploadId"]}
    etag = s3.upload_part(**named, PartNumber=1, Body=b"part")["ETag"]
    parts = {"Parts": [{"PartNumber": 1, "ETag": etag}]}
    done = s3.complete_multipart_upload(**named, MultipartUpload=parts)

    assert [each["Key"] for each in listed["Contents"]] == [key]
    assert s3.get_object(Bucket="lab", Key="copy")["Body"].read() == b"data"
    assert {each["Name"] for each in s3.list_buckets()["Buckets"]} >= {"em", "private", "lab"}
    assert done["Location"] == f"{PREFIX}/lab/parts"


def test_presigned_urls_are_accepted_below_the_prefix(s3: Any) -> None:
    """A URL that boto3 presigns for the prefix opens its key, and no other path."""
    url = s3.generate_presigned_url("get_object", {"Bucket": "private", "Key": "c/0/0"})

    assert urlsplit(url).path == f"{PREFIX}/private/c/0/0"
    assert httpx.get(url).content == CHUNKS["c/0/0"]
    assert httpx.get(url.replace("c/0/0", "c/0/1")).status_code == 403


@pytest.mark.parametrize(
    ("sent", "prefix"),
    [
        (b"/arrays", "/arrays"),
        (b"/arrays/", "/arrays"),
        (b"/lab-1/v1.2/a_b", "/lab-1/v1.2/a_b"),
        (b"/evil, /arrays", "/arrays"),
        (b"", ""),
        (b"/", ""),
        *[
            (bad, "")
            for bad in (
                *(b"arrays", b"//evil.example", b"/a//b", b"/..", b"/a/../b", b"/a/./b", b"/a/.."),
                *(b"/a?b", b"/a#b", b"/a\\b", b"\\\\evil", b"/a\tb", b"/a\x00", b"/a b", b"/a//"),
                *(b"/a%2Fb", b"/%2e%2e", b"/\xc3\xa9", b"https://evil.example/", b"/~token"),
                *(b"/arrays, /..", b'/"><script>', b"/arrays,", b"/a\r\nb", b"javascript:alert(1)"),
                *(b"/%2F/evil.example", b"/" + 8000 * b"a", 4000 * b"/a"),
            )
        ],
    ],
)
def test_header_is_one_safe_path(sent: bytes, prefix: str) -> None:
    """The last value of the header counts, if it is a path of plain names."""
    split = PathPrefix("", PROXIES).split(b"/em/c/0", {b"x-forwarded-prefix": sent}, LOCAL)

    assert split == (prefix, b"/em/c/0")


@given(st.text(), st.sampled_from(["", "/", "/arrays"]))
def test_prefix_is_a_path_that_no_link_leaves(text: str, before: str) -> None:
    """What is taken for a prefix is empty, or a path that URLs need not escape."""
    try:
        prefix = path_prefix(before + text)
    except ValueError:
        return
    parts = urlsplit(f"https://host{prefix}/em")

    assert (parts.netloc, parts.path) == ("host", f"{prefix}/em")
    assert "//" not in parts.path
    assert not {".", ".."} & {*parts.path.split("/")}
    assert prefix.isascii()


@pytest.mark.parametrize("peer", [b"192.0.2.1", b"", b"::1", b"unix:"])
def test_header_of_an_untrusted_peer_is_ignored(peer: bytes) -> None:
    """A peer that is no trusted proxy cannot set a prefix."""
    prefix = PathPrefix("", PROXIES)
    headers = {b"x-forwarded-prefix": b"/arrays"}

    assert prefix.split(b"/arrays/em/c", headers, peer) == ("", b"/arrays/em/c")


@pytest.mark.parametrize(
    ("path", "below"),
    [
        (b"/arrays/em/c", b"/em/c"),
        (b"/em/c", b"/em/c"),
        (b"/other/em/c", b"/other/em/c"),
        (b"/%61rrays/em/%63", b"/em/%63"),
        (b"/arrays", b""),
        (b"/arrays/", b"/"),
        (b"/arraysX/c", b"/arraysX/c"),
        (b"//arrays/c", b"//arrays/c"),
        (b"/arrays/arrays/c", b"/arrays/c"),
        (b"/Arrays/c", b"/Arrays/c"),
        (b"/arrays/~token/em/c", b"/~token/em/c"),
        (b"/arrays/metrics", b"/metrics"),
        (b"/%FFarrays/c", b"/%FFarrays/c"),
        (b"", b""),
    ],
)
def test_prefix_of_the_setting_is_stripped_once_and_whole(path: bytes, below: bytes) -> None:
    """The prefix of the setting, whatever a header names, is stripped once, where it ends at a
    slash, and only at the beginning.
    """
    prefix = PathPrefix("/arrays", PROXIES, ["arrays"])

    assert prefix.split(path, {b"x-forwarded-prefix": b"/other"}, LOCAL) == ("/arrays", below)


@pytest.mark.parametrize(
    ("header", "path"),
    [
        *((name, name + b"/c/0") for name in (b"/arrays", b"/api", b"/docs")),
        *((b"/x", b"/x" + path) for path in (b"/metrics", b"/%6detrics", b"/readyz")),
        (b"/x", b"/x/_shard/em/c/0"),
    ],
)
def test_path_that_begins_like_a_prefix_in_a_header_is_whole(header: bytes, path: bytes) -> None:
    """A path of a dataset or route that is called like the prefix of the header is whole.

    A forged header leads to no path that a proxy keeps private.
    """
    prefix = PathPrefix("", PROXIES, ["arrays"])

    assert prefix.split(path, {b"x-forwarded-prefix": header}, LOCAL) == (header.decode(), path)


def test_prefix_of_a_header_is_that_of_its_request(tmp_path: Path) -> None:
    """A prefix in a header changes links and OpenAPI of its own request only.

    A dataset that is called like it has its keys and right links.
    """
    own = {"x-forwarded-prefix": PREFIX}
    with client_of(settings(tmp_path, "arrays")) as client:
        for _ in range(2):
            chunk = client.get("/arrays/c/0/0", headers=own)
            assert chunk.content == CHUNKS["c/0/0"]
        described = client.get("/api/datasets/arrays", headers=own).json()
        servers = [
            client.get("/openapi.json", headers=headers).json().get("servers")
            for headers in ({}, {"x-forwarded-prefix": "/a"}, {"x-forwarded-prefix": "/b"}, {})
        ]

    assert described["path"] == "/arrays/arrays/"
    assert servers == [None, [{"url": "/a"}], [{"url": "/b"}], None]


def test_shard_has_one_name_with_and_without_the_prefix(tmp_path: Path) -> None:
    """A balancer that passes on paths with the prefix gets the names of the paths without it."""
    with client_of(settings(tmp_path, root_path=PREFIX)) as client:
        names = {
            client.get(f"/_shard{path}").headers["x-shard"]
            for path in ("/em/c/0/0", f"{PREFIX}/em/c/0/1", f"{PREFIX}/~token/em/c/0/0")
        }
        other = client.get(f"/_shard{PREFIX}/em/c/9/9").headers["x-shard"]

    assert len(names) == 1
    assert other not in names


@pytest.mark.parametrize(
    ("mount", "path", "root"),
    [
        ("", "/em/c/0/0", "/arrays"),
        ("/mnt", "/mnt/em/c/0/0", "/arrays/mnt"),
        ("/arrays", "/arrays/em/c/0/0", "/arrays"),
        ("/arrays/mnt", "/arrays/mnt/em/c/0/0", "/arrays/mnt"),
        ("/arrays2", "/arrays2/em/c/0/0", "/arrays/arrays2"),
    ],
)
async def test_prefix_and_mount_add_up(tmp_path: Path, mount: str, path: str, root: str) -> None:
    """The prefix comes before the path of a mount, unless the server has put it there already."""
    app = create_app(settings(tmp_path, root_path=PREFIX))
    transport = httpx.ASGITransport(app, root_path=mount)
    async with httpx.AsyncClient(transport=transport, base_url="http://outer") as client:
        assert (await client.get(path)).content == CHUNKS["c/0/0"]
        described = await client.get(f"{mount}/api/datasets/em")

    assert described.json()["path"] == f"{root}/em/"
