"""`app.http.auth.tokens`: signed tokens, the route that makes them, and those of issuers."""

import re
from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import jwt
import pytest
from fastapi import FastAPI, Request, Response
from joserfc import jws
from joserfc.errors import BadSignatureError
from joserfc.jwk import OctKey

from app.errors import ShardgateError, UnauthenticatedError
from app.http.auth.access import NOBODY, Caller, Datasets
from app.http.auth.oidc import Issuers
from app.http.auth.tokens import TokenSigner, build_tokens, read_grant
from app.http.body import RequestBodyReader
from app.http.problems import problem, status_of
from app.model import ObjectRef
from app.resolve.budget import ByteBudget
from app.resolve.containers import Containers, Dataset
from app.settings import DatasetSettings, Settings, TokenSettings
from tests.http.auth.issuing import JWKS, Issuer, forge, issuing, make_key, spell
from tests.storage.faulty import Fault
from tests.support.serving import serving

NOW = 1_000_000.0
LONGEST_S = 7200
SECRET = "a secret that all replicas share"


def minter(secret: str = SECRET, now: float = NOW, longest_s: int = LONGEST_S) -> TokenSigner:
    """Make a signer at a time that stands still."""
    return TokenSigner(
        TokenSettings.model_validate({"secret": secret, "longest_s": longest_s}), lambda: now
    )


async def refusal(minter: TokenSigner, token: str) -> str:
    """Tell why *token* is refused."""
    with pytest.raises(UnauthenticatedError) as caught:
        await minter.identify(token)
    return str(caught.value)


@pytest.mark.parametrize("name", ["sso:ada", 'a"b', "ü", "a/b", "~em", "sso:ada\\"])
async def test_a_token_lets_read_what_it_was_minted_for(name: str) -> None:
    """On every replica that has the secret, until it expires; it tells logs who minted it."""
    minted = minter().sign(name, ["em", "lm"], 60)
    known = await minter().identify(minted.token)

    assert known is not None
    assert known.caller.name == name
    assert known.caller.grants == {"public", read_grant("em"), read_grant("lm")}
    assert known.until_s == minted.expires_at.timestamp() == 1_000_060
    assert await minter(now=1_000_059.9).identify(minted.token) is not None
    assert "expired" in await refusal(minter(now=1_000_060), minted.token)


def test_a_token_is_short_and_fits_a_path() -> None:
    """No character of it is written in another way there; neither it nor the secret is shown.

    The secret is not the key: one that is put to another use as well signs no token.
    """
    made = minter()
    minted = made.sign("sso:ada", ["em"], 60)

    assert re.fullmatch(r"[A-Za-z0-9._-]+", minted.token)
    assert len(minted.token) < 220
    assert SECRET not in repr(made)
    assert minted.token not in repr(minted)
    with pytest.raises(BadSignatureError):
        jws.deserialize_compact(minted.token, OctKey.import_key(SECRET))


async def test_another_secret_signs_nothing_here() -> None:
    """Of a service that nobody told it to; where none is configured each start makes one."""
    minted = minter("the secret of somebody else, as long").sign("ada", ["em"], 60)
    token = TokenSigner(TokenSettings()).sign("ada", ["em"], 60).token

    assert "not signed by this service" in await refusal(minter(), minted.token)
    assert "not signed by this service" in await refusal(TokenSigner(TokenSettings()), token)


def tampered(**changes: object) -> str:
    """Change the claims of a good token."""
    header, claims, signature = minter().sign("ada", ["em"], 60).token.split(".")
    said = jwt.decode(f"{header}.{claims}.{signature}", options={"verify_signature": False})
    return f"{header}.{spell({**said, **changes})}.{signature}"


HEADER = {"alg": "HS256", "typ": "shardgate+jwt"}
CLAIMS = {"iss": "shardgate", "sub": "ada", "exp": 2_000_000, "datasets": ["em"]}


