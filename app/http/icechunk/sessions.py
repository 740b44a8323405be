"""Sessions of Icechunk repositories: begun, told of, ended, committed."""

from datetime import UTC, datetime
from http import HTTPStatus
from typing import Annotated, Final, NamedTuple

from fastapi import APIRouter, Depends, Header, Request
from pydantic import BaseModel

from app.formats.icechunk.changes import ChangeSet
from app.formats.icechunk.conflicts import Policy
from app.formats.icechunk.session import SessionDocument
from app.formats.icechunk.write_ids import WriteId
from app.http.auth.access import Datasets
from app.http.body import RequestBodyReader, RequestDocument, describe_document
from app.http.commit_bodies import CommitOptions, Committed, parse_key
from app.http.icechunk.writable import opens_writable
from app.http.openapi import CommitProblem, new_router, problems
from app.resolve.icechunk.commit_request import CommitRequest
from app.resolve.icechunk.committing import Committer
from app.resolve.icechunk.repositories import OpenedRepository
from app.resolve.icechunk.session import Session
from app.resolve.icechunk.session_commit import Made, SessionCommit
from app.resolve.icechunk.sessions import SessionReport, Sessions, report
from app.resolve.resolver import Resolver


class SessionOptions(RequestDocument):
    """Where a session begins."""

    branch: str = "main"
    """At its tip the session begins, and onto it the session is committed."""


class SessionCommitOptions(CommitOptions, RequestDocument):
    """How a session is committed."""


class SessionState(BaseModel, use_attribute_docstrings=True):
    """A session."""

    session_id: str
    """Its keys are `/{dataset}/@session.{session_id}/…`."""
    branch: str
    parent_id: str
    """The snapshot that it began with."""
    created_at: datetime
    expires_at: datetime
    """When it ends unless it is written to: that keeps it for a day, for 7 days at most in all."""
    state: str
    """`open`, `sealed` while it is being committed, or `committed`."""
    snapshot_id: str | None = None
    """What it has become."""


class SessionList(BaseModel):
    """Sessions, by their ids."""

    sessions: list[SessionState]


def build_sessions(
    datasets: Datasets,
    resolver: Resolver,
    sessions: Sessions,
    committer: Committer,
    documents: RequestBodyReader,
) -> APIRouter:
    """Build the routes of sessions."""
    router = new_router("/api/datasets/{dataset}/sessions", "Sessions")

    type Opened = Annotated[OpenedRepository, Depends(opens_writable(datasets, resolver))]

    async def find_session(opened: Opened, session_id: str) -> Session:
        return await sessions.find(opened.repository, session_id, opened.fetch)

    type Found = Annotated[Session, Depends(find_session)]

    @router.post(
        "",
        status_code=HTTPStatus.CREATED,
        openapi_extra=dict(describe_document(SessionOptions)),
        responses=problems(400, 403, 404, 405, 423),
    )
    async def begin_session(opened: Opened, request: Request) -> SessionState:
        """Begin a session at the tip of a branch.

        Its keys are read and written like those of plain Zarr, through any replica.
        """
        options = await documents.read_document(request, SessionOptions)
        return _tell(await sessions.create(opened, options.branch))

    @router.get("", responses=problems(400, 404, 405))
    async def list_sessions(opened: Opened) -> SessionList:
        """List the sessions: those that go on, and committed ones until they expire."""
        return SessionList(sessions=[_tell(each) for each in await sessions.every(opened)])

    @router.get("/{session_id}", responses=problems(404, 405))
    async def tell_of_session(session: Found) -> SessionState:
        """Tell how a session stands."""
        return _tell(report(session.place.session_id, await session.ask()))

    @router.delete(
        "/{session_id}",
        status_code=HTTPStatus.NO_CONTENT,
        responses=problems(404, 405, 503),
    )
    async def discard_session(session: Found) -> None:
        """End a session; what was written in it is there no more."""
        await sessions.discard(session)

    @router.post(
        "/{session_id}/commit",
        status_code=HTTPStatus.CREATED,
        openapi_extra=dict(describe_document(SessionCommitOptions)),
        responses=problems(400, 404, 405, 409, 423, conflict=CommitProblem),
    )
    async def commit_session(
        opened: Opened,
        session: Found,
        request: Request,
        idempotency_key: Annotated[str | None, Header(description=_KEY)] = None,
    ) -> Committed:
        """Commit all that was written in a session onto its branch.

        Who commits at the same time, or again, is answered the same. After a conflict the session
        goes on.
        """
        options = await documents.read_document(request, SessionCommitOptions)
        making = _Making(committer, opened, options)
        made = await SessionCommit(session, making.make, parse_key(idempotency_key)).run()
        return Committed(snapshot_id=made.snapshot_id, parent_id=made.parent_id)

    return router


_KEY: Final = "Makes a retry safe: another key finds a conflict where the session was committed."


class _Making(NamedTuple):
    """How a session is to be committed."""

    committer: Committer
    opened: OpenedRepository
    options: CommitOptions

    async def make(self, document: SessionDocument, changes: ChangeSet, write_id: str) -> Made:
        options = self.options
        request = CommitRequest(
            branch=document.branch,
            parent_id=document.parent_id,
            message=options.message,
            write_id=WriteId(write_id),
            metadata=options.metadata,
            policy=Policy(options.on_conflict),
            amend=options.amend,
            allow_empty=options.allow_empty,
        )
        return Made(*await self.committer.commit(self.opened, changes, request))


def _tell(session: SessionReport) -> SessionState:
    return SessionState(
        session_id=session.session_id,
        branch=session.branch,
        parent_id=session.parent_id,
        created_at=datetime.fromtimestamp(session.created_at_s, UTC),
        expires_at=datetime.fromtimestamp(session.expires_at_s, UTC),
        state=session.state,
        snapshot_id=session.snapshot_id,
    )
