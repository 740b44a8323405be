"""The route that mints tokens for paths."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Annotated, Final, Self

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field, PositiveInt, model_validator

from app.errors import BadBodyError, ForbiddenError, UnauthenticatedError
from app.http.credentials.caller import NOBODY, Caller
from app.http.credentials.minted import Minter, is_minted
from app.http.described import problems
from app.http.documents import Document, DocumentReader, documented
from app.http.routers import new_router

_USUAL_S: Final = 3600
_MOST_DATASETS: Final = 32

type Find = Callable[[str, Caller], object]
"""Gives a dataset, if the caller may read it.

Raises: `UnknownDatasetError`, `UnauthenticatedError`.
"""


class TokenOptions(Document):
    """What a token lets read, and how long."""

    dataset: str | None = None
    """One dataset; either this or `datasets`."""
    datasets: Annotated[list[str], Field(min_length=1, max_length=_MOST_DATASETS)] | None = None
    """Several."""
    expires_in_s: PositiveInt | None = None
    """At most `tokens.longest_s` of the settings; default: an hour, or that."""

    @model_validator(mode="after")
    def _names_datasets(self) -> Self:
        if (self.dataset is None) == (self.datasets is None):
            raise ValueError("either dataset or datasets says what the token lets read")
        return self

    @property
    def names(self) -> Sequence[str]:
        """Each once."""
        return list(dict.fromkeys(self.datasets or filter(None, [self.dataset])))


class Token(BaseModel, use_attribute_docstrings=True):
    """A token that lets whoever has it read."""

    token: Annotated[str, Field(repr=False)]
    """For `Authorization: Bearer`, or a path."""
    expires_at: datetime
    paths: Annotated[dict[str, str], Field(repr=False)]
    """Where the keys of each dataset begin for those who can send no header."""


def build_tokens(find: Find, minter: Minter, documents: DocumentReader) -> APIRouter:
    """Build the route of tokens."""
    router = new_router("/api/tokens", "Tokens")

    @router.post(
        "",
        status_code=HTTPStatus.CREATED,
        openapi_extra=dict(documented(TokenOptions)),
        responses=problems(400, 401, 403, 404),
    )
    async def mint_token(request: Request, response: Response) -> Token:
        """Make a short-lived token that lets read datasets which the caller may read.

        Whoever has the token has what it allows, until it expires: nobody can take it back.
        """
        caller = _minting(request.scope["caller"])
        options = await documents.read(request, TokenOptions)
        for name in options.names:
            find(name, caller)
        lifetime_s = _lifetime_s(options.expires_in_s, minter.longest_s)
        minted = minter.mint(caller.name, options.names, lifetime_s)
        response.headers["Cache-Control"] = "no-store"
        return Token(
            token=minted.token,
            expires_at=datetime.fromtimestamp(minted.expires_at_s, UTC),
            paths={name: f"/~{minted.token}/{name}/" for name in options.names},
        )

    return router


def _minting(caller: Caller) -> Caller:
    if caller == NOBODY:
        raise UnauthenticatedError("to mint a token takes credentials")
    if is_minted(caller):
        raise ForbiddenError("a minted token mints no other")
    return caller


def _lifetime_s(asked_s: int | None, longest_s: int) -> int:
    if asked_s is None:
        return min(_USUAL_S, longest_s)
    if asked_s > longest_s:
        raise BadBodyError(f"expires_in_s: tokens live {longest_s} s at most")
    return asked_s
