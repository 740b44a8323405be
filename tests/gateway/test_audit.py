"""`shardgate.gateway.audit`: a line for each write of the running service."""

import json
import socket
from collections.abc import Generator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import boto3
import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardgate.errors import DamagedError
from shardgate.model import ObjectRef
from shardgate.settings import CallerSettings, DatasetSettings, ServerSettings, Settings
from shardgate.storage.contract import Stat
from shardgate.storage.memory import MemoryStore
from tests.support.auth import browsing as signing_in
from tests.support.auth.provider import providing
from tests.support.committing import put_group
from tests.support.files import write_files
from tests.support.formats.zarr.building import build
from tests.support.processes import wait_until
from tests.support.server.taking import CHUNKS, NEW, wire
from tests.support.serving import client_of, serving

TOKEN: Final = "token-of-ana"
SECRET: Final = "secret-of-robot"
READING: Final = "token-of-rea"
type Line = dict[str, Any]


class Audited:
    """A client of a service, and the lines that it has logged."""

    def __init__(self, client: httpx.Client, path: Path) -> None:
        self.client = client
        self.path = path
        self._begin = len(self.all())

    def all(self) -> list[Line]:
        """Return all lines; each is one JSON object."""
        return [json.loads(line) for line in self.path.read_text("utf-8").split("\n")[:-1]]

    def lines(self, count: int = 1) -> list[Line]:
        """Return the next *count* lines."""
        begin = self._begin
        self._begin += count
        wait_until(lambda: len(self.all()) >= begin + count)
        return self.all()[begin : begin + count]

    def after(self, method: str, path: str, **request: Any) -> tuple[httpx.Response, Line]:
        """Send a request, and return the response and the next line."""
        response = self.client.request(method, path, **request)
        (line,) = self.lines()
        assert line["request_id"] == response.headers["x-request-id"]
        assert line["status"] == response.status_code
        return response, line

    def done(self, method: str, path: str, **request: Any) -> Line:
        """Send a request that succeeds, and return the next line."""
        response, line = self.after(method, path, **request)
        assert response.is_success, response.text
        assert line["outcome"] == "answered"
        return line

    @contextmanager
    def s3(self) -> Generator[Any]:
        """Open a client that signs."""
        s3 = boto3.client(
            "s3",
            endpoint_url=str(self.client.base_url),
            region_name="us-east-1",
            aws_access_key_id="robot",
            aws_secret_access_key=SECRET,
        )
        with closing(s3):
            yield s3


def _digest(token: str) -> tuple[str]:
    return (sha256(token.encode()).hexdigest(),)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Generator[tuple[httpx.Client, Path]]:
    """Serve a sharded array, objects, an empty repository and a read-only dataset."""
    folder = tmp_path_factory.mktemp("audit")
    write_files(build(CHUNKS), folder / "em")
    (folder / "repo").mkdir()
    rules: Any = {"read": ("rea",), "write": ("ana", "robot"), "writable": True, "admin": ("ana",)}
    configured = Settings(
        server=ServerSettings(audit_log=str(folder / "audit.jsonl")),
        callers={
            "ana": CallerSettings(token_sha256=_digest(TOKEN)),
            "rea": CallerSettings(token_sha256=_digest(READING)),
            "robot": CallerSettings(access_key_id="robot", secret_access_key=SECRET),
        },
        datasets={
            "em": DatasetSettings(url=(folder / "em").as_uri(), **rules),
            "any": DatasetSettings(url="memory://any", **rules),
            "repo": DatasetSettings(url=(folder / "repo").as_uri(), **rules),
            "fixed": DatasetSettings(url=(folder / "em").as_uri(), read=("ana",)),
        },
    )
    with client_of(configured) as client:
        client.headers["authorization"] = f"Bearer {TOKEN}"
        yield client, folder / "audit.jsonl"


@pytest.fixture
def audited(service: tuple[httpx.Client, Path]) -> Audited:
    """Return a reader of the lines that follow."""
    return Audited(*service)


