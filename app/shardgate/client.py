"""Write to an Icechunk repository from a Python program, through a running service.

A session begins at the tip of a branch, takes what zarr-python writes, and ends with a commit. Any
number of programs may commit to one branch at the same time: the service rebases and orders them.
"""

import re
import ssl
import time
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import ExitStack, suppress
from functools import cache, lru_cache
from http import HTTPStatus
from types import TracebackType
from typing import Any, Final, Literal, Self

import httpx

from shardgate.errors import CommitConflictError, install_command

try:
    from obstore.store import S3Store
    from zarr.abc.store import ByteRequest
    from zarr.core.buffer import Buffer, BufferPrototype
    from zarr.storage import ObjectStore
except ImportError as error:
    raise ImportError(f"open_session needs {install_command('client')}") from error

# The service, or a proxy before it, is busy: a later request may succeed.
_RETRIED: Final = (
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.BAD_GATEWAY,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
)
# A service that restarts is back after less; counted from the end of the first request that failed.
_RETRY_S: Final = 60.0
_LONGEST_PAUSE_S: Final = 5.0
# A commit of many shards writes each of them.
_TIMEOUT: Final = httpx.Timeout(30, read=600)
_URL: Final = re.compile(r"https?://[^/?#]+(/[^?#]*)?/[^/?#]+/?")
_DOCUMENTS_OF_ZARR_2: Final = {".zarray", ".zattrs", ".zgroup", ".zmetadata"}
_TOKEN: Final = re.compile(r"[\x21-\x7e]+")