@pytest.mark.parametrize(
    "token",
    [
        tampered(datasets=["secret"]),
        tampered(exp=2**40),
        tampered(sub="root"),
        forge({**HEADER, "alg": "none"}, CLAIMS),
        forge({**HEADER, "alg": "None"}, CLAIMS),
        forge(HEADER, CLAIMS),
        forge(HEADER, CLAIMS, b""),
        forge(HEADER, CLAIMS, SECRET.encode()),
        f"{spell(HEADER)}..",
    ],
)
async def test_a_forgery_is_refused(token: str) -> None:
    """Nobody signs but who has the secret, and with nothing but it."""
    said = await refusal(minter(), token)

    assert not any(part and part in said for part in token.split("."))


async def test_issuers_and_minters_do_not_take_each_others_tokens() -> None:
    """Neither by a claim nor by a type, though each is good; the type says what is ours."""
    ours = minter().sign("ada", ["em"], 60).token
    alike = [forge(header, CLAIMS) for header in ({"alg": "HS256"}, {"typ": 5})]
    for token in ("", "opaque", "a.b.c", ours[:-1], f"{ours}.x", *alike):
        assert await minter().identify(token) is None
    minted = TokenSigner(TokenSettings())
    with issuing() as issuer:
        ours = minted.sign("ada", ["em"], 60).token
        theirs = issuer.sign({"datasets": ["em"]})
        as_ours = issuer.sign({"datasets": ["em"]}, header={"typ": "shardgate+jwt"})
        async with Issuers({"sso": issuer.settings}) as issuers:
            assert await issuers.identify(ours) is None
            assert await minted.identify(theirs) is None
            assert "not signed by this service" in await refusal(minted, as_ours)
            with pytest.raises(UnauthenticatedError, match="type"):
                await issuers.identify(as_ours)


ADA = Caller("ada", frozenset({"public", "ada"}))


def asking(longest_s: int = LONGEST_S, caller: Caller = ADA) -> httpx.AsyncClient:
    """Open a client of the route, which *caller* asks; Ada and tokens may read two datasets."""
    root, containers = ObjectRef("memory://store", "any"), Containers([])
    datasets = {
        name: Dataset(
            name, root, containers, "auto", b"", readers=frozenset({"ada", read_grant(name)})
        )
        for name in ("em", "lm")
    }
    app = FastAPI()
    documents = RequestBodyReader(ByteBudget(2**20, wait_s=1), timeout_s=1)
    app.include_router(build_tokens(Datasets(datasets), minter(longest_s=longest_s), documents))

    @app.exception_handler(ShardgateError)
    async def on_error(_: Request, error: ShardgateError) -> Response:
        return Response(problem(status_of(error), str(error))[1], status_of(error))

    async def behind(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "caller": caller}, receive, send)

    return httpx.AsyncClient(transport=httpx.ASGITransport(behind), base_url="http://gateway")


@pytest.fixture
async def ada() -> AsyncGenerator[httpx.AsyncClient]:
    """Let ada ask."""
    async with asking() as client:
        yield client


async def mint(client: httpx.AsyncClient, document: object) -> httpx.Response:
    """Ask for a token."""
    return await client.post("/api/tokens", json=document)


async def test_a_token_is_minted_for_a_dataset(ada: httpx.AsyncClient) -> None:
    """With the path that viewers take for each, and when it ends."""
    answer = await mint(ada, {"dataset": "em", "expires_in_s": 60})

    told = answer.json()
    known = await minter().identify(told["token"])
    assert answer.status_code == 201
    assert answer.headers["cache-control"] == "no-store"
    assert known is not None
    assert known.caller == Caller("ada", frozenset({"public", read_grant("em")}))
    assert datetime.fromisoformat(told["expires_at"]) == datetime.fromtimestamp(NOW + 60, UTC)
    assert told["paths"] == {"em": f"/~{told['token']}/em/"}
    told = (await mint(ada, {"datasets": ["em", "lm", "em"]})).json()
    assert told["paths"] == {name: f"/~{told['token']}/{name}/" for name in ("em", "lm")}


