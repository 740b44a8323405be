"""`shardgate.http.auth.token_page`: links for viewers that cannot sign in."""

import re
from typing import Any

import httpx
import pytest

from tests.support.http.auth.browsing import HTML, Browser, begin_session
from tests.support.http.auth.people import TEXT
from tests.support.http.auth.provider import Provider

PAGE = "/login/tokens"
OWN = {"sec-fetch-site": "same-origin"}


def make(browser: Browser, dataset: str = "private", **headers: str) -> httpx.Response:
    """Make a link by the button of the page."""
    return browser.client.post(PAGE, json={"dataset": dataset}, headers=OWN | headers)


def read(browser: Browser, made: dict[str, Any]) -> httpx.Response:
    """Read a key by a link, without cookies."""
    return httpx.get(browser.client.base_url.join(f"{made['paths']['private']}text.txt"))


def test_page_leads_to_the_sign_in_and_back(browser: Browser) -> None:
    """The page leads a browser without a session to the sign-in, which ends at the page."""
    first = browser.client.get(PAGE, headers=HTML)
    back = browser.pass_issuer(browser.client.get(first.headers["location"]))
    last = browser.client.get(back)

    assert first.status_code == 303
    assert last.headers["location"] == PAGE


def test_page_shows_private_datasets_and_valid_links(browser: Browser) -> None:
    """The page names the private datasets of the person, and the links without their tokens."""
    begin_session(browser)
    made = make(browser).json()
    text = browser.client.get(PAGE, headers=HTML).text

    assert re.findall('data-dataset="([^"]*)"', text) == ["private"]
    assert f'data-post="./tokens/{made["token_id"]}/end"' in text
    assert made["token"] not in text


def test_link_reads_its_dataset_without_sign_in(browser: Browser) -> None:
    """A link reads its dataset for whoever has it, also after its maker has signed out."""
    begin_session(browser)
    answer = make(browser)
    browser.client.post("/login/end")

    assert answer.status_code == 201
    assert read(browser, answer.json()).content == TEXT


def test_revoked_link_is_refused(browser: Browser) -> None:
    """Revoking ends one link at once, and takes it from the page."""
    begin_session(browser)
    ended, kept = (make(browser).json() for _ in range(2))
    before = [read(browser, each).status_code for each in (ended, kept)]
    answer = browser.client.post(f"{PAGE}/{ended['token_id']}/end", headers=OWN)
    text = browser.client.get(PAGE, headers=HTML).text

    assert before == [200, 200]
    assert answer.status_code == 204
    assert [read(browser, each).status_code for each in (ended, kept)] == [401, 200]
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
    text = other.client.get(PAGE, headers=HTML).text
    answer = other.client.post(f"{PAGE}/{made['token_id']}/end", headers=OWN)

    assert made["token_id"] not in text
    assert answer.status_code == 404
    assert read(browser, made).content == TEXT


@pytest.mark.parametrize("dataset", ["secret", "none"])
def test_link_to_a_dataset_of_others_is_not_made(browser: Browser, dataset: str) -> None:
    """A dataset that the person may not read is 404, as one that does not exist."""
    begin_session(browser)

    assert make(browser, dataset).status_code == 404


@pytest.mark.parametrize("site", ["same-site", "cross-site"])
def test_page_of_another_origin_makes_and_revokes_none(browser: Browser, site: str) -> None:
    """A form or fetch of another site, or of another port, makes no link and revokes none."""
    begin_session(browser)
    made = make(browser).json()
    foreign = {"sec-fetch-site": site}

    assert make(browser, **foreign).status_code == 403
    end = browser.client.post(f"{PAGE}/{made['token_id']}/end", headers=foreign)
    assert end.status_code == 403
    assert read(browser, made).content == TEXT


def test_page_of_a_viewer_makes_none(browser: Browser) -> None:
    """A browser that names only the origin of a page of another site makes no link for it."""
    begin_session(browser)
    origin = {"origin": "https://viewer.example"}

    assert browser.client.post(PAGE, json={"dataset": "private"}, headers=origin).status_code == 403


def test_changes_need_a_session(browser: Browser) -> None:
    """A browser without a session makes and revokes no link."""
    assert make(browser).status_code == 401
    assert browser.client.post(f"{PAGE}/a/end", headers=OWN).status_code == 401


def test_token_in_the_path_opens_no_page(browser: Browser) -> None:
    """The page is not served below a token."""
    begin_session(browser)
    made = make(browser).json()

    assert browser.client.get(f"/~{made['token']}{PAGE}", headers=HTML).status_code == 400


@pytest.mark.parametrize("document", [{}, {"dataset": 5}, {"dataset": "private", "x": 1}, []])
def test_invalid_request_for_a_link_is_refused(browser: Browser, document: object) -> None:
    """A request for a link with unknown, missing or invalid members fails with 400."""
    begin_session(browser)

    assert browser.client.post(PAGE, json=document, headers=OWN).status_code == 400
