"""`app.http.credentials.issuer_documents`: what is read from an issuer, and what is not."""

import gzip
import json
from collections.abc import AsyncGenerator

import httpx
import pytest

from app.errors import IssuerUnavailableError
from app.http.credentials.issuer_documents import open_client, read_keys
from app.settings import IssuerSettings
from tests.http.credentials.issuing import AUDIENCE, DISCOVERY, JWKS, Issuer, make_key
from tests.storage.faulty import Fault, FaultyServer

TIMEOUT_S = 0.3


@pytest.fixture
def issuer(faulty: FaultyServer) -> Issuer:
    """Give an issuer that goes wrong when told to."""
    return Issuer(faulty)


@pytest.fixture
async def client() -> AsyncGenerator[httpx.AsyncClient]:
    """Open a client."""
    async with open_client(TIMEOUT_S) as client:
        yield client


async def kids(client: httpx.AsyncClient, settings: IssuerSettings) -> list[str | None]:
    """Read the names of the keys."""
    return [key.kid for key in await read_keys(client, settings, TIMEOUT_S)]


async def test_keys_are_where_the_configuration_says(
    issuer: Issuer, client: httpx.AsyncClient
) -> None:
    """It is found below the URL of the issuer."""
    assert await kids(client, issuer.settings) == ["first"]
    assert [seen.path for seen in issuer.server.seen] == [DISCOVERY, JWKS]


async def test_a_slash_at_the_end_belongs_to_the_name_only(
    issuer: Issuer, client: httpx.AsyncClient
) -> None:
    """The configuration has one slash before it (OpenID Connect Discovery §4)."""
    issuer.configure(issuer=f"{issuer.url}/", jwks_uri=f"{issuer.url}{JWKS}")

    assert await kids(client, IssuerSettings(url=f"{issuer.url}/", audience="x")) == ["first"]


async def test_keys_may_be_where_the_settings_say(
    issuer: Issuer, client: httpx.AsyncClient
) -> None:
    """Then no configuration is read."""
    settings = IssuerSettings(
        url="https://elsewhere.example", audience=AUDIENCE, jwks_url=f"{issuer.url}{JWKS}"
    )

    assert await kids(client, settings) == ["first"]
    assert issuer.reads(DISCOVERY) == 0


@pytest.mark.parametrize("path", [DISCOVERY, JWKS])
@pytest.mark.parametrize(
    "fault",
    [
        Fault.DENY,
        Fault.ERROR,
        Fault.STALL,
        Fault.STALL_BODY,
        Fault.RESET,
        Fault.CUT,
        Fault.GARBAGE,
    ],
)
async def test_an_issuer_that_fails_cannot_be_reached(
    issuer: Issuer, client: httpx.AsyncClient, path: str, fault: Fault
) -> None:
    """However it fails, and soon."""
    issuer.server.fail(fault, path=path)

    with pytest.raises(IssuerUnavailableError):
        await kids(client, issuer.settings)


async def test_an_issuer_that_is_not_there_cannot_be_reached(client: httpx.AsyncClient) -> None:
    """Nobody listens."""
    with FaultyServer().running() as server:
        settings = Issuer(server).settings

    with pytest.raises(IssuerUnavailableError):
        await kids(client, settings)


@pytest.mark.parametrize("path", [DISCOVERY, JWKS])
async def test_a_redirect_is_not_followed(
    issuer: Issuer, client: httpx.AsyncClient, path: str
) -> None:
    """It could lead to where nobody but we can go."""
    issuer.server.objects["/other/place"] = issuer.server.objects[path]
    issuer.server.redirects[path] = f"{issuer.url}/other/place"

    with pytest.raises(IssuerUnavailableError, match="302"):
        await kids(client, issuer.settings)
    assert issuer.reads("/other/place") == 0


@pytest.mark.parametrize("path", [DISCOVERY, JWKS])
@pytest.mark.parametrize("faults", [[], [Fault.CHUNKED]])
async def test_a_huge_document_is_refused(
    issuer: Issuer, client: httpx.AsyncClient, path: str, faults: list[Fault]
) -> None:
    """Whether it says its length or not."""
    issuer.server.objects[path] += b" " * 1024**2
    for fault in faults:
        issuer.server.fail(fault, path=path)

    with pytest.raises(IssuerUnavailableError, match="more than"):
        await kids(client, issuer.settings)


@pytest.mark.parametrize(
    "configuration",
    [
        {"issuer": "https://other.example", "jwks_uri": "{url}/keys/jwks"},
        {"issuer": "{url}/", "jwks_uri": "{url}/keys/jwks"},
        {"jwks_uri": "{url}/keys/jwks"},
        {"issuer": "{url}"},
        {"issuer": "{url}", "jwks_uri": 7},
        {"issuer": "{url}", "jwks_uri": "http://169.254.169.254/latest"},
        {"issuer": "{url}", "jwks_uri": "file:///etc/passwd"},
        {"issuer": "{url}", "jwks_uri": "https://[::"},
        {"issuer": "{url}", "jwks_uri": "https://user:password@lab.example/keys"},
        ["{url}"],
    ],
)
async def test_a_configuration_that_is_not_of_the_issuer_is_refused(
    issuer: Issuer, client: httpx.AsyncClient, configuration: object
) -> None:
    """It has the very name, and its keys are where nobody on the way can replace them."""
    said = json.dumps(configuration).replace("{url}", issuer.url)
    issuer.server.objects[DISCOVERY] = said.encode()

    with pytest.raises(IssuerUnavailableError):
        await kids(client, issuer.settings)
    assert issuer.reads() == 0


@pytest.mark.parametrize("path", [DISCOVERY, JWKS])
@pytest.mark.parametrize(
    "body", [b"", b"<html></html>", b"[" * 100_000, gzip.compress(b"{}", mtime=0), b"\xff\xfe"]
)
async def test_what_is_no_document_is_refused(
    issuer: Issuer, client: httpx.AsyncClient, path: str, body: bytes
) -> None:
    """A page that says to log in first, for example."""
    issuer.server.objects[path] = body

    with pytest.raises(IssuerUnavailableError):
        await kids(client, issuer.settings)


async def test_many_keys_are_read(issuer: Issuer, client: httpx.AsyncClient) -> None:
    """An issuer may be in the middle of changing them."""
    issuer.publish(make_key("first"), make_key("second"), make_key("third", "P-256"))

    assert await kids(client, issuer.settings) == ["first", "second", "third"]
