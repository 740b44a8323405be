"""`shardgate.signing_in`: the command `shardgate login`."""

import html
import json
import os
import pty
import re
import socket
import stat
import subprocess
import sys
import termios
from collections.abc import Callable, Generator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Thread
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qs, urlencode, urlsplit

import httpx
import jwt
import numpy as np
import pytest
import zarr
from pydantic import SecretStr
from typer.testing import CliRunner, Result

from shardgate.cli import app
from shardgate.errors import ConfigurationError, ForbiddenError
from shardgate.settings import DatasetSettings, IssuerSettings, LoginSettings, Settings
from shardgate.signing_in import KeptToken, TokenFile, is_accepted, sign_in
from tests.support.auth.provider import CLIENT_ID, CLIENT_SECRET, Provider, providing
from tests.support.documents import program
from tests.support.processes import environ, wait_until
from tests.support.serving import serving
from tests.support.storage.listening import Handler, Listener

_BROWSER: Final = """#!{python}
import html, re, sys, httpx
with httpx.Client(follow_redirects=True, timeout=60) as client:
    page = client.get(sys.argv[1]).text
    client.get(html.unescape(re.search('href="(http[^"]+)"', page)[1]))
"""
"""A browser whose person is known to the provider, and allows what is asked."""
_CHALLENGE: Final = "a" * 43


def browse(address: str) -> str:
    """Open *address*, and return the page at which the sign-in ends."""
    with httpx.Client(follow_redirects=True, timeout=60, verify=False) as client:  # noqa: S501
        return html.unescape(client.get(address).text)


def link_in(page: str) -> str:
    """Return the link that allows the command to read."""
    found = re.search(r'href="(http[^"]+)"', page)
    assert found, page
    return found[1]


def visit(address: str) -> bool:
    """Allow the command that has opened *address* to read."""
    Thread(target=lambda: httpx.get(link_in(browse(address)))).start()
    return True


def code_in(page: str) -> str:
    """Return the code that is shown."""
    found = re.search("<pre[^>]*><code>([^<]+)<", page)
    assert found, page
    return found[1]


type Answer = Callable[[str, dict[str, str]], tuple[int, object]]
"""Returns the status and document for a path and the document that was sent."""


class _Service(Handler[Answer]):
    def answer(self) -> None:
        """Answer as the owner says, or close the connection instead of the status 0."""
        status, document = self.server.owner(self.path, json.loads(self.body() or "{}"))
        body = json.dumps(document).encode()
        self.close_connection = not status
        if status:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)


def answering(token: Callable[[dict[str, str]], str]) -> Answer:
    """Return answers of a service without device codes; *token* is that for a code."""

    def answer(path: str, sent: dict[str, str]) -> tuple[int, object]:
        status = 403 if path == "/login/device" else 200
        return status, {"token": token(sent), "expires_at": later(3600)}

    return answer


class Service(NamedTuple):
    """A running service, and the folder of its private dataset."""

    url: str
    folder: Path

    def command_url(self, **query: object) -> str:
        """Return the address that the command opens, with *query*."""
        return f"{self.url}/login/command?{urlencode(query)}"


@pytest.fixture(scope="module")
def provider() -> Generator[Provider]:
    """Run a provider that has no codes for devices."""
    with providing() as provider:
        provider.device = None
        yield provider


