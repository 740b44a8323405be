"""`shardgate.auth.tokens`: tokens that the service signs, and the route that issues them."""

import json
import re
import time
from collections.abc import Generator
from datetime import datetime
from pathlib import Path

import httpx
import pytest
from pydantic import ValidationError

from shardgate.auth.access import Caller, Datasets
from shardgate.auth.token_records import CHECKED_S, TokenRecords
from shardgate.auth.tokens import MADE, TokenMint, read_grant
from shardgate.errors import ConfigurationError, UnauthenticatedError
from shardgate.main import create_app
from shardgate.model import ObjectRef
from shardgate.settings import DatasetSettings, Settings, TokenSettings
from shardgate.storage.memory import MemoryStore
from tests.support.auth.issuing import JWKS, issuing, spell
from tests.support.auth.people import TEXT, People, settings
from tests.support.processes import wait_until
from tests.support.seaweedfs import SeaweedFS
from tests.support.serving import client_of, serving
from tests.support.storage.faulty import Fault

NOW = 1_000_000.0
LONGEST_S = 7200
SECRET = "a secret that all replicas share"
RECORDS = ObjectRef("memory://tokens", "")


def minter(now: float = NOW) -> TokenMint:
    """Return a signer whose clock is fixed."""
    records = TokenRecords(MemoryStore(), RECORDS, lambda: now)
    return TokenMint(TokenSettings(secret=SECRET), Datasets({}), records, lambda: now)


@pytest.mark.parametrize("name", ["sso:ada", 'a"b', "ü", "a/b", "~em", "sso:ada\\"])
async def test_signed_token_grants_reading_its_datasets(name: str) -> None:
    """A signed token grants its caller the reading of its datasets until it expires."""
    minted = minter().mint(name, ["em", "lm"], 60)
    known = await minter().identify(minted.token)

    assert known is not None
    assert known.caller.name == name
    assert known.caller.grants == {"public", MADE, read_grant("em"), read_grant("lm")}
    assert 1_000_000 < known.until_s <= 1_000_000 + CHECKED_S
    assert minted.expires_at.timestamp() == 1_000_060
    assert await minter(now=1_000_059.9).identify(minted.token) is not None
    with pytest.raises(UnauthenticatedError, match="expired"):
        await minter(now=1_000_060).identify(minted.token)


def test_a_token_is_short_and_fits_a_path() -> None:
    """A token is short and needs no encoding in a path; repr shows neither it nor the secret."""
    made = minter()
    minted = made.mint("sso:ada", ["em"], 60)

    assert re.fullmatch(r"[A-Za-z0-9._-]+", minted.token)
    assert len(minted.token) < 220
    assert SECRET not in repr(made)
    assert minted.token not in repr(minted)


async def test_each_start_makes_a_secret() -> None:
    """A service without a secret in its settings refuses the tokens of another one."""
    here, there = (
        TokenMint(TokenSettings(), Datasets({}), TokenRecords(MemoryStore(), RECORDS))
        for _ in range(2)
    )

    with pytest.raises(UnauthenticatedError, match="not signed by this service"):
        await there.identify(here.mint("ada", ["em"], 60).token)


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> Generator[People]:
    """Serve a public and a private dataset, and issue tokens."""
    folder = tmp_path_factory.mktemp("people")
    tokens = TokenSettings.model_validate({"secret": SECRET, "longest_s": LONGEST_S})
    with serving(settings(folder, tokens=tokens)) as url:
        yield People(url, folder)


def mint(people: People, document: object, name: str | None = "ana") -> httpx.Response:
    """Request a token."""
    return people.ask("POST", "/api/tokens", name, content=json.dumps(document).encode())


def lifetime_of(answer: httpx.Response) -> float:
    """Return the seconds until a token expires."""
    return datetime.fromisoformat(answer.json()["expires_at"]).timestamp() - time.time()


async def test_token_is_issued_for_datasets(people: People) -> None:
    """`POST /api/tokens` returns a token with its expiry and the path of each dataset below it."""
    answer = mint(people, {"dataset": "private", "expires_in_s": 60})

    told = answer.json()
    known = await minter(now=time.time()).identify(told["token"])
    assert answer.status_code == 201
    assert answer.headers["cache-control"] == "no-store"
    assert known is not None
    assert known.caller == Caller("ana", frozenset({"public", MADE, read_grant("private")}))
    assert lifetime_of(answer) == pytest.approx(60, abs=20)
    assert told["paths"] == {"private": f"/~{told['token']}/private/"}
    told = mint(people, {"datasets": ["private", "open", "private"]}).json()
    assert told["paths"] == {name: f"/~{told['token']}/{name}/" for name in ("private", "open")}


