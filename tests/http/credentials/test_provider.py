"""Tokens of a real OpenID Connect provider, by the flow that people log in with."""

from collections.abc import Generator
from urllib.parse import parse_qs, urlsplit

import httpx
import oidc_provider_mock
import pytest

from app.errors import UnauthenticatedError
from app.http.credentials.issuers import Issuers
from app.settings import IssuerSettings

CLIENT = "gateway"
CALLBACK = "http://127.0.0.1/callback"


@pytest.fixture(scope="module")
def provider() -> Generator[str]:
    """Run a provider that knows ada."""
    with oidc_provider_mock.run_server_in_thread() as server:
        url = f"http://localhost:{server.server_port}"
        claims = {"groups": ["lab"], "realm_access": {"roles": ["reader"]}}
        httpx.put(f"{url}/users/ada", json=claims).raise_for_status()
        yield url


@pytest.fixture(scope="module")
def token(provider: str) -> str:
    """Log ada in, and get her token."""
    asked = {"client_id": CLIENT, "redirect_uri": CALLBACK, "response_type": "code"}
    allowed = httpx.post(
        f"{provider}/oauth2/authorize",
        params={**asked, "scope": "openid profile"},
        data={"sub": "ada"},
    )
    (code,) = parse_qs(urlsplit(allowed.headers["Location"]).query)["code"]
    exchanged = {"grant_type": "authorization_code", "code": code, "redirect_uri": CALLBACK}
    answer = httpx.post(f"{provider}/oauth2/token", data=exchanged, auth=(CLIENT, "secret"))
    return str(answer.json()["id_token"])


async def test_who_has_logged_in_is_known(provider: str, token: str) -> None:
    """By nothing but the URL of the provider and the audience."""
    settings = IssuerSettings(
        url=provider, audience=CLIENT, claims=("groups", "realm_access.roles")
    )
    async with Issuers({"sso": settings}) as issuers:
        known = await issuers.identify(token)

    assert known is not None
    assert known.caller.name == "sso:ada"
    assert known.caller.grants == {"public", "sso:lab", "sso:reader"}


async def test_who_has_logged_in_elsewhere_is_not(provider: str, token: str) -> None:
    """The token is for another audience."""
    settings = IssuerSettings(url=provider, audience="another")
    async with Issuers({"sso": settings}) as issuers:
        with pytest.raises(UnauthenticatedError, match="audience"):
            await issuers.identify(token)
