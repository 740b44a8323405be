"""`shardgate.http.auth.login`: signing in from a viewer, over HTTP."""

import html
import json
import logging
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qs, urlencode, urlsplit

import httpx
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st
from pydantic import SecretStr

from shardgate.http.auth.access import Caller, Datasets
from shardgate.http.auth.login import LoginTokens, caller_of_page
from shardgate.http.request import Request
from shardgate.settings import (
    DatasetSettings,
    IssuerSettings,
    LoginSettings,
    ServerSettings,
    Settings,
    TokenSettings,
)
from tests.http.auth.people import TEXT
from tests.http.auth.provider import CLIENT_ID, CLIENT_SECRET, Provider, providing
from tests.support.files import write_files
from tests.support.serving import serving

VIEWER: Final = "https://viewer.example"
OTHER: Final = "https://other-viewer.example"
AUTHORIZE: Final = "/login/api/v1/authorize"
CALLBACK: Final = "/login/callback"
SECRET: Final = "one secret for all replicas of a service"


def login_settings(**changes: Any) -> LoginSettings:
    """Return settings of signing in, with *changes*."""
    good = {
        "issuer": "lab",
        "client_id": CLIENT_ID,
        "client_secret": SecretStr(CLIENT_SECRET),
        "viewers": (VIEWER, OTHER),
    }
    return LoginSettings(**{**good, **changes})


def settings(provider: Provider, folder: Path, **changes: Any) -> Settings:
    """Return settings of a public dataset, one for the lab, and one for others."""
    rules = {"open": ("public",), "private": ("lab:lab",), "secret": ("lab:chiefs",)}
    rules |= {"mine": ("lab:email=eve@a.example",)}
    write_files({f"{name}/text.txt": TEXT for name in rules}, folder)
    return Settings(
        server=ServerSettings(hosts=("service.example",)),
        issuers={"lab": IssuerSettings(url=provider.url, audience="shardgate")},
        login=login_settings(**changes),
        tokens=TokenSettings(secret=SecretStr(SECRET)),
        datasets={
            name: DatasetSettings(
                url=str(folder / name),
                read=rule,
                writable=name == "private",
                write=("lab:lab",) if name == "private" else None,
            )
            for name, rule in rules.items()
        },
    )


class Page(NamedTuple):
    """The page that ends a sign-in."""

    response: httpx.Response

    @property
    def text(self) -> str:
        """What it says."""
        found = re.search(r"<p[^>]*>(.*?)</p>", self.response.text)
        assert found
        return html.unescape(found[1])

    @property
    def message(self) -> dict[str, Any]:
        """The message to the opener; empty if there is none."""
        return dict(json.loads(self._data("message") or "{}"))

    @property
    def origins(self) -> list[str]:
        """The origins that it is sent to."""
        return list(json.loads(self._data("origins")))

    def _data(self, name: str) -> str:
        found = re.search(rf'data-{name}="([^"]*)"', self.response.text)
        assert found
        return html.unescape(found[1])


class Browser:
    """A browser with cookies, which follows redirects when told to."""

    def __init__(self, url: str) -> None:
        self.client = httpx.Client(base_url=url, timeout=60, verify=False)  # noqa: S501 - http

    def name(self, kind: str) -> str:
        """Return the name of a cookie."""
        return f"shardgate-{kind}-{self.client.base_url.port}"

    def begin(self, path: str = AUTHORIZE, **headers: str) -> httpx.Response:
        """Open the window."""
        return self.client.get(path, headers=headers)

    def sign_in(self, **headers: str) -> str:
        """Open the window and sign in; return the URL that the issuer sends the browser to."""
        begun = self.begin(**headers)
        assert begun.status_code == 303, Page(begun).text
        return str(self.client.get(begun.headers["location"]).headers["location"])

    def come_back(self, url: str, **headers: str) -> Page:
        """Follow the issuer's redirect to *url*."""
        return Page(self.client.get(url, headers=headers))

    def page(self, **headers: str) -> Page:
        """Sign in, and return the page at the end."""
        return self.come_back(self.sign_in(**headers))


@pytest.fixture(scope="module")
def running() -> Generator[Provider]:
    """Run a provider."""
    with providing() as provider:
        yield provider


@pytest.fixture
def provider(running: Provider) -> Generator[Provider]:
    """Return the provider, which follows the specifications."""
    yield running
    running.reset()


