"""Under TLS, servers are who they say, and all else is as without."""

import asyncio
import ssl
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import pytest
import trustme

from app.storage.http1_client import CutOffError, HttpClient, Target
from tests.storage.http1.conftest import Serve
from tests.storage.http1.scripted import Do, Step, answer, fetch, until

ANSWERED: list[Step] = [Do.READ, answer()]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"
LARGE = bytes(range(256)) * (20 * 1024**2 // 256)


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    """Make an authority that nobody else knows."""
    return trustme.CA()


@pytest.fixture(scope="module")
def ca_file(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write down who is to be trusted."""
    path: Path = tmp_path_factory.mktemp("tls") / "ca.pem"
    authority.cert_pem.write_to_path(str(path))
    return str(path)


@pytest.fixture(scope="module")
def tls(authority: trustme.CA) -> ssl.SSLContext:
    """Be 127.0.0.1, and nobody else."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    return context


@pytest.fixture
async def trusting(ca_file: str) -> AsyncGenerator[HttpClient]:
    """Open a patient client of one connection that trusts the authority."""
    async with aclosing(HttpClient(connections=1, silence_s=60, ca_file=ca_file)) as opened:
        yield opened


async def test_a_server_without_tls_is_not_asked(serve: Serve, trusting: HttpClient) -> None:
    """There is no falling back to plain text."""
    server = await serve([b"HTTP/1.1 400 Bad Request\r\n\r\n"])
    with pytest.raises(ssl.SSLError):
        await trusting.send("GET", server.target(scheme="https"))


async def test_a_handshake_without_answer_is_silence(serve: Serve, hasty: HttpClient) -> None:
    """It belongs to connecting."""
    server = await serve([])
    with pytest.raises(TimeoutError):
        await hasty.send("GET", server.target(scheme="https"))

    await until(lambda: not server.open)


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_failed_handshake_makes_room(
    serve: Serve, tls: ssl.SSLContext, trusting: HttpClient, *, is_cancelled: bool
) -> None:
    """Neither refusing nor leaving a server costs a connection."""
    server = await serve(ANSWERED, tls=tls)
    other = await serve([] if is_cancelled else [b"no TLS"])
    failing = asyncio.create_task(trusting.send("GET", other.target(scheme="https")))
    await until(lambda: other.connections)
    if is_cancelled:
        failing.cancel()
    with pytest.raises((ssl.SSLError, asyncio.CancelledError)):
        await failing

    assert await fetch(trusting, server.target(scheme="https")) == b"hello"


async def test_a_missing_file_of_authorities_makes_room() -> None:
    """Each request tells what is wrong, instead of waiting for the one before."""
    async with aclosing(HttpClient(connections=1, silence_s=60, ca_file="/nonexistent")) as client:
        for _ in range(2):
            with pytest.raises(FileNotFoundError):
                await client.send("GET", Target("https://127.0.0.1:1/"))


async def test_a_connection_under_tls_is_used_again(
    serve: Serve, tls: ssl.SSLContext, trusting: HttpClient
) -> None:
    """Handshakes are what keeping connections saves most of."""
    server = await serve(ANSWERED * 2, tls=tls)
    for _ in range(2):
        assert await fetch(trusting, server.target(scheme="https")) == b"hello"

    assert server.connections == 1


@pytest.mark.parametrize(
    "end", [[Do.CLOSE], [Do.READ, Do.CLOSE], [Do.READ, Do.RESET]], ids=["idle", "closed", "reset"]
)
async def test_a_connection_under_tls_that_closed_is_replaced(
    serve: Serve, tls: ssl.SSLContext, trusting: HttpClient, end: list[Step]
) -> None:
    """Whether that is known before or after the request is written, nobody notices."""
    server = await serve([*ANSWERED, *end], [Do.READ, answer(b"again")], tls=tls)
    await fetch(trusting, server.target(scheme="https"))

    assert await fetch(trusting, server.target(scheme="https")) == b"again"


async def test_a_body_under_tls_may_be_cut_off(
    serve: Serve, tls: ssl.SSLContext, trusting: HttpClient
) -> None:
    """A proper end of TLS is no end of the body."""
    server = await serve([Do.READ, HEAD, b"he", Do.CLOSE], tls=tls)
    response = await trusting.send("GET", server.target(scheme="https"))
    with pytest.raises(CutOffError):
        await response.read()


async def test_an_unread_body_under_tls_stays_with_the_server(
    serve: Serve, tls: ssl.SSLContext, trusting: HttpClient
) -> None:
    """No layer takes in more than a little, and nothing is lost."""
    server = await serve([Do.READ, answer(LARGE)], tls=tls)
    response = await trusting.send("GET", server.target(scheme="https"))
    await until(lambda: response._nbytes > 512 * 1024)
    await asyncio.sleep(0.05)

    assert response._nbytes < 1.5 * 1024**2
    assert server.sent_bytes < len(LARGE) // 2
    assert await response.read() == LARGE


@pytest.mark.parametrize(("is_trusting", "host"), [(False, "127.0.0.1"), (True, "localhost")])
async def test_a_certificate_must_be_trusted_and_of_that_name(
    serve: Serve,
    tls: ssl.SSLContext,
    client: HttpClient,
    trusting: HttpClient,
    *,
    is_trusting: bool,
    host: str,
) -> None:
    """Without a file the system's authorities count; a certificate of another server is none."""
    server = await serve(ANSWERED, tls=tls)
    with pytest.raises(ssl.SSLCertVerificationError):
        await (trusting if is_trusting else client).send(
            "GET", server.target(scheme="https", host=host)
        )

    assert not server.requests
