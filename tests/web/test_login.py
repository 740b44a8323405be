"""`shardgate.web.login`: signing in from a viewer, over HTTP."""

import html
import logging
import re
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st

from shardgate.settings import LoginSettings
from tests.support.auth.browsing import (
    AUTHORIZE,
    CALLBACK,
    OTHER,
    VIEWER,
    Browser,
    Page,
    settings,
)
from tests.support.auth.provider import CLIENT_ID, Provider
from tests.support.records import replaced
from tests.support.serving import client_of


def test_auth_info_names_the_login_url(browser: Browser, url: str) -> None:
    """`/auth_info` names the URL to sign in at, and pages of any allowed origin may read it."""
    response = browser.client.get("/auth_info", headers={"origin": VIEWER})

    assert response.json() == {"login_url": f"{url}/login"}
    assert response.headers["access-control-allow-origin"] == "*"
    assert response.headers["cache-control"] == "no-store"


def test_browser_is_sent_to_the_issuer_with_pkce(browser: Browser, provider: Provider) -> None:
    """The issuer is asked for a code with a new state, nonce and S256 challenge of our own."""
    own = "state=a&nonce=b&redirect_uri=https://evil.example/"
    begun = (browser.begin(path) for path in (AUTHORIZE, f"{AUTHORIZE}?{own}"))
    locations = [urlsplit(each.headers["location"]) for each in begun]
    first, second = (
        {name: value for name, [value] in parse_qs(location.query).items()}
        for location in locations
    )

    assert replaced(locations[0], query="").geturl() == f"{provider.url}/authorize"
    assert first.keys() == second.keys()
    changed = {name for name in first if first[name] != second[name]}
    assert changed == {"state", "nonce", "code_challenge"}
    assert second["state"] != "a"
    assert second["nonce"] != "b"
    assert first["response_type"] == "code"
    assert first["client_id"] == CLIENT_ID
    assert first["scope"] == "openid"
    assert first["code_challenge_method"] == "S256"
    assert first["redirect_uri"] == f"{browser.client.base_url}{CALLBACK}"


def test_cookie_of_an_attempt_is_short_and_bound(browser: Browser) -> None:
    """The cookie of an attempt is for this host, minutes and HTTP only, not for other sites."""
    cookie = browser.begin().headers["set-cookie"]

    assert re.fullmatch(
        rf"{browser.attempts[0]}=[^;]+; HttpOnly; Max-Age=600; Path=/; SameSite=lax", cookie
    )


def test_cookie_cannot_be_set_by_others_over_https(browser: Browser) -> None:
    """Behind TLS the cookie has the prefix that keeps other hosts from setting it."""
    headers = {"host": "service.example", "x-forwarded-proto": "https"}
    begun = browser.client.get(AUTHORIZE, headers=headers)

    assert re.match("__Host-shardgate-attempt-[A-Za-z0-9_-]{8}-443=", begun.headers["set-cookie"])
    assert "; Secure" in begun.headers["set-cookie"]
    redirect_uri = "redirect_uri=https%3A%2F%2Fservice.example%2Flogin%2Fcallback"
    assert redirect_uri in begun.headers["location"]


@pytest.mark.parametrize(
    ("headers", "origins"), [({}, [VIEWER, OTHER]), ({"referer": f"{VIEWER}/"}, [VIEWER])]
)
def test_token_goes_to_the_listed_origins_only(
    browser: Browser, url: str, headers: dict[str, str], origins: list[str]
) -> None:
    """The message is addressed to the page that opened the window, or to all listed origins."""
    page = browser.page(**headers)

    assert page.response.status_code == 200
    assert page.message.keys() == {"token", "app_urls"}
    assert page.message["app_urls"] == [url]
    assert page.origins == origins
    assert "lab:ada has signed in" in page.text


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


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/private/text.txt", 200),
        ("GET", "/secret/text.txt", 404),
        ("GET", "/mine/text.txt", 404),
        ("PUT", "/private/new.txt", 403),
        ("POST", "/api/tokens", 403),
    ],
)
def test_token_lets_read_what_its_rules_say(
    browser: Browser, method: str, path: str, status: int
) -> None:
    """The token lets read the dataset of the group; it neither writes nor makes other tokens."""
    bearer = {"authorization": f"Bearer {browser.page().message['token']}"}

    assert browser.client.request(method, path, headers=bearer).status_code == status


def test_verified_address_is_a_right(browser: Browser, provider: Provider) -> None:
    """A dataset whose rule is an address is read by who has verified it at the issuer."""
    provider.claims = {"groups": [], "email": "eve@a.example", "email_verified": True}
    bearer = {"authorization": f"Bearer {browser.page().message['token']}"}
    paths = ("/mine/text.txt", "/private/text.txt")
    statuses = [browser.client.get(path, headers=bearer).status_code for path in paths]

    assert statuses == [200, 404]


