"""Datasets that not everybody may see, over the wire."""

import hashlib
import sys
from collections.abc import Generator
from types import FrameType
from typing import Any, Final
from urllib.parse import quote
from xml.etree import ElementTree as ET

import boto3
import httpx
import pytest
import zarr
from botocore import UNSIGNED
from botocore.config import Config

from shardgate.http.asgi import AsgiApp, AsgiExchange
from shardgate.http.request import Request, Response
from shardgate.main import create_app
from tests.http.auth.people import TEXT, TOKENS, People, settings
from tests.support.serving import serving

KEY: Final = "text.txt"
REQUESTS: Final = [
    ("GET", "/{}/text.txt"),
    ("HEAD", "/{}/text.txt"),
    ("GET", "/{}"),
    ("GET", "/{}/"),
    ("GET", "/{}/none"),
    ("GET", "/{}?list-type=2"),
    ("GET", "/{}?marker=a"),
    ("OPTIONS", "/{}/text.txt"),
    ("PUT", "/{}/text.txt"),
    ("DELETE", "/{}/text.txt"),
    ("POST", "/{}?delete"),
    ("POST", "/{}/text.txt?uploads"),
    ("DELETE", "/{}?prefix=a/"),
    ("PATCH", "/{}/text.txt"),
    ("GET", "/api/datasets/{}"),
    ("GET", "/api/datasets/{}/history"),
    ("GET", "/api/datasets/{}/branches"),
    ("POST", "/api/datasets/{}/sessions"),
    ("POST", "/api/datasets/{}/chunks"),
    ("DELETE", "/api/datasets/{}/tags/a"),
    ("GET", "/~token/{}/text.txt"),
]


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> Generator[People]:
    """Serve to all of them."""
    folder = tmp_path_factory.mktemp("people")
    with serving(settings(folder)) as url:
        yield People(url, folder)


def told(answer: httpx.Response, name: str) -> tuple[int, object, str]:
    """Give all that an answer tells, but for the *name* that was asked for."""
    headers = {
        key: value
        for key, value in answer.headers.items()
        if key not in {"x-request-id", "date", "content-length"}
    }
    request_id = answer.headers["x-request-id"]
    return answer.status_code, headers, answer.text.replace(name, "-").replace(request_id, "-")


@pytest.mark.parametrize("who", [None, "eve"])
@pytest.mark.parametrize(("method", "path"), REQUESTS)
def test_what_one_may_not_see_is_as_if_it_did_not_exist(
    people: People, method: str, path: str, who: str | None
) -> None:
    """No request tells a private dataset from an unknown one."""
    private, unknown = (
        told(people.ask(method, path.format(name), who), name) for name in ("private", "unknown")
    )

    assert private == unknown


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> AsgiApp:
    """Build the service, to be called in this thread."""
    return create_app(settings(tmp_path_factory.mktemp("called")))


async def functions_entered(
    app: AsgiApp, method: str, path: str, authorization: bytes | None
) -> list[str]:
    """List the functions of the service that one request enters, in their order."""
    headers = {b"host": b"localhost", b"content-length": b"0"}
    if authorization is not None:
        headers[b"authorization"] = authorization
    entered: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and "/app/" in frame.f_code.co_filename:
            entered.append(frame.f_code.co_qualname)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(_: dict[str, Any]) -> None:
        pass

    raw_path, _, query = path.encode().partition(b"?")
    scope = {
        "type": "http", "method": method, "path": path.partition("?")[0], "raw_path": raw_path,
        "query_string": query, "headers": list(headers.items()), "client": ("192.0.2.1", 1),
        "http_version": "1.1", "scheme": "http", "server": ("localhost", 80), "root_path": "",
    }  # fmt: skip
    sys.setprofile(note)
    try:
        answer = None
        if method == "GET" and not query:
            answer = app.answer(Request("GET", raw_path, [], headers, b"192.0.2.1"))
        if answer is None:
            await app(scope, receive, send)
        elif not isinstance(answer, Response):
            await answer(AsgiExchange(send, None, []))
    finally:
        sys.setprofile(None)
    return entered


@pytest.mark.parametrize("authorization", [None, b"Bearer token-of-eve", b"Bearer none"])
@pytest.mark.parametrize(("method", "path"), [*REQUESTS, ("GET", "/_shard/{}/text.txt")])
async def test_private_dataset_takes_the_work_of_an_unknown_one(
    app: AsgiApp, method: str, path: str, authorization: bytes | None
) -> None:
    """A request for a private dataset calls the same functions as one for an unknown one."""

    async def work_for(name: str) -> list[str]:
        for _ in range(2):  # the first one fills caches
            entered = await functions_entered(app, method, path.format(name), authorization)
        return entered

    private = await work_for("private")
    assert private == await work_for("unknown")
    assert private


