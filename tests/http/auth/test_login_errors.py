"""`shardgate.http.auth.login`: what issuers refuse, and the ways on from it."""

import html
import re
import shutil
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs, parse_qsl, urlencode, urlsplit

import httpx
import pytest

from shardgate.settings import (
    DatasetSettings,
    IssuerSettings,
    ServerSettings,
    Settings,
)
from tests.support.http.auth.browsing import (
    AUTHORIZE,
    CALLBACK,
    VIEWER,
    Browser,
    Page,
    begin_session,
    settings,
)
from tests.support.http.auth.provider import Provider
from tests.support.serving import serving

COMMAND: Final = f"/login/command?challenge={'a' * 43}&port="
OTHER: Final = {AUTHORIZE: f"{AUTHORIZE}?other=", "/login?page=/private/": "/login?page=%2F&other="}


def prompt_of(asked: httpx.Response) -> str | None:
    """Return the prompt with which the browser is sent to the issuer."""
    query = urlsplit(str(asked.headers.get("location", ""))).query
    return dict(parse_qsl(query)).get("prompt")


def refuse(browser: Browser, asked: httpx.Response, error: str) -> httpx.Response:
    """Come back from the issuer with *error*."""
    state = parse_qs(urlsplit(asked.headers["location"]).query)["state"][0]
    query = urlencode({"error": error, "state": state})
    return browser.client.get(f"{CALLBACK}?{query}")


def links(response: httpx.Response) -> list[str]:
    """Return where the links of a page lead."""
    return [html.unescape(each) for each in re.findall('<a [^>]*href="([^"]*)"', response.text)]


@pytest.mark.parametrize("path", [f"{AUTHORIZE}?other=", "/login?page=/private/&other="])
@pytest.mark.parametrize("error", ["invalid_request", "account_selection_required"])
def test_refused_choice_of_an_account_becomes_a_login(
    browser: Browser, path: str, error: str
) -> None:
    """An issuer that refuses `select_account` is asked for `login`, for the same purpose."""
    asked = browser.begin(path)
    again = refuse(browser, asked, error)
    end = browser.client.get(browser.pass_issuer(again))

    assert (prompt_of(asked), prompt_of(again)) == ("select_account", "login")
    assert end.status_code == (200 if path.startswith(AUTHORIZE) else 303)
    assert end.headers.get("location", "/private/") == "/private/"


def test_sign_in_for_a_viewer_stays_its_own(browser: Browser) -> None:
    """The token of a sign-in that begins again goes to the page that opened the window."""
    asked = browser.begin(f"{AUTHORIZE}?other=", referer=f"{VIEWER}/")
    again = refuse(browser, asked, "invalid_request")

    assert browser.come_back(browser.pass_issuer(again)).origins == [VIEWER]


def test_refused_login_is_told(browser: Browser) -> None:
    """An issuer that refuses `login` as well is not asked a third time."""
    again = refuse(browser, browser.begin(f"{AUTHORIZE}?other="), "invalid_request")
    page = refuse(browser, again, "invalid_request")

    assert page.status_code == 403
    assert "refused the sign-in: invalid_request" in Page(page).text


@pytest.mark.parametrize("error", ["access_denied", "server_error", "temporarily_unavailable"])
def test_refusal_of_a_person_is_told(browser: Browser, error: str) -> None:
    """A person who refuses at the choice of an account, or a fault there, is not asked again."""
    assert refuse(browser, browser.begin(f"{AUTHORIZE}?other="), error).status_code == 403


@pytest.mark.parametrize(
    ("error", "prompt"),
    [
        ("login_required", "login"),
        ("interaction_required", "login"),
        ("account_selection_required", "login"),
        ("consent_required", None),
        ("invalid_scope", None),
    ],
)
def test_issuer_that_asks_nobody_unless_told_is_told(
    browser: Browser, error: str, prompt: str | None
) -> None:
    """An issuer that wants to be told to ask the person is asked with `login`, once."""
    again = refuse(browser, browser.begin(), error)

    assert prompt_of(again) == prompt
    assert prompt is not None or f"refused the sign-in: {error}" in Page(again).text
    assert prompt is None or refuse(browser, again, error).status_code == 403