@pytest.fixture(scope="module")
def url(running: Provider, tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """Serve the datasets."""
    with serving(settings(running, tmp_path_factory.mktemp("login"))) as url:
        yield url


@pytest.fixture
def browser(provider: Provider, url: str) -> Generator[Browser]:
    """Open a browser without cookies."""
    browser = Browser(url)
    with browser.client:
        yield browser


@pytest.fixture
def other(provider: Provider, url: str) -> Generator[Browser]:
    """Open a browser of somebody else."""
    browser = Browser(url)
    with browser.client:
        yield browser


def test_auth_info_names_the_login_url(browser: Browser, url: str) -> None:
    """`/auth_info` names the URL to sign in at, and pages of any allowed origin may read it."""
    response = browser.client.get("/auth_info", headers={"origin": VIEWER})

    assert response.json() == {"login_url": f"{url}/login"}
    assert response.headers["access-control-allow-origin"] == "*"
    assert response.headers["cache-control"] == "no-store"


def test_browser_is_sent_to_the_issuer_with_pkce(browser: Browser, provider: Provider) -> None:
    """The issuer is asked for a code with state, nonce and an S256 challenge, new each time."""
    locations = [urlsplit(browser.begin().headers["location"]) for _ in range(2)]
    first, second = (
        {name: value for name, [value] in parse_qs(location.query).items()}
        for location in locations
    )

    assert locations[0]._replace(query="").geturl() == f"{provider.url}/authorize"
    assert first.keys() == second.keys()
    assert {name for name in first if first[name] != second[name]} == {
        *("state", "nonce", "code_challenge")
    }
    assert first["response_type"] == "code"
    assert first["client_id"] == CLIENT_ID
    assert first["scope"] == "openid"
    assert first["code_challenge_method"] == "S256"
    assert first["redirect_uri"] == f"{browser.client.base_url}{CALLBACK}"


def test_cookie_of_an_attempt_is_short_and_bound(browser: Browser) -> None:
    """The cookie of an attempt is for this host, minutes and HTTP only, not for other sites."""
    cookie = browser.begin().headers["set-cookie"]

    assert re.fullmatch(
        rf"{browser.name('attempt')}=[^;]+; HttpOnly; Max-Age=600; Path=/; SameSite=lax", cookie
    )


def test_cookie_of_another_port_is_another(browser: Browser) -> None:
    """Over plain http the cookie of a service on another port of the host is ignored."""
    begin_session(browser)
    headers = HTML | {"host": "127.0.0.1:1"}

    assert browser.client.get("/private/", headers=headers).status_code == 401


def test_cookie_cannot_be_set_by_others_over_https(browser: Browser) -> None:
    """Behind TLS the cookie has the prefix that keeps other hosts from setting it."""
    headers = {"host": "service.example", "x-forwarded-proto": "https"}
    begun = browser.client.get(AUTHORIZE, headers=headers)

    assert begun.headers["set-cookie"].startswith("__Host-shardgate-attempt=")
    assert "; Secure" in begun.headers["set-cookie"]
    assert (
        "redirect_uri=https%3A%2F%2Fservice.example%2Flogin%2Fcallback"
        in (begun.headers["location"])
    )


def test_token_goes_to_the_listed_origins_only(browser: Browser, url: str) -> None:
    """The message has the token and our origin, and is addressed to the listed origins."""
    page = browser.page()

    assert page.response.status_code == 200
    assert page.message.keys() == {"token", "app_urls"}
    assert page.message["app_urls"] == [url]
    assert page.origins == [VIEWER, OTHER]
    assert "lab:ada has signed in" in page.text


def test_token_goes_to_the_page_that_opened_the_window(browser: Browser) -> None:
    """Where the browser names the page that opened the window, no other gets the token."""
    assert browser.page(referer=f"{VIEWER}/").origins == [VIEWER]


def test_page_with_a_token_is_neither_kept_nor_framed(browser: Browser) -> None:
    """The page is not stored, framed or named as a referrer, and runs its own script only."""
    headers = browser.page().response.headers
    policy = headers["content-security-policy"]

    assert headers["cache-control"] == "no-store"
    assert headers["referrer-policy"] == "no-referrer"
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert re.search(r"script-src 'sha256-[^']+'(;|$)", policy)
    assert "cross-origin-opener-policy" not in headers


def test_token_lets_read_what_its_rules_say(browser: Browser) -> None:
    """The token lets read the dataset of the group, in a header or a path, and no other."""
    token = browser.page().message["token"]
    bearer = {"authorization": f"Bearer {token}"}

    def status(path: str, **headers: str) -> int:
        return browser.client.get(path, headers=headers).status_code

    assert status("/private/text.txt") == 401
    assert status("/private/text.txt", **bearer) == 200
    assert status(f"/~{token}/private/text.txt") == 200
    assert status("/secret/text.txt", **bearer) == 404


def test_verified_address_is_a_right(browser: Browser, provider: Provider) -> None:
    """A dataset whose rule is an address is read by who has verified it at the issuer."""
    provider.claims = {"groups": [], "email": "eve@a.example", "email_verified": True}
    bearer = {"authorization": f"Bearer {browser.page().message['token']}"}
    mine, others = (
        browser.client.get(f"/{name}/text.txt", headers=bearer).status_code
        for name in ("mine", "private")
    )

    assert (mine, others) == (200, 404)


def test_token_lets_neither_write_nor_make_tokens(browser: Browser) -> None:
    """The token does not write, although its holder may, and makes no other token."""
    token = browser.page().message["token"]
    bearer = {"authorization": f"Bearer {token}"}
    put = browser.client.put("/private/new.txt", content=b"-", headers=bearer)
    made = browser.client.post("/api/tokens", json={"dataset": "private"}, headers=bearer)

    assert (put.status_code, made.status_code) == (403, 403)


def test_caller_without_rights_gets_no_token(browser: Browser, provider: Provider) -> None:
    """Somebody who may read no private dataset gets no token, and a page that says so."""
    provider.claims = {"groups": ["guests"], "sub": "eve"}
    page = browser.page()

    assert page.response.status_code == 403
    assert "lab:eve has signed in, but may read no dataset here" in page.text
    assert not page.message


def test_a_frame_cannot_sign_in(browser: Browser) -> None:
    """A frame of a page is refused when it begins, and when it comes back."""
    frame = {"sec-fetch-dest": "iframe", "sec-fetch-mode": "navigate"}
    back = browser.sign_in()

    assert browser.begin(**frame).status_code == 403
    assert browser.come_back(back, **frame).response.status_code == 403


def test_script_of_a_page_cannot_sign_in(browser: Browser) -> None:
    """A fetch of a page's script is refused when it begins, and when it comes back."""
    fetch = {"sec-fetch-dest": "empty", "sec-fetch-mode": "cors"}
    back = browser.sign_in()

    assert browser.begin(**fetch).status_code == 403
    assert browser.come_back(back, **fetch).response.status_code == 403


@pytest.mark.parametrize(
    "referer",
    [
        "https://evil.example/",
        f"{VIEWER}.evil.example/",
        "https://viewer.example:444/",
        "http://viewer.example/",
        "https://evil@viewer.example/",
        "null",
        "[",
    ],
)
def test_page_that_is_not_listed_cannot_begin(browser: Browser, referer: str) -> None:
    """A window that a page of another origin has opened is refused in words."""
    begun = browser.begin(referer=referer)

    assert begun.status_code == 403
    assert "login.viewers does not name" in Page(begun).text
    assert "set-cookie" not in begun.headers


@pytest.mark.parametrize("is_named", [False, True])
def test_own_page_cannot_begin_for_a_viewer(browser: Browser, url: str, *, is_named: bool) -> None:
    """A script of the service's own pages gets no token, unless the settings list its origin."""
    begun = browser.begin(
        **({"referer": f"{url}/docs"} if is_named else {"sec-fetch-site": "same-origin"})
    )

    assert begun.status_code == 403
    assert f"login.viewers does not name {url}" in Page(begun).text


def test_service_without_viewers_begins_for_none(provider: Provider, tmp_path: Path) -> None:
    """Without origins in the settings no window begins a sign-in, whoever has opened it."""
    with serving(settings(provider, tmp_path, viewers=())) as url:
        begun = httpx.get(url + AUTHORIZE)

    assert begun.status_code == 403
    assert "login.viewers does not name any page" in Page(begun).text


def test_foreign_redirect_uri_is_ignored(browser: Browser) -> None:
    """Parameters of the window's URL change nothing that is sent to the issuer."""
    evil = "https://evil.example/"
    begun = browser.begin(f"{AUTHORIZE}?redirect_uri={evil}&redirect={evil}&state=a&nonce=b")
    query = parse_qs(urlsplit(begun.headers["location"]).query)

    assert query["redirect_uri"] == [f"{browser.client.base_url}{CALLBACK}"]
    assert "evil" not in begun.headers["location"]
    assert query["state"] != ["a"]


@pytest.mark.parametrize("path", [AUTHORIZE, CALLBACK, "/auth_info", "/login", "/login/command"])
def test_slash_too_many_is_not_found(browser: Browser, path: str) -> None:
    """A slash at the end is 404, no redirect, which would take the code to plain http."""
    headers = {"host": "service.example", "x-forwarded-proto": "https"}
    response = browser.client.get(f"{path}/?code=a", headers=headers)

    assert response.status_code == 404
    assert "location" not in response.headers


@pytest.mark.parametrize("path", [AUTHORIZE, CALLBACK, "/auth_info"])
def test_unknown_host_is_refused(browser: Browser, path: str) -> None:
    """Sign-in under a host name that is not of the service is refused."""
    assert browser.client.get(path, headers={"host": "rebound.example"}).status_code == 421


def test_sign_in_over_plain_http_is_refused(browser: Browser) -> None:
    """Sign-in under a name of the service without TLS is refused."""
    begun = browser.begin(host="service.example")

    assert begun.status_code == 403
    assert "needs https" in Page(begun).text


@pytest.mark.parametrize("path", [AUTHORIZE, CALLBACK, "/auth_info"])
def test_sign_in_below_a_token_is_refused(browser: Browser, path: str) -> None:
    """Below a token in the path there is no sign-in."""
    assert browser.client.get(f"/~token{path}").status_code == 400


def test_another_browser_cannot_come_back(browser: Browser, other: Browser) -> None:
    """The issuer's redirect is worth nothing in a browser that has begun no sign-in."""
    back = browser.sign_in()
    page = other.come_back(back)

    assert page.response.status_code == 403
    assert "has begun no sign-in" in page.text
    assert not page.message


def test_any_replica_finishes_a_sign_in(
    browser: Browser, provider: Provider, tmp_path: Path
) -> None:
    """A sign-in that one replica has begun is finished by another, under their common name."""
    headers = {"host": "service.example", "x-forwarded-proto": "https"}
    begun = browser.begin(**headers)
    cookie = begun.headers["set-cookie"].partition(";")[0]
    back = urlsplit(browser.client.get(begun.headers["location"]).headers["location"])
    with serving(settings(provider, tmp_path)) as url:
        page = Page(
            httpx.get(f"{url}{back.path}?{back.query}", headers={**headers, "cookie": cookie})
        )
    token = page.message["token"]
    response = browser.client.get("/private/text.txt", headers={"authorization": f"Bearer {token}"})

    assert back.netloc == "service.example"
    assert page.message["app_urls"] == ["https://service.example"]
    assert response.status_code == 200


def test_code_of_another_person_cannot_be_injected(browser: Browser, other: Browser) -> None:
    """A code of one browser is refused in another one, even under that one's state."""
    stolen = parse_qs(urlsplit(browser.sign_in()).query)["code"][0]
    own = urlsplit(other.sign_in())
    state = parse_qs(own.query)["state"][0]
    page = other.come_back(f"{CALLBACK}?code={stolen}&state={state}")

    assert page.response.status_code == 403
    assert "invalid_grant" in page.text
    assert not page.message


def test_state_of_another_browser_is_refused(browser: Browser, other: Browser) -> None:
    """The answer for another browser's attempt is refused before its code is used."""
    browser.begin()
    page = browser.come_back(other.sign_in())

    assert page.response.status_code == 403
    assert "belongs to another sign-in" in page.text
    assert other.page().message


def test_replayed_answer_is_refused(browser: Browser) -> None:
    """An answer is worth something once: its cookie is gone, and its code used."""
    back = browser.sign_in()
    cookies = dict(browser.client.cookies)
    assert browser.come_back(back).message

    again = browser.come_back(back)
    assert again.response.status_code == 403
    assert "has begun no sign-in" in again.text
    browser.client.cookies.update(cookies)
    assert "is over" in browser.come_back(back).text


def test_failed_answer_ends_the_attempt(browser: Browser, provider: Provider) -> None:
    """After an answer with the state of the attempt it is over, whatever else the answer says."""
    provider.answer = {"code": None, "error": "access_denied"}
    back = browser.sign_in()
    browser.come_back(back)

    assert "has begun no sign-in" in browser.come_back(back).text


@pytest.mark.parametrize("query", ["", "?code=a", "?code=a&state=b", "?state=a&state=b"])
def test_page_that_does_not_know_the_state_cancels_nothing(browser: Browser, query: str) -> None:
    """A sign-in goes on after another site has opened the URL that the issuer sends browsers to."""
    back = browser.sign_in()
    assert not browser.come_back(f"{CALLBACK}{query}").message

    assert browser.come_back(back).message


@pytest.mark.parametrize(
    "cookie", ["", "a", "a.b.c", "eyJhbGciOiJub25lIiwidHlwIjoic2hhcmRnYXRlLWF0dGVtcHQrand0In0.e30."]
)
def test_forged_cookie_is_refused(browser: Browser, cookie: str) -> None:
    """A cookie that the service has not signed begins nothing."""
    back = browser.sign_in()
    browser.client.cookies.clear()
    browser.client.cookies[browser.name("attempt")] = cookie

    assert "has begun no sign-in" in browser.come_back(back).text


def test_token_is_no_cookie_and_no_cookie_a_token(browser: Browser) -> None:
    """A token in the place of the cookie is refused, and the cookie as a token."""
    back = browser.sign_in()
    cookie = browser.client.cookies[browser.name("attempt")]
    token = browser.page().message["token"]
    browser.client.cookies.clear()
    browser.client.cookies[browser.name("attempt")] = token
    bearer = {"authorization": f"Bearer {cookie}"}

    assert "has begun no sign-in" in browser.come_back(back).text
    assert browser.client.get("/private/text.txt", headers=bearer).status_code == 401


@pytest.mark.parametrize("name", ["code", "state", "iss"])
def test_repeated_parameter_is_refused(browser: Browser, name: str) -> None:
    """An answer with a repeated parameter is refused."""
    page = browser.come_back(f"{browser.sign_in()}&{name}=a&{name}=b")

    assert page.response.status_code == 400
    assert not page.message


def test_answer_of_another_issuer_is_refused(browser: Browser, provider: Provider) -> None:
    """An answer that names another issuer is refused before its code is used (RFC 9207)."""
    provider.answer = {"iss": "https://evil.example"}
    provider.forms.clear()
    page = browser.page()

    assert "not from the issuer that was asked" in page.text
    assert not provider.forms


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        ({"nonce": "another"}, "the ID token belongs to another sign-in"),
        ({"nonce": None}, "the ID token belongs to another sign-in"),
        ({"aud": "another"}, "is for another audience"),
        ({"aud": [CLIENT_ID, "another"]}, "issued to another service"),
        ({"azp": "another"}, "issued to another service"),
        ({"aud": [CLIENT_ID, "another"], "azp": "another"}, "issued to another service"),
        ({"iss": "https://evil.example"}, "is malformed"),
        ({"exp": 1}, "has expired"),
        ({"exp": None}, "has no exp"),
        ({"sub": None}, "has no sub"),
        ({"sub": "a\nb"}, "cannot be a name"),
    ],
)
def test_wrong_id_token_is_refused(
    browser: Browser, provider: Provider, claims: dict[str, object], reason: str
) -> None:
    """An ID token for another sign-in, service or time signs nobody in."""
    provider.claims = claims
    page = browser.page()

    assert page.response.status_code in {401, 403}
    assert reason in page.text
    assert not page.message


