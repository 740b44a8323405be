"""Metrics, logs and traces of a running service."""

import hashlib
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Generator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urljoin

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.attacks.raw import exchange
from tests.support.commands import running
from tests.support.files import write_files
from tests.support.formats.zarr.building import build
from tests.support.processes import ROOT, environ
from tests.support.storage.listening import Handler, Listener

TOKEN: Final = "token-of-ana"
CHUNKS: Final = {"c/0/0": b"0123456789", "c/0/1": b"another", "c/1/1": b"more"}
TRACE_ID: Final = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID: Final = "b7ad6b7169203331"
CLIENT: Final = "198.51.100.7"
"""Address of a client behind a proxy."""
SECRETS: Final = (TOKEN, "signature-in-the-query")


class Span(NamedTuple):
    """A span as the collector receives it."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, Any]
    is_error: bool


class Shown(NamedTuple):
    """Metrics, log lines and spans of some requests."""

    lines: list[dict[str, Any]]
    samples: dict[tuple[str, tuple[tuple[str, str], ...]], float]
    spans: list[Span]

    def sample(self, name: str, **labels: str) -> float:
        """Return the value of a sample."""
        return self.samples[name, tuple(sorted(labels.items()))]

    def accessed(self, request_id: str) -> dict[str, Any]:
        """Return the line of a request."""
        lines = [line for line in self.lines if line["logger"] == "shardgate.access"]
        (line,) = (line for line in lines if line["request_id"] == request_id)
        return line

    def request(self, request_id: str) -> Span:
        """Return the span of a request."""
        name = "shardgate.request_id"
        (span,) = (span for span in self.spans if span.attributes.get(name) == request_id)
        return span

    def within(self, span: Span) -> list[Span]:
        """Return all spans below *span*."""
        inner = [each for each in self.spans if each.parent_id == span.span_id]
        return inner + [each for one in inner for each in self.within(one)]


class _Collector(Handler[list[Span]]):
    """Receives spans, and decodes them with OpenTelemetry's own protocol buffers."""

    def answer(self) -> None:
        """Keep the spans."""
        sent = ExportTraceServiceRequest.FromString(self.body())
        for resource in sent.resource_spans:
            names = {each.key: each.value.string_value for each in resource.resource.attributes}
            assert names["service.name"] == "shardgate"
            for scope in resource.scope_spans:
                self.server.owner += map(_span, scope.spans)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _span(sent: Any) -> Span:
    attributes = {
        each.key: getattr(each.value, each.value.WhichOneof("value")) for each in sent.attributes
    }
    ids = (sent.trace_id.hex(), sent.span_id.hex(), sent.parent_span_id.hex())
    return Span(sent.name, *ids, attributes, sent.status.code == sent.status.STATUS_CODE_ERROR)


@contextmanager
def _running(log: Path, **more: str) -> Generator[str]:
    """Run the command, stop it with SIGTERM, and keep in *log* what it said."""
    with running("serve", lines=1, **more) as (process, (line,)):
        yield urljoin(line.split()[0], "/").rstrip("/")
        _, said = process.end()
        log.write_text(said, "utf-8")


def _settings(folder: Path) -> dict[str, str]:
    for name in "open", "private":
        write_files(build(CHUNKS), folder / name)
    digest = hashlib.sha256(TOKEN.encode()).hexdigest()
    return {
        "SHARDGATE_SERVER__PORT": "0",
        "SHARDGATE_SERVER__ACCESS_LOG": "true",
        "SHARDGATE_SERVER__LOG_FORMAT": "json",
        "SHARDGATE_SERVER__METRICS": '["ana"]',
        "SHARDGATE_LIMITS__COALESCE_GAP_BYTES": "0",  # else a busy machine's store looks far away
        "SHARDGATE_CALLERS__ANA__TOKEN_SHA256": json.dumps([digest]),
        "SHARDGATE_DATASETS__OPEN__URL": str(folder / "open"),
        "SHARDGATE_DATASETS__PRIVATE__URL": str(folder / "private"),
        "SHARDGATE_DATASETS__PRIVATE__READ": '["ana"]',
        "SHARDGATE_DATASETS__DOWN__URL": "http://127.0.0.1:9/down",
    }


