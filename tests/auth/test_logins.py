"""`shardgate.auth.logins`: cookies and tokens of people who have signed in."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest
from fastapi import Request as PageRequest
from pydantic import SecretStr

from shardgate.auth.access import Datasets
from shardgate.auth.logins import LOGIN_COOKIE, LoginTokens, caller_of_page, kinds_of
from shardgate.auth.token_records import TokenRecords
from shardgate.model import ObjectRef
from shardgate.server.request import Request
from shardgate.settings import DatasetSettings, IssuerSettings, Settings, TokenSettings
from shardgate.storage.memory import MemoryStore
from tests.support.auth.browsing import (
    HTML,
    SECRET,
    Browser,
    Page,
    begin_session,
    login_settings,
    settings,
)
from tests.support.auth.provider import Provider
from tests.support.pages import main_links
from tests.support.serving import serving

LINK = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
"""Headers of a link or frame of another site."""


@pytest.mark.parametrize(("path", "is_opened"), [("/private/", True), ("/~a/private/", False)])
async def test_cookie_is_ignored_below_a_token(path: str, *, is_opened: bool) -> None:
    """A request with a token in its path has no caller of a cookie."""
    issuers = {"lab": IssuerSettings(url="https://a", audience="-")}
    records = TokenRecords(MemoryStore(), ObjectRef("memory://tokens", ""))
    signer = LoginTokens(Settings(issuers=issuers, login=login_settings()), Datasets({}), records)
    cookie = signer.sign(LOGIN_COOKIE, {"sub": "lab:ada", "rules": [], "sid": "a"}, 60)
    headers = {
        b"accept": b"text/html",
        b"cookie": f"__Host-shardgate-session-443={cookie}".encode(),
    }
    caller = await caller_of_page(signer, Request("GET", path.encode(), [], headers, b""))

    assert (caller is not None) == is_opened


def test_cookies_of_other_services_of_the_host_are_not_found() -> None:
    """Attempts of a service are told from those of another one, whose name ends in the port."""
    own = "__Host-shardgate-attempt-abcd1234-443"
    others = [f"{own}!x-443", f"{own}!a.b", f"{own}!a!b", own.replace("443", "8443")]
    cookie = "; ".join(f"{name}=x" for name in (*others, own))
    headers = {b"host": b"a.example", b"x-forwarded-proto": b"https"}
    responder = SimpleNamespace(request=Request("GET", b"/login", [], headers, b""))
    page_headers = [(b"cookie", cookie.encode())]
    request = PageRequest({"type": "http", "headers": page_headers, "responder": responder})

    assert kinds_of(request, "shardgate-attempt") == ["shardgate-attempt-abcd1234"]


def test_person_signs_in_for_pages(browser: Browser) -> None:
    """Signing in at `/login` ends at the start page, with a cookie for HTTP and this site only."""
    response = begin_session(browser)
    cookies = response.headers.get_list("set-cookie")

    assert (response.status_code, response.headers["location"]) == (303, "/")
    assert re.fullmatch(
        rf"{browser.name('session')}=[^;]+; HttpOnly; Max-Age=3600; Path=/; SameSite=lax",
        cookies[0],
    )
    assert re.match('shardgate-attempt-[^=]*=""; HttpOnly; Max-Age=0', cookies[1])


def test_start_page_shows_what_the_person_may_see(browser: Browser) -> None:
    """The start page lists private datasets of who has signed in, and says how to."""
    before = browser.client.get("/", headers=HTML).text
    begin_session(browser)
    after = browser.client.get("/", headers=HTML).text

    assert 'href="./login"' in before
    assert "./private/" not in before
    assert 'data-post="./login/end"' in after
    assert "./private/" in after
    assert "./secret/" not in after


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/private/", HTML),
        ("/private/?at.z=3", HTML),
        ("/api/datasets/private", {}),
        ("/api/datasets/private", {"sec-fetch-site": "same-origin"}),
        ("/private/", HTML | {"sec-fetch-site": "none"}),
        ("/private/", HTML | LINK | {"sec-fetch-dest": "document"}),
    ],
)
def test_cookie_opens_pages(browser: Browser, path: str, headers: dict[str, str]) -> None:
    """The cookie opens pages of private datasets, and what pages read from the API."""
    assert browser.client.get(path, headers=headers).status_code == 401
    begin_session(browser)

    assert browser.client.get(path, headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("GET", "/private/text.txt", {}),
        ("GET", "/private/text.txt", HTML),
        ("HEAD", "/private/text.txt", {}),
        ("GET", "/private/", {}),
        ("GET", "/private/?list-type=2", HTML),
        ("PUT", "/private/text.txt", HTML),
        ("PUT", "/private/folder/", HTML),
        ("DELETE", "/private/text.txt", {}),
        ("DELETE", "/private?prefix=text", HTML),
        ("POST", "/private?delete", {}),
        ("POST", "/api/datasets/private/sessions", {}),
        ("POST", "/api/tokens", {}),
        ("GET", "/metrics", HTML),
        ("GET", "/~a/private/", HTML),
        ("GET", "/private/", HTML | {"sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"}),
        ("GET", "/private/", HTML | {"sec-fetch-site": "same-site", "sec-fetch-dest": "image"}),
        ("GET", "/private/", HTML | LINK | {"sec-fetch-dest": "iframe"}),
        ("GET", "/api/datasets/private", {"sec-fetch-site": "same-site"}),
        ("GET", "/api/datasets/private", {"sec-fetch-site": "cross-site"}),
    ],
)
def test_cookie_opens_neither_data_nor_writes(
    browser: Browser, method: str, path: str, headers: dict[str, str]
) -> None:
    """The cookie opens no data, no writes, and nothing that pages of other sites ask for."""
    begin_session(browser)

    expected = 403 if "list-type" in path else 401  # as S3 spells it
    assert browser.client.request(method, path, headers=headers).status_code == expected


@pytest.mark.parametrize(
    ("page", "end"),
    [
        ("/private/a%20b/", "/private/a%20b/"),
        *((page, "/") for page in ("//evil.example", "/\\evil.example", "https://evil.example")),
        *((page, "/") for page in ("/a\n", "", "a", "/" * 2000)),
    ],
)
def test_sign_in_ends_at_a_page_of_this_service(browser: Browser, page: str, end: str) -> None:
    """Signing in leads to a path of this service, else to the start page."""
    back = browser.pass_issuer(browser.begin(f"/login?{urlencode({'page': page})}"))

    assert browser.client.get(back).headers["location"] == end


@pytest.mark.parametrize(
    ("prefix", "port", "host", "expected"),
    [
        ("", "", "127.0.0.1:1", 401),
        ("", "", "service.example", 401),
        ("__Host-", "443", "service.example", 200),
        ("__Host-", "8443", "service.example", 401),
        ("__Host-", "8443", "service.example:8443", 200),
        ("__Host-", "8443", "service.example:9443", 401),
    ],
)
def test_cookie_counts_at_its_port_only(
    browser: Browser, prefix: str, port: str, host: str, expected: int
) -> None:
    """A cookie counts at its own port, and under a name of the service with `__Host-` only."""
    begin_session(browser)
    own = browser.name("session")
    cookie = browser.client.cookies[own]
    browser.client.cookies.clear()
    browser.client.cookies[f"{prefix}shardgate-session-{port}" if port else own] = cookie

    assert browser.client.get("/private/", headers=HTML | {"host": host}).status_code == expected


def is_valid(browser: Browser, token: str) -> bool:
    """Return whether the service takes *token*, without the cookies of the browser."""
    headers = {"authorization": f"Bearer {token}"}
    answer = httpx.get(f"{browser.client.base_url}/api/datasets", headers=headers)
    assert answer.status_code in {200, 401}
    return answer.status_code == 200


def test_signing_out_ends_the_tokens_of_the_session(browser: Browser, other: Browser) -> None:
    """Signing out ends all tokens of the browser, cached ones too, and none of another browser."""
    tokens = [each.page().message["token"] for each in (browser, browser, other)]
    cookie = browser.client.cookies[browser.name("session")]

    assert [is_valid(browser, token) for token in tokens] == [True, True, True]
    assert browser.client.post("/login/end").status_code == 204
    assert browser.name("session") not in browser.client.cookies
    assert [is_valid(browser, token) for token in tokens] == [False, False, True]
    browser.client.cookies[browser.name("session")] = cookie
    assert browser.client.get("/private/", headers=HTML).status_code == 401


@pytest.mark.parametrize("claims", [{"sub": "bob"}, {"sub": "bob", "groups": []}, {"groups": []}])
def test_another_sign_in_ends_the_session(
    browser: Browser, provider: Provider, claims: dict[str, Any]
) -> None:
    """A session ends when the browser signs in somebody else, or its owner may read no more."""
    first = browser.page().message["token"]
    cookie = browser.client.cookies[browser.name("session")]
    assert is_valid(browser, first)
    provider.claims = claims
    browser.page()
    kept = browser.client.cookies.get(browser.name("session"))
    browser.client.cookies.clear()
    browser.client.cookies[browser.name("session")] = cookie

    assert not is_valid(browser, first)
    assert browser.client.get("/private/", headers=HTML).status_code == 401
    assert kept != cookie
    assert (kept is None) == ("groups" in claims)


def test_signing_out_without_a_session_does_nothing(browser: Browser) -> None:
    """Signing out twice, or with a wrong cookie, is no error."""
    browser.client.cookies[browser.name("session")] = "a.b.c"

    assert browser.client.post("/login/end").status_code == 204
    assert browser.client.get("/login/end").status_code == 405


@pytest.mark.parametrize(
    ("site", "expected"),
    [(None, 204), ("same-origin", 204), ("none", 204), ("same-site", 403), ("cross-site", 403)],
)
def test_only_own_pages_sign_out(browser: Browser, site: str | None, expected: int) -> None:
    """A form or fetch of another site, or of another port, ends no session."""
    token = browser.page().message["token"]
    headers = {} if site is None else {"sec-fetch-site": site}
    response = browser.client.post("/login/end", headers=headers)

    assert response.status_code == expected
    assert ("set-cookie" in response.headers) == (expected == 204)
    assert is_valid(browser, token) == (expected == 403)


def test_more_rules_than_a_cookie_holds_sign_in_viewers_only(
    provider: Provider, tmp_path: Path
) -> None:
    """Somebody who fulfils hundreds of rules gets a token, but no cookie, and reads why."""
    groups = [f"group-{number}-with-a-long-name" for number in range(200)]
    provider.claims = {"groups": groups}
    many = {
        group: DatasetSettings(url=f"memory://{group}", read=(f"lab:{group}",)) for group in groups
    }
    configured = settings(provider, tmp_path).model_copy(update={"datasets": many})
    with serving(configured) as url, (browser := Browser(url)).client:
        refused = Page(begin_session(browser))
        bearer = {"authorization": f"Bearer {browser.page().message['token']}"}
        shown = browser.client.get("/api/datasets", headers=bearer).json()

    assert refused.response.status_code == 403
    assert "more rules than a cookie can hold" in refused.text
    assert browser.name("session") not in browser.client.cookies
    assert len(shown["datasets"]) == len(groups)


def test_failing_records_of_tokens_are_told(provider: Provider, tmp_path: Path) -> None:
    """While records fail, the page of links says so, and signing out removes the cookie."""
    records = tmp_path / "records"
    records.mkdir()
    shared = TokenSettings(secret=SecretStr(SECRET), url=str(records))
    served = settings(provider, tmp_path / "data").model_copy(update={"tokens": shared})
    with serving(served) as url, (browser := Browser(url)).client:
        begin_session(browser)
        shutil.rmtree(records)
        records.write_bytes(b"")
        page = browser.client.get("/login/tokens")
        failed = browser.client.post("/login/end")

    assert page.status_code == failed.status_code == 503
    assert main_links(page.text)[:2] == ["", "/"]
    assert "at the moment" in failed.json()["detail"]
    assert browser.name("session") not in browser.client.cookies
