"""`shardgate.auth.oidc_client`: requests to issuers, and their answers."""

import secrets
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import httpx
import pytest
from pydantic import SecretStr

from shardgate.auth.oidc import Claims, Issuers
from shardgate.auth.oidc_client import Attempt, OidcClient, next_prompt
from shardgate.errors import ConfigurationError, ForbiddenError, IssuerUnavailableError
from shardgate.settings import IssuerSettings, LoginSettings
from tests.support.auth.provider import CLIENT_ID, CLIENT_SECRET, Provider
from tests.support.clocks import Clock

REDIRECT_URI = "https://service.example/login/callback"


@asynccontextmanager
async def open_flow(
    provider: Provider, clock: Callable[[], float] = time.monotonic, **changes: Any
) -> AsyncGenerator[OidcClient]:
    """Open the client's side, with *changes* of its settings."""
    good = {"issuer": "lab", "client_id": CLIENT_ID, "client_secret": SecretStr(CLIENT_SECRET)}
    issuers = {"lab": IssuerSettings(url=provider.url, audience="shardgate")}
    settings = LoginSettings(**{**good, **changes})
    async with (
        aclosing(Issuers(issuers)) as opened,
        aclosing(OidcClient(opened.by_name["lab"], settings, clock)) as flow,
    ):
        yield flow


def query_of(url: str) -> dict[str, str]:
    """Return the parameters of *url*."""
    return dict(parse_qsl(urlsplit(url).query))


async def sign_in(flow: OidcClient) -> Claims:
    """Sign in, and return the claims."""
    attempt = Attempt.new()
    url = await flow.begin(attempt, REDIRECT_URI)
    async with httpx.AsyncClient() as client:
        location = (await client.get(url)).headers["location"]
    return await flow.finish(attempt, REDIRECT_URI, query_of(location))


async def test_secrets_of_attempts_are_long_and_distinct() -> None:
    """Each attempt has three secrets of 256 bits, fit for a verifier of PKCE."""
    known = {*Attempt.new(), *Attempt.new()}

    assert len(known) == 6
    assert {len(each) for each in known} == {len(secrets.token_urlsafe(32))}


@pytest.mark.parametrize(
    ("method", "changes"),
    [("client_secret_basic", {}), ("client_secret_post", {}), ("none", {"client_secret": None})],
)
async def test_client_names_itself_as_the_issuer_wants_it(
    provider: Provider, method: str, changes: dict[str, Any]
) -> None:
    """The secret is sent in a header or in the form; without one the form has the client."""
    provider.auth_method = method
    provider.extra = {"token_endpoint_auth_methods_supported": [method]}
    async with open_flow(provider, **changes) as flow:
        claims = await sign_in(flow)

    assert claims["sub"] == "ada"


async def test_secret_is_read_from_its_file(provider: Provider, tmp_path: Path) -> None:
    """The file of the secret is read at each sign-in; without it nobody signs in."""
    file = tmp_path / "secret"
    async with open_flow(provider, client_secret=None, client_secret_file=file) as flow:
        with pytest.raises(ConfigurationError, match="client_secret_file cannot be read"):
            await sign_in(flow)
        file.write_text(f"{CLIENT_SECRET}\n")
        claims = await sign_in(flow)

    assert claims["sub"] == "ada"


async def test_scopes_are_asked_for(provider: Provider) -> None:
    """The scopes of the settings are asked for."""
    async with open_flow(provider, scopes=("openid", "groups")) as flow:
        url = await flow.begin(Attempt.new(), REDIRECT_URI)

    assert query_of(url)["scope"] == "openid groups"


@pytest.mark.parametrize(
    ("supported", "prompt"),
    [
        (None, "select_account"),
        (["none", "login", "select_account"], "select_account"),
        (["none", "login"], "login"),
    ],
)
async def test_person_is_chosen_as_the_issuer_can(
    provider: Provider, supported: list[str] | None, prompt: str
) -> None:
    """Somebody else signs in by the choice of an account, or by a login where it is unknown."""
    provider.extra = {"prompt_values_supported": supported}
    async with open_flow(provider) as flow:
        urls = [
            await flow.begin(Attempt.new(), REDIRECT_URI, asked) for asked in ("", "select_account")
        ]
    prompts = [query_of(url).get("prompt") for url in urls]

    assert prompts == [None, prompt]


