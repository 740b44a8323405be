"""`shardgate.web.login_commands`: signing in on another device than the command runs on."""

import httpx

from tests.support.auth.browsing import Browser
from tests.support.auth.people import TEXT
from tests.support.auth.provider import Provider


def exchange(browser: Browser, device_code: str) -> httpx.Response:
    """Ask for the token of a device code."""
    return browser.client.post("/login/device/token", json={"device_code": device_code})


def test_device_code_is_good_for_one_token(browser: Browser, provider: Provider) -> None:
    """A command that waits for another device gets 202, then a token that reads, and no second."""
    provider.waiting = ["authorization_pending"]
    code = browser.client.post("/login/device").json()["device_code"]
    waited, got, again = (exchange(browser, code) for _ in range(3))
    bearer = {"authorization": f"Bearer {got.json()['token']}"}

    assert (waited.status_code, waited.json()) == (202, {"error": "authorization_pending"})
    assert browser.client.get("/private/text.txt", headers=bearer).content == TEXT
    assert browser.client.put("/private/a", content=b"", headers=bearer).status_code == 403
    assert again.status_code == 403


def test_device_of_a_caller_without_rights_gets_no_token(
    browser: Browser, provider: Provider
) -> None:
    """A person who may read no private dataset gets no token on another device either."""
    provider.claims = {"groups": ["others"]}
    refused = exchange(browser, browser.client.post("/login/device").json()["device_code"])

    assert refused.status_code == 403
    assert "may read no dataset here" in refused.json()["detail"]


def test_device_is_refused_where_the_issuer_refuses_the_client(
    browser: Browser, provider: Provider
) -> None:
    """A client that may not use device codes is told so in the words of the issuer."""
    provider.device = None
    refused = browser.client.post("/login/device")

    assert refused.status_code == 403
    assert refused.json()["detail"].endswith("unauthorized_client")