@pytest.mark.parametrize("azp", [None, CLIENT_ID])
def test_id_token_of_this_service_is_accepted(
    browser: Browser, provider: Provider, azp: str | None
) -> None:
    """An ID token for this service alone, or for several but issued to it, signs in."""
    provider.claims = {"azp": azp, "aud": [CLIENT_ID, "another"] if azp else [CLIENT_ID]}

    assert browser.page().message


def test_id_token_of_another_key_is_refused(browser: Browser, provider: Provider) -> None:
    """An ID token that is not signed by the issuer's key is refused."""
    provider.signs_with = "second"
    page = browser.page()

    assert page.response.status_code == 401
    assert "is not signed by its issuer" in page.text
    assert not page.message


@pytest.mark.parametrize(
    ("refusal", "status", "reason"),
    [
        ((400, {"error": "invalid_grant"}), 403, "refused the sign-in: invalid_grant"),
        ((401, {"error": "<b>bold</b>"}), 403, "refused the sign-in."),
        ((200, {"access_token": "a"}), 403, "sent no ID token"),
        ((200, {"id_token": "a.b.c"}), 403, "sent no ID token"),
        ((200, []), 403, "sent no ID token"),
        ((500, {}), 503, "the issuer cannot be asked at the moment"),
        ((302, {}), 503, "the issuer cannot be asked at the moment"),
    ],
)
def test_refusal_of_the_issuer_is_told(
    browser: Browser, provider: Provider, refusal: tuple[int, object], status: int, reason: str
) -> None:
    """What the issuer says instead of a token is told in words, without its markup."""
    provider.refusal = refusal
    page = browser.page()

    assert page.response.status_code == status
    assert reason in page.text
    assert "<b>" not in page.response.text