@pytest.mark.parametrize(
    ("prompt", "error", "following"),
    [
        *(
            ("select_account", error, "login")
            for error in ("invalid_request", "account_selection_required", "login_required")
        ),
        *(
            ("select_account", error, "")
            for error in ("access_denied", "server_error", "temporarily_unavailable", "")
        ),
        *(
            ("", error, "login")
            for error in ("login_required", "interaction_required", "account_selection_required")
        ),
        *(("", error, "") for error in ("consent_required", "invalid_scope", "")),
        *(("login", error, "") for error in ("invalid_request", "login_required")),
    ],
)
def test_refused_prompt_is_followed_by_a_login(prompt: str, error: str, following: str) -> None:
    """A prompt that the issuer refuses is followed by `login`, once; other refusals are final."""
    assert next_prompt(prompt, error) == following


async def test_cookies_of_the_issuer_are_not_kept(provider: Provider) -> None:
    """The request for somebody's token has no cookie of the one before."""
    provider.cookies.clear()
    async with open_flow(provider) as flow:
        for _ in range(2):
            await sign_in(flow)

    assert provider.cookies == [None, None]


async def test_claims_are_those_of_the_userinfo_endpoint(provider: Provider) -> None:
    """The claims of the userinfo endpoint replace those of the ID token if the settings say so."""
    provider.userinfo = 200, {"sub": "ada", "groups": ["chiefs"]}
    async with open_flow(provider) as flow, open_flow(provider, userinfo=True) as asking:
        groups = [(await sign_in(each))["groups"] for each in (flow, asking)]

    assert groups == [["lab"], ["chiefs"]]


@pytest.mark.parametrize(
    ("name", "value", "error", "reason"),
    [
        *(
            ("userinfo", (200, document), ForbiddenError, "is of another subject")
            for document in ({"sub": "eve"}, {}, ["ada"])
        ),
        (
            "userinfo",
            (401, {"sub": "ada"}),
            IssuerUnavailableError,
            "userinfo_endpoint answers 401",
        ),
        ("access_token", None, ForbiddenError, "sent no access token"),
        ("extra", {"userinfo_endpoint": None}, IssuerUnavailableError, "cannot be read"),
    ],
)
async def test_issuer_without_the_wanted_userinfo_is_refused(
    provider: Provider, name: str, value: object, error: type[Exception], reason: str
) -> None:
    """Userinfo of another subject, or none where it is wanted, signs nobody in."""
    setattr(provider, name, value)
    async with open_flow(provider, userinfo=True) as flow:
        with pytest.raises(error, match=reason):
            await sign_in(flow)


async def test_issuer_that_names_itself_always_has_to(provider: Provider) -> None:
    """The answer of an issuer that says it names itself is refused without `iss` (RFC 9207)."""
    provider.extra = {"authorization_response_iss_parameter_supported": True}
    async with open_flow(provider) as flow:
        with pytest.raises(ForbiddenError, match="not from the issuer that was asked"):
            await sign_in(flow)
        provider.answer = {"iss": provider.url}
        claims = await sign_in(flow)

    assert claims["sub"] == "ada"


@pytest.mark.parametrize(
    "configuration",
    [
        {"authorization_endpoint": None},
        {"authorization_endpoint": "javascript:alert(1)"},
        {"token_endpoint": "http://evil.example/token"},
    ],
)
async def test_unsafe_configuration_is_refused(
    provider: Provider, configuration: dict[str, object]
) -> None:
    """A configuration with an endpoint that is missing or no safe URL is refused."""
    provider.extra = configuration
    async with open_flow(provider) as flow:
        with pytest.raises(IssuerUnavailableError):
            await flow.begin(Attempt.new(), REDIRECT_URI)