@pytest.fixture(scope="module")
def service(provider: Provider, tmp_path_factory: pytest.TempPathFactory) -> Generator[Service]:
    """Serve an array to those who have signed in at the provider."""
    folder = tmp_path_factory.mktemp("private")
    data = np.arange(64, dtype="uint8").reshape(8, 8)
    zarr.create_array(folder, name="sharded", data=data, chunks=(2, 2), shards=(4, 4))
    settings = Settings(
        issuers={"lab": IssuerSettings(url=provider.url, audience="shardgate")},
        login=LoginSettings(
            issuer="lab", client_id=CLIENT_ID, client_secret=SecretStr(CLIENT_SECRET)
        ),
        datasets={"private": DatasetSettings(url=str(folder), read=("lab:lab",))},
    )
    with serving(settings) as url:
        yield Service(url, folder)


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a user with a browser and an empty folder for settings."""
    browser = tmp_path / "browser"
    browser.write_text(_BROWSER.format(python=sys.executable))
    browser.chmod(0o755)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return environ(BROWSER=f"{browser} %s", XDG_CONFIG_HOME=str(tmp_path / "config"), PATH=path)


def run(url: str, variables: dict[str, str]) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(app, ["login", url], env=variables)


def test_command_prints_the_header_and_keeps_the_token(
    service: Service, variables: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command signs in by the browser, and prints a header that reads; again without one, until
    the service no longer takes the token, which another sign-in replaces.
    """
    command = [sys.executable, "-m", "shardgate", "login", service.url]
    first = subprocess.check_output(command, env=variables, text=True, timeout=120)
    name, value = first.strip().split(": ")
    read = httpx.get(f"{service.url}/private/sharded/zarr.json", headers={name: value})
    file = tmp_path / "config/shardgate/tokens.json"
    modes = [stat.S_IMODE(each.stat().st_mode) for each in (file, file.parent)]
    files = [each.name for each in file.parent.iterdir()]
    monkeypatch.setattr("webbrowser.open", lambda _: pytest.fail("opened"))
    again = run(f"{service.url}/", variables)
    kept = json.loads(file.read_text())
    kept[service.url]["token"] += "a"
    file.write_text(json.dumps(kept))
    monkeypatch.setattr("webbrowser.open", visit)
    replaced = run(service.url, variables)

    assert read.is_success
    assert modes == [0o600, 0o700]
    assert files == [file.name]
    assert (again.stdout, again.stderr) == (first, "")
    assert replaced.exit_code == 0
    assert f"{kept[service.url]['token']}\n" not in replaced.stdout
    assert json.loads(file.read_text())[service.url]["token"] in replaced.stdout


