"""Datasets that only some callers may read, over HTTP."""

import hashlib
import secrets
import sys
from collections.abc import Generator
from pathlib import Path
from types import FrameType
from typing import Final
from urllib.parse import quote
from xml.etree import ElementTree as ET

import httpx
import pytest
import zarr
from botocore import UNSIGNED

from shardgate.main import create_app
from shardgate.server.asgi import AsgiApp
from shardgate.server.request import Request
from shardgate.settings import ServerSettings
from tests.support.auth.people import TEXT, TOKENS, People, settings
from tests.support.clients.filling import open_boto3
from tests.support.files import write_files
from tests.support.serving import client_of, serving

KEY: Final = "text.txt"
ANAS: Final = f"/private/{KEY}"
DIGEST: Final = hashlib.sha256(TOKENS["ana"].encode())
REQUESTS: Final = [
    *(("GET", "/{}/text.txt"), ("HEAD", "/{}/text.txt"), ("GET", "/{}"), ("GET", "/{}/")),
    *(("GET", "/{}/none"), ("GET", "/{}?list-type=2"), ("GET", "/{}?marker=a")),
    *(("OPTIONS", "/{}/text.txt"), ("PUT", "/{}/text.txt"), ("DELETE", "/{}/text.txt")),
    *(("POST", "/{}?delete"), ("POST", "/{}/text.txt?uploads"), ("DELETE", "/{}?prefix=a/")),
    ("PATCH", "/{}/text.txt"),
    ("GET", "/api/datasets/{}"),
    ("GET", "/api/datasets/{}/history"),
    ("GET", "/api/datasets/{}/branches"),
    ("POST", "/api/datasets/{}/sessions"),
    ("POST", "/api/datasets/{}/chunks"),
    ("DELETE", "/api/datasets/{}/tags/a"),
    ("GET", "/~token/{}/text.txt"),
    *(
        ("GET", f"/_shard/{{}}{key}")
        for key in ("/text.txt", "", "/", "/a/", "//", "/@session.A/a")
    ),
    *(("HEAD", "/_shard/{}/text.txt"), ("POST", "/_shard/{}/text.txt")),
]


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> Generator[People]:
    """Serve a public and a private dataset to all callers."""
    folder = tmp_path_factory.mktemp("people")
    with serving(settings(folder)) as url:
        yield People(url, folder)


def told(answer: httpx.Response, name: str) -> tuple[int, object, str]:
    """Return all of a response but for the *name* that was requested."""
    headers = {
        key: value
        for key, value in answer.headers.items()
        if key not in {"x-request-id", "x-shard", "date", "content-length"}
    }
    request_id = answer.headers.get("x-request-id", "-")
    return answer.status_code, headers, answer.text.replace(name, "-").replace(request_id, "-")


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> AsgiApp:
    """Build the service, to be called in this thread."""
    return create_app(settings(tmp_path_factory.mktemp("called")))