def test_line_of_a_put_names_all_that_is_known(audited: Audited) -> None:
    """The line of a PUT has the time, the caller and its address, the key, sizes and versions."""
    before = audited.client.get("/em/c/0/1").headers["etag"]
    response, line = audited.after("PUT", "/em/c/0/1", content=NEW)

    written_at = datetime.fromisoformat(line.pop("time"))
    assert abs(datetime.now(UTC) - written_at) < timedelta(minutes=10)
    assert line == {
        "request_id": response.headers["x-request-id"],
        "caller": "ana",
        "credentials": "bearer",
        "client": "127.0.0.1",
        "action": "PUT",
        "dataset": "em",
        "key": "c/0/1",
        "status": 200,
        "outcome": "answered",
        "bytes": len(NEW),
        "before": before,
        "after": response.headers["etag"],
    }


@pytest.mark.parametrize("path", ["/em/c/1/0", "/em/@sharded/c/1/0", "/any/a%20b/c"])
def test_versions_follow_one_another(audited: Audited, path: str) -> None:
    """The version after a write of an inner chunk, shard or object is that before the next one;
    absence is null.
    """
    audited.client.delete(path, headers={"if-match": "*"})
    audited.lines()
    new = {"if-none-match": "*"}
    body = build(CHUNKS)["c/0/0"] if "@sharded" in path else NEW

    created = audited.done("PUT", path, content=body, headers=new)
    etag = {"if-match": created["after"]}
    deleted = audited.done("DELETE", path, headers=etag)
    refused, conflict = audited.after("PUT", path, content=body, headers=etag)

    assert (created["before"], created["after"]) == (None, deleted["before"])
    assert deleted["after"] is None
    assert (refused.status_code, conflict["outcome"], conflict["before"]) == (412, "refused", None)
    assert "after" not in conflict


def test_prefix_that_is_deleted_has_one_line(audited: Audited) -> None:
    """The line of a deleted prefix has it as key, and the number of deleted keys."""
    for name in "xyz":
        audited.done("PUT", f"/any/folder/{name}", content=b"1")

    line = audited.done("DELETE", "/any?prefix=folder/")

    assert (line["action"], line["key"], line["deleted"]) == ("DELETE", "folder/", 3)


def test_many_deleted_keys_have_lines_of_their_own(audited: Audited) -> None:
    """Each key of DeleteObjects has a line with its own status and version."""
    etag = audited.done("PUT", "/any/one", content=b"1")["after"]
    audited.done("PUT", "/any/two", content=b"2")
    keys = [{"Key": "one"}, {"Key": "two", "ETag": '"other"'}, {"Key": "three"}]
    with audited.s3() as s3:
        s3.delete_objects(Bucket="any", Delete={"Objects": keys})

    one, two, three = audited.lines(3)

    assert [each["key"] for each in (one, two, three)] == ["one", "two", "three"]
    assert {each["action"] for each in (one, two, three)} == {"DeleteObjects"}
    assert [each["status"] for each in (one, two, three)] == [200, 412, 200]
    assert (one["before"], three["before"], two["outcome"]) == (etag, None, "refused")
    assert {each["caller"] for each in (one, two, three)} == {"robot"}
    assert one["credentials"] == "signature"