def test_documented_program_reads_with_the_header(
    service: Service, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """fsspec, obstore and TensorStore read a private array as the documents show."""
    for name in ("BROWSER", "XDG_CONFIG_HOME", "PATH"):
        monkeypatch.setenv(name, variables[name])
    text = program("docs/access.md", "HTTPStore(").replace("http://127.0.0.1:8000", service.url)
    found: dict[str, Any] = {}
    exec(text, found)  # noqa: S102 - what is documented
    stored = zarr.open_array(service.folder, path="sharded")[:]

    for name in ("by_fsspec", "by_obstore"):
        np.testing.assert_array_equal(found[name][:], stored)
    np.testing.assert_array_equal(found["by_tensorstore"].read().result(), stored)


def test_entered_code_prints_the_header_alone(
    service: Service, variables: dict[str, str], tmp_path: Path
) -> None:
    """The output of `--no-browser` is the header alone, which programs read, even if the user has
    no place for the token, which the command tells.
    """
    (tmp_path / "config").write_text("")
    command = [sys.executable, "-m", "shardgate", "login", service.url, "--no-browser"]
    with subprocess.Popen(
        command, env=variables, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stderr
        address = [process.stderr.readline() for _ in range(2)][1].strip()
        output, told = process.communicate(f"{code_in(browse(address))}\n", timeout=60)

    assert "The token is not kept: " in told
    assert "tokens.json: Not a directory" in told
    header = re.fullmatch(r"Authorization: Bearer (\S+)\n", output)
    assert header
    assert is_accepted(service.url, KeptToken(header[1], ""))


def test_long_code_is_entered_at_a_terminal(variables: dict[str, str]) -> None:
    """A code of more bytes than a line that the terminal edits arrives as a whole."""
    listener = Listener(_Service, answering(lambda sent: sent.get("code", "")[-64:]))
    end = "e" * 64
    command = [sys.executable, "-m", "shardgate", "login", listener.url, "--no-browser"]
    ours, theirs = pty.openpty()
    with (
        listener.running(),
        os.fdopen(theirs, "rb") as stdin,
        subprocess.Popen(
            command, env=variables, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process,
        os.fdopen(ours, "wb", buffering=0) as terminal,  # closes first, and so ends the command
    ):
        assert process.stderr
        told = b""
        while not told.endswith(b"Code: "):
            told += (byte := process.stderr.read(1))
            assert byte, told
        wait_until(lambda: not termios.tcgetattr(theirs)[3] & termios.ICANON)
        code = b"a" * 8000 + end.encode() + b"\n"
        Thread(target=terminal.write, args=(code,)).start()
        output, _ = process.communicate(timeout=60)

    assert output.decode() == f"Authorization: Bearer {end}\n"


@pytest.mark.parametrize("complete", [None, "https://login.example/enter?code=WDJB-MJHT"])
def test_device_code_is_entered_elsewhere(
    service: Service, provider: Provider, monkeypatch: pytest.MonkeyPatch, complete: str | None
) -> None:
    """The command without a browser shows the code of the issuer and its page, and waits."""
    monkeypatch.setattr(provider, "device", {"verification_uri_complete": complete})
    provider.waiting = ["authorization_pending", "slow_down"]
    said: list[str] = []
    pauses: list[float] = []
    token = sign_in(service.url, said.append, lambda: pytest.fail("asked"), pauses.append)
    page = complete or f"{provider.url}/enter"

    assert is_accepted(service.url, token)
    assert ["WDJB-MJHT" in text and text.endswith(f":\n{page}") for text in said] == [True]
    assert pauses == [1, 1, 5]


@pytest.mark.parametrize("status", [0, 429, 502, 503, 504])
def test_device_waits_longer_for_a_failing_service(status: int) -> None:
    """A service that fails for a moment is asked again, five seconds later than before."""
    pauses: list[float] = []
    statuses = [status, 200]
    codes = {"device_code": "a", "user_code": "b", "expires_in": 60, "interval": 2}

    def answer(path: str, _: dict[str, str]) -> tuple[int, object]:
        if path == "/login/device/token":
            return statuses.pop(0), {"token": "t", "expires_at": later(3600)}
        return 200, {**codes, "verification_uri": "https://login.example"}

    with (listener := Listener(_Service, answer)).running():
        token = sign_in(listener.url, lambda _: None, lambda: "", pauses.append)

    assert token.token == "t"
    assert pauses == [2, 7]


def test_device_code_with_an_endless_lifetime_is_refused() -> None:
    """A lifetime beyond all clocks is no answer of a service."""
    codes = {"device_code": "a", "user_code": "b", "verification_uri": "https://login.example"}
    listener = Listener(_Service, lambda *_: (200, {**codes, "expires_in": 10**400}))

    with listener.running(), pytest.raises(ForbiddenError, match="no code for another device"):
        sign_in(listener.url, lambda _: None, lambda: "")


def test_code_of_another_command_is_refused(service: Service) -> None:
    """A code is worth nothing to a command that has not begun its sign-in."""
    code = code_in(browse(service.command_url(challenge=_CHALLENGE)))

    with pytest.raises(ForbiddenError, match="not of this sign-in"):
        sign_in(service.url, lambda _: None, lambda: code)


def test_code_has_no_token(service: Service) -> None:
    """A code, which browsers remember, opens no data, and neither do texts that it is made of."""
    code = code_in(browse(service.command_url(challenge=_CHALLENGE)))
    known = jwt.decode(code, options={"verify_signature": False})
    texts = [code, *(value for value in known.values() if isinstance(value, str))]

    assert known.keys() == {"sub", "rules", "sid", "challenge", "iss", "aud", "exp"}
    assert [is_accepted(service.url, KeptToken(text, "")) for text in texts] == [False] * len(texts)


def test_page_at_the_end_warns(service: Service) -> None:
    """The page with a code says when to enter it, and to give it to nobody; that for a port of this
    machine links to it, and says when to follow the link.
    """
    with_code, with_link = (
        browse(service.command_url(challenge=_CHALLENGE, **port)) for port in ({}, {"port": 54321})
    )

    assert "only if you have just started" in with_code
    assert "Give it to nobody" in with_code
    assert "Only if you have just started" in with_link
    assert urlsplit(link_in(with_link)).netloc == "127.0.0.1:54321"
    assert 'data-message=""' in with_link


@pytest.mark.parametrize(
    "query",
    [
        {},
        {"challenge": "short"},
        {"challenge": "a" * 44},
        {"challenge": f"{'a' * 42}="},
        {"challenge": _CHALLENGE, "port": "80"},
        {"challenge": _CHALLENGE, "port": "65536"},
        {"challenge": _CHALLENGE, "port": "8000@evil.example"},
        {"challenge": _CHALLENGE, "port": "evil.example"},
        {"challenge": _CHALLENGE, "port": "٨٠٠٠"},
    ],
)
def test_wrong_request_of_a_command_is_refused(service: Service, query: dict[str, str]) -> None:
    """A challenge or port that is none begins nothing."""
    response = httpx.get(service.command_url(**query))

    assert response.status_code == 400
    assert "set-cookie" not in response.headers


@pytest.mark.parametrize(
    "headers",
    [
        {"referer": "https://evil.example/"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "none", "sec-fetch-dest": "iframe"},
    ],
)
def test_page_cannot_begin_for_a_command(service: Service, headers: dict[str, str]) -> None:
    """A link or frame of a page begins no sign-in of a command, so none can be phished for."""
    response = httpx.get(service.command_url(challenge=_CHALLENGE), headers=headers)

    assert response.status_code == 403
    assert "set-cookie" not in response.headers


def test_command_waits_for_the_right_code(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Requests of others do not end the wait: of no URL or code, and of a wrong one. A service that
    cannot be reached when the browser comes is told there, and asked again.
    """
    statuses = [0, 200]

    def answer(path: str, sent: dict[str, str]) -> tuple[int, object]:
        if path == "/auth_info":
            return 200, {}
        if sent["code"] != "right":
            return 403, {"detail": "wrong"}
        return statuses.pop(0), {"token": "t", "expires_at": later(3600)}

    pages: list[httpx.Response] = []
    paths = ("favicon.ico", "?code=wrong", "?state=a", "?code=right", "?code=right")

    def come(address: str) -> bool:
        port = parse_qs(urlsplit(address).query)["port"][0]
        with socket.create_connection(("127.0.0.1", int(port))) as odd:
            odd.sendall(b"GET http://[ HTTP/1.0\r\n\r\n")
            odd.makefile("rb").read()  # until it is answered
        pages.extend(httpx.get(f"http://127.0.0.1:{port}/{path}") for path in paths)
        return True

    monkeypatch.setattr("webbrowser.open", come)
    with (listener := Listener(_Service, answer)).running():
        token = sign_in(listener.url, print)
        wait_until(lambda: len(pages) == len(paths))

    assert token.token == "t"
    assert [page.status_code for page in pages] == [400, 400, 400, 400, 200]
    assert "cannot be reached" in pages[3].text
    assert "You are signed in" in pages[4].text
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("token", ["a\nX-Other: b", "\x1b[2J", "a b", "", "é"])
def test_answer_that_is_no_token_is_refused(token: str) -> None:
    """A token with characters that no token has is refused: it would end the header."""
    listener = Listener(_Service, answering(lambda _: token))
    with listener.running(), pytest.raises(ForbiddenError, match="no bearer token"):
        sign_in(listener.url, lambda _: None, lambda: "code")


def test_wrong_environment_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Certificates of the environment that cannot be used are an error in words."""
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere")

    with pytest.raises(ConfigurationError, match="SSL_CERT_FILE, SSL_CERT_DIR or a proxy"):
        sign_in("https://127.0.0.1:1", print, str)


@pytest.mark.parametrize(
    ("status", "document", "reason"),
    [
        (421, {"detail": "server.hosts does not name this"}, r"server\.hosts does not name"),
        (421, [], "the service answers 421"),
        (404, {"detail": "not found"}, "does not offer sign-in"),
    ],
)
def test_refusal_of_the_service_is_told(status: int, document: object, reason: str) -> None:
    """A service that refuses the first request is told in its own words, one without sign-in in
    others.
    """
    listener = Listener(_Service, lambda *_: (status, document))
    with listener.running(), pytest.raises(ForbiddenError, match=reason):
        sign_in(listener.url, print, str)


def test_machine_without_a_browser_is_told(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no browser opens, the command names the option for a browser elsewhere, and waits."""
    monkeypatch.setattr("webbrowser.open", lambda address: not visit(address))
    said: list[str] = []

    assert is_accepted(service.url, sign_in(service.url, said.append))
    wait_until(lambda: any("--no-browser" in text for text in said))


def test_unreachable_service_is_told() -> None:
    """A service that cannot be reached is an error with the URL."""
    with pytest.raises(ConfigurationError, match=r"^http://127\.0\.0\.1:1/auth_info: "):
        sign_in("http://127.0.0.1:1", print, str)


def later(seconds: float) -> str:
    """Return a time from now."""
    return (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"https://a": 5}', '{"https://a": {"token": "a"}}']
)
def test_malformed_file_has_no_tokens(tmp_path: Path, text: str) -> None:
    """A file that was not written by the command has no tokens, and is replaced."""
    path = tmp_path / "tokens.json"
    path.write_text(text)
    file, token = TokenFile(path), KeptToken("token", later(3600))

    assert file.get("https://a") is None
    file.put("https://a", token)
    assert file.get("https://a/") == token


def test_file_keeps_tokens_of_several_services(tmp_path: Path) -> None:
    """Tokens are kept by service, and those that expire soon are not returned."""
    file = TokenFile(tmp_path / "new/folder/tokens.json")
    file.put("https://a", KeptToken("first", later(3600)))
    file.put("https://b/", KeptToken("second", later(30)))

    assert file.get("https://a") is not None
    assert file.get("https://b") is None
    assert file.get("https://c") is None
