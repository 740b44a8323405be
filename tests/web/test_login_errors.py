"""`shardgate.web.login`: what issuers refuse, and the ways on from it."""

from pathlib import Path
from typing import Final
from urllib.parse import parse_qs, parse_qsl, urlencode, urlsplit

import httpx
import pytest

from shardgate.settings import IssuerSettings, ServerSettings
from tests.support.auth.browsing import (
    AUTHORIZE,
    CALLBACK,
    HTML,
    VIEWER,
    Browser,
    Page,
    begin_session,
    settings,
)
from tests.support.auth.provider import Provider
from tests.support.pages import main_links
from tests.support.serving import client_of, serving

COMMAND: Final = f"/login/command?challenge={'a' * 43}&port="


def prompt_of(asked: httpx.Response) -> str | None:
    """Return the prompt with which the browser is sent to the issuer."""
    query = urlsplit(str(asked.headers.get("location", ""))).query
    return dict(parse_qsl(query)).get("prompt")


def refuse(browser: Browser, asked: httpx.Response, error: str) -> httpx.Response:
    """Come back from the issuer with *error*."""
    state = parse_qs(urlsplit(asked.headers["location"]).query)["state"][0]
    query = urlencode({"error": error, "state": state})
    return browser.client.get(f"{CALLBACK}?{query}")


@pytest.mark.parametrize("path", [f"{AUTHORIZE}?other=", "/login?page=/private/&other="])
def test_refused_choice_of_an_account_becomes_a_login(browser: Browser, path: str) -> None:
    """An issuer that refuses `select_account` is asked for `login`, once, for the same purpose."""
    asked = browser.begin(path, referer=f"{VIEWER}/")
    again = refuse(browser, asked, "invalid_request")
    end = browser.come_back(browser.pass_issuer(again))
    login = refuse(browser, browser.begin(path), "invalid_request")
    refused = Page(refuse(browser, login, "invalid_request"))

    assert (prompt_of(asked), prompt_of(again)) == ("select_account", "login")
    if path.startswith(AUTHORIZE):
        assert end.origins == [VIEWER]
    else:
        assert end.response.headers["location"] == "/private/"
    assert refused.response.status_code == 403
    assert "refused the sign-in: invalid_request" in refused.text


@pytest.mark.parametrize("path", [AUTHORIZE, "/login?page=/private/", COMMAND])
def test_every_error_has_a_way_on(browser: Browser, provider: Provider, path: str) -> None:
    """The page of a refused sign-in links to another one, to its own, and to the start page."""
    begun = browser.begin(path)
    page = refuse(browser, begun, "access_denied")
    other, *again, start = main_links(page.text)

    assert page.status_code == 403
    assert "refused the sign-in: access_denied" in Page(page).text
    assert "has begun no sign-in" in Page(refuse(browser, begun, "access_denied")).text
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
    other, *_, start = main_links(page.text)

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
    """The oldest of more than three sign-ins end, so that their cookies fit into a header."""
    page = f"/login?page=/{'"' * 999}"
    begun = [browser.begin(page) for _ in range(6)]
    ends = [browser.client.get(browser.pass_issuer(each)).status_code for each in begun]

    cookies = [each.headers.get_list("set-cookie")[0] for each in begun]
    assert ends == [403, 403, 403, 303, 303, 303]
    assert max(map(len, cookies)) < 4096
    assert sum(map(len, cookies[-3:])) < 12 * 1024


def test_device_codes_are_limited_for_each_client(provider: Provider, tmp_path: Path) -> None:
    """A client that asks for many device codes is told when to come back; others are not."""
    server = ServerSettings(trusted_proxies=("127.0.0.1/32",))
    limited = settings(provider, tmp_path).model_copy(update={"server": server})
    provider.forms.clear()
    with client_of(limited) as client:

        def ask(address: str) -> httpx.Response:
            return client.post("/login/device", headers={"x-forwarded-for": address})

        answers = [ask("192.0.2.1") for _ in range(30)]
        other = ask("192.0.2.2")

    refused = [each for each in answers if each.status_code == 429]
    assert len(answers) - len(refused) == len(provider.forms) - 1
    assert refused
    assert all(1 <= int(each.headers["retry-after"]) <= 60 for each in refused)
    assert other.status_code == 200


def test_slash_of_the_issuer_is_named_at_the_sign_in(provider: Provider, tmp_path: Path) -> None:
    """The page of a sign-in names the slash at the end that the setting of the issuer lacks."""
    provider.extra = {"issuer": f"{provider.url}/"}
    with client_of(settings(provider, tmp_path)) as client:
        page = client.get("/login")

    assert page.status_code == 424
    assert "slash at the end, which its url in issuers lacks" in Page(page).text


@pytest.mark.parametrize(
    ("path", "host", "status", "ways"),
    [
        ("/login/mistyped", "localhost", 404, ["/login?page=%2F", "/"]),
        ("/login/end", "localhost", 405, ["/login?page=%2F", "/"]),
        ("/login", "rebound.example", 421, ["/"]),
        (CALLBACK, "rebound.example", 421, ["/"]),
        (AUTHORIZE, "rebound.example", 421, ["/"]),
        ("/docs/mistyped", "localhost", 404, ["/"]),
    ],
)
def test_error_outside_of_a_sign_in_is_a_page_to_browsers(
    browser: Browser, path: str, host: str, status: int, ways: list[str]
) -> None:
    """A mistyped path and a foreign host name are answered by a page with a way on."""
    page = browser.client.get(path, headers={"accept": "text/html", "host": host})

    assert (page.status_code, main_links(page.text)) == (status, ways)
    assert page.headers["cache-control"] == "no-store"


def test_auth_info_under_a_foreign_name_names_the_url_of_a_page(browser: Browser) -> None:
    """A refusal of the host has the URL of a page, which says why, under the same name."""
    refused = browser.client.get("/auth_info", headers={"host": "rebound.example"})

    assert refused.status_code == 421
    assert refused.json()["login_url"] == "https://rebound.example/login"


def test_pages_are_not_framed(browser: Browser) -> None:
    """Pages of other origins cannot frame any page of the service."""
    begin_session(browser)
    for path in ("/", "/docs", "/viewer/v/page/", "/private/", "/login/tokens", "/login/command"):
        page = browser.client.get(path, headers=HTML)
        assert page.headers["content-type"].startswith("text/html"), path
        assert "frame-ancestors '" in page.headers["content-security-policy"], path


def test_service_at_an_inner_name_of_the_issuer(provider: Provider, tmp_path: Path) -> None:
    """A sign-in ends where only an inner name leads to the configuration of the issuer."""
    outer = "https://login.example/realms/lab"
    provider.extra = {"issuer": outer, "authorization_endpoint": f"{outer}/authorize"}
    provider.claims = {"iss": outer}
    issuer = IssuerSettings(url=outer, audience="shardgate", discovery_url=provider.url)
    inner = settings(provider, tmp_path).model_copy(update={"issuers": {"lab": issuer}})
    with serving(inner) as url, (browser := Browser(url)).client:
        location = browser.begin().headers["location"]
        reached = location.replace(outer, provider.url)
        end = browser.come_back(browser.client.get(reached).headers["location"])

    assert location.startswith(f"{outer}/authorize?")
    assert end.message