def test_s3_operations_are_named(audited: Audited) -> None:
    """Copies, and the steps of uploads, have the names of S3; completing writes the key."""
    with audited.s3() as s3:
        put = s3.put_object(Bucket="any", Key="source", Body=b"bytes")
        copied = s3.copy_object(
            Bucket="any", Key="to", CopySource={"Bucket": "any", "Key": "source"}
        )
        names = {"Bucket": "any", "Key": "parts"}
        upload = {**names, "UploadId": s3.create_multipart_upload(**names)["UploadId"]}
        part = {"PartNumber": 1, "ETag": s3.upload_part(**upload, PartNumber=1, Body=b"12")["ETag"]}
        done = s3.complete_multipart_upload(**upload, MultipartUpload={"Parts": [part]})
        gone = {**names, "UploadId": s3.create_multipart_upload(**names)["UploadId"]}
        s3.abort_multipart_upload(**gone)

    lines = audited.lines(7)

    assert [each["action"] for each in lines] == [
        "PUT",
        "CopyObject",
        "CreateMultipartUpload",
        "UploadPart",
        "CompleteMultipartUpload",
        "CreateMultipartUpload",
        "AbortMultipartUpload",
    ]
    assert [each["key"] for each in lines] == ["source", "to", *5 * ["parts"]]
    afters = {each["action"]: each["after"] for each in lines if "after" in each}
    assert afters == {
        "PUT": put["ETag"],
        "CopyObject": copied["CopyObjectResult"]["ETag"],
        "CompleteMultipartUpload": done["ETag"],
    }


def test_refused_writers_are_logged(audited: Audited) -> None:
    """Refusals for rights have lines: of nobody, of wrong tokens, of readers, and of datasets that
    take no writes or do not exist. A token in the path is not in them.
    """
    expected = [
        ("/em/c/0/0", {"authorization": ""}, 401, "", "none"),
        ("/em/c/0/0", {"authorization": "Bearer wrong"}, 401, "", "bearer"),
        ("/em/c/0/0", {"authorization": f"Bearer {READING}"}, 403, "rea", "bearer"),
        (f"/~{READING}/em/c/0/0", {}, 403, "rea", "path"),
        ("/fixed/c/0/0", {}, 405, "ana", "bearer"),
        ("/none/c/0/0", {}, 404, "ana", "bearer"),
        ("/em/c/0/0", {"host": "evil.example"}, 421, "", "bearer"),
    ]
    for path, headers, status, caller, credentials in expected:
        _, line = audited.after("PUT", path, content=NEW, headers=headers)
        found = (line["status"], line["caller"], line["credentials"], line["outcome"])
        outcome = "absent" if status == 404 else "refused"
        assert found == (status, caller, credentials, outcome)
    logged = audited.path.read_text("utf-8")

    assert not any(secret in logged for secret in (TOKEN, READING, SECRET))


def test_tokens_in_wrong_places_are_left_out(audited: Audited) -> None:
    """A token behind the name of a dataset, or in place of its id, is not in the line."""
    token = audited.client.post("/api/tokens", json={"dataset": "em"}).json()["token"]
    audited.lines()
    anonymous = {"authorization": ""}
    _, of_key = audited.after("PUT", f"/em/~{token}/c/0", content=NEW, headers=anonymous)
    _, unknown = audited.after("PUT", f"/none/{token}/c/0", content=NEW, headers=anonymous)
    _, revoked = audited.after("DELETE", f"/api/tokens/{token}")

    assert of_key["key"] == "~/c/0"
    assert unknown["path"] == "/none/~/c/0"
    assert (revoked["path"], revoked["dataset"], revoked["status"]) == ("/api/tokens/~", "", 404)
    assert token not in audited.path.read_text("utf-8")


class _BlindStore(MemoryStore):
    """Cannot tell versions, and counts how often it is asked to."""

    stats = 0

    async def stat(self, ref: ObjectRef) -> Stat | None:
        """Refuse to tell."""
        self.stats += 1
        raise DamagedError(ref, "no header of it can be read")


def test_write_whose_version_before_is_refused_is_made(tmp_path: Path) -> None:
    """A version that the store does not tell is left out of the line, and the write is made."""
    path = tmp_path / "log"
    configured = Settings(
        server=ServerSettings(audit_log=str(path)),
        datasets={"any": DatasetSettings(url="memory://any", writable=True)},
    )
    store = _BlindStore()
    with client_of(configured, wrap=lambda _: store) as client:
        line = Audited(client, path).done("PUT", "/any/key", content=b"1")

    assert ("before" in line, line["after"] is None, store.stats) == (False, False, 1)