@pytest.mark.parametrize("path", [AUTHORIZE, "/login?page=/private/"])
def test_caller_without_rights_can_sign_in_as_another(
    browser: Browser, provider: Provider, path: str
) -> None:
    """Who may read nothing gets neither token nor cookie, but a link to sign in as another."""
    provider.claims = {"groups": ["guests"], "sub": "eve"}
    page = browser.come_back(browser.pass_issuer(browser.begin(path)))
    link = html.unescape(re.findall('href="([^"]*)">Sign in as', page.response.text)[0])
    asked = browser.begin(link).headers["location"]
    assert browser.name("session") not in browser.client.cookies
    provider.claims = {}
    end = browser.client.get(browser.client.get(asked).headers["location"])

    assert page.response.status_code == 403
    assert "lab:eve has signed in, but may read no dataset here" in page.text
    assert not page.message
    assert parse_qs(urlsplit(asked).query)["prompt"] == ["select_account"]
    assert end.headers.get("location", "/private/") == "/private/"
    assert (end.status_code, path) in {(200, AUTHORIZE), (303, "/login?page=/private/")}


@pytest.mark.parametrize(("dest", "mode"), [("iframe", "navigate"), ("empty", "cors")])
def test_frames_and_scripts_cannot_sign_in(browser: Browser, dest: str, mode: str) -> None:
    """A frame or a fetch of a script is refused when it begins, and when it comes back."""
    headers = {"sec-fetch-dest": dest, "sec-fetch-mode": mode}
    back = browser.sign_in()

    assert browser.begin(**headers).status_code == 403
    assert browser.come_back(back, **headers).response.status_code == 403


@pytest.mark.parametrize(
    ("header", "value", "named"),
    [
        *(
            ("referer", value, value.removesuffix("/"))
            for value in (
                "https://evil.example/",
                f"{VIEWER}.evil.example/",
                "https://viewer.example:444/",
                "http://viewer.example/",
                "https://evil@viewer.example/",
                "null",
                "[",
            )
        ),
        ("referer", "{url}/docs", "{url}"),
        ("sec-fetch-site", "same-origin", "{url}"),
    ],
)
def test_page_that_is_not_listed_cannot_begin(
    browser: Browser, url: str, header: str, value: str, named: str
) -> None:
    """A window of an unlisted page, or of the service itself, is refused in words."""
    begun = browser.begin(**{header: value.replace("{url}", url)})

    assert begun.status_code == 403
    assert f"login.viewers does not name {named.replace('{url}', url)}" in Page(begun).text
    assert "set-cookie" not in begun.headers


def test_service_without_viewers_begins_for_none(provider: Provider, tmp_path: Path) -> None:
    """A service without origins in its settings begins no sign-in, whoever opens the window."""
    with client_of(settings(provider, tmp_path, viewers=())) as client:
        begun = client.get(AUTHORIZE)

    assert begun.status_code == 403
    assert "login.viewers does not name any page" in Page(begun).text


@pytest.mark.parametrize(
    "path",
    [
        *(f"{path}/" for path in (AUTHORIZE, CALLBACK, "/auth_info", "/login", "/login/command")),
        *("/api/datasets/", "/docs/", "/login/unknown"),
    ],
)
def test_slash_too_many_is_not_found(browser: Browser, path: str) -> None:
    """A slash too many, or an unknown path, is 404, no redirect of the code to plain http."""
    headers = {"host": "service.example", "x-forwarded-proto": "https"}
    response = browser.client.get(f"{path}?code=a", headers=headers)

    assert response.status_code == 404
    assert "location" not in response.headers


def test_sign_in_over_plain_http_is_refused(browser: Browser) -> None:
    """Sign-in under a name of the service without TLS is refused, on another device as well."""
    begun = browser.begin(host="service.example")
    on_device = browser.client.post("/login/device", headers={"host": "service.example"})

    assert begun.status_code == on_device.status_code == 403
    assert "needs https" in Page(begun).text
    assert on_device.json()["detail"] == "signing in needs https"


@pytest.mark.parametrize("path", [AUTHORIZE, CALLBACK, "/auth_info", "/login/tokens"])
def test_sign_in_below_a_token_is_refused(browser: Browser, path: str) -> None:
    """Below a token in the path there is no sign-in."""
    assert browser.client.get(f"/~token{path}").status_code == 400


def test_any_replica_finishes_a_sign_in(
    browser: Browser, provider: Provider, tmp_path: Path
) -> None:
    """A sign-in that one replica has begun is finished by another, under their common name."""
    headers = {"host": "service.example", "x-forwarded-proto": "https"}
    begun = browser.begin(**headers)
    headers["cookie"] = begun.headers["set-cookie"].partition(";")[0]
    back = urlsplit(browser.pass_issuer(begun))
    with client_of(settings(provider, tmp_path)) as client:
        page = Page(client.get(f"{back.path}?{back.query}", headers=headers))
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