@pytest.mark.parametrize("path", [AUTHORIZE, "/login?page=/private/", COMMAND])
def test_every_error_has_a_way_on(browser: Browser, provider: Provider, path: str) -> None:
    """The page of a refused sign-in links to another one, and the start page; each can be opened,
    but a command has to begin by itself.
    """
    page = refuse(browser, browser.begin(path), "access_denied")
    other, *again, start = links(page)

    assert page.status_code == 403
    assert prompt_of(browser.begin(other)) == "select_account"
    assert [browser.begin(each).status_code for each in again] == [303] * (path != COMMAND)
    assert browser.client.get(start).status_code == 200


@pytest.mark.parametrize(
    "path",
    [AUTHORIZE, "/login", COMMAND, CALLBACK, "/login/command", f"{CALLBACK}?code=a&state=b"],
)
def test_page_that_cannot_begin_has_a_way_on(browser: Browser, path: str) -> None:
    """The page of a sign-in that cannot begin, or has ended, links to another one."""
    page = browser.begin(path, **{"sec-fetch-dest": "iframe"})
    other, *_, start = links(page)

    assert page.status_code in {400, 403}
    assert browser.begin(other).status_code == 303
    assert start == "/"


def test_windows_of_one_browser_sign_in_side_by_side(browser: Browser) -> None:
    """A sign-in ends in the window that has begun it, whatever other windows have begun since."""
    begun = [browser.begin(path) for path in (AUTHORIZE, "/login?page=/private/", AUTHORIZE)]
    first, page, last = (browser.pass_issuer(each) for each in begun)

    assert browser.come_back(last).message
    assert browser.client.get(page).headers["location"] == "/private/"
    assert browser.come_back(first).message
    assert browser.attempts == []


def test_windows_of_one_browser_are_few(browser: Browser) -> None:
    """Of more than three sign-ins the oldest end, so that their cookies fit into a header."""
    page = f"/login?page=/{'"' * 999}"
    begun = [browser.begin(page) for _ in range(6)]
    ends = [browser.client.get(browser.pass_issuer(each)).status_code for each in begun]

    cookies = [each.headers.get_list("set-cookie")[0] for each in begun]
    assert ends == [403, 403, 403, 303, 303, 303]
    assert max(map(len, cookies)) < 4096
    assert sum(map(len, cookies[-3:])) < 12 * 1024


def test_device_codes_are_limited_for_each_client(provider: Provider, tmp_path: Path) -> None:
    """A client that asks for many device codes is told when to come back; others are not."""
    limited = settings(provider, tmp_path)
    server = limited.server.model_copy(update={"trusted_proxies": ("127.0.0.1/32",)})
    server = ServerSettings.model_validate(server.model_dump())
    with serving(limited.model_copy(update={"server": server})) as url:
        provider.forms.clear()

        def ask(client: str) -> httpx.Response:
            return httpx.post(f"{url}/login/device", headers={"x-forwarded-for": client})

        answers = [ask("192.0.2.1") for _ in range(30)]
        refused = [each for each in answers if each.status_code == 429]
        assert len(refused) + len(provider.forms) == 30
        assert refused
        assert all(1 <= int(each.headers["retry-after"]) <= 60 for each in refused)
        assert ask("192.0.2.2").status_code == 200


@pytest.mark.parametrize("is_missing", [False, True])
def test_slash_of_the_issuer_is_named_at_the_sign_in(
    provider: Provider, tmp_path: Path, *, is_missing: bool
) -> None:
    """The page of a sign-in names the slash at the end that the issuer, or its setting, has."""
    url = provider.url + "/" * (not is_missing)
    provider.extra = {"issuer": f"{provider.url}/" if is_missing else provider.url}
    wrong = settings(provider, tmp_path).model_copy(
        update={"issuers": {"lab": IssuerSettings(url=url, audience="shardgate")}}
    )
    with serving(wrong) as service:
        page = httpx.get(f"{service}/login")

    assert page.status_code == 424
    assert f"slash at the end, which its url in issuers {'lacks' if is_missing else 'has'}" in (
        Page(page).text
    )