class SessionError(Exception):
    """The service refused a request, or could not be reached; *status* is `None` in that case."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


def open_session(
    url: str, *, branch: str = "main", path: str = "", token: str | None = None
) -> "Session":
    """Begin a session on *branch* of the repository that a service has at *url*.

    *url* is that of a writable dataset, such as ``http://127.0.0.1:8000/lab``. *path* leads to the
    repository if the dataset holds several. *token* is sent as ``Authorization: Bearer``.

    The request is repeated for a minute while it is answered that the service is busy. A session
    whose begin was not answered ends by itself a day later.

    Raises: `SessionError`.
    """
    if not _URL.fullmatch(url):
        raise SessionError(f"{url}: expected the URL of a dataset, as http://HOST/DATASET")
    # The HTTP client refuses such a token too, and repeats it in the error.
    if token is not None and not _TOKEN.fullmatch(token):
        raise SessionError("token: expected ASCII characters without spaces and line breaks")
    service, _, dataset = url.rstrip("/").rpartition("/")
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    tls = _trusted() if service.startswith("https:") else False
    client = httpx.Client(base_url=f"{service}/", headers=headers, timeout=_TIMEOUT, verify=tls)
    sessions = f"api/datasets/{dataset}/sessions"
    query = {"path": path} if path else {}
    with ExitStack() as undo:
        undo.callback(client.close)
        body = {"branch": branch}
        begun = _request(client, "POST", sessions, is_idempotent=False, params=query, json=body)
        if not begun.keys() >= {"session_id", "parent_id"}:
            raise SessionError(f"{url}: what answers there is not Shardgate")
        session_id = str(begun["session_id"])
        api = f"{sessions}/{session_id}"
        undo.callback(_discard, client, api, query)
        prefix = "/".join([*filter(None, path.split("/")), f"@session.{session_id}/"])
        store = _PrefixedStore(_open_store(service, dataset, token), prefix=prefix)
        session = Session(client, api, query, begun, store)
        undo.pop_all()  # all that is the session's from here on
    return session


class Session:
    """A session; as a context manager it is discarded at its end, unless it was committed, or may
    have been: a commit was not answered, or an error ended the wait for its answer.
    """

    def __init__(
        self,
        client: httpx.Client,
        api: str,
        query: Mapping[str, str],
        begun: Mapping[str, Any],
        store: ObjectStore[Any],
    ) -> None:
        self._client = client
        self._api = api
        self._query = query
        self.session_id = str(begun["session_id"])
        """Its keys are ``/{dataset}/@session.{session_id}/…``."""
        self.parent_id = str(begun["parent_id"])
        """The snapshot that it began at."""
        self.snapshot_id: str | None = None
        """The snapshot of its commit."""
        self._is_unsure = False
        self.store = store
        """A store of zarr-python, which shows the snapshot with the changes of the session. It may
        be pickled, with the token, for workers that write to one session.
        """

    def commit(
        self,
        message: str,
        *,
        metadata: Mapping[str, Any] | None = None,
        on_conflict: Literal["fail", "ours", "theirs"] = "fail",
        allow_empty: bool = False,
    ) -> str:
        """Commit all changes on top of the branch's newest snapshot, and return the new one's id.

        *on_conflict* says whose chunks win if others have written the same ones. The request is
        repeated, for a minute after it first failed, while the service is busy or cannot be
        reached: the session is committed once.

        Raises: `CommitConflictError` if others have changed the same; nothing is committed then,
        and the session stays open. `SessionError` for other refusals, and where the outcome is not
        known: it may be called again then.
        """
        body = {
            "message": message,
            "metadata": dict(metadata or {}),
            "on_conflict": on_conflict,
            "allow_empty": allow_empty,
        }
        if self._client.is_closed:
            raise SessionError(f"the session {self.session_id} ended with its block")
        path = f"{self._api}/commit"
        self._is_unsure = True
        try:
            committed = _request(self._client, "POST", path, params=self._query, json=body)
        except CommitConflictError:
            self._is_unsure = False
            raise
        except SessionError as error:
            self._is_unsure = not _is_refusal(error)
            raise
        if "snapshot_id" not in committed:
            raise SessionError(f"{self._client.base_url}{path}: the answer names no snapshot")
        self.snapshot_id = str(committed["snapshot_id"])
        return self.snapshot_id

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if self.snapshot_id is None and not self._is_unsure:
                _discard(self._client, self._api, self._query)
        finally:
            self._client.close()


@cache
def _trusted() -> ssl.SSLContext:
    """Return the trusted authorities; reading them takes longer than a commit."""
    return httpx.create_ssl_context()


class _PrefixedStore(ObjectStore[S3Store]):
    """The keys of *store* below *prefix*, which ends in a slash: those of a session.

    A store of obstore with a prefix of its own would read the trusted authorities anew.
    """

    def __init__(self, store: S3Store, *, prefix: str, read_only: bool = False) -> None:
        super().__init__(store, read_only=read_only)
        self._prefix = prefix

    def __eq__(self, other: object) -> bool:
        is_same = isinstance(other, _PrefixedStore) and self._prefix == other._prefix
        return is_same and super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]  # as of all stores of zarr-python

    def with_read_only(self, read_only: bool = False) -> Self:  # noqa: FBT001, FBT002  zarr's
        return type(self)(self.store, prefix=self._prefix, read_only=read_only)

    async def get(
        self,
        key: str,
        prototype: BufferPrototype,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        # zarr-python looks for both versions at once, each time that it opens an array or group.
        if key.rpartition("/")[2] in _DOCUMENTS_OF_ZARR_2:
            return None
        return await super().get(self._prefix + key, prototype, byte_range)

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        below = [(self._prefix + key, byte_range) for key, byte_range in key_ranges]
        return await super().get_partial_values(prototype, below)

    async def exists(self, key: str) -> bool:
        return await super().exists(self._prefix + key)

    async def getsize(self, key: str) -> int:
        return await super().getsize(self._prefix + key)

    async def getsize_prefix(self, prefix: str) -> int:
        return await super().getsize_prefix(self._prefix + prefix)

    async def set(self, key: str, value: Buffer) -> None:
        await super().set(self._prefix + key, value)

    async def set_if_not_exists(self, key: str, value: Buffer) -> None:
        await super().set_if_not_exists(self._prefix + key, value)

    async def delete(self, key: str) -> None:
        await super().delete(self._prefix + key)

    async def delete_dir(self, prefix: str) -> None:
        self._check_writable()
        # It deletes the keys that it lists, as `delete` of this class could not.
        await ObjectStore(self.store).delete_dir(self._prefix + prefix)

    def list(self) -> AsyncGenerator[str]:
        return self.list_prefix("")

    async def list_prefix(self, prefix: str) -> AsyncGenerator[str]:
        async for key in super().list_prefix(self._prefix + prefix):
            yield key.removeprefix(self._prefix)

    async def list_dir(self, prefix: str) -> AsyncGenerator[str]:
        async for name in super().list_dir(self._prefix + prefix):
            yield name


@lru_cache(maxsize=16)
def _open_store(service: str, dataset: str, token: str | None) -> S3Store:
    """Open the store of a dataset: an HTTP client, which reads the trusted authorities.

    That takes longer than all else in a session, so the next one uses the same.
    """
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return S3Store(
        dataset,
        endpoint=service,
        region="us-east-1",
        skip_signature=True,
        virtual_hosted_style_request=False,
        client_options={"allow_http": True, "default_headers": headers, "timeout": "10m"},
    )


def _request(
    client: httpx.Client, method: str, path: str, *, is_idempotent: bool = True, **options: Any
) -> Mapping[str, Any]:
    """Send a request, with retries while these may help, and return the document of the answer.

    Without an answer of the service, or of a proxy before it, only what *is_idempotent* is sent
    again.

    Raises: `CommitConflictError`, `SessionError`.
    """
    until_s = None
    pause_s = 0.1
    while True:
        error: Exception
        try:
            response = _send(client, method, path, **options)
        except SessionError as unanswered:
            error = unanswered
            may_help = is_idempotent
        else:
            if response.is_success:
                return _document(response)
            error = _error(response)
            may_help = response.status_code in _RETRIED
        # A commit may take longer than that before its connection breaks.
        until_s = until_s or time.monotonic() + _RETRY_S
        if not may_help or time.monotonic() + pause_s > until_s:
            raise error
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _discard(client: httpx.Client, api: str, query: Mapping[str, str]) -> None:
    # It ends by itself a day later, and the error that led here says more.
    with suppress(SessionError):
        _send(client, "DELETE", api, params=query)


def _send(client: httpx.Client, method: str, path: str, **options: Any) -> httpx.Response:
    try:
        return client.request(method, path, **options)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = str(error) or type(error).__name__
        raise SessionError(f"{client.base_url}{path}: {reason}") from error


def _is_refusal(error: SessionError) -> bool:
    """Return whether the service has answered that it did not do what was requested."""
    status = error.status
    if status is None or status in _RETRIED:
        return False
    return status < HTTPStatus.INTERNAL_SERVER_ERROR


def _error(response: httpx.Response) -> Exception:
    """Return the error that a problem document describes (RFC 9457)."""
    problem = _document(response)
    with suppress(LookupError, TypeError):
        return CommitConflictError(
            problem["expected_parent"], problem["actual_parent"], problem["conflicts"]
        )
    reason = problem.get("detail", f"the service answers {response.status_code}")
    request = response.request
    return SessionError(f"{request.method} {request.url}: {reason}", response.status_code)


def _document(response: httpx.Response) -> Mapping[str, Any]:
    with suppress(ValueError, RecursionError):
        found = response.json()
        return found if isinstance(found, dict) else {}
    return {}
