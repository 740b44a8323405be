"""Browsers that sign people in, and the service that they sign in at."""

import html
import json
import re
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
from pydantic import SecretStr

from shardgate.settings import (
    DatasetSettings,
    IssuerSettings,
    LoginSettings,
    ServerSettings,
    Settings,
    TokenSettings,
)
from tests.support.auth.people import TEXT
from tests.support.auth.provider import CLIENT_ID, CLIENT_SECRET, Provider
from tests.support.files import write_files

VIEWER: Final = "https://viewer.example"
OTHER: Final = "https://other-viewer.example"
AUTHORIZE: Final = "/login/api/v1/authorize"
CALLBACK: Final = "/login/callback"
SECRET: Final = "one secret for all replicas of a service"
HTML: Final = {"accept": "text/html"}


def login_settings(**changes: Any) -> LoginSettings:
    """Return settings of signing in, with *changes*."""
    good = {
        "issuer": "lab",
        "client_id": CLIENT_ID,
        "client_secret": SecretStr(CLIENT_SECRET),
        "viewers": (VIEWER, OTHER),
    }
    return LoginSettings(**{**good, **changes})


def settings(provider: Provider, folder: Path, **changes: Any) -> Settings:
    """Return settings of a public dataset, one for the lab, and one for others."""
    rules = {"open": ("public",), "private": ("lab:lab",), "secret": ("lab:chiefs",)}
    rules |= {"mine": ("lab:email=eve@a.example",)}
    write_files({f"{name}/text.txt": TEXT for name in rules}, folder)
    return Settings(
        server=ServerSettings(hosts=("service.example",)),
        issuers={"lab": IssuerSettings(url=provider.url, audience="shardgate")},
        login=login_settings(**changes),
        tokens=TokenSettings(secret=SecretStr(SECRET)),
        datasets={
            name: DatasetSettings(
                url=str(folder / name),
                read=rule,
                writable=name == "private",
                write=("lab:lab",) if name == "private" else None,
            )
            for name, rule in rules.items()
        },
    )


class Page(NamedTuple):
    """The page that ends a sign-in."""

    response: httpx.Response

    @property
    def text(self) -> str:
        """What it says."""
        found = re.search(r"<p[^>]*>(.*?)</p>", self.response.text)
        assert found
        return html.unescape(found[1])

    @property
    def message(self) -> dict[str, Any]:
        """The message to the opener; empty if there is none."""
        return dict(json.loads(self._data("message") or "{}"))

    @property
    def origins(self) -> list[str]:
        """The origins that it is sent to."""
        return list(json.loads(self._data("origins")))

    def _data(self, name: str) -> str:
        found = re.search(rf'data-{name}="([^"]*)"', self.response.text)
        assert found
        return html.unescape(found[1])


class Browser:
    """A browser with cookies, which follows redirects when told to."""

    def __init__(self, url: str) -> None:
        self.client = httpx.Client(base_url=url, timeout=60, verify=False)  # noqa: S501 - http

    def name(self, kind: str) -> str:
        """Return the name of a cookie."""
        return f"shardgate-{kind}-{self.client.base_url.port}"

    @property
    def attempts(self) -> list[str]:
        """Names of the cookies of sign-ins that have begun, the oldest first."""
        return [name for name in self.client.cookies if name.startswith("shardgate-attempt-")]

    def begin(self, path: str = AUTHORIZE, **headers: str) -> httpx.Response:
        """Open the window."""
        return self.client.get(path, headers=headers)

    def sign_in(self, **headers: str) -> str:
        """Open the window and sign in; return the URL that the issuer sends the browser to."""
        begun = self.begin(**headers)
        assert begun.status_code == 303, Page(begun).text
        return self.pass_issuer(begun)

    def pass_issuer(self, begun: httpx.Response) -> str:
        """Follow the redirect of *begun* to the issuer; return the URL that this leads back to."""
        return str(self.client.get(begun.headers["location"]).headers["location"])

    def come_back(self, url: str, **headers: str) -> Page:
        """Follow the issuer's redirect to *url*."""
        return Page(self.client.get(url, headers=headers))

    def page(self, **headers: str) -> Page:
        """Sign in, and return the page at the end."""
        return self.come_back(self.sign_in(**headers))


def begin_session(browser: Browser) -> httpx.Response:
    """Sign in for the pages of the service, and return the last response."""
    return browser.client.get(browser.pass_issuer(browser.begin("/login")))
