"""Requests that are over: counted, and told in the log, a number of them together."""

import asyncio
from collections.abc import Iterable
from itertools import batched
from typing import Any, Final, cast, get_args

from app.seeing.access_log import AccessLog
from app.seeing.request_counts import RequestCounts
from app.seeing.told import Told

_FIELDS: Final = len(get_args(Told.__value__))
_AT_ONCE: Final = 128
"""So many lines have room in an empty pipe (64 KiB), though each has 500 bytes."""
_LONGEST_S: Final = 0.2
"""So long a line waits for others; a process that is killed loses it."""
_SOON_S: Final = 0.01
"""So long what had no room waits for the reader of the log."""

_MANY: Final = _AT_ONCE * _FIELDS
"""So many fields are settled at once."""


class Requests:
    """Counts requests, and writes lines of them, when there are a number of them.

    What is done between two bodies takes five times as long as in a row, for they drive code and
    data out of the processor's caches. Even objects to keep what is told of each request cost as
    much as its line: the fields of all stand in one list.
    """

    def __init__(self, datasets: Iterable[str], access_log: AccessLog | None = None) -> None:
        """Count requests of *datasets*."""
        self.counts = RequestCounts(datasets)
        """Without those that are not settled."""
        self._fields: list[Any] = []
        """The fields of `Told` of each that is not settled."""
        self._access_log = access_log
        self._is_timed = access_log is None
        """Whether those that wait are settled in time, or nobody asks for that."""
        self._is_late = False
        """Whether the log is behind, and will write on."""

    @property
    def has_keys(self) -> bool:
        """Whether the log has the keys of requests."""
        return self._access_log is not None and self._access_log.has_keys

    def tell(self, told: Told) -> None:
        """Count a request that is over, and write its line, in a moment."""
        self._fields += told
        if len(self._fields) >= _MANY:
            self.settle()
        if not self._is_timed:
            self._is_timed = True
            asyncio.get_running_loop().call_later(_LONGEST_S, self._end_waiting)

    def settle(self) -> RequestCounts:
        """Count all that are over, and write their lines, as far as somebody takes them."""
        told = cast(list[Told], list(batched(self._fields, _FIELDS)))
        self._fields.clear()
        self.counts.count(told)
        if self._access_log is not None:
            self._access_log.write(told)
        self._await_reader()
        return self.counts

    def _end_waiting(self) -> None:
        self._is_timed = False
        self.settle()

    def _await_reader(self) -> None:
        if self._access_log is not None and self._access_log.is_behind and not self._is_late:
            self._is_late = True
            asyncio.get_running_loop().call_later(_SOON_S, self._write_on, self._access_log)

    def _write_on(self, access_log: AccessLog) -> None:
        self._is_late = False
        access_log.write(())
        self._await_reader()
