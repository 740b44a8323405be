"""Takes credentials off requests, and asks for them only where they matter."""

from collections.abc import Mapping, MutableMapping
from time import time
from typing import Any, Final
from urllib.parse import unquote

from app.errors import UnauthenticatedError
from app.http.answer import combined
from app.http.credentials.access import Datasets, demand_writing
from app.http.credentials.bearers import BEARER, Bearers
from app.http.credentials.caller import NOBODY, Caller
from app.http.credentials.signatures import Signatures
from app.resolve.resolver import Dataset
from app.seeing.seen import note_caller
from app.setting_fields import PUBLIC

_IN_PATHS: Final = (b"/~", b"/%7E", b"/%7e")
_TILDE: Final = ord("~")

type Request = MutableMapping[str, Any]
"""The scope of a request (ASGI), to which is added who asks."""


class Door:
    """Lets callers see what rules allow them.

    What everybody may do asks for no credentials, and looks at none: clients of S3 send some
    everywhere, and a chunk that is public costs nothing more.
    """

    def __init__(self, datasets: Datasets, bearers: Bearers, signatures: Signatures) -> None:
        self._datasets = datasets
        self._bearers = bearers
        self._remembered = bearers.remembered
        self._signatures = signatures

    def recall(
        self, dataset: Dataset, given: Mapping[bytes, bytes], token: str | None
    ) -> Caller | None:
        """Tell who asks for *dataset*, if it is known already that they may read it.

        They have the headers *given*, or a *token* in the path. It is done for each chunk, for
        which it is done in one step.
        """
        shown = given.get(b"authorization", b"") if token is None else token
        known = self._remembered.get(shown)
        if known is None:
            return None
        caller, until_s = known
        if until_s <= time() or dataset.readers.isdisjoint(caller.grants):
            return None
        return caller

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


def split_token(raw_path: bytes) -> tuple[str | None, bytes]:
    """Take the token off ``/~TOKEN/{dataset}/{virtual key}``."""
    if not raw_path.startswith(_IN_PATHS):
        return None, raw_path
    begin = len(b"/~") if raw_path[1] == _TILDE else len(b"/%7E")
    end = raw_path.find(b"/", begin)
    if end < 0:
        end = len(raw_path)
    return raw_path[begin:end].decode("latin-1"), raw_path[end:]


def without_token(scope: Request) -> Request:
    """Put a token that is in the path where it is not taken for a part of it."""
    token, raw_path = split_token(scope["raw_path"])
    if token is None:
        return scope
    return {
        **scope,
        "token": token,
        "raw_path": raw_path,
        "path": unquote(raw_path.decode("utf-8", "replace")),
    }