def test_answer_whose_iss_has_a_slash_too_many_is_refused(
    browser: Browser, provider: Provider
) -> None:
    """An answer of the issuer with a slash too many is refused to the letter, and names it."""
    provider.answer = {"iss": f"{provider.url}/"}

    assert "has a slash at the end" in browser.page().text


@pytest.mark.parametrize(
    ("path", "host", "status", "ways"),
    [
        ("/login/mistyped", "localhost", 404, ["/login?page=%2F", "/"]),
        ("/login/end", "localhost", 405, ["/login?page=%2F", "/"]),
        ("/login", "rebound.example", 421, ["/"]),
        ("/login/callback", "rebound.example", 421, ["/"]),
        ("/docs/mistyped", "localhost", 404, ["/"]),
    ],
)
def test_error_outside_of_a_sign_in_is_a_page_to_browsers(
    browser: Browser, path: str, host: str, status: int, ways: list[str]
) -> None:
    """A mistyped path and a foreign host name are answered by a page with a way on."""
    page = browser.client.get(path, headers={"accept": "text/html", "host": host})

    assert (page.status_code, links(page)) == (status, ways)
    assert page.headers["cache-control"] == "no-store"


def test_auth_info_without_sign_in_names_the_url_of_one(tmp_path: Path) -> None:
    """Viewers, which take any JSON for an answer, find the URL of a page in an error as well."""
    closed = Settings(datasets={"a": DatasetSettings(url=str(tmp_path))})
    with serving(closed) as url:
        missing = httpx.get(f"{url}/auth_info")

    assert (missing.status_code, missing.json()["login_url"]) == (404, f"{url}/login")


def test_auth_info_under_a_foreign_name_names_the_url_of_a_page(browser: Browser) -> None:
    """A refusal of the host has the URL of a page, which says why, under the same name."""
    refused = browser.client.get("/auth_info", headers={"host": "rebound.example"})

    assert refused.status_code == 421
    assert refused.json()["login_url"] == "https://rebound.example/login"


def test_pages_of_the_api_and_the_viewer_are_not_framed(browser: Browser) -> None:
    """Pages of other origins cannot frame any page of the service."""
    for path in ("/", "/docs", "/viewer/v/page/", "/login/tokens", "/private/", AUTHORIZE):
        headers = {"accept": "text/html", "sec-fetch-dest": "document"}
        page = browser.client.get(path, headers=headers, follow_redirects=False)
        if page.headers.get("content-type", "").startswith("text/html"):
            assert "frame-ancestors '" in page.headers["content-security-policy"], path


def test_service_at_an_inner_name_of_the_issuer(provider: Provider, tmp_path: Path) -> None:
    """A sign-in at an issuer whose outer name this service cannot reach ends, if the configuration
    is read by an inner name.
    """
    outer = "https://login.example/realms/lab"
    provider.extra = {"issuer": outer, "authorization_endpoint": f"{outer}/authorize"}
    provider.claims = {"iss": outer}
    issuer = IssuerSettings(url=outer, audience="shardgate", discovery_url=provider.url)
    inner = settings(provider, tmp_path).model_copy(update={"issuers": {"lab": issuer}})
    with serving(inner) as url:
        browser = Browser(url)
        with browser.client:
            asked = browser.begin()
            assert asked.headers["location"].startswith(f"{outer}/authorize?")
            reached = asked.headers["location"].replace(outer, provider.url)
            end = browser.come_back(browser.client.get(reached).headers["location"])

    assert end.message


def test_page_of_links_without_records_has_a_way_on(provider: Provider, tmp_path: Path) -> None:
    """The page of links says that the records of tokens cannot be used, and can be tried again."""
    records = tmp_path / "records"
    records.mkdir()
    shared = settings(provider, tmp_path / "data")
    tokens = shared.tokens.model_copy(update={"url": records.as_uri()})
    with (
        serving(shared.model_copy(update={"tokens": tokens})) as url,
        (browser := Browser(url)).client,
    ):
        begin_session(browser)
        shutil.rmtree(records)
        records.write_bytes(b"")
        page = browser.client.get("/login/tokens")

    assert page.status_code == 503
    assert links(page) == ["", "/"]
