"""Requests that are over: counted, and told in the log, a number of them together."""

import asyncio
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, Final

from app.seeing.access_log import AccessLog
from app.seeing.request_counts import RequestCounts
from app.seeing.told import FIELDS, Kind, Run

_AT_ONCE: Final = 512
"""While requests are settled none is answered, and clients fall asleep and must be woken: cached
chunks are served 2 % more slowly where 128 are settled at once. Lines that have no room in a pipe,
which has 64 KiB, wait for its reader."""
_LONGEST_S: Final = 0.2
"""So long a line waits for others; a process that is killed loses it."""
_SOON_S: Final = 0.002
"""So long what had no room waits before the reader of the log is looked for again."""
_END_S: Final = 1.0
"""So long the end waits for that reader."""


class Requests:
    """Counts requests, and writes lines of them, when there are a number of them.

    What is done between two bodies takes five times as long as in a row, for they drive code and
    data out of the processor's caches. What is kept of a request has its share in that, so what
    requests in a row have in common is kept once.
    """

    def __init__(self, datasets: Iterable[str], access_log: AccessLog | None = None) -> None:
        """Count requests of *datasets*."""
        self.counts = RequestCounts(datasets)
        """Without those that are not settled."""
        self._kind: Kind | None = None
        """Of the last request, unless it is settled."""
        self._begun: list[tuple[Kind, int]] = []
        """Each `Run` that is not settled: its kind, and where its fields begin."""
        self._fields: list[Any] = []
        """The fields of all of them."""
        self._access_log = access_log
        self._is_timed = access_log is None
        """Whether those that wait are settled in time, or nobody asks for that."""
        self._is_late = False
        """Whether the log is behind, and will write on."""

    @property
    def has_keys(self) -> bool:
        """Whether the log has the keys of requests."""
        return self._access_log is not None and self._access_log.has_keys

    def tell(self, kind: Kind, request_id: bytes, nbytes: int, client: bytes) -> None:
        """Count a request that is over, and write its line, in a moment."""
        if kind != self._kind:
            self._kind = kind
            self._begun.append((kind, len(self._fields)))
        self._fields += (request_id, nbytes, client)
        if len(self._fields) >= FIELDS * _AT_ONCE:
            self.settle()
        if not self._is_timed:
            self._is_timed = True
            asyncio.get_running_loop().call_later(_LONGEST_S, self._end_waiting)

    def settle(self) -> RequestCounts:
        """Count all that are over, and write their lines, as far as somebody takes them."""
        runs = self._take()
        self.counts.count(runs)
        if self._access_log is not None:
            self._access_log.write(runs)
        self._await_reader()
        return self.counts

    def end(self) -> None:
        """Settle what is left, and wait for the reader of the log, but not for long."""
        self.settle()
        if self._access_log is not None:
            self._access_log.end(within_s=_END_S)

    def _take(self) -> list[Run]:
        begun, fields = self._begun, self._fields
        self._kind, self._begun, self._fields = None, [], []
        bounds = [*(begin for _, begin in begun), len(fields)]
        return [
            Run(kind, tuple(fields[begin:end]))
            for (kind, _), (begin, end) in zip(begun, pairwise(bounds), strict=True)
        ]

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