async def ask_and_listen(
    app: AsgiApp, method: str, path: str, headers: dict[str, str]
) -> tuple[httpx.Response, list[str]]:
    """Return the response to a request, and the functions of the service that it enters."""
    entered: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and "/app/" in frame.f_code.co_filename:
            entered.append(frame.f_code.co_qualname)

    sent = {name.encode(): value.encode() for name, value in headers.items()}
    transport = httpx.ASGITransport(app, client=("192.0.2.1", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        sys.setprofile(note)
        try:
            if method == "GET" and "?" not in path:  # as the server does, for answers from memory
                sent[b"host"] = b"localhost"
                app.cached(Request("GET", path.encode(), [], sent, b"192.0.2.1"))
            answer = await client.request(method, path, headers=headers)
        finally:
            sys.setprofile(None)
    return answer, entered


@pytest.mark.parametrize("token", [None, TOKENS["eve"], "none"])
@pytest.mark.parametrize(("method", "path"), REQUESTS)
async def test_unreadable_dataset_equals_an_unknown_one(
    app: AsgiApp, method: str, path: str, token: str | None
) -> None:
    """A dataset without rights answers as an unknown one does, by the same functions."""
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    answers = []
    works = []
    for name in ("private", "unknown"):
        for _ in range(2):  # the first one fills caches
            answer, entered = await ask_and_listen(app, method, path.format(name), headers)
        answers.append(told(answer, name))
        works.append(entered)

    assert answers[0] == answers[1]
    assert works[0] == works[1]
    assert works[0]


@pytest.mark.parametrize(
    ("method", "path", "who", "status"),
    [
        *(("GET", ANAS, who, status) for who, status in ((None, 401), ("eve", 404))),
        *(("PUT", "/private/new", who, status) for who, status in (("ana", 403), ("bob", 200))),
        ("PUT", f"/~{quote(TOKENS['bob'], safe='')}/private/new", None, 200),
        *(("GET", f"/{tilde}{TOKENS['ana']}{ANAS}", None, 200) for tilde in ("~", "%7E", "%7e")),
        *(("PUT", "/open/new", who, status) for who, status in ((None, 401), ("ana", 403))),
        ("PUT", "/open/new", "bob", 200),
        *(("GET", "/metrics", who, status) for who, status in ((None, 401), ("ana", 403))),
        *(
            ("GET", f"/~{TOKENS['ana']}/{path}", None, 400)
            for path in ("metrics", "readyz", "docs", "metrics/")
        ),
    ],
)
def test_status_follows_the_rights_of_the_caller(
    people: People, method: str, path: str, who: str | None, status: int
) -> None:
    """No credentials are 401, no right to write 403, none to read 404, paths of operators 400."""
    content = secrets.token_bytes(4) if method == "PUT" else None
    answer = people.ask(method, path, who, content=content)

    assert answer.status_code == status
    assert answer.headers["access-control-allow-origin"] == "*"
    if status == 401:
        assert answer.headers["www-authenticate"].startswith("Bearer")
    if path == "/private/new" and status == 403:
        assert answer.json()["detail"] == "ana may not write to private"
    if path.endswith("/new") and status == 200:
        folder = "open" if "open" in path else "private"
        assert (people.folder / folder / "new").read_bytes() == content


def test_readers_and_writers_may_read(people: People) -> None:
    """The second answer comes from memory, and asks for credentials as any other does."""
    for who in "ana", None, "bob", "eve", "ana", "bob":
        answer = people.ask("GET", f"/private/{KEY}", who)
        assert (answer.content == TEXT) is (who in {"ana", "bob"})


@pytest.mark.parametrize("path", [KEY, "none", "group", "", "?list-type=2"])
def test_private_responses_are_not_shared(people: People, path: str) -> None:
    """Responses of a private dataset are `private`, vary by Authorization, and send no referrer."""
    group = b'{"zarr_format": 3, "node_type": "group"}'
    write_files({"private/group/zarr.json": group}, people.folder)
    slash = "" if path.startswith("?") else "/"
    headers = people.ask("GET", f"/private{slash}{path}", "ana").headers

    assert headers["cache-control"].startswith("private, max-age=60")
    assert "Authorization" in headers.get_list("vary")
    assert headers["referrer-policy"] == "no-referrer"


def test_private_shard_key_is_hashed(people: People) -> None:
    """`/_shard` returns different values for two chunks of a private shard to untrusted callers."""
    folder = people.folder / "private" / "shards"
    zarr.create_array(folder, shape=(8,), chunks=(1,), shards=(8,), dtype="u1", overwrite=True)
    names = {people.ask("GET", f"/_shard/private/shards/c/{n}").headers["x-shard"] for n in (0, 1)}

    assert len(names) == 2


def test_trusted_proxy_gets_the_shard_for_itself_only(tmp_path: Path) -> None:
    """A trusted proxy gets one name for two chunks of a private shard; its clients get two."""
    folder = tmp_path / "private/shards"
    zarr.create_array(folder, shape=(8,), chunks=(1,), shards=(8,), dtype="u1")
    trusting = ServerSettings(trusted_proxies=("127.0.0.0/8",))
    paths = [f"/_shard/private/shards/c/{n}" for n in (0, 1)]
    with client_of(settings(tmp_path, server=trusting)) as client:
        for headers, told in (({}, 1), ({"x-forwarded-for": "192.0.2.1"}, 2)):
            names = {client.get(path, headers=headers).headers["x-shard"] for path in paths}
            assert len(names) == told


@pytest.mark.parametrize(
    ("path", "header", "value"),
    [
        *(
            (ANAS, "authorization", sent)
            for sent in (
                "Bearer",
                "Bearer wrong",
                "Bearer \u00e9",
                "Bearer " + "x" * 20_000,
                f"Bearer {TOKENS['ana'][:-1]}",
                f"Bearer {DIGEST.hexdigest()}",
                "Basic YW5hOnRva2VuLW9mLWFuYQ==",
                TOKENS["ana"],
            )
        ),
        (ANAS, "cookie", f"token={TOKENS['ana']}"),
        (ANAS, "x-api-key", TOKENS["ana"]),
        (ANAS, "referer", f"/~{TOKENS['ana']}/private/"),
        *(
            (f"{ANAS}?{name}={TOKENS['ana']}", "accept", "*/*")
            for name in ("token", "access_token", "X-Amz-Security-Token")
        ),
        (f"/~wrong{ANAS}", "accept", "*/*"),
        (f"/~{quote(DIGEST.digest(), safe='')}{ANAS}", "accept", "*/*"),
        ("/api/datasets", "authorization", "Bearer wrong"),
    ],
)
def test_wrong_or_misplaced_token_is_401(
    people: People, path: str, header: str, value: str
) -> None:
    """A wrong or misplaced token is 401, also for a list of the API, and is not repeated."""
    answer = httpx.get(f"{people.url}{path}", headers={header.encode(): value.encode("latin-1")})

    assert answer.status_code == 401
    assert TOKENS["ana"] not in answer.text


def test_public_paths_ignore_wrong_credentials(people: People) -> None:
    """A public dataset and `/healthz` are served to a request with a wrong token."""
    given = {"authorization": "Bearer wrong"}

    assert people.ask("GET", f"/open/{KEY}", headers=given).content == TEXT
    assert people.ask("GET", "/healthz", headers=given).status_code == 200


def test_token_path_redirects_to_the_start_page(people: People) -> None:
    """A path of a token alone leads to the start page; pages below it do not contain the token."""
    token = quote(TOKENS["bob"], safe="")
    answer = people.ask("GET", f"/~{token}")
    page = people.ask("GET", f"/~{TOKENS['ana']}/private/")

    assert (answer.status_code, answer.headers["location"]) == (307, f"./~{token}/")
    assert f'href="./{KEY}"' in page.text
    assert TOKENS["ana"] not in page.text
    assert page.headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize(
    ("who", "seen", "writable"),
    [
        (None, ["open"], 0),
        ("eve", ["open"], 1),
        ("ana", ["open", "private"], 0),
        ("bob", ["open", "private"], 2),
    ],
)
def test_lists_have_readable_datasets(
    people: People, who: str | None, seen: list[str], writable: int
) -> None:
    """Lists of datasets contain those that the caller may read, and tell which are writable."""
    for path in "/", "/api/datasets":
        listed = people.ask("GET", path, who).json()["datasets"]
        assert [dataset["name"] for dataset in listed] == seen
        assert sum(dataset["writable"] for dataset in listed) == writable
    assert people.ask("GET", "/readyz", who).json()["datasets"] == dict.fromkeys(seen, "ok")
    if who is None:
        s3 = open_boto3(people.url, signature_version=UNSIGNED)
        assert [bucket["Name"] for bucket in s3.list_buckets()["Buckets"]] == seen


@pytest.mark.parametrize("is_part", [False, True])
def test_copy_needs_a_readable_source(people: People, is_part: bool) -> None:  # noqa: FBT001
    """A source without rights is as an unknown one; a copy to a dataset without rights is 403."""
    (people.folder / "open" / "free").write_bytes(b"free")
    path = "/open/copy"
    if is_part:
        created = ET.fromstring(people.ask("POST", f"{path}?uploads", "bob").content)  # noqa: S314
        path += f"?partNumber=1&uploadId={created[2].text}"

    def copy(who: str, source: str) -> httpx.Response:
        return people.ask("PUT", path, who, headers={"x-amz-copy-source": source})

    statuses = [copy("bob", source).status_code for source in ("private/text.txt", "open/free")]
    private, unknown = (
        told(copy("eve", f"{name}/text.txt"), name) for name in ("private", "unknown")
    )
    assert statuses == [200, 200]
    assert private == unknown
    assert private[0] == 404
    assert copy("ana", "open/free").status_code == 403


@pytest.mark.parametrize(("name", "said"), [(None, 0), ("ana", 0), ("bob", 2)])
def test_start_page_shows_the_callers_rights(people: People, name: str | None, said: int) -> None:
    """The start page shows private datasets to readers, and `writable` to writers only."""
    html = {"accept": "text/html"}
    lead = "" if name is None else f"/~{quote(TOKENS[name], safe='')}"
    for path, who in (("/", name), (f"{lead}/", None)):
        page = people.ask("GET", path, who, headers=html)
        assert page.status_code == 200
        assert page.text.count("<small>writable") == said
        assert ('href="./private/"' in page.text) is (name is not None)
        assert ("private" in page.text) is (name is not None)


def test_list_below_a_token_has_paths_below_it(people: People) -> None:
    """Lists of datasets below a token have paths with that token, which can be requested."""
    for path in ("/", "/api/datasets"):
        listed = people.ask("GET", f"/~{TOKENS['ana']}{path}").json()["datasets"]
        paths = {each["name"]: each["path"] for each in listed}
        assert paths["private"] == f"/~{TOKENS['ana']}/private/"
        assert people.ask("GET", f"{paths['private']}{KEY}").status_code == 200
