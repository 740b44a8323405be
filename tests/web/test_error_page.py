"""`shardgate.web.error_page`: what browsers get in place of problem documents."""

import json
from http import HTTPStatus
from typing import Any, Final, cast

import pytest

from shardgate.server.asgi import request_of
from shardgate.server.problems import Failure
from shardgate.server.request import Headers, PathPrefix
from shardgate.settings import LoginSettings
from shardgate.web.error_page import ErrorPages
from tests.support.pages import main_links

HTML: Final = b"text/html,*/*;q=0.8"
SIGN_IN: Final = LoginSettings(issuer="lab", client_id="a")


async def explain(
    path: str, status: int, *, accept: bytes = HTML, login: LoginSettings = SIGN_IN
) -> tuple[dict[bytes, bytes], str]:
    """Return the headers and body of an error of *path*, below a prefix."""
    headers: Headers = [(b"host", b"lab.example"), (b"accept", accept)]
    scope: dict[str, Any] = {"method": "GET", "path": path, "headers": headers, "query_string": b""}
    request = request_of(scope, dict(headers), prefix=PathPrefix("/arrays"))
    reason = "<b>too many</b> \N{RIGHT-TO-LEFT OVERRIDE}"
    failure = Failure(HTTPStatus(status), reason)
    response = await ErrorPages(login).explain(request, failure)
    return dict(cast("Headers", response.headers)), cast("bytes", response.body).decode()


@pytest.mark.parametrize(
    ("path", "status", "ways"),
    [
        ("/login", 503, [""]),
        ("/login/callback", 429, [""]),
        ("/login/command", 504, [""]),
        ("/login/mistyped", 404, ["/arrays/login?page=%2F"]),
        ("/login", 421, []),
        ("/private/", 401, ["/arrays/login?page=%2Fprivate%2F"]),
        ("/arrays/private/", 401, ["/arrays/login?page=%2Fprivate%2F"]),
        ("/private/", 503, [""]),
        ("/private/c/0/99", 404, ["/arrays/private/"]),
        ("/private/c/0/99", 401, ["/arrays/login?page=%2Fprivate%2Fc%2F0%2F99"]),
        ("/nothing/", 404, []),
        ("/", 500, []),
        ("/~token/private/", 401, []),
        ("/~token/private/", 503, [""]),
    ],
)
async def test_page_of_an_error_leads_on(path: str, status: int, ways: list[str]) -> None:
    """A page leads to the start page and to what may help; it is neither stored nor framed."""
    headers, page = await explain(path, status)

    assert main_links(page) == [*ways, "/arrays/"]
    assert f"<h1>{HTTPStatus(status).phrase}</h1>" in page
    assert headers[b"content-type"] == b"text/html; charset=utf-8"
    assert headers[b"cache-control"] == b"no-store"
    assert b"frame-ancestors 'none'" in headers[b"content-security-policy"]
    assert (b"retry-after" in headers) == (status in {429, 503, 504})
    assert len(page.encode()) == int(headers[b"content-length"])


async def test_reason_on_a_page_is_text() -> None:
    """A reason has neither tags nor characters that reverse a line."""
    _, page = await explain("/login", 503)

    assert "&lt;b&gt;too many" in page
    assert "\N{RIGHT-TO-LEFT OVERRIDE}" not in page


async def test_page_of_an_error_of_signing_in_is_of_no_origin() -> None:
    """A page at a path of signing in has no origin, with which no viewer's sign-in could begin."""
    login, _ = await explain("/login", 503)
    other, _ = await explain("/private/", 503)

    assert b"sandbox allow-scripts" in login[b"content-security-policy"]
    assert b"sandbox" not in other[b"content-security-policy"]


async def test_service_without_sign_in_leads_to_none() -> None:
    """Where people cannot sign in, pages of errors do not lead there."""
    _, page = await explain("/private/", 401, login=LoginSettings())

    assert main_links(page) == ["/arrays/"]


@pytest.mark.parametrize(
    ("path", "accept"),
    [
        ("/login", b"application/json"),
        ("/private/", b"*/*"),
        ("/private/", b"text/html;q=0"),
        ("/private/c/0/0", b"*/*"),
        ("/api/datasets", HTML),
        ("/auth_info", HTML),
    ],
)
async def test_other_clients_get_problem_documents(path: str, accept: bytes) -> None:
    """Clients that are no browsers, and the API, get problem documents, which say so."""
    headers, body = await explain(path, 503, accept=accept)
    document = json.loads(body)

    assert headers[b"content-type"] == b"application/problem+json"
    assert headers[b"vary"] == b"Accept"
    assert document["status"] == 503
    assert document.get("login_url") in {None, "https://lab.example/arrays/login"}
    assert ("login_url" in document) == (path == "/auth_info")