@pytest.mark.parametrize(("longest_s", "lifetime_s"), [(LONGEST_S, 3600), (600, 600)])
async def test_a_token_lives_an_hour(longest_s: int, lifetime_s: int) -> None:
    """Or as long as it may, where that is less; that bound may be asked for."""
    async with asking(longest_s) as client:
        told = (await mint(client, {"dataset": "em"})).json()
        longest = await mint(client, {"dataset": "em", "expires_in_s": longest_s})

    assert datetime.fromisoformat(told["expires_at"]).timestamp() == NOW + lifetime_s
    assert longest.status_code == 201


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"dataset": "em", "datasets": ["lm"]},
        {"datasets": []},
        {"datasets": ["em"] * 33},
        {"datasets": "em"},
        {"dataset": 5},
        {"dataset": "em", "expires_in_s": LONGEST_S + 1},
        {"dataset": "em", "expires_in_s": 10**30},
        {"dataset": "em", "expires_in_s": 0},
        {"dataset": "em", "expires_in_s": -5},
        {"dataset": "em", "expires_in_s": True},
        {"dataset": "em", "expires_in_s": 1.5},
        {"dataset": "em", "expires_in_s": "60"},
        {"dataset": "em", "write": True},
        [],
    ],
)
async def test_what_cannot_be_asked_for_is_refused(
    ada: httpx.AsyncClient, document: object
) -> None:
    """Nothing is guessed."""
    assert (await mint(ada, document)).status_code == 400


async def test_nobody_mints() -> None:
    """Nor learns which datasets there are."""
    async with asking(caller=NOBODY) as client:
        for document in ({"dataset": "em"}, {"dataset": "none"}, {"x": 5}):
            assert (await mint(client, document)).status_code == 401


TEXT = b"what the lab may read"


class Lab(NamedTuple):
    """A service, and the issuer that it trusts."""

    issuer: Issuer
    url: str

    def read(self, token: str, path: str = "/em/text.txt") -> httpx.Response:
        """Ask with *token*."""
        return httpx.get(f"{self.url}{path}", headers={"authorization": f"Bearer {token}"})

    def mint(self, token: str, dataset: str = "em") -> httpx.Response:
        """Ask for a token with *token*."""
        headers = {"authorization": f"Bearer {token}"}
        return httpx.post(f"{self.url}/api/tokens", json={"dataset": dataset}, headers=headers)


def serve_lab(folder: Path, issuer: Issuer) -> Settings:
    """Serve what the lab may read, and what only its head may."""
    for name in "em", "secret":
        (folder / name).mkdir()
        (folder / name / "text.txt").write_bytes(TEXT)
    return Settings(
        issuers={"sso": issuer.settings},
        datasets={
            "em": DatasetSettings(url=str(folder / "em"), read=("sso:lab",)),
            "secret": DatasetSettings(url=str(folder / "secret"), read=("sso:head",)),
        },
    )


def test_a_minted_token_reads_by_its_path(tmp_path: Path) -> None:
    """And as a bearer token, nothing else; what others may read is as what does not exist.

    The keys of the issuer are read when the first token comes, and not before.
    """
    with issuing() as issuer, serving(serve_lab(tmp_path, issuer)) as url:
        issuer.publish(make_key("second"))
        lab, ada = Lab(issuer, url), issuer.sign({"groups": ["lab"]}, key=make_key("second"))
        minted = lab.mint(ada).json()

        assert lab.read(ada).content == TEXT
        assert lab.read(ada, "/secret/text.txt").status_code == 404
        assert lab.mint(ada, "secret").status_code == 404
        assert httpx.get(f"{url}{minted['paths']['em']}text.txt").content == TEXT
        assert lab.read(minted["token"]).content == TEXT
        assert lab.read(minted["token"], "/secret/text.txt").status_code == 404
        assert lab.mint(minted["token"]).status_code == 403


def test_when_the_issuer_is_away_all_come_back_later(tmp_path: Path) -> None:
    """None is refused: readers would take that for an answer."""
    with issuing() as issuer, serving(serve_lab(tmp_path, issuer)) as url:
        issuer.server.fail(Fault.ERROR, path=JWKS)
        token = issuer.sign({"groups": ["lab"]})
        answers = [Lab(issuer, url).read(token), Lab(issuer, url).mint(token)]

    assert [answer.status_code for answer in answers] == [503, 503]
    assert all("Retry-After" in answer.headers for answer in answers)
    assert all(issuer.url not in answer.text for answer in answers)
