"""`shardgate.web.token_page`: links for viewers that cannot sign in."""

import re
from typing import Any

import httpx
import pytest

from tests.support.auth.browsing import HTML, VIEWER, Browser, begin_session
from tests.support.auth.people import TEXT
from tests.support.auth.provider import Provider

PAGE = "/login/tokens"
OWN = {"sec-fetch-site": "same-origin"}


def make(browser: Browser, dataset: str = "private", **headers: str) -> httpx.Response:
    """Make a link by the button of the page."""
    return browser.client.post(PAGE, json={"dataset": dataset}, headers=headers or OWN)


def end(browser: Browser, token_id: str, **headers: str) -> httpx.Response:
    """Revoke a link by its button."""
    return browser.client.post(f"{PAGE}/{token_id}/end", headers=headers or OWN)


def read(browser: Browser, made: dict[str, Any]) -> httpx.Response:
    """Read a key by a link, without cookies."""
    return httpx.get(browser.client.base_url.join(f"{made['paths']['private']}text.txt"))


def test_page_leads_to_the_sign_in_and_back(browser: Browser) -> None:
    """The page leads a browser without a session to the sign-in, which ends at the page."""
    first = browser.client.get(PAGE, headers=HTML)
    back = browser.pass_issuer(browser.client.get(first.headers["location"]))

    assert first.status_code == 303
    assert browser.client.get(back).headers["location"] == PAGE


def test_link_reads_its_dataset_without_sign_in(browser: Browser) -> None:
    """A link reads its dataset for whoever has it, also after its maker has signed out."""
    begin_session(browser)
    answer = make(browser)
    browser.client.post("/login/end")

    assert answer.status_code == 201
    assert read(browser, answer.json()).content == TEXT


def test_revoked_link_is_refused(browser: Browser) -> None:
    """The page names datasets and links without tokens; revoking ends one link at once."""
    begin_session(browser)
    ended, kept = (make(browser).json() for _ in range(2))
    before = [read(browser, each).status_code for each in (ended, kept)]
    shown = browser.client.get(PAGE, headers=HTML).text
    answer = end(browser, ended["token_id"])
    after = [read(browser, each).status_code for each in (ended, kept)]
    text = browser.client.get(PAGE, headers=HTML).text

    assert re.findall('data-dataset="([^"]*)"', shown) == ["private"]
    for each in (ended, kept):
        assert f'data-post="./tokens/{each["token_id"]}/end"' in shown
        assert each["token"] not in shown
    assert answer.status_code == 204
    assert (before, after) == ([200, 200], [401, 200])
    assert ended["token_id"] not in text
    assert kept["token_id"] in text


def test_links_of_others_are_neither_shown_nor_revoked(
    browser: Browser, other: Browser, provider: Provider
) -> None:
    """Somebody else in the same group sees none of the links, and cannot revoke them."""
    begin_session(browser)
    made = make(browser).json()
    provider.claims = {"sub": "bob"}
    begin_session(other)

    assert made["token_id"] not in other.client.get(PAGE, headers=HTML).text
    assert end(other, made["token_id"]).status_code == 404
    assert read(browser, made).content == TEXT


@pytest.mark.parametrize(
    "foreign",
    [{"sec-fetch-site": "same-site"}, {"sec-fetch-site": "cross-site"}, {"origin": VIEWER}],
)
def test_page_of_another_origin_makes_and_revokes_none(
    browser: Browser, foreign: dict[str, str]
) -> None:
    """A form or fetch of another site, or of another port, makes no link and revokes none."""
    begin_session(browser)
    made = make(browser).json()

    assert make(browser, **foreign).status_code == 403
    assert end(browser, made["token_id"], **foreign).status_code == 403
    assert read(browser, made).content == TEXT


def test_changes_need_a_session_with_its_rights(browser: Browser) -> None:
    """Without a session, its rights or a valid request no link is made or revoked."""
    assert make(browser).status_code == 401
    assert end(browser, "a").status_code == 401
    begin_session(browser)
    assert make(browser, "secret").status_code == 404
    assert browser.client.post(PAGE, json={}, headers=OWN).status_code == 400
