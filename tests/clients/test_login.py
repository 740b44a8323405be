"""Signing in with the codes of `oidc-provider`, a real OpenID provider."""

import html
import os
import re
import time
from collections.abc import Generator
from pathlib import Path
from threading import Thread
from typing import Final

import httpx
import pytest
from pydantic import SecretStr

from shardgate.errors import ForbiddenError
from shardgate.settings import DatasetSettings, IssuerSettings, LoginSettings, Settings
from shardgate.signing_in import KeptToken, sign_in
from tests.support.files import write_files
from tests.support.lacking import lack, need
from tests.support.processes import free_ports, listening
from tests.support.serving import serving

_JS: Final = Path(__file__).parent / "js"
_CLIENT: Final = "gateway"
_SECRET: Final = "a secret of the client"
_DATA: Final = b"what the lab may read"


def enter(page: str, *, is_allowed: bool) -> None:
    """Send the forms of the provider from *page* on, or follow the link that refuses."""
    with httpx.Client(follow_redirects=True, timeout=60) as client:
        response = client.get(page)
        while form := re.search('<form.*?action="([^"]*)".*?</form>', response.text, re.DOTALL):
            refusal = re.search('href="([^"]*/abort)"', response.text)
            if refusal is not None and not is_allowed:
                client.get(response.url.join(html.unescape(refusal[1])))
                return
            fields = dict(re.findall('name="([^"]+)"[^>]*value="([^"]*)"', form[0]))
            fields |= {"login": "ada", "password": "any"} if 'name="login"' in form[0] else {}
            response = client.post(response.url.join(html.unescape(form[1])), data=fields)


@pytest.fixture(scope="module")
def provider() -> Generator[str]:
    """Run the provider, or skip the test."""
    node = need("node")
    if not (_JS / "node_modules/oidc-provider").exists():
        lack("oidc-provider is not installed: npm install --prefix tests/clients/js")
    (port,) = free_ports(1)
    command = [node, str(_JS / "openid_provider.mjs"), str(port), _CLIENT, _SECRET]
    with listening(command, port, Path(os.devnull)):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def service(provider: str, tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """Serve a text to the lab, whose people the provider knows."""
    folder = tmp_path_factory.mktemp("private")
    write_files({"text.txt": _DATA}, folder)
    settings = Settings(
        issuers={"op": IssuerSettings(url=provider, audience="shardgate")},
        login=LoginSettings(
            issuer="op", client_id=_CLIENT, client_secret=SecretStr(_SECRET), userinfo=True
        ),
        datasets={"private": DatasetSettings(url=str(folder), read=("op:lab",))},
    )
    with serving(settings) as url:
        yield url


def sign_in_by_code(service: str, *, is_allowed: bool) -> KeptToken:
    """Sign in, while somebody opens the page that the command shows."""

    def tell(text: str) -> None:
        page = text.rsplit(maxsplit=1)[-1]
        Thread(target=enter, args=(page,), kwargs={"is_allowed": is_allowed}).start()

    return sign_in(service, tell, lambda: pytest.fail("asked"), lambda _: time.sleep(0.1))


def test_person_enters_the_device_code_at_the_provider(service: str) -> None:
    """The command gets a token that reads once the person has signed in at the page of the code."""
    token = sign_in_by_code(service, is_allowed=True).token
    headers = {"Authorization": f"Bearer {token}"}

    assert httpx.get(f"{service}/private/text.txt", headers=headers).content == _DATA


def test_person_refuses_the_device_code_at_the_provider(service: str) -> None:
    """The command ends with the reason once the person has refused at the page of the code."""
    with pytest.raises(ForbiddenError, match="access_denied"):
        sign_in_by_code(service, is_allowed=False)