def test_nobody_is_asked_for_credentials(people: People) -> None:
    """A reader of Zarr would take 404 for fill value; who has no rights finds nothing."""
    answer = people.ask("GET", f"/private/{KEY}")

    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert answer.headers["access-control-allow-origin"] == "*"
    assert people.ask("GET", f"/private/{KEY}", "eve").status_code == 404


def test_who_may_read_or_write_reads(people: People) -> None:
    """The second answer comes from memory, and asks for credentials as any other does."""
    for who in "ana", None, "bob", "eve", "ana", "bob":
        answer = people.ask("GET", f"/private/{KEY}", who)
        assert (answer.content == TEXT) is (who in {"ana", "bob"})


@pytest.mark.parametrize("path", [KEY, "none", "group", "", "?list-type=2"])
def test_private_answers_are_kept_by_their_reader_only(people: People, path: str) -> None:
    """Bytes, links, a redirect and absence: no proxy hands them on, no link tells where from."""
    (people.folder / "private" / "group").mkdir(exist_ok=True)
    group = '{"zarr_format": 3, "node_type": "group"}'
    (people.folder / "private" / "group" / "zarr.json").write_text(group)
    slash = "" if path.startswith("?") else "/"
    headers = people.ask("GET", f"/private{slash}{path}", "ana").headers

    assert headers["cache-control"] == "private, max-age=60"
    assert "Authorization" in headers.get_list("vary")
    assert headers["referrer-policy"] == "no-referrer"


def test_a_balancer_is_told_nothing_of_private_shards(people: People) -> None:
    """Who is no trusted proxy gets the hash of what they ask for, of unknown datasets as well."""
    folder = people.folder / "private" / "shards"
    zarr.create_array(folder, shape=(8,), chunks=(1,), shards=(8,), dtype="u1", overwrite=True)
    names = {people.ask("GET", f"/_shard/private/shards/c/{n}").headers["x-shard"] for n in (0, 1)}

    assert len(names) == 2


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
@pytest.mark.parametrize("path", ["", "/", "/a", "/a/", "//", "/@session.A/a"])
def test_a_balancer_is_named_private_and_unknown_keys_alike(
    people: People, method: str, path: str
) -> None:
    """Whether a name is there tells nothing of the dataset."""
    told = [people.ask(method, f"/_shard/{name}{path}").headers for name in ("private", "unknown")]

    assert told[0].keys() == told[1].keys()


@pytest.mark.parametrize("path", ["metrics", "readyz", "docs", "metrics/"])
def test_what_is_for_operators_is_not_below_a_token(people: People, path: str) -> None:
    """Proxies know it by its path."""
    assert people.ask("GET", f"/~{TOKENS['ana']}/{path}").status_code == 400


def test_a_signed_body_cannot_be_left_out(people: People) -> None:
    """Where a body has only defaults, none would mean something else."""
    digest = hashlib.sha256(b'{"dataset": "private"}').hexdigest()
    answer = people.ask("POST", "/api/tokens", "ana", headers={"x-amz-content-sha256": digest})

    detail = "the body does not match x-amz-content-sha256"
    assert (answer.status_code, answer.json()["detail"]) == (400, detail)


def test_a_reader_may_not_write(people: People) -> None:
    """Who sees the dataset is told why; what is named in `write` is enough, in a path too."""
    answer = people.ask("PUT", f"/private/{KEY}", "ana", content=b"x")
    path = f"/~{quote(TOKENS['bob'], safe='')}/private/other"

    assert (answer.status_code, answer.json()["detail"]) == (403, "ana may not write to private")
    assert people.ask("PUT", "/private/new", "bob", content=b"x").status_code == 200
    assert (people.folder / "private" / "new").read_bytes() == b"x"
    assert people.ask("PUT", path, content=b"x").status_code == 200


@pytest.mark.parametrize(("who", "status"), [(None, 401), ("ana", 403), ("bob", 200)])
def test_what_all_may_read_is_written_by_some(people: People, who: str | None, status: int) -> None:
    """Reading and writing have rules of their own."""
    assert people.ask("PUT", "/open/new", who, content=b"x").status_code == status


