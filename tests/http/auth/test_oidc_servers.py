"""Issuers over TLS, and a real OpenID Connect provider."""

import ssl
from collections.abc import Generator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx
import oidc_provider_mock
import pytest
import trustme

from app.errors import IssuerUnavailableError
from app.http.auth.oidc import Issuers, open_client, read_keys
from app.settings import IssuerSettings
from tests.http.auth.issuing import JWKS, Issuer
from tests.storage.faulty import FaultyServer

TIMEOUT_S = 2.0


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    """Make an authority that nobody else knows."""
    return trustme.CA()


@pytest.fixture
def issuer(authority: trustme.CA) -> Generator[Issuer]:
    """Run an issuer with a certificate of the authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    with FaultyServer(tls=context).running() as server:
        yield Issuer(server)


@pytest.fixture
def trusting(
    authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> pytest.MonkeyPatch:
    """Trust the authority, as an operator does."""
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    return monkeypatch


async def kids(settings: IssuerSettings) -> list[str | None]:
    """Read the names of the keys."""
    async with open_client(TIMEOUT_S) as client:
        return [key.kid for key in await read_keys(client, settings, TIMEOUT_S)]


@pytest.mark.usefixtures("trusting")
async def test_an_issuer_with_a_trusted_certificate_is_asked(issuer: Issuer) -> None:
    """`SSL_CERT_FILE` names the authorities that vouch."""
    assert await kids(issuer.settings) == ["first"]


async def test_an_issuer_that_nobody_vouches_for_is_not(issuer: Issuer) -> None:
    """Whoever sits in between could say anything."""
    with pytest.raises(IssuerUnavailableError, match="CERTIFICATE_VERIFY_FAILED"):
        await kids(issuer.settings)
    assert issuer.server.seen == []


@pytest.mark.usefixtures("trusting")
async def test_keys_of_such_an_issuer_come_over_tls(issuer: Issuer) -> None:
    """Not even this machine may say what they are."""
    with FaultyServer().running() as plain:
        plain.objects[JWKS] = issuer.server.objects[JWKS]
        issuer.configure(issuer=issuer.url, jwks_uri=f"{plain.url}{JWKS}")

        with pytest.raises(IssuerUnavailableError, match="not https"):
            await kids(issuer.settings)
        assert plain.seen == []


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