def test_reads_have_no_lines(audited: Audited) -> None:
    """GET, HEAD and OPTIONS have no lines."""
    for method in ("GET", "HEAD", "OPTIONS", "GET"):
        audited.client.request(method, "/em/zarr.json")
    audited.client.get("/api/datasets")
    line = audited.done("DELETE", "/any/nothing")

    assert line["key"] == "nothing"


def test_changes_of_a_repository_have_snapshots(audited: Audited) -> None:
    """Creation, commits, sessions, branches and tags have refs, and snapshots before and after."""
    route = "/api/datasets/repo"
    made = audited.done("POST", "/api/datasets", json={"name": "repo"})
    first = made["after"]
    session = audited.done("POST", f"{route}/sessions", json={})
    group = {"zarr_format": 3, "node_type": "group"}
    prefix = f"@session.{session['session']}"
    written = audited.done("PUT", f"/repo/{prefix}/zarr.json", json=group)
    committed = audited.done(
        "POST", f"{route}/sessions/{session['session']}/commit", json={"message": "one"}
    )
    discarded = audited.done("POST", f"{route}/sessions", json={})["session"]
    ended = audited.done("DELETE", f"{route}/sessions/{discarded}")
    body = {
        "branch": "main",
        "parent_id": committed["after"],
        "message": "two",
        "changes": [put_group("/x")],
    }
    direct = audited.done("POST", f"{route}/commits", json=body)
    branch = audited.done(
        "POST", f"{route}/branches", json={"name": "a/b", "snapshot_id": direct["after"]}
    )
    tip = {"if-match": f'"{direct["after"]}"'}
    reset = audited.done("PUT", f"{route}/branches/a%2Fb", json={"snapshot_id": first}, headers=tip)
    removed = audited.done("DELETE", f"{route}/branches/a%2Fb")
    tag = audited.done("POST", f"{route}/tags", json={"name": "v1", "snapshot_id": first})
    untagged = audited.done("DELETE", f"{route}/tags/v1")
    chunk = audited.done("POST", f"{route}/chunks", content=b"12")

    assert made["dataset"] == session["dataset"] == "repo"
    assert (session["ref"], session["before"]) == ("main", first)
    assert written["key"] == f"{prefix}/zarr.json"
    assert ended["path"] == f"{route}/sessions/{discarded}"
    assert (committed["ref"], committed["before"]) == ("main", first)
    assert (direct["ref"], direct["before"]) == ("main", committed["after"])
    assert (branch["ref"], branch["after"]) == ("a/b", direct["after"])
    assert (reset["ref"], reset["before"], reset["after"]) == ("a/b", direct["after"], first)
    assert (removed["ref"], removed["before"]) == ("a/b", first)
    assert (tag["ref"], tag["after"]) == ("v1", first)
    assert (untagged["ref"], untagged["before"]) == ("v1", first)
    assert (chunk["bytes"], len(chunk["chunk_id"])) == (2, 20)


@pytest.mark.parametrize(
    ("name", "document"),
    [
        ("status", {"availability": "online", "limited_availability_reason": "moved"}),
        ("flags", {"move_node": False}),
        ("metadata", {"metadata": {"a": 1}}),
        ("config", {"config": {"inline_chunk_threshold_bytes": 7}}),
    ],
)
def test_changed_settings_have_etags(audited: Audited, name: str, document: Any) -> None:
    """Status, flags, metadata and configuration have the ETags before and after."""
    if not (audited.path.parent / "repo" / "repo").exists():
        audited.done("POST", "/api/datasets", json={"name": "repo"})
    route = f"/api/datasets/repo/{name}"
    etag = audited.client.get(route).headers["etag"]
    response, line = audited.after("PUT", route, json=document, headers={"if-match": etag})
    refused, other = audited.after(
        "PUT", route, json=document, headers={"authorization": f"Bearer {READING}"}
    )

    assert (line["action"], line["path"]) == ("PUT", route)
    assert (line["before"], line["after"]) == (etag, response.headers["etag"])
    assert (refused.status_code, other["caller"]) == (403, "rea")


