"""Reads what issuers publish, over httpx; none of its exceptions leaves this module."""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Final

import httpx
import orjson

from app.errors import IssuerUnavailableError
from app.http.credentials.verification_keys import VerificationKey, decode_jwks
from app.setting_fields import issuer_url
from app.settings import IssuerSettings

_DISCOVERY: Final = "/.well-known/openid-configuration"
_MOST_NBYTES: Final = 1024**2
_ENCRYPTED: Final = "https://"


def open_client(timeout_s: float) -> httpx.AsyncClient:
    """Open a client that goes nowhere but where it is sent."""
    headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
    return httpx.AsyncClient(headers=headers, follow_redirects=False, timeout=timeout_s)


async def read_keys(
    client: httpx.AsyncClient, issuer: IssuerSettings, timeout_s: float
) -> tuple[VerificationKey, ...]:
    """Read the keys of *issuer*, in *timeout_s* altogether.

    Raises: `IssuerUnavailableError`, whose text is for the operator.
    """
    with _translated(issuer.url):
        async with asyncio.timeout(timeout_s):
            url = issuer.jwks_url or await _discover(client, issuer.url)
            return decode_jwks(await _get(client, url))


async def _discover(client: httpx.AsyncClient, issuer: str) -> str:
    """Find where the keys of *issuer* are (OpenID Connect Discovery §4)."""
    match orjson.loads(await _get(client, f"{issuer.rstrip('/')}{_DISCOVERY}")):
        case {"issuer": str(named), "jwks_uri": str(url)} if named == issuer:
            if issuer.startswith(_ENCRYPTED) and not url.startswith(_ENCRYPTED):
                raise ValueError("its jwks_uri is not https://")
            return issuer_url(url)
        case _:
            raise ValueError("its configuration is of another issuer, or names no jwks_uri")


async def _get(client: httpx.AsyncClient, url: str) -> bytes:
    async with client.stream("GET", url) as response:
        if response.status_code != HTTPStatus.OK:
            raise ValueError(f"{url} answers {response.status_code}")
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise ValueError(f"{url} comes in a coding that was not asked for")
        body = bytearray()
        async for piece in response.aiter_raw():
            body += piece
            if len(body) > _MOST_NBYTES:
                raise ValueError(f"{url} has more than {_MOST_NBYTES} bytes")
        return bytes(body)


@contextmanager
def _translated(issuer: str) -> Generator[None]:
    try:
        yield
    except TimeoutError as error:
        raise IssuerUnavailableError(f"{issuer}: does not answer in time") from error
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise IssuerUnavailableError(f"{issuer}: {error or type(error).__name__}") from error
