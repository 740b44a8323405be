"""``/login/tokens``: people make links for viewers that cannot sign in, and revoke them."""

from http import HTTPStatus
from typing import Final

from fastapi import APIRouter, Request, Response
from starlette.responses import RedirectResponse

from shardgate.auth.access import Caller
from shardgate.auth.logins import LoginTokens, demand_own_page
from shardgate.auth.tokens import Token, TokenMint, TokenOptions
from shardgate.errors import UnauthenticatedError
from shardgate.observability.metrics import note_caller
from shardgate.server.address import address_of
from shardgate.server.body import RequestBodyReader
from shardgate.web.rendering import PageTemplate

_PATH: Final = "/login/tokens"


def build_token_page(
    logins: LoginTokens, tokens: TokenMint, bodies: RequestBodyReader
) -> APIRouter:
    """Build the page of the tokens of one person, by the login of the browser."""
    router = APIRouter(include_in_schema=False, prefix=_PATH)
    page = PageTemplate("tokens.html")

    @router.get("", response_model=None)
    async def show(request: Request) -> Response:
        """Answer with the page, or lead to the sign-in."""
        if (login := await logins.login_of(request)) is None:
            location = f"{address_of(request).root_path}/login?page={_PATH}"
            return RedirectResponse(location, HTTPStatus.SEE_OTHER)
        caller = login.caller
        made = await tokens.records.list(caller.name)
        readable = tokens.datasets.readable_by(caller)
        return await page.respond(
            home="../",
            caller_name=caller.name,
            names=[dataset.name for dataset in readable if not dataset.is_public],
            tokens=made.tokens,
        )

    async def demand_caller(request: Request) -> Caller:
        """Return the caller who changes something by a page of this service.

        Raises: `ForbiddenError`, `UnauthenticatedError`, `TokenRecordsError`.
        """
        demand_own_page(request, "make and revoke tokens")
        if (login := await logins.login_of(request)) is None:
            raise UnauthenticatedError("this browser has no session; sign in first")
        note_caller(login.caller.name)
        return login.caller

    @router.post("", status_code=201)
    async def make(request: Request) -> Token:
        caller = await demand_caller(request)
        options = await bodies.read_document(request, TokenOptions)
        return await tokens.make(caller, options, request.scope["root_path"])

    @router.post("/{token_id}/end", status_code=204)
    async def end(request: Request, token_id: str) -> None:
        caller = await demand_caller(request)
        await tokens.records.revoke(caller.name, token_id)

    return router