@pytest.mark.parametrize(
    ("path", "given"),
    [
        *(
            (f"/private/{KEY}", given)
            for given in (
                {"authorization": "Bearer wrong"},
                {"authorization": "Bearer"},
                {"authorization": "Bearer " + "x" * 20_000},
                {"authorization": "Bearer \u00e9"},
                {"authorization": "Basic YW5hOnRva2VuLW9mLWFuYQ=="},
                {"authorization": TOKENS["ana"]},
                {"cookie": f"token={TOKENS['ana']}"},
                {"x-api-key": TOKENS["ana"]},
                {"referer": f"/~{TOKENS['ana']}/private/"},
            )
        ),
        *(
            (f"/private/{KEY}?{name}={TOKENS['ana']}", {})
            for name in ("token", "access_token", "X-Amz-Security-Token")
        ),
        (f"/~wrong/private/{KEY}", {}),
        ("/api/datasets", {"authorization": "Bearer wrong"}),
    ],
)
def test_a_token_is_good_in_its_place_only(
    people: People, path: str, given: dict[str, str]
) -> None:
    """Elsewhere, as in queries, which are in every log, a good one is a wrong one.

    Of the API a list without what was hoped for would be taken for the whole.
    """
    encoded = {name.encode(): value.encode("latin-1") for name, value in given.items()}
    answer = httpx.get(f"{people.url}{path}", headers=encoded)

    assert answer.status_code == 401
    assert TOKENS["ana"] not in answer.text


def test_what_is_public_looks_at_no_credentials(people: People) -> None:
    """Clients of S3 send some everywhere."""
    given = {"authorization": "Bearer wrong"}

    assert people.ask("GET", f"/open/{KEY}", headers=given).content == TEXT
    assert people.ask("GET", "/healthz", headers=given).status_code == 200


@pytest.mark.parametrize("tilde", ["~", "%7E", "%7e"])
@pytest.mark.parametrize("who", ["ana", "bob"])
def test_a_token_goes_into_the_path(people: People, who: str, tilde: str) -> None:
    """Viewers can send it nowhere else; what a path cannot hold is percent-encoded."""
    path = f"/{tilde}{quote(TOKENS[who], safe='')}/private/{KEY}"

    assert [people.ask("GET", path).content for _ in range(2)] == [TEXT, TEXT]


def test_a_token_alone_leads_to_the_start_page(people: People) -> None:
    """Links from there are relative, keep the token and do not hold it."""
    token = quote(TOKENS["bob"], safe="")
    answer = people.ask("GET", f"/~{token}")
    page = people.ask("GET", f"/~{TOKENS['ana']}/private/")

    assert (answer.status_code, answer.headers["location"]) == (307, f"./~{token}/")
    assert f'href="./{KEY}"' in page.text
    assert TOKENS["ana"] not in page.text
    assert page.headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize(
    ("who", "seen"), [(None, ["open"]), ("eve", ["open"]), ("ana", ["open", "private"])]
)
def test_lists_have_what_one_may_see(people: People, who: str | None, seen: list[str]) -> None:
    """No list tells of others; a probe of readiness has no credentials, and waits for all."""
    for path in "/", "/api/datasets":
        listed = people.ask("GET", path, who).json()["datasets"]
        assert [dataset["name"] for dataset in listed] == seen
    assert people.ask("GET", "/readyz", who).json()["datasets"] == dict.fromkeys(seen, "ok")
    if who is None:
        config = Config(signature_version=UNSIGNED)
        s3 = boto3.client("s3", "us-east-1", endpoint_url=people.url, config=config)
        assert [bucket["Name"] for bucket in s3.list_buckets()["Buckets"]] == seen


@pytest.mark.parametrize(("who", "status"), [(None, 401), ("ana", 403)])
def test_counts_are_for_nobody_unless_somebody_is_named(
    people: People, who: str | None, status: int
) -> None:
    """They name all datasets."""
    assert people.ask("GET", "/metrics", who).status_code == status


@pytest.mark.parametrize("is_part", [False, True])
def test_nothing_is_copied_out_of_what_one_may_not_read(people: People, is_part: bool) -> None:  # noqa: FBT001
    """The caller of CopyObject or UploadPartCopy reads the source, or it does not exist."""
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
def test_the_start_page_tells_each_what_they_may(
    people: People, name: str | None, said: int
) -> None:
    """A dataset is writable to those only who may write to it, and private ones are not shown."""
    html = {"accept": "text/html"}
    lead = "" if name is None else f"/~{quote(TOKENS[name], safe='')}"
    page = people.ask("GET", "/", name, headers=html).text
    below = people.ask("GET", f"{lead}/", headers=html)

    assert page.count("· writable") == below.text.count("· writable") == said
    listed = people.ask("GET", "/", name).json()["datasets"]
    assert sum(each["writable"] for each in listed) == said
    assert below.status_code == 200
    assert ('href="./private/"' in below.text) is (name is not None)
    assert ("private" in below.text) is (name is not None)


def test_a_list_below_a_token_leads_on_below_it(people: People) -> None:
    """The paths that it tells can be asked, and of `/api` too."""
    for path in ("/", "/api/datasets"):
        listed = people.ask("GET", f"/~{TOKENS['ana']}{path}").json()["datasets"]
        paths = {each["name"]: each["path"] for each in listed}
        assert paths["private"] == f"/~{TOKENS['ana']}/private/"
        assert people.ask("GET", f"{paths['private']}{KEY}").status_code == 200
