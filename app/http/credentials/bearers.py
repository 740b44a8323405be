"""Bearer tokens (RFC 6750): digests that are configured, and tokens that others have signed."""

import hashlib
import hmac
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from math import inf
from typing import Final, NamedTuple
from urllib.parse import unquote_to_bytes

from app.errors import UnauthenticatedError
from app.http.credentials.caller import Caller
from app.setting_fields import PUBLIC
from app.settings import CallerSettings

BEARER: Final = b"bearer "
"""What values of `Authorization` begin with that hold a token, in any case of letters."""

_REMEMBERED: Final = 4096
_LONGEST_REMEMBERED: Final = 4096
"""Characters of what was shown; spaces and percent signs make one token long in many ways."""
_LONGEST_NBYTES: Final = 16 * 1024
"""More is no token; headers are not longer."""


class Known(NamedTuple):
    """Who a token is of, and until when that holds."""

    caller: Caller
    until_s: float
    """In seconds since 1970."""


type Shown = bytes | str
"""A token as it arrived: a value of `Authorization`, or as text the segment of a path."""

type Identify = Callable[[str], Awaitable[Known | None]]
"""Tells whose a token is; `None` where it is of another kind.

Raises: `UnauthenticatedError` for one that is not good any more, or forged.
"""


class Bearers:
    """Tells whose a token is.

    The digest of a token is compared with every one that is configured, each in constant time.
    What was found once is remembered as it was shown, which costs a tenth of a digest. To look it
    up tells nothing either: it is compared only with what has the same hash, and the key of the
    hash is known to nobody.
    """

    def __init__(self, callers: Mapping[str, CallerSettings], others: Sequence[Identify]) -> None:
        self._others = others
        self._digests = [
            (bytes.fromhex(digest), Known(named(name), inf))
            for name, caller in callers.items()
            for digest in caller.token_sha256
        ]
        self.remembered: dict[Shown, Known] = {}
        """Whose tokens are, as they were shown."""

    def recall(self, shown: Shown) -> Known | None:
        """Tell whose the token is that was *shown*, if that is known already."""
        known = self.remembered.get(shown)
        return known if known is not None and known.until_s > time.time() else None

    async def identify(self, shown: Shown) -> Caller:
        """Tell whose the token is that was *shown*.

        Raises: `UnauthenticatedError`, and what hinders those who would know.
        """
        if (remembered := self.recall(shown)) is not None:
            return remembered.caller
        token = _token(shown)
        known = self._configured(token) or await self._ask(token)
        if known is None:
            raise UnauthenticatedError("the token is none that is known here")
        if len(shown) > _LONGEST_REMEMBERED:
            return known.caller
        if len(self.remembered) >= _REMEMBERED:
            del self.remembered[next(iter(self.remembered))]
        self.remembered[shown] = known
        return known.caller

    def _configured(self, token: bytes) -> Known | None:
        found, digest = None, hashlib.sha256(token).digest()
        for each, known in self._digests:
            if hmac.compare_digest(each, digest):
                found = known
        return found

    async def _ask(self, token: bytes) -> Known | None:
        if len(token) > _LONGEST_NBYTES or not token.isascii():
            return None
        for identify in self._others:
            if (known := await identify(token.decode("ascii"))) is not None:
                return known
        return None


def _token(shown: Shown) -> bytes:
    if isinstance(shown, str):
        return unquote_to_bytes(shown)
    return shown[len(BEARER) :].strip()


def named(name: str) -> Caller:
    """Make the caller that is configured by *name*."""
    return Caller(name, frozenset({PUBLIC, name}))
