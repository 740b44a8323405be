"""The keys of one issuer, read when they are needed and kept for a while."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from math import inf
from typing import Final

from app.errors import IssuerUnavailableError
from app.http.credentials.verification_keys import VerificationKey, choose

KEPT_S: Final = 3600.0
"""A key that the issuer has withdrawn is good so long, at most."""

RETRIED_S: Final = 60.0
"""So long keys that are older are used without asking, when the issuer could not be reached."""

APART_S: Final = 10.0
"""The issuer is asked for keys that are not known no sooner than this after the last time."""

type ReadKeys = Callable[[], Awaitable[Sequence[VerificationKey]]]

_log = logging.getLogger(__name__)


class Jwks:
    """The keys of an issuer.

    What is being read is read to its end, whoever leaves: clients that come and go could
    otherwise keep the keys from all others. All who ask meanwhile wait for the same.
    """

    def __init__(self, read: ReadKeys, clock: Callable[[], float] = time.monotonic) -> None:
        self._read_keys = read
        self._clock = clock
        self._keys: Sequence[VerificationKey] | None = None
        self._stale_at = -inf
        self._quiet_until = -inf
        self._reading: asyncio.Task[None] | None = None

    async def find(self, kid: str | None, algorithm: str) -> VerificationKey | None:
        """Find the key *kid*; one that is not known may be new.

        Raises: `IssuerUnavailableError` where no keys are known.
        """
        if self._clock() >= self._stale_at:
            await self._refresh()
        found = choose(self._keys or (), kid, algorithm)
        if found is None:
            await self._refresh()
            found = choose(self._keys or (), kid, algorithm)
        if self._keys is None:
            raise IssuerUnavailableError("the keys of the token's issuer cannot be read")
        return found

    async def aclose(self) -> None:
        """Read no more."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])

    async def _refresh(self) -> None:
        """Read the keys anew, unless that was done a moment ago."""
        if self._reading is None:
            if self._clock() < self._quiet_until:
                return
            self._reading = asyncio.create_task(self._read())
        await asyncio.shield(self._reading)

    async def _read(self) -> None:
        try:
            self._keys = await self._read_keys()
            self._stale_at = self._clock() + KEPT_S
        except IssuerUnavailableError as error:
            _log.warning("no keys of the issuer %s", error)
            self._stale_at = self._clock() + RETRIED_S
        finally:
            self._quiet_until = self._clock() + APART_S
            self._reading = None