def test_fault_of_the_issuer_is_logged_only(
    browser: Browser, provider: Provider, caplog: pytest.LogCaptureFixture
) -> None:
    """The page does not show the URL and the fault of an issuer, which the log has."""
    provider.refusal = 500, {}
    with caplog.at_level(logging.WARNING, logger="shardgate"):
        page = browser.page()

    assert provider.url not in page.response.text
    assert f"{provider.url}: its token_endpoint answers 500" in caplog.text


def test_refused_consent_is_told(browser: Browser, provider: Provider) -> None:
    """Somebody who refuses at the issuer reads so."""
    provider.answer = {"code": None, "error": "access_denied"}

    assert "refused the sign-in: access_denied" in browser.page().text


TEXTS: Final = st.text(st.characters(codec="utf-8"), max_size=40)
HEADERS: Final = st.text(st.characters(min_codepoint=33, max_codepoint=255), max_size=40)


@given(answer=st.lists(st.tuples(st.sampled_from(["code", "state", "iss", "error", "a"]), TEXTS)))
@settings_of_hypothesis(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_answer_but_the_issuers_is_refused(
    browser: Browser, answer: list[tuple[str, str]]
) -> None:
    """Whatever a browser brings back instead of the issuer's answer is refused, in a page."""
    browser.begin()
    page = browser.come_back(f"{CALLBACK}?{urlencode(answer)}")

    assert page.response.status_code in {400, 403}
    assert page.text.startswith("You are not signed in: ")
    assert not page.message


@given(cookie=HEADERS, referer=HEADERS, host=st.one_of(st.none(), HEADERS))
@settings_of_hypothesis(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_header_is_answered(
    browser: Browser, cookie: str, referer: str, host: str | None
) -> None:
    """Headers of any characters open nothing, and are no fault of the service."""
    headers = {
        "cookie": f"{browser.name('session')}={cookie}",
        "referer": referer,
        "accept": "text/html",
    }
    headers |= {} if host is None else {"host": host}
    sent = {name.encode(): value.encode("latin-1") for name, value in headers.items()}
    begun = browser.client.get(AUTHORIZE, headers=sent)
    page = browser.client.get("/private/", headers=sent)

    assert begun.status_code in {400, 403, 421}
    assert page.status_code in {400, 401, 421}


def begin_session(browser: Browser) -> httpx.Response:
    """Sign in for the pages of the service, and return the last response."""
    begun = browser.begin("/login")
    back = browser.client.get(begun.headers["location"]).headers["location"]
    return browser.client.get(back)


HTML: Final = {"accept": "text/html"}


def test_person_signs_in_for_pages(browser: Browser) -> None:
    """Signing in at `/login` ends at the start page, with a cookie for HTTP and this site only."""
    response = begin_session(browser)
    cookies = response.headers.get_list("set-cookie")

    assert (response.status_code, response.headers["location"]) == (303, "/")
    assert re.fullmatch(
        rf"{browser.name('session')}=[^;]+; HttpOnly; Max-Age=3600; Path=/; SameSite=lax",
        cookies[0],
    )
    assert cookies[1].startswith(f'{browser.name("attempt")}=""; HttpOnly; Max-Age=0')


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
        ("/api/datasets/private", {}),
        ("/api/datasets/private", {"sec-fetch-site": "same-origin"}),
        ("/private/", HTML | {"sec-fetch-site": "none"}),
        (
            "/private/",
            HTML
            | {
                "sec-fetch-site": "cross-site",
                "sec-fetch-mode": "navigate",
                "sec-fetch-dest": "document",
            },
        ),
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
        (
            "GET",
            "/private/",
            HTML
            | {
                "sec-fetch-site": "cross-site",
                "sec-fetch-mode": "navigate",
                "sec-fetch-dest": "iframe",
            },
        ),
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


def test_secret_dataset_stays_unknown_to_who_has_signed_in(browser: Browser) -> None:
    """A dataset that the person may not read is indistinguishable from one that is not there."""
    begin_session(browser)
    known, unknown = (browser.client.get(f"/{name}/", headers=HTML) for name in ("secret", "nope"))

    assert known.status_code == unknown.status_code == 404
    assert known.text.replace("secret", "nope") == unknown.text


def test_session_is_no_token_and_no_token_a_session(browser: Browser) -> None:
    """The cookie is no bearer token, and a token no cookie."""
    token = browser.page().message["token"]
    cookie = browser.client.cookies[browser.name("session")]
    bearer = {"authorization": f"Bearer {cookie}"}
    browser.client.cookies.clear()

    assert browser.client.get("/private/text.txt", headers=bearer).status_code == 401
    browser.client.cookies[browser.name("session")] = token
    assert browser.client.get("/private/", headers=HTML).status_code == 401


def test_cookie_of_plain_http_is_ignored_elsewhere(browser: Browser) -> None:
    """Under a name of the service only the cookie with the prefix counts."""
    begin_session(browser)
    cookie = browser.client.cookies[browser.name("session")]
    headers = HTML | {"host": "service.example"}
    plain = browser.client.get("/private/", headers=headers)
    browser.client.cookies.clear()
    browser.client.cookies["__Host-shardgate-session"] = cookie
    safe = browser.client.get("/private/", headers=headers)

    assert (plain.status_code, safe.status_code) == (401, 200)


def test_signing_out_ends_the_tokens_of_the_session(browser: Browser, other: Browser) -> None:
    """Signing out ends all tokens of the browser, cached ones too, and none of another browser."""
    ended = [browser.page().message["token"] for _ in range(2)]
    kept = other.page().message["token"]

    def statuses() -> list[int]:
        return [
            httpx.get(
                f"{browser.client.base_url}/api/datasets",
                headers={"authorization": f"Bearer {token}"},
            ).status_code
            for token in (*ended, kept)
        ]

    assert statuses() == [200, 200, 200]
    cookie = browser.client.cookies[browser.name("session")]
    response = browser.client.post("/login/end")
    assert response.status_code == 204
    assert browser.name("session") not in browser.client.cookies
    assert statuses() == [401, 401, 200]
    browser.client.cookies[browser.name("session")] = cookie
    assert browser.client.get("/private/", headers=HTML).status_code == 401


def is_valid(url: object, token: str) -> bool:
    """Return whether the service takes *token*."""
    headers = {"authorization": f"Bearer {token}"}
    return httpx.get(f"{url}/api/datasets", headers=headers).is_success


@pytest.mark.parametrize("claims", [{"sub": "bob"}, {"sub": "bob", "groups": []}, {"groups": []}])
def test_another_sign_in_ends_the_session(
    browser: Browser, provider: Provider, claims: dict[str, Any]
) -> None:
    """A session ends when the browser signs in somebody else, or its owner may read no more."""
    first = browser.page().message["token"]
    cookie = browser.client.cookies[browser.name("session")]
    assert is_valid(browser.client.base_url, first)
    provider.claims = claims
    browser.page()
    kept = browser.client.cookies.get(browser.name("session"))
    browser.client.cookies.clear()
    browser.client.cookies[browser.name("session")] = cookie

    assert not is_valid(browser.client.base_url, first)
    assert browser.client.get("/private/", headers=HTML).status_code == 401
    assert kept != cookie
    assert (kept is None) == ("groups" in claims)


def test_person_who_signs_in_again_keeps_the_session(browser: Browser) -> None:
    """Tokens stay valid when their owner signs in again with the same browser."""
    first = browser.page().message["token"]
    browser.page()

    assert is_valid(browser.client.base_url, first)


def test_signing_out_without_a_session_does_nothing(browser: Browser) -> None:
    """Signing out twice, or with a wrong cookie, is no error."""
    browser.client.cookies[browser.name("session")] = "a.b.c"

    assert browser.client.post("/login/end").status_code == 204
    assert browser.client.get("/login/end").status_code == 405


@pytest.mark.parametrize(
    ("site", "status"),
    [(None, 204), ("same-origin", 204), ("none", 204), ("same-site", 403), ("cross-site", 403)],
)
def test_only_own_pages_sign_out(browser: Browser, site: str | None, status: int) -> None:
    """A form or fetch of another site, or of another port, ends no session."""
    token = browser.page().message["token"]
    headers = {} if site is None else {"sec-fetch-site": site}
    response = browser.client.post("/login/end", headers=headers)

    assert response.status_code == status
    assert ("set-cookie" in response.headers) == (status == 204)
    assert is_valid(browser.client.base_url, token) == (status == 403)


def test_person_without_rights_begins_no_session(browser: Browser, provider: Provider) -> None:
    """Somebody who may read no private dataset gets no cookie."""
    provider.claims = {"groups": []}

    assert begin_session(browser).status_code == 403
    assert browser.name("session") not in browser.client.cookies


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
    with serving(configured) as url:
        browser = Browser(url)
        with browser.client:
            refused = Page(begin_session(browser))
            token = browser.page().message["token"]
            shown = browser.client.get(
                "/api/datasets", headers={"authorization": f"Bearer {token}"}
            ).json()

    assert refused.response.status_code == 403
    assert "more rules than a cookie can hold" in refused.text
    assert browser.name("session") not in browser.client.cookies
    assert len(shown["datasets"]) == len(groups)


def tokens(now: float, secret: str = SECRET, url: str = "https://a", **login: Any) -> LoginTokens:
    """Return a signer at a time, for people who sign in at *url*."""
    configured = Settings(
        tokens=TokenSettings(secret=SecretStr(secret)),
        issuers={"lab": IssuerSettings(url=url, audience="-")},
        login=login_settings(**login),
    )
    return LoginTokens(configured, Datasets({}), lambda: now)


def test_token_is_good_until_it_expires() -> None:
    """Claims can be read for their lifetime, under the same kind."""
    sealed = tokens(1000).seal("viewer", {"sub": "a"}, 60)

    assert tokens(1059).unseal("viewer", sealed)
    assert tokens(1060).unseal("viewer", sealed) is None
    assert tokens(1000).unseal("attempt", sealed) is None


@pytest.mark.parametrize(
    "changed",
    [
        tokens(1000, "another secret, which replaced the one before"),
        tokens(1000, client_id="another"),
        tokens(1000, url="https://b"),
    ],
)
def test_token_ends_with_its_secret_and_client(changed: LoginTokens) -> None:
    """Another secret, client, or URL of the issuer ends all tokens."""
    sealed = tokens(1000).seal("viewer", {"sub": "a"}, 60)

    assert changed.unseal("viewer", sealed) is None


@pytest.mark.parametrize(("path", "is_opened"), [("/private/", True), ("/~a/private/", False)])
def test_cookie_is_ignored_below_a_token(path: str, *, is_opened: bool) -> None:
    """A request with a token in its path has no caller of a cookie."""
    signer = tokens(1000)
    cookie = signer.seal("session", {"sub": "lab:ada", "rules": [], "sid": "a"})
    headers = {b"accept": b"text/html", b"cookie": f"__Host-shardgate-session={cookie}".encode()}
    caller = caller_of_page(signer, Request("GET", path.encode(), [], headers, b""))

    assert (caller is not None) == is_opened


def test_caller_without_a_rule_gets_no_token() -> None:
    """A caller who fulfils no rule of a private dataset gets no token."""
    caller = Caller("lab:ada", frozenset({"public", "lab:lab"}))

    assert tokens(1000).rights_of(caller, "a") is None


def test_service_without_login_has_no_routes(provider: Provider, tmp_path: Path) -> None:
    """A service that has no issuer to sign in at answers 404."""
    configured = settings(provider, tmp_path).model_copy(update={"login": LoginSettings()})
    with serving(configured) as url:
        for path in ("/auth_info", "/login", AUTHORIZE, CALLBACK):
            assert httpx.get(url + path).status_code == 404
