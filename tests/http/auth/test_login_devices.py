"""`shardgate.http.auth.login`: signing in on another device than the command runs on."""

import logging

import pytest

from tests.support.http.auth.browsing import Browser
from tests.support.http.auth.people import TEXT
from tests.support.http.auth.provider import Provider


def begin_on_device(browser: Browser) -> dict[str, str]:
    """Begin a sign-in on another device, and return the body that asks for the token."""
    begun = browser.client.post("/login/device").json()
    return {"device_code": begun["device_code"]}


def test_token_of_another_device_reads_only(browser: Browser, provider: Provider) -> None:
    """A command that waits for another device gets 202, then a token that reads and writes not."""
    provider.waiting = ["authorization_pending"]
    sent = begin_on_device(browser)
    waited, got = (browser.client.post("/login/device/token", json=sent) for _ in range(2))
    bearer = {"authorization": f"Bearer {got.json()['token']}"}

    assert (waited.status_code, waited.json()) == (202, {"error": "authorization_pending"})
    assert browser.client.get("/private/text.txt", headers=bearer).content == TEXT
    assert browser.client.get("/secret/text.txt", headers=bearer).status_code == 404
    assert browser.client.put("/private/a", content=b"", headers=bearer).status_code == 403


def test_code_of_a_device_is_good_for_one_token(browser: Browser) -> None:
    """The code of a device is refused once it has brought a token."""
    sent = begin_on_device(browser)
    answers = [browser.client.post("/login/device/token", json=sent) for _ in range(2)]

    assert [answer.status_code for answer in answers] == [200, 403]


def test_device_of_a_caller_without_rights_gets_no_token(
    browser: Browser, provider: Provider
) -> None:
    """A person who may read no private dataset gets no token on another device either."""
    provider.claims = {"groups": ["others"]}
    refused = browser.client.post("/login/device/token", json=begin_on_device(browser))

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


def test_device_code_over_plain_http_is_refused(browser: Browser) -> None:
    """No sign-in by a device code begins without TLS, except on this machine."""
    refused = browser.client.post("/login/device", headers={"host": "service.example"})

    assert refused.status_code == 403
    assert refused.json()["detail"] == "signing in needs https"


def test_fault_of_the_issuer_is_hidden_from_devices(
    browser: Browser, provider: Provider, caplog: pytest.LogCaptureFixture
) -> None:
    """A device is told to try again, and the log has the URL and the status of the issuer."""
    provider.refusal = 500, {}
    with caplog.at_level(logging.WARNING, logger="shardgate"):
        refused = browser.client.post("/login/device")

    assert refused.status_code == 503
    assert refused.json()["detail"].startswith("the issuer cannot be asked at the moment")
    assert f"{provider.url}/device answers 500" in caplog.text
