"""`/api` routes of commits to Icechunk repositories, with and without a session."""

import re
import secrets
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from hashlib import blake2b
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Header, Request
from pydantic import BaseModel

from shardgate.api.commit_body import (
    JSON_LINES,
    CommitBody,
    CommitOptions,
    SessionCommitOptions,
    parse_commit,
    parse_commit_lines,
)
from shardgate.api.openapi import CONFLICTS, new_router, reads
from shardgate.api.repositories import opens
from shardgate.auditing import note
from shardgate.auth.access import Datasets
from shardgate.concurrency import is_large, run_in_thread
from shardgate.errors import BadHeaderError
from shardgate.formats.icechunk.changes import ChangeSet, MoveNode
from shardgate.formats.icechunk.conflicts import Policy
from shardgate.formats.icechunk.ids import encode_id
from shardgate.formats.icechunk.repo_writer import WriteId
from shardgate.icechunk.chunk_files import put_chunk
from shardgate.icechunk.commit import CommitRequest, CommitResult
from shardgate.icechunk.repository import OpenedRepository
from shardgate.icechunk.sessions.document import Committed, SessionDocument
from shardgate.icechunk.sessions.registry import Sessions
from shardgate.icechunk.sessions.session import OpenedSession
from shardgate.icechunk.sessions.session_commit import SessionCommit
from shardgate.icechunk.trains import Committer
from shardgate.read.budget import ByteBudget
from shardgate.read.resolver import Resolver
from shardgate.server.body import RequestBodyReader, RequestDocument

_LINES_SCHEMA: Final = {"type": "string", "description": "Options, then a change in each line."}
_OF_COMMIT: Final = "Makes a retry safe: of requests with one key only the first commits."
_OF_SESSION: Final = "Makes a retry safe: a session committed with another key is a conflict."


class CommittedSnapshot(BaseModel, use_attribute_docstrings=True, from_attributes=True):
    """A new snapshot."""

    snapshot_id: str
    parent_id: str | None
    """The previous commit; after a rebase, not the one that the changes were made against."""


class WrittenChunk(BaseModel, use_attribute_docstrings=True):
    """A chunk that no commit refers to yet."""

    chunk_id: str
    length: int


class SessionOptions(RequestDocument):
    """Options of a new session."""

    branch: str = "main"
    """The session starts at its tip, and is committed to it."""


class SessionState(BaseModel, use_attribute_docstrings=True):
    """A session."""

    session_id: str
    """Its keys are `/{dataset}/@session.{session_id}/…`."""
    branch: str
    parent_id: str
    """The snapshot that it started from."""
    created_at: datetime
    expires_at: datetime
    """End of the session. A write postpones it to a day later, up to 7 days after the start."""
    state: str
    """`open`, `sealed` while it is being committed, or `committed`."""
    snapshot_id: str | None = None
    """The snapshot of its commit."""


def build_sessions(
    datasets: Datasets,
    resolver: Resolver,
    sessions: Sessions,
    committer: Committer,
    bodies: RequestBodyReader,
) -> APIRouter:
    """Build the routes of sessions."""
    router = new_router("/api/datasets/{dataset}/sessions", "Sessions")

    open_repository = opens(datasets.find_writable, resolver)

    type Opened = Annotated[OpenedRepository, Depends(open_repository)]

    async def open_session(opened: Opened, session_id: str) -> OpenedSession:
        return (await sessions.open(opened.repository, session_id, opened.fetch)).session

    async def open_edited(opened: Opened, session_id: str) -> OpenedSession:
        repository = opened.repository
        store = await sessions.open(repository, session_id, opened.fetch, is_edited=True)
        return store.session

    type SessionDep = Annotated[OpenedSession, Depends(open_session)]

    @router.post("", status_code=201, openapi_extra=reads(SessionOptions))
    async def begin_session(opened: Opened, request: Request) -> SessionState:
        """Begin a session at the tip of a branch.

        Its keys are read and written like those of plain Zarr, through any replica.
        """
        options = await bodies.read_document(request, SessionOptions)
        note(ref=options.branch)
        state = _describe(*await sessions.create(opened, options.branch))
        note(session=state.session_id, before=state.parent_id)
        return state

    @router.get("/{session_id}")
    async def read_session(session: SessionDep) -> SessionState:
        """Return the state of a session."""
        return _describe(session.location.session_id, await session.read())

    @router.delete("/{session_id}", status_code=204)
    async def discard_session(session: SessionDep) -> None:
        """End a session without a commit, and delete its changes."""
        await sessions.discard(session)

    _add_session_commit(router, Depends(open_repository), Depends(open_edited), committer, bodies)
    return router


def _add_session_commit(
    router: APIRouter,
    opening: Any,
    opening_session: Any,
    committer: Committer,
    bodies: RequestBodyReader,
) -> None:
    @router.post(
        "/{session_id}/commit",  # noqa: FAST003 - the dependency of the session takes it
        status_code=201,
        responses=CONFLICTS,
        openapi_extra=reads(SessionCommitOptions),
    )
    async def commit_session(
        opened: Annotated[OpenedRepository, opening],
        session: Annotated[OpenedSession, opening_session],
        request: Request,
        idempotency_key: Annotated[str | None, Header(description=_OF_SESSION)] = None,
    ) -> CommittedSnapshot:
        """Commit all changes of a session to its branch.

        Concurrent and repeated requests get the same answer. After a conflict the session is open
        again.
        """
        options = await bodies.read_document(request, SessionCommitOptions)

        async def commit(
            document: SessionDocument, changes: ChangeSet, write_id: WriteId
        ) -> CommitResult:
            branch = None if options.detached else document.branch
            note(ref=branch)
            wanted = _commit_request(options, branch, document.parent_id, write_id)
            return await committer.commit(opened, changes, wanted)

        result = await SessionCommit(session, commit, parse_key(idempotency_key)).run()
        return _committed(result)