@pytest.mark.parametrize("has_begun", [False, True])
def test_state_of_another_browser_is_refused(
    browser: Browser, other: Browser, *, has_begun: bool
) -> None:
    """The answer for another browser's attempt is refused before its code is used."""
    back = other.sign_in()
    if has_begun:
        browser.begin()
    page = browser.come_back(back)

    assert page.response.status_code == 403
    assert "has begun no sign-in here" in page.text
    assert not page.message
    assert other.come_back(back).message


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


@pytest.mark.parametrize("query", ["", "?code=a", "?code=a&state=b", "?state=a&state=b"])
def test_page_that_does_not_know_the_state_cancels_nothing(browser: Browser, query: str) -> None:
    """A sign-in goes on after another site has opened the URL that the issuer sends browsers to."""
    back = browser.sign_in()
    assert not browser.come_back(f"{CALLBACK}{query}").message

    assert browser.come_back(back).message


@pytest.mark.parametrize("name", ["code", "iss"])
def test_repeated_parameter_is_refused(browser: Browser, name: str) -> None:
    """An answer with a repeated parameter is refused."""
    page = browser.come_back(f"{browser.sign_in()}&{name}=a&{name}=b")

    assert page.response.status_code == 400
    assert not page.message


@pytest.mark.parametrize(
    ("issuer", "reason"),
    [
        ("https://evil.example", "is not from the issuer that was asked"),
        ("{url}/", "has a slash at the end"),
    ],
)
def test_answer_of_another_issuer_is_refused(
    browser: Browser, provider: Provider, issuer: str, reason: str
) -> None:
    """An answer of another issuer is refused before its code is used (RFC 9207)."""
    provider.answer = {"iss": issuer.replace("{url}", provider.url)}
    provider.forms.clear()
    page = browser.page()

    assert reason in page.text
    assert not provider.forms


@pytest.mark.parametrize(
    ("refusal", "status", "reason"),
    [
        ((400, {"error": "invalid_grant"}), 403, "refused the sign-in: invalid_grant"),
        ((401, {"error": "<b>bold</b>"}), 403, "refused the sign-in."),
        ((403, {"error": "invalid_grant"}), 403, "refused the sign-in: invalid_grant"),
        ((200, {"access_token": "a"}), 403, "sent no ID token"),
        ((200, {"id_token": "a.b.c"}), 403, "sent no ID token"),
        ((200, []), 403, "sent no ID token"),
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
    """The URL and the fault of an issuer are in the log, and neither on a page nor on a device."""
    provider.refusal = 500, {}
    with caplog.at_level(logging.WARNING, logger="shardgate"):
        page = browser.page()
        on_device = browser.client.post("/login/device")

    assert page.response.status_code == on_device.status_code == 503
    assert "the issuer cannot be asked at the moment" in page.text
    assert on_device.json()["detail"].startswith("the issuer cannot be asked at the moment")
    assert provider.url not in page.response.text + on_device.text
    for path in ("token", "device"):
        assert f"{provider.url}: {provider.url}/{path} answers 500" in caplog.text


TEXTS: Final = st.text(st.characters(codec="utf-8"), max_size=20)
HEADERS: Final = st.text(st.characters(min_codepoint=33, max_codepoint=255), max_size=20)


@given(
    st.lists(st.tuples(st.sampled_from(["code", "state", "iss", "error", "a"]), TEXTS), max_size=5)
)
@settings_of_hypothesis(
    max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_answer_but_the_issuers_is_refused(
    browser: Browser, answer: list[tuple[str, str]]
) -> None:
    """Whatever a browser brings back instead of the issuer's answer is refused, in a page."""
    if not browser.attempts:
        browser.begin()
    page = browser.come_back(f"{CALLBACK}?{urlencode(answer)}")

    assert page.response.status_code in {400, 403}
    assert page.text.startswith("You are not signed in: ")
    assert not page.message


@given(cookie=HEADERS, referer=HEADERS, host=st.one_of(st.none(), HEADERS))
@settings_of_hypothesis(
    max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture]
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


def test_service_without_login_has_no_routes(provider: Provider, tmp_path: Path) -> None:
    """A service without an issuer is 404, with the URL of a page for viewers."""
    configured = settings(provider, tmp_path).model_copy(update={"login": LoginSettings()})
    with client_of(configured) as client:
        answers = [client.get(path) for path in ("/auth_info", "/login", AUTHORIZE, CALLBACK)]

    assert [answer.status_code for answer in answers] == [404] * 4
    assert answers[0].json()["login_url"] == answers[1].url
