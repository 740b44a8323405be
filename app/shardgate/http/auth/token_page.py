"""``/login/tokens``: people make links for viewers that cannot sign in, and revoke them."""

from http import HTTPStatus
from typing import Final

from fastapi import APIRouter, Request, Response
from starlette.responses import RedirectResponse

from shardgate.errors import UnauthenticatedError
from shardgate.http.auth.access import Caller
from shardgate.http.auth.login_sessions import LoginTokens, demand_own_page
from shardgate.http.auth.tokens import Token, TokenMint, TokenOptions
from shardgate.http.body import RequestBodyReader
from shardgate.http.pages.rendering import PageTemplate
from shardgate.http.pages.viewer import address_of

PATH: Final = "/login/tokens"


class TokenPage:
    """Page of the tokens of one person, by the session of the browser."""

    def __init__(self, sessions: LoginTokens, tokens: TokenMint) -> None:
        self._sessions = sessions
        self._tokens = tokens
        self._page = PageTemplate("tokens.html")

    async def find_caller(self, request: Request) -> Caller | None:
        """Return the caller of the browser's session, if any. Raises: `TokenRecordsError`."""
        session = await self._sessions.session_of(request)
        return None if session is None else session.caller

    async def demand_caller(self, request: Request) -> Caller:
        """Return the caller of the browser's session, for a change.

        Raises: `ForbiddenError`, `UnauthenticatedError`, see `find_caller`.
        """
        demand_own_page(request, "make and revoke tokens")
        if (caller := await self.find_caller(request)) is None:
            raise UnauthenticatedError("this browser has no session; sign in first")
        return caller

    async def show(self, request: Request) -> Response:
        """Answer with the page, or lead to the sign-in. Raises: `TokenRecordsError`."""
        if (caller := await self.find_caller(request)) is None:
            location = f"{address_of(request).root_path}/login?page={PATH}"
            return RedirectResponse(location, HTTPStatus.SEE_OTHER)
        known = await self._tokens.records.list(caller.name)
        readable = self._tokens.datasets.readable_by(caller)
        content = await self._page.render(
            caller_name=caller.name,
            names=[dataset.name for dataset in readable if not dataset.is_public],
            tokens=known.tokens,
        )
        headers = {name.decode(): value.decode() for name, value in self._page.headers}
        return Response(content, media_type="text/html", headers=headers)


def build_token_page(
    sessions: LoginTokens, tokens: TokenMint, bodies: RequestBodyReader
) -> APIRouter:
    """Build the routes of the page."""
    router = APIRouter(include_in_schema=False, prefix=PATH)
    page = TokenPage(sessions, tokens)
    router.add_api_route("", page.show, response_model=None)

    @router.post("", status_code=201)
    async def make(request: Request) -> Token:
        caller = await page.demand_caller(request)
        options = await bodies.read_document(request, TokenOptions)
        return await tokens.make(caller, options, request.scope["root_path"])

    @router.post("/{token_id}/end", status_code=204)
    async def end(request: Request, token_id: str) -> None:
        caller = await page.demand_caller(request)
        await tokens.records.revoke(caller.name, token_id)

    return router
