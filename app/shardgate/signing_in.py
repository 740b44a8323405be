"""``shardgate login``: sign in at a service by a browser, and keep the token for this user."""

import json
import os
import re
import secrets
import sys
import termios
import time
import webbrowser
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from datetime import datetime
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from tempfile import NamedTemporaryFile
from threading import Thread
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qs, urlencode

import httpx
from pydantic import ValidationError

from shardgate.auth.oidc import checked_environment
from shardgate.auth.oidc_client import DeviceAuthorization, challenge_of
from shardgate.errors import ConfigurationError, ForbiddenError
from shardgate.formats.reading import DecodeError, check_format
from shardgate.settings import issuer_url

# Statuses after which the token may be asked for once more.
_WAITING: Final = (
    HTTPStatus.ACCEPTED,
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.BAD_GATEWAY,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
)
# Longer time between requests, if the issuer or the network asks for it (RFC 8628 §3.5).
_SLOWER_S: Final = 5


class KeptToken(NamedTuple):
    """A token, and when it expires, as RFC 3339 has it."""

    token: str
    expires_at: str

    @property
    def is_valid(self) -> bool:
        """Return whether it can be used for another minute."""
        return datetime.fromisoformat(self.expires_at).timestamp() > time.time() + 60


class TokenFile:
    """File of the user's tokens by the URL of the service, with mode 0600."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def get(self, url: str) -> KeptToken | None:
        """Return a valid token for *url*."""
        with suppress(LookupError, TypeError, ValueError, ConfigurationError):
            token = KeptToken(**self._read()[url.rstrip("/")])
            return token if token.is_valid else None
        return None

    def put(self, url: str, token: KeptToken) -> None:
        """Keep *token* for *url*."""
        folder = self._path.parent
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            text = json.dumps({**self._read(), url.rstrip("/"): token._asdict()}, indent=1)
            # Only this user may read a temporary file.
            with NamedTemporaryFile(
                "w", encoding="utf-8", dir=folder, delete_on_close=False
            ) as file:
                file.write(text)
                file.close()
                Path(file.name).replace(self._path)
        except OSError as error:
            raise ConfigurationError(f"{self._path}: {error.strerror}") from error

    def _read(self) -> dict[str, Any]:
        found = None
        with suppress(OSError, ValueError, RecursionError):
            found = json.loads(self._path.read_text("utf-8"))
        if not isinstance(found, dict):
            return {}
        try:  # a file that this version would damage
            check_format(found)
        except DecodeError as error:
            raise ConfigurationError(f"{self._path}: {error}") from None
        return found


def sign_in(
    url: str,
    tell: Callable[[str], None],
    ask: Callable[[], str] | None = None,
    pause: Callable[[float], object] = time.sleep,
) -> KeptToken:
    """Sign in at the service at *url*, and return the token.

    Without *ask* the person signs in by the browser of this machine. With it, by a browser
    elsewhere: with a code of the issuer that the person enters there or, if the issuer has none for
    this service, with the code that *ask* returns.

    Raises: `ConfigurationError` if the service cannot be reached, `ForbiddenError`.
    """
    verifier = secrets.token_urlsafe(32)
    query = {"challenge": challenge_of(verifier)}
    with _open_client(url) as client:
        response = _send(client, "GET", "auth_info")
        if response.status_code == HTTPStatus.NOT_FOUND:
            reason = "does not offer sign-in; its configuration needs login.issuer"
            raise ForbiddenError(f"{url} {reason}")
        if response.status_code != HTTPStatus.OK:
            raise ForbiddenError(f"{response.url}: {_reason(response)}")

        def redeem(code: str) -> KeptToken:
            body = {"code": code, "verifier": verifier}
            return _token_in(_send(client, "POST", "login/token", json=body))

        command_url = f"{client.base_url}login/command"
        if ask is not None:
            if (token := _sign_in_on_device(client, tell, pause)) is not None:
                return token
            tell(f"Open this address in a browser:\n{command_url}?{urlencode(query)}")
            return redeem(ask().strip())
        with _Listener(redeem) as listener:
            query["port"] = str(listener.server_port)
            address = f"{command_url}?{urlencode(query)}"
            tell(f"Sign in with the browser, which opens\n{address}")
            # A browser in the terminal blocks until the person ends it, after it has been here.
            Thread(target=_browse, args=(address, tell), daemon=True).start()
            return listener.wait()


def _sign_in_on_device(
    client: httpx.Client, tell: Callable[[str], None], pause: Callable[[float], object]
) -> KeptToken | None:
    """Sign in by a device code (RFC 8628); `None` if the service or its issuer has none.

    Raises: `ForbiddenError`.
    """
    response = _send(client, "POST", "login/device")
    if not response.is_success:
        return None
    try:
        begun = DeviceAuthorization.model_validate_json(response.content)
    except ValidationError:
        raise ForbiddenError("the service sent no code for another device") from None
    page = begun.verification_uri_complete
    action = "enter" if page is None else "check that it shows"
    address = page or begun.verification_uri
    tell(f"Open this address in a browser, and {action} the code {begun.user_code}:\n{address}")
    body = {"device_code": begun.device_code}
    interval_s = begun.interval
    until = time.monotonic() + begun.expires_in
    while time.monotonic() < until:
        pause(max(interval_s, 1))
        try:
            response = _send(client, "POST", "login/device/token", json=body)
        except ConfigurationError:
            interval_s += _SLOWER_S
            continue
        if response.status_code not in _WAITING:
            return _token_in(response)
        if response.status_code != HTTPStatus.ACCEPTED or "slow_down" in response.text:
            interval_s += _SLOWER_S
    raise ForbiddenError("the sign-in took longer than the issuer allows")


def _browse(address: str, tell: Callable[[str], None]) -> None:
    if not webbrowser.open(address):
        tell("No browser opens on this machine: open the address here, or use --no-browser.")


@contextmanager
def long_lines() -> Generator[None]:
    """Take longer lines from a terminal than it edits: 1,024 bytes on macOS, 4,096 on Linux."""
    descriptor = sys.stdin.fileno()
    if not os.isatty(descriptor):
        yield
        return
    before = termios.tcgetattr(descriptor)
    unedited = termios.tcgetattr(descriptor)
    unedited[3] &= ~termios.ICANON  # modes of the line
    characters = unedited[6]
    characters[termios.VMIN] = 1  # a read waits for one byte, however long
    characters[termios.VTIME] = 0
    termios.tcsetattr(descriptor, termios.TCSANOW, unedited)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def is_accepted(url: str, token: KeptToken) -> bool:
    """Return whether the service at *url* takes *token*. Raises: `ConfigurationError`."""
    headers = {"Authorization": f"Bearer {token.token}"}
    with _open_client(url) as client:
        return _send(client, "GET", "api/datasets", headers=headers).is_success


def _open_client(url: str) -> httpx.Client:
    try:
        base_url = httpx.URL(f"{issuer_url(url).rstrip('/')}/")
    except (ValueError, httpx.InvalidURL) as error:
        raise ConfigurationError(f"{url} {error}") from None
    with checked_environment():
        return httpx.Client(base_url=base_url, timeout=30)


def _token_in(response: httpx.Response) -> KeptToken:
    if response.is_success:
        with suppress(LookupError, TypeError, ValueError):
            document = response.json()
            token = KeptToken(str(document["token"]), str(document["expires_at"]))
            # It is printed as a part of a header (RFC 6750 §2.1).
            if re.fullmatch("[A-Za-z0-9._~+/-]+=*", token.token):
                return token
        raise ForbiddenError("the service sent no bearer token")
    raise ForbiddenError(_reason(response))


def _reason(response: httpx.Response) -> str:
    """Return what a problem document says, or else the status."""
    with suppress(LookupError, TypeError, ValueError):
        return str(response.json()["detail"])
    return f"the service answers {response.status_code}"


def _send(client: httpx.Client, method: str, path: str, **options: Any) -> httpx.Response:
    try:
        return client.request(method, path, **options)
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:  # the last of odd host names
        reason = error or type(error).__name__
        raise ConfigurationError(f"{client.base_url}{path}: {reason}") from error


class _Handler(BaseHTTPRequestHandler):
    server: "_Listener"
    timeout = 10  # browsers open connections in advance, and may send nothing

    def do_GET(self) -> None:
        """Redeem the code that the browser brings; other requests do not end the wait."""
        code = parse_qs(self.path.partition("?")[2]).get("code", [""])[0]
        status = HTTPStatus.BAD_REQUEST
        text = (
            "This is not the sign-in that was begun here. Open the address that the command prints."
        )
        if code:
            try:
                self.server.token = self.server.redeem(code)
            except ForbiddenError:
                pass  # any page of the browser can bring a code
            except ConfigurationError:
                text = "The service cannot be reached. Load this page again."
            else:
                status = HTTPStatus.OK
                text = "You are signed in. This window may be closed."
        self.send_response(status)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Security-Policy", "default-src 'none'; frame-ancestors 'none'")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        head = "<!doctype html><meta charset=utf-8><title>Shardgate</title>"
        self.wfile.write(f"{head}<p>{text}</p>".encode())

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as it is called
        """Log nothing: requests hold codes."""


class _Listener(HTTPServer):
    """Waits on this machine for the browser, whose code it redeems."""

    def __init__(self, redeem: Callable[[str], KeptToken]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.redeem = redeem
        self.token: KeptToken | None = None

    def wait(self) -> KeptToken:
        """Return the token. Raises: `ForbiddenError` if the browser takes too long."""
        until = time.monotonic() + 600
        while self.token is None:
            self.timeout = until - time.monotonic()
            if self.timeout <= 0:
                raise ForbiddenError("the sign-in took longer than ten minutes")
            self.handle_request()
        return self.token
