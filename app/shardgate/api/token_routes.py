"""`/api/tokens`: tokens that callers make, list and revoke."""

from fastapi import APIRouter, Request

from shardgate.api.openapi import new_router, reads
from shardgate.auth.access import NOBODY, Caller
from shardgate.auth.token_records import TokenList
from shardgate.auth.tokens import MADE, Token, TokenMint, TokenOptions
from shardgate.errors import ForbiddenError, UnauthenticatedError
from shardgate.server.body import RequestBodyReader


def build_tokens(tokens: TokenMint, bodies: RequestBodyReader) -> APIRouter:
    """Build the routes of tokens."""
    router = new_router("/api/tokens", "Tokens")

    @router.post("", status_code=201, openapi_extra=reads(TokenOptions))
    async def mint_token(request: Request) -> Token:
        """Make a short-lived token to read datasets that the caller may read."""
        caller = _demand_maker(request)
        options = await bodies.read_document(request, TokenOptions)
        return await tokens.make(caller, options, request.scope["root_path"])

    @router.get("")
    async def list_tokens(request: Request) -> TokenList:
        """List the valid tokens that the caller has made, without their text."""
        return await tokens.records.list(_demand_maker(request).name)

    @router.delete("/{token_id}", status_code=204)
    async def revoke_token(request: Request, token_id: str) -> None:
        """Revoke a token that the caller has made; processes that share the records of tokens
        refuse it within 10 s.
        """
        await tokens.records.revoke(_demand_maker(request).name, token_id)

    return router


def _demand_maker(request: Request) -> Caller:
    """Return the caller of *request*, if it may make, list and revoke tokens.

    Raises: `UnauthenticatedError`, `ForbiddenError`.
    """
    caller: Caller = request.scope["caller"]
    if caller == NOBODY:
        raise UnauthenticatedError("credentials are needed for tokens")
    if MADE in caller.grants:
        raise ForbiddenError("a token made here makes, lists and revokes none")
    return caller
