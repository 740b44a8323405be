"""Records of tokens: who made which, and which have ended before their time.

They are small objects of a store that all replicas share, or of the memory of this process. No
record holds a token, or its signature. The versions of the service before and after this one read
the names of records in ``ended/``: a later form of them would be written beside this one.
"""

import asyncio
import hashlib
import json
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from math import inf
from typing import Final

from pydantic import AwareDatetime, BaseModel, Field

from shardgate.auditing import note
from shardgate.concurrency import SingleFlight, bounded_gather
from shardgate.errors import (
    StorageError,
    TokenRecordsError,
    TooManyRequestsError,
    UnknownTokenError,
)
from shardgate.formats.documents import parse_json
from shardgate.formats.reading import DecodeError, check_format
from shardgate.model import ObjectRef
from shardgate.storage.contract import Found, ObjectStore

CHECKED_S: Final = 5.0  # time after which is read again which tokens have ended in other processes
_WAIT_S: Final = 3.0
_MOST: Final = 10_000  # most tokens of one caller that have not expired, revoked ones included
_MOST_REMOVED: Final = 100  # at a time: a request waits for it
_AT_ONCE: Final = 16
_log = logging.getLogger(__name__)


class TokenRecord(BaseModel, use_attribute_docstrings=True):
    """A valid token that a caller has made."""

    token_id: str
    datasets: list[str]
    """The datasets that it lets read."""
    expires_at: AwareDatetime
    made_at: AwareDatetime = Field(default_factory=lambda: datetime.now(UTC).replace(microsecond=0))


class TokenList(BaseModel, use_attribute_docstrings=True):
    """Tokens of a caller."""

    tokens: list[TokenRecord]
    """The newest first; of many, those that expire last."""