TRACED: Final = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
BEARER: Final = {"authorization": f"Bearer {TOKEN}"}
REQUESTS: Final[list[tuple[str, str, dict[str, str], str, int, str, str]]] = [
    ("read", "/open/c/0/0", TRACED, "open", 200, "answered", ""),
    ("hit", "/open/c/0/0", TRACED, "open", 200, "hit", ""),
    ("part", "/open/c/0/0", {"range": "bytes=1-2"}, "open", 206, "hit", ""),
    ("known", "/open/c/0/0", {"if-none-match": "*"}, "open", 304, "not_modified", ""),
    ("in-path", f"/~{TOKEN}/private/c/0/1", {}, "private", 200, "answered", "ana"),
    ("in-path-hit", f"/~{TOKEN}/private/c/0/1", {}, "private", 200, "hit", "ana"),
    ("bearer", "/private/c/1/1", BEARER, "private", 200, "answered", "ana"),
    ("nobody", "/private/c/1/1", {}, "private", 401, "refused", ""),
    ("query", f"/open/c/0/1?a={SECRETS[1]}", {}, "open", 200, "answered", ""),
    ("absent", "/open/c/7/7", {}, "open", 404, "absent", ""),
    ("spelled", "/%6fpen/c/7/7", {}, "open", 404, "absent", ""),
    ("tilde", f"/%7E{TOKEN}/private/c/7/7", {}, "private", 404, "absent", "ana"),
    ("bare", "/open", {}, "open", 307, "answered", ""),
    ("none", "/none/c/0/0", {}, "", 401, "refused", ""),
    ("put", "/open/c/0/0", {}, "open", 405, "refused", ""),
    ("down", "/down/c/9/9", {}, "down", 503, "failed", ""),
    ("metrics", "/metrics", BEARER, "", 200, "answered", "ana"),
]
"""Id, path and headers of each request, and its dataset, status, outcome and caller."""


def _ask(client: httpx.Client) -> str:
    """Send a malformed request and all others, and return the metrics."""
    exchange(str(client.base_url), b"what?\r\n\r\n")
    for request_id, path, headers, _, status, *_ in REQUESTS:
        method = "PUT" if request_id == "put" else "GET"
        answer = client.request(method, path, headers={"x-request-id": request_id, **headers})
        assert answer.status_code == status
    return answer.text


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    """Run the service, send it requests, and collect its metrics, lines and spans."""
    folder = tmp_path_factory.mktemp("observability")
    log = folder / "log"
    listener = Listener(_Collector, spans := list[Span]())
    with listener.running():
        settings = _settings(folder) | {"OTEL_EXPORTER_OTLP_ENDPOINT": listener.url}
        settings["SHARDGATE_SERVER__TRUSTED_PROXIES"] = '["127.0.0.1"]'
        headers = {"x-forwarded-for": CLIENT}
        with (
            _running(log, **settings) as url,
            httpx.Client(base_url=url, headers=headers) as client,
        ):
            text = _ask(client)
    lines = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    return Shown(lines, samples, spans)


def test_requests_are_counted_by_outcome(shown: Shown) -> None:
    """Requests are counted by dataset, method and outcome, such as hit, answered and absent."""
    name, of = "shardgate_requests_total", {"dataset": "open", "method": "GET"}

    counts = {"hit": 2, "answered": 3, "absent": 2, "not_modified": 1}
    assert {outcome: shown.sample(name, outcome=outcome, **of) for outcome in counts} == counts
    assert shown.sample(name, dataset="", method="other", outcome="refused") == 1
    timed = ("shardgate_request_seconds_count", (("method", "GET"), ("outcome", "hit")))
    assert timed not in shown.samples
    assert shown.sample(name, dataset="open", method="PUT", outcome="refused") == 1
    assert shown.sample(name, dataset="private", method="GET", outcome="hit") == 1
    assert shown.sample("shardgate_connections") == 1
    assert shown.sample("shardgate_requests_in_flight") == 1  # the scrape


