"""Records of tokens: who made which, and which have ended before their time.

They are small objects of a store that all replicas share, or of the memory of this process. No
record holds a token, or its signature.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from math import inf
from typing import Final

from pydantic import BaseModel, Field, ValidationError

from shardgate.concurrency import SingleFlight, bounded_gather
from shardgate.errors import StorageError, TooManyRequestsError, UnknownTokenError
from shardgate.model import ObjectRef
from shardgate.storage.contract import Found, ObjectStore

CHECKED_S: Final = 10.0
"""Longest time until a process hears of tokens that have ended in another one."""
_MOST: Final = 1000
"""Most valid tokens of one caller."""
_AT_ONCE: Final = 16
_DIGITS: Final = 12
"""Digits of times in names, which sort by them."""
_log = logging.getLogger(__name__)


class TokenRecord(BaseModel, use_attribute_docstrings=True):
    """A valid token that a caller has made."""

    token_id: str
    datasets: list[str]
    """The datasets that it lets read."""
    expires_at: datetime
    made_at: datetime = Field(default_factory=lambda: datetime.now(UTC).replace(microsecond=0))


class TokenList(BaseModel, use_attribute_docstrings=True):
    """Tokens of a caller."""

    tokens: list[TokenRecord]
    """The newest first."""


class TokenRecords:
    """Keeps an object for each token below ``made/`` and its owner's digest, and one for each that
    has ended, or session, below ``ended/``; their names begin with the time of expiry.
    """

    def __init__(
        self, store: ObjectStore, root: ObjectRef, now: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._root = root
        self._now = now
        self._ended: dict[str, float] = {}
        """When those that have ended would have expired."""
        self._stale_at = -inf
        self._reads = SingleFlight[str]()
        self.on_end: Callable[[], None] = lambda: None
        """Called when a token has ended here."""

    async def add(self, owner: str, record: TokenRecord) -> None:
        """Keep *record* of a token that the caller *owner* has made.

        Raises: `TooManyRequestsError`, `StorageError`.
        """
        folder = self._made_by(owner)
        if len(await self._names(folder)) >= _MOST:
            raise TooManyRequestsError(f"{owner} has {_MOST} valid tokens; revoke some of them")
        name = _name(record.expires_at.timestamp(), record.token_id)
        document = record.model_dump_json().encode()
        await self._store.put(folder.join(name), [document], expected=None)

    async def list(self, owner: str) -> TokenList:
        """Return the valid tokens of *owner*. Raises: `StorageError`."""
        await self.refresh()
        folder = self._made_by(owner)
        names = [name for name in await self._names(folder) if not self.has_ended(_id_of(name))]

        async def read(name: str) -> TokenRecord | None:
            found = await self._store.get(folder.join(name))
            with suppress(ValidationError):  # of an object that somebody else has put there
                if isinstance(found, Found):
                    return TokenRecord.model_validate_json(found.data)
            return None

        found = filter(None, await bounded_gather(read, names, limit=_AT_ONCE))
        return TokenList(tokens=sorted(found, key=lambda each: each.made_at, reverse=True))

    async def revoke(self, owner: str, token_id: str) -> None:
        """End a token of *owner*. Raises: `UnknownTokenError`, `StorageError`."""
        for name in await self._names(self._made_by(owner)):
            if _id_of(name) == token_id:
                await self.end(token_id, _expiry_of(name))
                return
        raise UnknownTokenError(f"{owner} has no valid token {token_id}")

    async def end(self, token_id: str, until_s: float) -> None:
        """Refuse a token, or all of a session, that would be valid until *until_s*.

        Raises: `StorageError`.
        """
        ref = self._root.join("ended").join(_name(until_s, token_id))
        await self._store.put(ref, [b"{}"], expected=None)
        self._ended[token_id] = until_s
        self.on_end()

    def has_ended(self, token_id: str | None) -> bool:
        """Return whether a token, or session, was known to have ended at the last `refresh`."""
        return token_id in self._ended

    async def refresh(self) -> None:
        """Read which tokens have ended, if that is older than `CHECKED_S`; while that fails, those
        that are known have. Raises: `StorageError` if they were never read.
        """
        if self._now() >= self._stale_at:
            await self._reads.run("ended", self._read)

    async def _read(self) -> None:
        now = self._now()
        try:
            names = await self._names(self._root.join("ended"))
        except StorageError as error:
            if self._stale_at == -inf:
                raise
            _log.warning("it is not known which tokens have ended elsewhere: %s", error)
        else:
            self._ended |= {_id_of(name): _expiry_of(name) for name in names}
            self._ended = {each: until_s for each, until_s in self._ended.items() if until_s > now}
        self._stale_at = now + CHECKED_S

    async def _names(self, folder: ObjectRef) -> Sequence[str]:
        """Return the names in *folder* of what has not expired, and remove the others."""
        names, expired, now = [], [], self._now()
        async for each in self._store.list(folder.prefix):
            name = each.ref.key.rpartition("/")[2]
            if _expiry_of(name) > now:
                names.append(name)
            else:
                expired.append(each.ref)
        await bounded_gather(self._remove, expired, limit=_AT_ONCE)
        return names

    async def _remove(self, ref: ObjectRef) -> None:
        with suppress(StorageError):  # the next listing finds it again
            await self._store.delete(ref, expected=None)

    def _made_by(self, owner: str) -> ObjectRef:
        digest = hashlib.sha256(owner.encode(errors="surrogatepass")).hexdigest()
        return self._root.join("made").join(digest)


def _name(expires_at_s: float, token_id: str) -> str:
    return f"{int(expires_at_s):0{_DIGITS}}-{token_id}"


def _expiry_of(name: str) -> int:
    digits = name[:_DIGITS]
    return int(digits) if digits.isdecimal() else 0


def _id_of(name: str) -> str:
    return name[_DIGITS + 1 :]
