"""Commits without a session: chunks are posted anywhere, then all that refers to them at once."""

import asyncio
import secrets
from hashlib import blake2b
from http import HTTPStatus
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Header, Request

from app.formats.icechunk.changes import Edit, read_edits
from app.formats.icechunk.conflicts import Policy
from app.formats.icechunk.ids import encode_id
from app.formats.icechunk.write_ids import WriteId
from app.http.auth.access import Datasets
from app.http.body import RequestBodyReader
from app.http.commit_bodies import (
    CommitBody,
    Committed,
    WrittenChunk,
    parse_commit,
    parse_key,
)
from app.http.icechunk.writable import opens_writable
from app.http.openapi import CommitProblem, new_router, problems
from app.resolve.budget import ByteBudget
from app.resolve.icechunk.chunk_files import ChunkFiles
from app.resolve.icechunk.commit_request import CommitRequest
from app.resolve.icechunk.repositories import OpenedRepository
from app.resolve.icechunk.stateless import StatelessCommits
from app.resolve.resolver import Resolver

_MAX_NBYTES: Final = 64 * 1024**2
"""A larger commit is refused."""
_MEMORY_PER_BYTE: Final = 16
"""Of a body, once it is decoded."""


def build_commits(  # noqa: PLR0913 - its parts, each made by the composition root
    datasets: Datasets,
    resolver: Resolver,
    taker: RequestBodyReader,
    files: ChunkFiles,
    commits: StatelessCommits,
    *,
    max_chunk_nbytes: int,
    decoded: ByteBudget,
) -> APIRouter:
    """Build the routes; all commits that are *decoded* at a time count there."""
    router = new_router("/api/datasets/{dataset}", "Commits")

    type Opened = Annotated[OpenedRepository, Depends(opens_writable(datasets, resolver))]

    @router.post(
        "/chunks",
        status_code=HTTPStatus.CREATED,
        openapi_extra=_BYTES,
        responses=problems(400, 403, 404, 405, 411, 413, 423),
    )
    async def write_chunk(opened: Opened, request: Request) -> WrittenChunk:
        """Write a chunk, encoded as the array has it, for a commit to refer to.

        Chunks that no commit ever refers to are collected with what else is unused.
        """
        async with taker.read_body(request, max_chunk_nbytes) as body:
            chunk_id = await files.put(opened, body)
            return WrittenChunk(chunk_id=encode_id(chunk_id), length=len(body))

    @router.post(
        "/commits",
        status_code=HTTPStatus.CREATED,
        summary="Commit Changes",
        openapi_extra=_DOCUMENT,
        responses=problems(400, 403, 404, 405, 409, 411, 413, 423, conflict=CommitProblem),
    )
    async def commit(
        opened: Opened,
        request: Request,
        idempotency_key: Annotated[str | None, Header(description=_KEY)] = None,
    ) -> Committed:
        """Commit changes of nodes, and references to chunks that are written already.

        Before anything is written each reference is looked at: the chunk has to be there, and
        long enough. A branch that has moved on since the parent is no conflict by itself: what
        others have changed meanwhile is, where it does not go together with this.
        """
        key = parse_key(idempotency_key)
        async with (
            taker.read_body(request, _MAX_NBYTES) as body,
            decoded.room(_MEMORY_PER_BYTE * len(body)),
        ):
            asked, edits = await asyncio.to_thread(_read, body)
            made = await commits.commit(opened, edits, _request(asked, key, body))
        return Committed(snapshot_id=made.snapshot_id, parent_id=made.parent_id)

    return router


_KEY: Final = "Makes a retry safe: of requests with one key only the first commits."
_BYTES: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}
_DOCUMENT: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": CommitBody.model_json_schema()}},
    }
}


def _read(body: bytes) -> tuple[CommitBody, list[Edit]]:
    asked = parse_commit(body)
    edits = read_edits(asked.changes)
    asked.changes.clear()
    return asked, edits


def _request(asked: CommitBody, key: str | None, body: bytes) -> CommitRequest:
    if key is None:
        write_id = WriteId(f"once-{secrets.token_hex(16)}")
    else:
        write_id = WriteId(key, blake2b(body, digest_size=16).hexdigest())
    return CommitRequest(
        branch=asked.branch,
        parent_id=asked.parent_id or "",
        message=asked.message,
        write_id=write_id,
        metadata=asked.metadata,
        policy=Policy(asked.on_conflict),
        amend=asked.amend,
        allow_empty=asked.allow_empty,
    )
