"""Takes credentials off requests, and asks for them only where they matter."""

from collections.abc import MutableMapping
from math import inf
from time import time
from typing import Any, Final
from urllib.parse import unquote

from app.errors import MisdirectedError, UnauthenticatedError
from app.http.answer import combined
from app.http.cors import Hosts
from app.http.credentials.access import Datasets, demand_writing, may_read
from app.http.credentials.bearers import BEARER, Bearers
from app.http.credentials.caller import NOBODY, Caller
from app.http.credentials.signatures import Signatures
from app.observability.requests import note_caller
from app.resolve.resolver import Dataset
from app.setting_fields import PUBLIC, RESERVED

_IN_PATHS: Final = (b"/~", b"/%7E", b"/%7e")
_TILDE: Final = ord("~")
_OURS: Final = RESERVED | {""}
_READING: Final = ("GET", "HEAD")
_VISITORS: Final = 4096
_WELCOME_S: Final = 1.0
"""Soon enough looked at again, and seldom enough to cost nothing."""

type Request = MutableMapping[str, Any]
"""The scope of a request (ASGI), to which is added who asks."""

type Asked = tuple[str, bytes, bool]
"""The name of a dataset, what was shown to read it, and whether as a segment of the path."""

type Visitor = tuple[Caller | None, float]
"""Who asks, and until when that is not looked at again, by the clock of the event loop."""

UNKNOWN: Final[Visitor] = None, -inf


class Door:
    """Lets callers see what rules allow them.

    What everybody may do asks for no credentials, and looks at none: clients of S3 send some
    everywhere, and a chunk that is public costs nothing more.
    """

    def __init__(
        self, datasets: Datasets, bearers: Bearers, signatures: Signatures, hosts: Hosts
    ) -> None:
        self.hosts = hosts
        self._datasets = datasets
        self._bearers = bearers
        self._signatures = signatures
        self.visitors: dict[Asked, Visitor] = {}
        """Who may read what they ask for: looked up for each chunk, in one step."""

    def recall(self, dataset: Dataset, asked: Asked, now: float) -> Caller | None:
        """Tell who *asked* for *dataset*, if it is known already that they may read it.

        It is *now* by the clock of the event loop, and they are a visitor for a while.
        """
        _, shown, is_in_path = asked
        known = self._bearers.recall(_token(shown) if is_in_path else shown)
        if known is None or not may_read(known.caller, dataset):
            return None
        if len(self.visitors) >= _VISITORS:
            self.visitors.clear()
        until = now + min(known.until_s - time(), _WELCOME_S)
        self.visitors[asked] = known.caller, until
        return known.caller

    def demand_host(self, scope: Request) -> None:
        """Return if the request names a host of the service, or only reads what is public.

        Raises: `MisdirectedError`.
        """
        if scope["method"] in _READING and not self._is_private(scope["path"]):
            return
        host = combined(scope["headers"]).get(b"host", b"")
        if not self.hosts.admits(host):
            raise MisdirectedError(f"server.hosts does not name {host.decode('latin-1')[:255]!r}")

    async def caller(self, scope: Request) -> Caller:
        """Tell who asks.

        Raises: `UnauthenticatedError`, `SignatureError`.
        """
        if "caller" not in scope:
            is_same = self._datasets.is_all_public
            scope["caller"] = NOBODY if is_same else await self._identify(scope)
        found: Caller = scope["caller"]
        note_caller(found.name)
        return found

    async def enter(self, scope: Request, name: str) -> Dataset:
        """Give the dataset *name* to read from.

        Raises: `UnknownDatasetError`, `UnauthenticatedError`, `SignatureError`.
        """
        dataset = self._datasets.get(name)
        if dataset is not None and dataset.is_public:
            return dataset
        return self._datasets.find(name, await self.caller(scope))

    async def demand_writing(self, scope: Request, dataset: Dataset) -> None:
        """Return if who asks may write to *dataset*.

        Raises: `UnauthenticatedError`, `ForbiddenError`, `SignatureError`.
        """
        if PUBLIC not in dataset.writers:
            demand_writing(await self.caller(scope), dataset)

    def _is_private(self, path: str) -> bool:
        """Tell whether *path* names a dataset that is not public, or one that does not exist.

        The two are indistinguishable where any dataset is private.
        """
        name = path.removeprefix("/api/datasets")[1:].partition("/")[0]
        dataset = self._datasets.get(name)
        if dataset is not None:
            return not dataset.is_public
        return name not in _OURS and not self._datasets.is_all_public

    async def _identify(self, scope: Request) -> Caller:
        if "token" in scope:
            return await self._bearers.identify(scope["token"])
        authorization = combined(scope["headers"]).get(b"authorization", b"")
        if authorization[: len(BEARER)].lower() == BEARER:
            return await self._bearers.identify(authorization)
        if (signed := self._signatures.check(scope)) is not None:
            scope["signed"] = signed
            return signed.caller
        if authorization:
            raise UnauthenticatedError("Authorization is neither a bearer token nor S3's signature")
        return NOBODY


def split_token(raw_path: bytes) -> tuple[bytes | None, bytes]:
    """Take the segment with the token off ``/~TOKEN/{dataset}/{virtual key}``."""
    if not raw_path.startswith(_IN_PATHS):
        return None, raw_path
    end = raw_path.find(b"/", 1)
    if end < 0:
        return raw_path, b""
    return raw_path[:end], raw_path[end:]


def without_token(scope: Request) -> Request:
    """Put a token that is in the path where it is not taken for a part of it."""
    segment, raw_path = split_token(scope["raw_path"])
    if segment is None:
        return scope
    return {
        **scope,
        "token": _token(segment),
        "raw_path": raw_path,
        "path": unquote(raw_path.decode("utf-8", "replace")),
    }


def _token(segment: bytes) -> str:
    """Give the token in the *segment* of a path, as it is spelled there."""
    begin = len(b"/~") if segment[1] == _TILDE else len(b"/%7E")
    return segment[begin:].decode("latin-1")