async def test_issuer_that_fails_is_left_alone(provider: Provider) -> None:
    """After a failure sign-ins fail at once, until the issuer is asked again a minute later."""
    provider.seen.clear()
    provider.extra = {"issuer": "https://evil.example"}
    clock = Clock(0.0)
    async with open_flow(provider, clock) as flow:
        for clock.now in (0, 0, 59):
            with pytest.raises(IssuerUnavailableError):
                await flow.begin(Attempt.new(), REDIRECT_URI)
        assert len(provider.seen) == 1
        provider.extra, clock.now = {}, 60
        await flow.begin(Attempt.new(), REDIRECT_URI)

    assert len(provider.seen) == 2


async def test_device_of_an_issuer_that_offers_none_is_refused(provider: Provider) -> None:
    """An issuer without a device authorization endpoint begins no sign-in on another device."""
    provider.extra = {"device_authorization_endpoint": None}
    async with open_flow(provider) as flow:
        claims = await sign_in(flow)
        with pytest.raises(ForbiddenError, match="offers no sign-in on another device"):
            await flow.begin_on_device()

    assert claims["sub"] == "ada"


@pytest.mark.parametrize(
    "answer",
    [
        {"device_code": None},
        {"user_code": "WDJB\x1b[2J"},
        {"verification_uri": 5},
        {"expires_in": 0},
        {"interval": -1},
    ],
)
async def test_wrong_codes_for_a_device_are_refused(
    provider: Provider, answer: dict[str, object]
) -> None:
    """An answer that lacks a code, or has one that a terminal does not print, is refused."""
    provider.device = answer
    async with open_flow(provider) as flow:
        with pytest.raises(ForbiddenError, match="sent no codes"):
            await flow.begin_on_device()


async def test_query_of_the_authorization_endpoint_is_kept(provider: Provider) -> None:
    """Parameters of the issuer's own URL are kept, but take the place of none that is sent."""
    url = f"{provider.url}/authorize?p=b2c_1_susi&client_id=other&state=a"
    provider.extra = {"authorization_endpoint": url}
    async with open_flow(provider) as flow:
        asked = query_of(await flow.begin(Attempt.new(), REDIRECT_URI))

    assert (asked["p"], asked["client_id"]) == ("b2c_1_susi", CLIENT_ID)
    assert asked["state"] != "a"


@pytest.mark.parametrize("name", ["verification_uri", "verification_url"])
async def test_page_of_device_codes_has_either_name(provider: Provider, name: str) -> None:
    """The page for a device code may have its name in drafts of RFC 8628, and times may be text."""
    page = f"{provider.url}/enter"
    provider.device = {"verification_uri": None, name: page, "expires_in": "60", "interval": "5"}
    async with open_flow(provider) as flow:
        codes = await flow.begin_on_device()

    assert (codes.verification_uri, codes.expires_in, codes.interval) == (page, 60, 5)


@pytest.mark.parametrize(
    ("status", "document", "outcome"),
    [
        *((status, {"error": "authorization_pending"}, None) for status in (400, 403, 428)),
        (400, {"error": "expired_token"}, ForbiddenError),
        *((status, {"message": "no"}, IssuerUnavailableError) for status in (404, 429)),
        (500, {"error": "authorization_pending"}, IssuerUnavailableError),
    ],
)
async def test_error_of_any_client_status_is_an_answer(
    provider: Provider, status: int, document: dict[str, str], outcome: type[Exception] | None
) -> None:
    """A device waits by any 4xx status with an error of OAuth; others are outages."""
    async with open_flow(provider) as flow:
        codes = await flow.begin_on_device()
        provider.refusal = status, document
        with nullcontext() if outcome is None else pytest.raises(outcome):
            assert await flow.finish_on_device(codes.device_code) == "authorization_pending"


async def test_encrypted_issuer_has_an_encrypted_page(provider: Provider) -> None:
    """The page of an issuer that is https is https, also where an inner name leads to the rest."""
    outer = "https://login.example"
    provider.extra = {"issuer": outer}
    issuers = {"lab": IssuerSettings(url=outer, audience="a", discovery_url=provider.url)}
    settings = LoginSettings(issuer="lab", client_id=CLIENT_ID)
    async with (
        aclosing(Issuers(issuers)) as opened,
        aclosing(OidcClient(opened.by_name["lab"], settings)) as flow,
    ):
        with pytest.raises(IssuerUnavailableError):
            await flow.begin(Attempt.new(), REDIRECT_URI)
