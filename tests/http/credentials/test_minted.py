"""`app.http.credentials.minted`: tokens of our own."""

import re

import jwt
import pytest
from joserfc import jws
from joserfc.errors import BadSignatureError
from joserfc.jwk import OctKey

from app.errors import UnauthenticatedError
from app.http.credentials.issuers import Issuers
from app.http.credentials.minted import Minter, grant_to_read, is_minted
from app.settings import TokenSettings
from tests.http.credentials.issuing import forge, issuing, spell

NOW = 1_000_000.5
SECRET = "a secret that all replicas share"


def minter(secret: str = SECRET, now: float = NOW) -> Minter:
    """Make a minter at a time that stands still."""
    return Minter(TokenSettings.model_validate({"secret": secret}), lambda: now)


async def refusal(minter: Minter, token: str) -> str:
    """Tell why *token* is refused."""
    with pytest.raises(UnauthenticatedError) as caught:
        await minter.identify(token)
    return str(caught.value)


async def test_a_token_lets_read_what_it_was_minted_for() -> None:
    """On every replica that has the secret, and until it expires."""
    minted = minter().mint("sso:ada", ["em", "lm"], 60)

    known = await minter().identify(minted.token)

    assert known is not None
    assert known.caller.name == "sso:ada"
    assert known.caller.grants == {"public", grant_to_read("em"), grant_to_read("lm")}
    assert known.until_s == minted.expires_at_s == 1_000_060
    assert is_minted(known.caller)


def test_a_token_is_short_and_fits_a_path() -> None:
    """No character of it is written in another way there."""
    token = minter().mint("sso:ada", ["em"], 60).token

    assert re.fullmatch(r"[A-Za-z0-9._-]+", token)
    assert len(token) < 220


@pytest.mark.parametrize("name", ['a"b', "ü", "a/b", "~em", "sso:ada\\"])
async def test_any_name_is_kept(name: str) -> None:
    """A token tells logs who minted it."""
    known = await minter().identify(minter().mint(name, ["em"], 60).token)

    assert known is not None
    assert known.caller.name == name


async def test_a_token_expires() -> None:
    """At the second that was told."""
    minted = minter().mint("ada", ["em"], 60)

    assert await minter(now=1_000_059.9).identify(minted.token) is not None
    assert "expired" in await refusal(minter(now=1_000_060), minted.token)


async def test_another_secret_signs_nothing_here() -> None:
    """Of a service that nobody told it to."""
    minted = minter("the secret of somebody else, as long").mint("ada", ["em"], 60)

    assert "not minted here" in await refusal(minter(), minted.token)


async def test_a_secret_is_made_at_each_start() -> None:
    """Two services that have none configured do not take the tokens of each other."""
    token = Minter(TokenSettings()).mint("ada", ["em"], 60).token

    assert "not minted here" in await refusal(Minter(TokenSettings()), token)


def tampered(**changes: object) -> str:
    """Change the claims of a good token."""
    header, claims, signature = minter().mint("ada", ["em"], 60).token.split(".")
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


@pytest.mark.parametrize(
    "token",
    [
        "",
        "opaque",
        "a.b.c",
        forge({"alg": "HS256"}, CLAIMS),
        forge({"typ": 5}, CLAIMS),
        minter().mint("ada", ["em"], 60).token[:-1],
        minter().mint("ada", ["em"], 60).token + ".x",
    ],
)
async def test_what_is_not_of_ours_may_be_known_to_others(token: str) -> None:
    """The type in the header says what is ours."""
    assert await minter().identify(token) is None


async def test_issuers_and_minters_do_not_take_each_others_tokens() -> None:
    """Neither by a claim nor by a type, though each token is good."""
    minted = Minter(TokenSettings())
    with issuing() as issuer:
        ours = minted.mint("ada", ["em"], 60).token
        theirs = issuer.sign({"datasets": ["em"]})
        as_ours = issuer.sign({"datasets": ["em"]}, header={"typ": "shardgate+jwt"})
        async with Issuers({"sso": issuer.settings}) as issuers:
            assert await issuers.identify(ours) is None
            assert await minted.identify(theirs) is None
            assert "not minted here" in await refusal(minted, as_ours)
            with pytest.raises(UnauthenticatedError, match="type"):
                await issuers.identify(as_ours)


def test_the_secret_is_not_the_key() -> None:
    """A secret that is put to another use as well signs no token."""
    token = minter().mint("ada", ["em"], 60).token

    with pytest.raises(BadSignatureError):
        jws.deserialize_compact(token, OctKey.import_key(SECRET))


def test_secrets_are_not_shown() -> None:
    """Neither what signs tokens nor a token that was made."""
    made = minter()
    minted = made.mint("ada", ["em"], 60)

    assert SECRET not in repr(made)
    assert minted.token not in repr(minted)