def test_token_lifetime_is_an_hour_or_the_maximum(people: People, tmp_path: Path) -> None:
    """A token is valid for an hour, or for `longest_s` if that is less or is requested."""
    short = TokenSettings.model_validate({"secret": SECRET, "longest_s": 600})
    with serving(settings(tmp_path, tokens=short)) as url:
        least = mint(People(url, tmp_path), {"dataset": "private"})
    usual = mint(people, {"dataset": "private"})
    longest = mint(people, {"dataset": "private", "expires_in_s": LONGEST_S})

    lifetimes = [*map(lifetime_of, (least, usual, longest))]
    assert lifetimes == pytest.approx([600, 3600, LONGEST_S], abs=20)


@pytest.mark.parametrize(
    "document",
    [
        *({}, [], {"dataset": 5}, {"datasets": []}, {"datasets": "private"}),
        {"datasets": ["private"] * 33},
        *({"dataset": ""}, {"datasets": ["private", ""]}),
        {"dataset": "private", "datasets": ["open"]},
        {"dataset": "private", "write": True},
        *(
            {"dataset": "private", "expires_in_s": seconds}
            for seconds in (LONGEST_S + 1, 10**30, 0, -5, True, 1.5, "60")
        ),
    ],
)
def test_invalid_token_request_is_refused(people: People, document: object) -> None:
    """A request for a token with unknown, missing or invalid members fails with 400."""
    assert mint(people, document).status_code == 400


def test_token_request_needs_credentials(people: People) -> None:
    """A request for a token without credentials is 401, for known and unknown datasets."""
    for document in ({"dataset": "private"}, {"dataset": "none"}, {"x": 5}):
        assert mint(people, document, None).status_code == 401


def test_issued_token_reads_its_dataset_only(people: People) -> None:
    """A token reads its dataset and no other; there is none for what its caller may not read."""
    private, public = (mint(people, {"dataset": name}).json() for name in ("private", "open"))
    read = people.ask("GET", f"{private['paths']['private']}text.txt")
    statuses = [
        people.ask(
            "GET", "/private/text.txt", headers={"authorization": f"Bearer {each['token']}"}
        ).status_code
        for each in (private, public)
    ]

    assert read.content == TEXT
    assert statuses == [200, 404]
    assert mint(people, {"dataset": "private"}, "eve").status_code == 404


def test_unavailable_issuer_is_503(tmp_path: Path) -> None:
    """Tokens of an unavailable issuer are 503 with Retry-After; without an algorithm 401."""
    private = DatasetSettings(url=str(tmp_path), read=("sso:lab",))
    with issuing() as issuer:
        issuer.server.fail(Fault.ERROR, path=JWKS)
        tokens = [issuer.sign(), f"{spell({'alg': 'none'})}.{spell(issuer.claims())}."]
        configured = Settings(issuers={"sso": issuer.settings}, datasets={"em": private})
        with client_of(configured) as client:
            valid, forged = (
                [
                    client.request(method, path, headers={"authorization": f"Bearer {token}"})
                    for method, path in (("GET", "/em/text.txt"), ("POST", "/api/tokens"))
                ]
                for token in tokens
            )

    assert [answer.status_code for answer in forged] == [401, 401]
    assert [answer.status_code for answer in valid] == [503, 503]
    assert all("Retry-After" in answer.headers for answer in valid)
    assert all(issuer.url not in answer.text for answer in valid)


def test_made_tokens_are_listed_without_their_text(people: People) -> None:
    """A caller's valid tokens are listed, the newest first, with neither token nor path."""
    made = [mint(people, {"dataset": name}, "bob").json() for name in ("private", "open")]
    shown = people.ask("GET", "/api/tokens", "bob")
    tokens = shown.json()["tokens"]

    assert {each["token_id"]: each["datasets"] for each in tokens} == {
        each["token_id"]: list(each["paths"]) for each in made
    }
    assert not any(each["token"] in shown.text for each in made)
    assert people.ask("GET", "/api/tokens", "eve").json() == {"tokens": []}


