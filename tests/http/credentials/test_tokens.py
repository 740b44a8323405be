"""`POST /api/tokens`: who may mint which tokens."""

from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request, Response

from app.errors import ShardgateError, UnknownDatasetError
from app.http.credentials.caller import NOBODY, Caller
from app.http.credentials.minted import Minter, grant_to_read
from app.http.credentials.tokens import build_tokens
from app.http.documents import DocumentReader
from app.http.problems import problem, status_of
from app.resolve.budget import ByteBudget
from app.settings import TokenSettings

ADA = Caller("ada", frozenset({"public", "ada"}))
NOW = 1_000_000.0
LONGEST_S = 7200


class Door:
    """Tells who asks, as the door of the service does."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.caller = ADA

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Speak ASGI."""
        await self.app({**scope, "caller": self.caller}, receive, send)


def find(name: str, caller: Caller) -> None:
    """Return if there is such a dataset."""
    if name not in {"em", "lm"} or caller.grants.isdisjoint({"ada", grant_to_read(name)}):
        raise UnknownDatasetError(f"there is no dataset {name}")


def minter(longest_s: int = LONGEST_S) -> Minter:
    """Make a minter at a time that stands still."""
    secret = "a secret that all replicas share"
    return Minter(
        TokenSettings.model_validate({"secret": secret, "longest_s": longest_s}), lambda: NOW
    )


def door(longest_s: int = LONGEST_S) -> Door:
    """Build the route behind a door."""
    app = FastAPI()
    documents = DocumentReader(ByteBudget(2**20, wait_s=1), 1)
    app.include_router(build_tokens(find, minter(longest_s), documents))

    @app.exception_handler(ShardgateError)
    async def on_error(_: Request, error: ShardgateError) -> Response:
        return Response(problem(status_of(error), str(error))[1], status_of(error))

    return Door(app)


@pytest.fixture
async def ada() -> AsyncGenerator[httpx.AsyncClient]:
    """Let ada ask."""
    async with asking(door()) as client:
        yield client


def asking(door: Door) -> httpx.AsyncClient:
    """Open a client of the route."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(door), base_url="http://gateway")


async def mint(client: httpx.AsyncClient, document: object) -> httpx.Response:
    """Ask for a token."""
    return await client.post("/api/tokens", json=document)


async def test_a_token_is_minted_for_a_dataset(ada: httpx.AsyncClient) -> None:
    """With the path that viewers take, and when it ends."""
    answer = await mint(ada, {"dataset": "em", "expires_in_s": 60})

    told = answer.json()
    known = await minter().identify(told["token"])
    assert answer.status_code == 201
    assert known is not None
    assert known.caller == Caller("ada", frozenset({"public", grant_to_read("em")}))
    assert datetime.fromisoformat(told["expires_at"]) == datetime.fromtimestamp(NOW + 60, UTC)
    assert told["paths"] == {"em": f"/~{told['token']}/em/"}


async def test_a_token_may_be_for_several_datasets(ada: httpx.AsyncClient) -> None:
    """Each has its path."""
    told = (await mint(ada, {"datasets": ["em", "lm", "em"]})).json()

    assert told["paths"] == {name: f"/~{told['token']}/{name}/" for name in ("em", "lm")}


async def test_no_cache_keeps_a_token(ada: httpx.AsyncClient) -> None:
    """Whoever looks into one would have it."""
    answer = await mint(ada, {"dataset": "em"})

    assert answer.headers["Cache-Control"] == "no-store"


@pytest.mark.parametrize(("longest_s", "lifetime_s"), [(LONGEST_S, 3600), (600, 600)])
async def test_a_token_lives_an_hour(longest_s: int, lifetime_s: int) -> None:
    """Or as long as it may, where that is less."""
    async with asking(door(longest_s)) as client:
        told = (await mint(client, {"dataset": "em"})).json()

    assert datetime.fromisoformat(told["expires_at"]).timestamp() == NOW + lifetime_s


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


async def test_the_longest_life_may_be_asked_for(ada: httpx.AsyncClient) -> None:
    """The bound is within."""
    assert (await mint(ada, {"dataset": "em", "expires_in_s": LONGEST_S})).status_code == 201


async def test_what_the_caller_may_not_see_is_not_there(ada: httpx.AsyncClient) -> None:
    """Not even where other datasets are named with it."""
    assert (await mint(ada, {"datasets": ["em", "secret"]})).status_code == 404


@pytest.mark.parametrize("document", [{"dataset": "em"}, {"dataset": "none"}, {"x": 5}])
async def test_nobody_mints(document: object) -> None:
    """Nor learns which datasets there are."""
    gate = door()
    gate.caller = NOBODY
    async with asking(gate) as client:
        answer = await mint(client, document)

    assert answer.status_code == 401


async def test_a_minted_token_mints_no_other() -> None:
    """It would live for ever."""
    gate = door()
    known = await minter().identify(minter().mint("ada", ["em"], 60).token)
    assert known is not None
    gate.caller = known.caller
    async with asking(gate) as client:
        answer = await mint(client, {"dataset": "em"})

    assert answer.status_code == 403
