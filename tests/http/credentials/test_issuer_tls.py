"""Issuers over TLS are who they say, and their keys come over TLS too."""

import ssl
from collections.abc import Generator
from pathlib import Path

import pytest
import trustme

from app.errors import IssuerUnavailableError
from app.http.credentials.issuer_documents import open_client, read_keys
from app.settings import IssuerSettings
from tests.http.credentials.issuing import JWKS, Issuer
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
