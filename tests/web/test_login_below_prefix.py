"""Signing in at a service below a path of its host, behind nginx."""

import re
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs, urlsplit

import pytest

from shardgate.settings import ServerSettings
from shardgate.signing_in import sign_in
from tests.support.auth.browsing import (
    AUTHORIZE,
    CALLBACK,
    HTML,
    Browser,
    Page,
    begin_session,
    settings,
)
from tests.support.auth.people import TEXT
from tests.support.auth.provider import Provider
from tests.support.proxies import PREFIX, locations, proxying
from tests.support.serving import serving

_WAYS: Final = {
    "stripped, by the header": (True, ServerSettings(trusted_proxies=("127.0.0.0/8",))),
    "kept, by the setting": (False, ServerSettings(root_path=PREFIX)),
}


@pytest.fixture(scope="module", params=_WAYS)
def url(
    request: pytest.FixtureRequest, running: Provider, tmp_path_factory: pytest.TempPathFactory
) -> Generator[str]:
    """Serve the datasets below a prefix."""
    is_stripped, server = _WAYS[request.param]
    folder = tmp_path_factory.mktemp("login")
    changed = settings(running, folder).model_copy(update={"server": server})
    text = locations(is_stripped=is_stripped, is_told=bool(server.trusted_proxies))
    with serving(changed) as gateway, proxying(folder, gateway, text) as nginx:
        yield nginx + PREFIX


@pytest.fixture
def origin(url: str) -> str:
    """Return the origin of the service."""
    return url.removesuffix(PREFIX)


def test_private_page_leads_to_the_sign_in_and_back(
    browser: Browser, url: str, origin: str
) -> None:
    """A private page links to the sign-in below the prefix, which ends at that page."""
    refused = browser.client.get("/private/", headers=HTML)
    (link,) = re.findall(r'<a class="button" href="([^"]*)"', refused.text)
    begun = browser.client.get(origin + link)
    query = parse_qs(urlsplit(begun.headers["location"]).query)
    ended = browser.client.get(browser.pass_issuer(begun))

    assert link == f"{PREFIX}/login?page=%2Fprivate%2F"
    assert query["redirect_uri"] == [f"{url}{CALLBACK}"]
    assert ended.headers["location"] == f"{PREFIX}/private/"
    assert browser.client.get("/private/", headers=HTML).is_success


def test_viewers_find_the_sign_in_at_the_root_of_the_host(
    browser: Browser, url: str, origin: str
) -> None:
    """`/auth_info` names the login URL below the prefix, at the root of the host too."""
    for each in (f"{url}/auth_info", f"{origin}/auth_info"):
        assert browser.client.get(each).json() == {"login_url": f"{url}/login"}


def test_cookies_are_for_the_whole_host(browser: Browser) -> None:
    """The path of cookies is that of the host; their names have the path of the service."""
    cookie = browser.begin().headers["set-cookie"]

    assert re.match(rf"shardgate-attempt-[\w-]{{8}}-{browser.client.base_url.port}!arrays=", cookie)
    assert "; Path=/;" in cookie


def test_services_of_one_host_are_independent(running: Provider, tmp_path: Path) -> None:
    """Services below paths that look alike have sessions and sign-ins of their own."""
    paths = ("/a.b", "/a/b")
    with ExitStack() as stack:
        text = "proxy_set_header Host $http_host;"
        for each in paths:
            server = ServerSettings(root_path=each)
            changed = settings(running, tmp_path).model_copy(update={"server": server})
            gateway = stack.enter_context(serving(changed))
            text += f"location {each}/ {{ proxy_pass {gateway}; }}"
        host = stack.enter_context(proxying(tmp_path, "", text))
        browser = Browser(host)
        client = stack.enter_context(browser.client)
        begun = [client.get(f"{each}/login?page=/private/") for each in paths for _ in range(3)]
        last = [client.get(browser.pass_issuer(each)) for each in begun]
        opened = [client.get(f"{each}/private/", headers=HTML).status_code for each in paths]
        client.post(f"{paths[0]}/login/end")
        closed = [client.get(f"{each}/private/", headers=HTML).status_code for each in paths]

    assert [each.headers.get("location") for each in last] == [
        f"{each}/private/" for each in paths for _ in range(3)
    ]
    assert (opened, closed) == ([200, 200], [401, 200])


def test_viewer_gets_a_token_for_the_origin(
    browser: Browser, provider: Provider, origin: str
) -> None:
    """The message to a viewer names the origin; a link to sign in as another has the prefix."""
    token, urls = browser.page().message.values()
    bearer = {"authorization": f"Bearer {token}"}
    provider.claims = {"groups": ["others"]}

    assert urls == [origin]
    assert browser.client.get("/private/text.txt", headers=bearer).content == TEXT
    assert browser.client.get(f"/~{token}/private/text.txt").content == TEXT
    assert f'href="{PREFIX}{AUTHORIZE}?' in browser.page().response.text


def test_page_of_links_works_below_the_prefix(browser: Browser, origin: str) -> None:
    """The page of links leads to the sign-in, and makes a link whose path has the prefix."""
    led = browser.client.get("/login/tokens", headers=HTML)
    begin_session(browser)
    made = browser.client.post("/login/tokens", json={"dataset": "private"}).json()
    path = made["paths"]["private"]

    assert led.headers["location"] == f"{PREFIX}/login?page=/login/tokens"
    assert path.startswith(f"{PREFIX}/~")
    assert browser.client.get(f"{origin}{path}text.txt").content == TEXT
    assert browser.client.get("/login/tokens", headers=HTML).is_success


@pytest.mark.usefixtures("provider")
def test_command_signs_in_by_a_device_code(url: str) -> None:
    """`shardgate login URL` takes a URL with a prefix, with a final slash and without."""
    for each in (url, f"{url}/"):
        token = sign_in(each, lambda _: None, ask=str, pause=lambda _: None)
        assert token.is_valid


def test_command_signs_in_by_an_address_below_the_prefix(
    browser: Browser, provider: Provider, url: str
) -> None:
    """The address that the command prints is below the prefix, and its code brings a token."""
    provider.device = None
    told: list[str] = []

    def ask() -> str:
        address = told[-1].splitlines()[-1]
        assert address.startswith(f"{url}/login/command?")
        page = Page(browser.client.get(browser.pass_issuer(browser.client.get(address))))
        (code,) = re.findall(r"<code>([^<]{40,})</code>", page.response.text)
        return str(code)

    assert sign_in(url, told.append, ask).is_valid