def build_commits(  # noqa: PLR0913 - its parts, each made by the composition root
    datasets: Datasets,
    resolver: Resolver,
    bodies: RequestBodyReader,
    committer: Committer,
    *,
    max_chunk_nbytes: int,
    decoded: ByteBudget,
) -> APIRouter:
    """Build the routes of commits without a session; *decoded* bounds the memory of all bodies."""
    router = new_router("/api/datasets/{dataset}", "Commits")

    opening = Depends(opens(datasets.find_writable, resolver))
    octets = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    body = {"requestBody": {"required": True, "content": octets}}

    @router.post("/chunks", status_code=201, openapi_extra=body)
    async def write_chunk(
        opened: Annotated[OpenedRepository, opening], request: Request
    ) -> WrittenChunk:
        """Write a chunk, encoded by the codecs of its array, for a later commit.

        Garbage collection removes chunks that no commit refers to.
        """
        async with bodies.read_body(request, max_chunk_nbytes) as body:
            chunk_id = await put_chunk(committer.swaps.store, opened, body)
            note(chunk_id=encode_id(chunk_id))
            return WrittenChunk(chunk_id=encode_id(chunk_id), length=len(body))

    _add_commit(router, opening, bodies, decoded, committer)
    return router


def _add_commit(
    router: APIRouter,
    opening: Any,
    bodies: RequestBodyReader,
    decoded: ByteBudget,
    committer: Committer,
) -> None:
    @router.post(
        "/commits",
        summary="Commit Changes",
        status_code=201,
        responses=CONFLICTS,
        openapi_extra=reads(CommitBody, **{JSON_LINES: _LINES_SCHEMA}),
    )
    async def commit(
        opened: Annotated[OpenedRepository, opening],
        request: Request,
        idempotency_key: Annotated[str | None, Header(description=_OF_COMMIT)] = None,
    ) -> CommittedSnapshot:
        """Commit changes of nodes, and references to chunks that exist already.

        A body of more than 2 MiB, up to 64 MiB, is sent as `application/x-ndjson`: its first line
        is an object with all members but `changes`, and each further line, of up to 2 MiB, is one
        change. Several lines may put chunks of the same array.

        Every reference is checked before anything is written: the chunk must exist and be long
        enough. Commits of others since the parent are a conflict only where they changed the same.
        """
        key = parse_key(idempotency_key)
        async with (
            bodies.read_body(request, 64 * 1024**2) as body,
            decoded.room(16 * len(body)),  # decoded, a body takes up to so much memory
        ):
            is_in_lines = request.headers.get("content-type", "").lower().startswith(JSON_LINES)
            parse = parse_commit_lines if is_in_lines else parse_commit
            is_long = len(body) > 16 * 1024  # shorter ones are parsed in about a millisecond
            options, edits = await run_in_thread(parse, body, is_long=is_long)
            write_id = WriteId(f"once-{secrets.token_hex(16)}")
            if key is not None:  # with another body, the same key is a conflict
                hash_body = partial(blake2b, body, digest_size=16)
                digest = await run_in_thread(hash_body, is_long=is_large(len(body)))
                write_id = WriteId(key, digest.hexdigest())
            parent_id = options.parent_id or ""
            wanted = _commit_request(options, options.branch, parent_id, write_id)
            is_move = any(isinstance(each, MoveNode) for each in edits)
            wanted = replace(wanted, moves_nodes=is_move)
            note(ref=options.branch)
            return _committed(await committer.commit_edits(opened, edits, wanted))


def _committed(result: CommitResult) -> CommittedSnapshot:
    note(before=result.parent_id, after=result.snapshot_id)
    return CommittedSnapshot.model_validate(result)


def parse_key(key: str | None) -> str | None:
    """Derive the id of a write from the header ``Idempotency-Key``. Raises: `BadHeaderError`."""
    if key is None:
        return None
    if not re.fullmatch(r"[\x21-\x7e]{1,255}", key):
        raise BadHeaderError("Idempotency-Key: expected 1 to 255 ASCII characters without spaces")
    return f"key-{blake2b(key.encode(), digest_size=16).hexdigest()}"


def _commit_request(
    options: CommitOptions, branch: str | None, parent_id: str, write_id: WriteId
) -> CommitRequest:
    return CommitRequest(
        branch=branch,
        parent_id=parent_id,
        message=options.message,
        write_id=write_id,
        metadata=options.metadata,
        policy=Policy(options.on_conflict),
        amend=options.amend,
        allow_empty=options.allow_empty,
    )


def _describe(session_id: str, document: SessionDocument) -> SessionState:
    state = document.state
    return SessionState(
        session_id=session_id,
        branch=document.branch,
        parent_id=document.parent_id,
        created_at=datetime.fromtimestamp(document.created_at_s, UTC),
        expires_at=datetime.fromtimestamp(document.expires_at_s, UTC),
        state=state.name,
        snapshot_id=state.snapshot_id if isinstance(state, Committed) else None,
    )