def test_tokens_are_logged_by_their_ids(audited: Audited) -> None:
    """Making and revoking a token has its id, and never the token."""
    response, made = audited.after("POST", "/api/tokens", json={"dataset": "em"})
    token = response.json()
    ended = audited.done("DELETE", f"/api/tokens/{token['token_id']}")

    assert (made["token_id"], made["datasets"]) == (token["token_id"], ["em"])
    assert (ended["token_id"], ended["caller"]) == (token["token_id"], "ana")
    assert token["token"] not in audited.path.read_text("utf-8")


def test_tokens_of_people_are_logged(tmp_path: Path) -> None:
    """Links that people make and revoke, tokens of commands, and signing out have lines with the
    name; a command that waits has none.
    """
    path = tmp_path / "log"
    with providing() as provider:
        configured = signing_in.settings(provider, tmp_path)
        server = configured.server.model_copy(update={"audit_log": str(path)})
        with serving(configured.model_copy(update={"server": server})) as url:
            browser = signing_in.Browser(url)
            audited = Audited(browser.client, path)
            with browser.client:
                signing_in.begin_session(browser)
                own = {"sec-fetch-site": "same-origin"}
                page = "/login/tokens"
                response, made = audited.after(
                    "POST", page, json={"dataset": "private"}, headers=own
                )
                token_id = response.json()["token_id"]
                ended = audited.done("POST", f"{page}/{token_id}/end", headers=own)
                foreign = {"sec-fetch-site": "cross-site"}
                _, refused = audited.after("POST", page, json={}, headers=foreign)
                provider.waiting = ["authorization_pending"]
                code = browser.client.post("/login/device").json()["device_code"]
                for _ in range(2):
                    browser.client.post("/login/device/token", json={"device_code": code})
                (command,) = audited.lines()
                left = audited.done("POST", "/login/end", headers=own)

    assert (made["token_id"], ended["token_id"]) == (token_id, token_id)
    assert (refused["status"], refused["caller"]) == (403, "")
    assert (command["path"], command["status"]) == ("/login/device/token", 200)
    assert {each["caller"] for each in (made, ended, command, left)} == {made["caller"]} != {""}
    assert made["credentials"] == "cookie"


def test_write_whose_client_has_gone_is_logged(audited: Audited) -> None:
    """A client that leaves within its body, and never hears an answer, has a line."""
    with wire(audited.client) as raw:
        raw.say(
            f"PUT /any/half HTTP/1.1\nauthorization: Bearer {TOKEN}\ncontent-length: 9", b"1234"
        )
        raw.connection.shutdown(socket.SHUT_RDWR)
    (line,) = audited.lines()

    assert (line["key"], line["status"], line["outcome"]) == ("half", 0, "gone")


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    name=st.binary(min_size=1, max_size=40)
    | st.sampled_from([b"\n{}", b"\xff\xfe", b'"\\', b"\x00", "\u2028\U0001f9ca".encode()]),
    is_ref=st.booleans(),
)
def test_hostile_names_are_one_valid_line(audited: Audited, name: bytes, *, is_ref: bool) -> None:
    """Any bytes as key, or name of a branch, token or dataset, are one line of JSON in UTF-8."""
    quoted = "".join(f"%{byte:02x}" for byte in name)
    if is_ref:
        ref = {"name": name.decode("utf-8", "surrogateescape"), "snapshot_id": "x"}
        body = json.dumps(ref)  # lone surrogates are escaped
        _, line = audited.after("POST", "/api/datasets/repo/branches", content=body)
        assert line["path"] == "/api/datasets/repo/branches"
        audited.after("DELETE", f"/api/tokens/{quoted}")
        audited.after("PUT", f"/{quoted}/key", content=b"1")
        return
    response, line = audited.after("PUT", f"/any/{quoted}", content=b"1")
    if response.is_success and not name.startswith(b"@"):
        assert line["key"].encode() == name