def test_revoked_token_is_refused(people: People) -> None:
    """A revoked token is 401 at once, cached or not, and is not listed; another stays valid."""
    made, kept = (mint(people, {"dataset": "private"}).json() for _ in range(2))
    revoking = f"/api/tokens/{made['token_id']}"
    bearer = {"authorization": f"Bearer {made['token']}"}

    def statuses() -> list[int]:
        paths = [f"{each['paths']['private']}text.txt" for each in (made, kept)]
        by_path = [people.ask("GET", path).status_code for path in paths]
        by_header = people.ask("GET", "/private/text.txt", headers=bearer)
        return [*by_path, by_header.status_code]

    assert [statuses() for _ in range(3)] == [[200, 200, 200]] * 3
    assert people.ask("DELETE", revoking, "ana").status_code == 204
    assert statuses() == [401, 200, 401]
    assert people.ask("DELETE", revoking, "ana").status_code == 204
    listed = people.ask("GET", "/api/tokens", "ana").text
    assert kept["token_id"] in listed
    assert made["token_id"] not in listed


def test_only_its_maker_revokes_a_token(people: People) -> None:
    """The id of a token of somebody else, or of none, is 404; without credentials it is 401."""
    made = mint(people, {"dataset": "private"}).json()
    path = f"/api/tokens/{made['token_id']}"

    assert people.ask("DELETE", path, "bob").status_code == 404
    assert people.ask("DELETE", "/api/tokens/none", "ana").status_code == 404
    assert people.ask("DELETE", path).status_code == 401
    assert people.ask("GET", f"{made['paths']['private']}text.txt").content == TEXT


def test_bearer_of_a_made_token_makes_sees_and_revokes_none(people: People) -> None:
    """Who was given a token can neither make tokens, nor list and revoke those of its maker."""
    made = mint(people, {"dataset": "private"}).json()
    bearer = {"authorization": f"Bearer {made['token']}"}

    for method, path in (("POST", ""), ("GET", ""), ("DELETE", f"/{made['token_id']}")):
        assert people.ask(method, f"/api/tokens{path}", headers=bearer).status_code == 403


@pytest.mark.parametrize("kind", ["file", "s3"])
def test_replicas_share_records_of_tokens(
    kind: str, tmp_path: Path, seaweedfs: SeaweedFS, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas with the same `tokens.url` list each other's tokens, and refuse revoked ones."""
    monkeypatch.setattr("shardgate.auth.token_records.CHECKED_S", 0.2)
    s3 = {"url": f"s3://{seaweedfs.bucket}/{tmp_path.name}", "store": "weed"}
    (tmp_path / "records").mkdir()
    place = {"url": str(tmp_path / "records")} if kind == "file" else s3
    tokens = TokenSettings.model_validate({"secret": SECRET, **place})
    configured = settings(tmp_path, tokens=tokens, stores={"weed": seaweedfs.settings})
    with serving(configured) as one, serving(configured) as two:
        first, second = People(one, tmp_path), People(two, tmp_path)
        made, kept = (mint(first, {"dataset": "private"}).json() for _ in range(2))

        def statuses() -> list[int]:
            paths = [f"{each['paths']['private']}text.txt" for each in (made, kept)]
            return [second.ask("GET", path).status_code for path in paths]

        before = [statuses() for _ in range(3)]
        listed = second.ask("GET", "/api/tokens", "ana").json()["tokens"]
        revoked = first.ask("DELETE", f"/api/tokens/{made['token_id']}", "ana")
        wait_until(lambda: statuses() != [200, 200])
        after = statuses()

    assert {each["token_id"] for each in listed} == {made["token_id"], kept["token_id"]}
    assert revoked.status_code == 204
    assert before == [[200, 200]] * 3
    assert after == [401, 200]


@pytest.mark.parametrize(
    ("tokens", "complaint"),
    [
        ({"url": "https://a.example/b"}, "tokens.url"),
        ({"url": "s3://a", "store": "b"}, "tokens.store"),
    ],
)
def test_unusable_store_of_records_is_refused(tokens: dict[str, str], complaint: str) -> None:
    """Records cannot lie in a store that takes no writes, or that the settings do not have."""
    with pytest.raises(ValidationError, match=re.escape(complaint)):
        Settings(tokens=TokenSettings.model_validate(tokens))


@pytest.mark.parametrize("place", ["em", "em/tokens", "", "link", "e%6D"])
def test_records_and_datasets_do_not_lie_in_each_other(tmp_path: Path, place: str) -> None:
    """A folder of records in a dataset, around one, or reached by a link, is refused."""
    (tmp_path / "em").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "em")
    settings = Settings(
        tokens=TokenSettings.model_validate({"url": f"{tmp_path.as_uri()}/{place}"}),
        datasets={"em": DatasetSettings(url=str(tmp_path / "em"))},
    )
    with pytest.raises(ConfigurationError, match=r"datasets\.em"):
        create_app(settings)