class TokenRecords:
    """Keeps an object for each token, in ``made/`` below a digest of its owner, and for each token
    or login that has ended, in ``ended/``. Their names begin with the time of expiry.

    All methods but `refresh` raise `TokenRecordsError` while the store fails.
    """

    def __init__(
        self,
        store: ObjectStore,
        root: ObjectRef,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._root = root
        self._now = now
        self._clock = clock
        # Expiry of the records of tokens and logins that have ended, by id.
        self._ended: dict[str, float] = {}
        self._is_known = False
        self._stale_at = -inf
        # Clients that leave early must not keep all others from the answer.
        self._reads = SingleFlight[str](outlasts=True)
        self.on_end: Callable[[], None] = lambda: None
        """Called when a token has ended here."""

    async def aclose(self) -> None:
        """End reads in progress."""
        await self._reads.aclose()

    async def add(self, owner: str, record: TokenRecord) -> None:
        """Keep *record* of a token that the caller *owner* has made.

        Raises: `TooManyRequestsError`.
        """
        folder = self._made_by(owner)
        name = _name(record.expires_at.timestamp(), record.token_id)
        document = json.dumps({"format": 1, **record.model_dump(mode="json")}).encode()
        with _reported():
            if len(await self._unexpired(folder, removes=True)) >= _MOST:
                raise TooManyRequestsError(f"{owner} has {_MOST} tokens that have not expired")
            await self._store.put(folder.join(name), [document], expected=None)

    async def list(self, owner: str) -> TokenList:
        """Return the valid tokens of *owner*: of many, the 100 that expire last."""
        await self.refresh()
        folder = self._made_by(owner)
        with _reported():
            made = await self._unexpired(folder)
        ids = [token_id for token_id in made if not self.has_ended(token_id)]

        async def read(token_id: str) -> TokenRecord | None:
            found = await self._store.get(folder.join(_name(made[token_id], token_id)))
            if not isinstance(found, Found):
                return None
            try:
                document = parse_json(found.data)
                check_format(document)
                return TokenRecord.model_validate(document)
            except DecodeError as error:
                raise TokenRecordsError(f"the record of the token {token_id}: {error}") from error
            except ValueError:  # an object that somebody else has put there
                return None

        with _reported():
            # Names begin with the time of expiry: the last 100 expire last.
            records = await bounded_gather(read, ids[-100:], limit=_AT_ONCE)
        found = [record for record in records if record is not None]
        return TokenList(tokens=sorted(found, key=lambda each: each.made_at, reverse=True))

    async def revoke(self, owner: str, token_id: str) -> None:
        """End a token of *owner*. Raises: `UnknownTokenError`."""
        with _reported():
            made = await self._unexpired(self._made_by(owner))
        if token_id not in made:
            raise UnknownTokenError(f"{owner} has no valid token {token_id}")
        note(token_id=token_id)
        await self.end(token_id, made[token_id])

    async def end(self, token_id: str, until_s: float) -> None:
        """Refuse a token, or all of a login, that would be valid until *until_s*; where this
        fails, only in this process.
        """
        kept_until_s = until_s + 60  # clocks of replicas differ
        self._ended[token_id] = kept_until_s
        self.on_end()
        ref = self._root.join("ended").join(_name(kept_until_s, token_id))
        with _reported():
            await self._store.put(ref, [b"{}"], expected=None)

    def has_ended(self, token_id: str) -> bool:
        """Return whether a token, or login, was known to have ended at the last `refresh`."""
        return token_id in self._ended

    @property
    def fresh_s(self) -> float:
        """Seconds until `refresh` reads again."""
        return self._stale_at - self._clock()

    async def refresh(self) -> None:
        """Read which tokens have ended, unless they were read lately; a failure changes nothing.

        Raises: `TokenRecordsError` if they were never read.
        """
        if self.fresh_s <= 0:
            try:
                async with asyncio.timeout(_WAIT_S):
                    await self._reads.run("ended", self._read)
            except TimeoutError:  # the read goes on, and for a while no other request waits for it
                self._stale_at = self._clock() + CHECKED_S
        if not self._is_known:
            raise TokenRecordsError("it cannot be read at the moment which tokens have ended")

    async def _read(self) -> None:
        try:
            found = await self._unexpired(self._root.join("ended"), removes=True)
        except StorageError as error:
            _log.warning("it is not known which tokens have ended elsewhere: %s", error)
        else:
            now = self._now()
            known = {each: until_s for each, until_s in self._ended.items() if until_s > now}
            self._ended = {**known, **found}
            self._is_known = True
        self._stale_at = self._clock() + CHECKED_S

    async def _unexpired(self, folder: ObjectRef, *, removes: bool = False) -> Mapping[str, int]:
        """Return the ids in *folder* and when they expire; *removes* some of the expired ones."""
        unexpired: dict[str, int] = {}
        expired: list[ObjectRef] = []
        async for each in self._store.list(folder.prefix):
            digits, _, token_id = each.ref.key.rpartition("/")[2].partition("-")
            if not re.fullmatch("[0-9]{12}", digits):
                continue  # of somebody else, or of a later version of the service
            if int(digits) > self._now():
                unexpired[token_id] = int(digits)
            elif removes and len(expired) < _MOST_REMOVED:
                expired.append(each.ref)
        try:
            remove = partial(self._store.delete, expected=None)
            await bounded_gather(remove, expired, limit=_AT_ONCE)
        except StorageError as error:
            _log.warning("expired records of tokens cannot be removed: %s", error)
        return unexpired

    def _made_by(self, owner: str) -> ObjectRef:
        digest = hashlib.sha256(owner.encode(errors="surrogatepass")).hexdigest()
        return self._root.join("made").join(digest)


@contextmanager
def _reported() -> Iterator[None]:
    """Log a `StorageError`, which names the place of the records, and raise another one."""
    try:
        yield
    except StorageError as error:
        _log.warning("records of tokens cannot be read or written: %s", error)
        raise TokenRecordsError("the records of tokens cannot be used at the moment") from error


def _name(expires_at_s: float, token_id: str) -> str:
    # Of a fixed number of digits, so that names sort by time.
    return f"{int(expires_at_s):012}-{token_id}"