def test_reads_of_the_store_are_counted_by_kind(shown: Shown) -> None:
    """Reads of the store and their bytes are counted by kind, such as shard-index and chunk."""
    of = {"store": "file", "method": "get"}

    assert shown.sample("shardgate_upstream_seconds_count", kind="shard-index", **of) == 2
    assert shown.sample("shardgate_upstream_seconds_count", kind="chunk", **of) == 4
    total = sum(map(len, CHUNKS.values())) + len(CHUNKS["c/0/1"])
    assert shown.sample("shardgate_upstream_bytes_total", kind="chunk", **of) == total


def test_caches_are_counted(shown: Shown) -> None:
    """Look-ups of the chunk and index caches are counted as hits and misses."""
    name = "shardgate_cache_lookups_total"

    assert shown.sample(name, cache="chunk", result="hit") == 3
    assert shown.sample(name, cache="chunk", result="miss") == 4
    assert shown.sample("shardgate_cache_entries", cache="chunk") == 4
    assert shown.sample(name, cache="index", result="miss") > 0


@pytest.mark.parametrize(
    ("request_id", "dataset", "status", "outcome", "caller"),
    [(request_id, *expected) for request_id, _, _, *expected in REQUESTS],
)
def test_each_request_has_a_line(  # noqa: PLR0917
    shown: Shown, request_id: str, dataset: str, status: int, outcome: str, caller: str
) -> None:
    """The access log has a line for each request with dataset, status, outcome, caller and client.

    Responses from memory have 0 ms.
    """
    line = shown.accessed(request_id)

    assert (line["dataset"], line["status"], line["outcome"]) == (dataset, status, outcome)
    assert line["caller"] == caller
    assert line["client"] == CLIENT
    assert (line["bytes"] > 0) is (status not in {304, 307})
    assert (line["ms"] > 0) is (outcome not in {"hit", "not_modified"})


def test_no_line_has_a_key_or_a_secret(shown: Shown) -> None:
    """The log contains no keys, queries or tokens at its default level."""
    text = json.dumps(shown.lines)

    assert not [secret for secret in (*SECRETS, *CHUNKS, "c/7/7") if secret in text]


def test_a_trace_continues_that_of_the_client(shown: Shown) -> None:
    """A request's span is a child of the client's, and its log line has the trace's id."""
    for request_id in "read", "hit":
        span = shown.request(request_id)
        assert (span.trace_id, span.parent_id) == (TRACE_ID, PARENT_ID)
        assert shown.accessed(request_id)["trace_id"] == TRACE_ID
    other = shown.request("in-path")
    assert other.parent_id == ""
    assert shown.accessed("in-path")["trace_id"] == other.trace_id


def test_calls_of_stores_are_spans_in_that_of_their_request(shown: Shown) -> None:
    """Calls of stores are spans below the request's, with kind, store and bytes.

    A response from memory has none.
    """
    first = shown.within(shown.request("read"))
    by_kind = {span.attributes["shardgate.kind"]: span for span in first}
    index, chunk = by_kind["shard-index"], by_kind["chunk"]

    assert index.name == "get file"
    assert index.attributes["shardgate.store"] == "file"
    assert index.attributes["shardgate.bytes"] > 0
    assert chunk.attributes["shardgate.bytes"] == len(CHUNKS["c/0/0"])
    assert shown.within(shown.request("hit")) == []


def test_failed_request_and_calls_of_its_store_are_errors(shown: Shown) -> None:
    """The span of a failed request is an error, and has the error of each call of its store."""
    down = shown.request("down")
    calls = shown.within(down)

    assert (down.is_error, shown.request("absent").is_error) == (True, False)
    assert {call.attributes.get("error.type") for call in calls} == {"StorageUnavailableError"}
    assert "error.type" not in shown.within(shown.request("read"))[0].attributes


def test_spans_name_keys_of_public_data_only(shown: Shown) -> None:
    """Spans have the keys of public datasets only, and no secret."""
    private = [span for span in shown.spans if span.attributes.get("shardgate.dataset") != "open"]

    assert shown.request("read").attributes["shardgate.key"] == "c/0/0"
    assert len(private) > 3
    assert not [key for key in CHUNKS if key in str(private)]
    assert not [secret for secret in SECRETS if secret in str(shown.spans)]


_TOKEN_PLACES: Final = [
    "/{}", "/{}/", "//{}/private/c/0/0", "/{}/private/c/0/0", "/{}/private/", "/{}/private?batch",
    "/_shard/{}/private/c/0/0", "/_shard/private/{}/c", "/_shard%2F{}/private", "/_shard/{}",
    "/private/{}/c/0/0", "/private/c/0/{}", "/open/{}", "/open/a%2F{}", "/absent/{}/c", "/down/{}",
    "/{}/down/c/0/0", "/{}/api/datasets/private/history", "/api/{}/datasets", "/api/datasets/{}",
    "/api/datasets/open/sessions/{}", "/api/tokens/{}", "/viewer/{}", "/{}/viewer/", "/healthz/{}",
    "/{}/readyz", "/metrics/{}", "/{}/metrics", "/docs/{}", "/{}/{}/open/c/0/0",
    "/private/c/0/0?token={}", "/open?list-type=2&prefix={}", "/down/?{}", "/open?delete&{}",
]  # fmt: skip
_BAD_REQUESTS: Final = [
    b"GET /%b/private HTTP/1.1\r\n\r\n",
    b"GET /%b private HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET http:%b HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /_shard/%b HTTP/3.1\r\nHost: x\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\n%b\r\n\r\n",
    b"%b\r\n\r\n",
]


@pytest.mark.parametrize(
    ("level", "log_format"),
    [("debug", "json"), pytest.param("info", "text", marks=pytest.mark.soak)],
)
def test_misplaced_token_is_not_logged(tmp_path: Path, level: str, log_format: str) -> None:
    """A token in any part of a path, query, header or malformed request is not logged.

    Keys are logged at DEBUG only, and X-Forwarded-For of an untrusted client never is.
    """
    settings = _settings(tmp_path) | {
        "SHARDGATE_SERVER__LOG_FORMAT": log_format,
        "SHARDGATE_SERVER__LOG_LEVEL": level,
        "SHARDGATE_DATASETS__DOWN__URL": "http://127.0.0.1:1/data",
        "SHARDGATE_DATASETS__DOWN__VIEW": "raw",
        "SHARDGATE_LIMITS__DEADLINE_S": "1",
    }
    log = tmp_path / "log"
    spelled = [f"{tilde}{TOKEN}" for tilde in ("~", "%7E", "%7e", "%257E")]
    with _running(log, **settings) as url, closing(HTTPConnection(url[7:], timeout=30)) as asking:
        for place, token in itertools.product(_TOKEN_PLACES, spelled):
            for method in "GET", "PUT":
                asking.request(method, place.replace("{}", token))
                asking.getresponse().read()
        for scheme in "Bearer ", "Basic ", "", "AWS4-HMAC-SHA256 Credential=":
            headers = {"Authorization": f"{scheme}{TOKEN}", "X-Forwarded-For": CLIENT}
            asking.request("GET", "/private/c/0/0", headers=headers)
            asking.getresponse().read()
        for request, token in itertools.product(_BAD_REQUESTS, spelled):
            exchange(url, request % token.encode())

    text = log.read_text("utf-8")
    assert not [each for each in (TOKEN, CLIENT) if each in text]
    for logged in ('"key":"c/0/~"', '"outcome":"hit".*"key":"c/0/0"'):
        assert (re.search(logged, text) is not None) is (level == "debug")
    assert len(text.splitlines()) > 200


def test_extras_are_not_imported_by_default() -> None:
    """Making the service imports neither OpenTelemetry's SDK nor the viewer's package."""
    code = (
        "import sys; from shardgate import Settings; from shardgate.processes import make_app; "
        "make_app(Settings()); "
        "sys.exit(any(name in sys.modules for name in "
        "('opentelemetry.sdk', 'opentelemetry.exporter', 'neuroglancer', 'tornado', "
        "'tensorstore', 'PIL')))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environ(), cwd=ROOT, check=False)

    assert done.returncode == 0
