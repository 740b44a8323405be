"""Limits of concurrent requests, in all and of each kind, and of the wait for a response."""

from collections import Counter
from typing import Self

from shardgate.concurrency import Deadline, Deadlines, largest_share
from shardgate.errors import BusyError, OverdueError, TooManyRequestsError
from shardgate.server.request import Exchange, Networks, Request, client_of

type _Group = tuple[str, str]
"""Kind of requests, and their dataset; empty for all datasets."""


class ConcurrencyLimiter:
    """Admits *most* requests at a time, and *most_per_client* of each client unless that is 0.

    Three quarters of *most* may be requests of one of *several_datasets*, which wait for its store,
    and three quarters of any share may be writes, which wait for their clients. A read whose
    response has not begun after *longest_s* is cancelled.
    """

    def __init__(
        self,
        *,
        most: int,
        most_per_client: int,
        longest_s: float,
        proxies: Networks,
        several_datasets: bool,
    ) -> None:
        self.most = most
        self.most_per_dataset = largest_share(most) if several_datasets else most
        self.most_per_client = most_per_client
        self.deadlines = Deadlines(longest_s)
        self._proxies = proxies
        self.running = 0
        self.by_group: dict[_Group, int] = {}
        self.by_client: Counter[str] = Counter()

    def client_of(self, request: Request) -> str | None:
        """Return whose requests *request* counts among; `None` for a peer without an address."""
        if not request.peer:
            return None
        return client_of(request.peer.decode(), request.headers, self._proxies)


class Permit(Deadline):
    """Permission to answer *request* by *exchange* while the block lasts.

    Raises: on entering `BusyError`, `TooManyRequestsError`; on leaving `OverdueError` if the
    response of a read did not begin in time.
    """

    __slots__ = ("_exchange", "_groups", "_limiter", "client", "is_read")

    def __init__(self, limiter: ConcurrencyLimiter, request: Request, exchange: Exchange) -> None:
        super().__init__(limiter.deadlines)
        self._limiter = limiter
        self._exchange = exchange
        self.client = limiter.client_of(request) if limiter.most_per_client else None
        self.is_read = request.method in {"GET", "HEAD"}
        dataset = request.dataset
        most = limiter.most_per_dataset
        self._groups: tuple[tuple[_Group, int], ...] = ((("requests", dataset), most),)
        if not self.is_read:
            self._groups += (
                (("writes", dataset), largest_share(most)),
                (("writes", ""), largest_share(limiter.most)),
            )

    def __enter__(self) -> Self:
        limiter = self._limiter
        if limiter.running >= limiter.most:
            raise BusyError(f"too many concurrent requests (limit {limiter.most})")
        by_group = limiter.by_group
        for (kind, dataset), limit in self._groups:
            if by_group.get((kind, dataset), 0) >= limit:
                what = f"{kind} of {dataset}" if dataset else kind
                raise BusyError(f"too many concurrent {what} (limit {limit})")
        client = self.client
        if client is not None:
            most = limiter.most_per_client
            if limiter.by_client[client] >= most:
                text = f"too many concurrent requests from this client (limit {most})"
                raise TooManyRequestsError(text)
            limiter.by_client[client] += 1
        limiter.running += 1
        for group, _ in self._groups:
            by_group[group] = by_group.get(group, 0) + 1
        return super().__enter__() if self.is_read else self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        limiter = self._limiter
        limiter.running -= 1
        for group, _ in self._groups:
            limiter.by_group[group] -= 1
            if not limiter.by_group[group]:
                del limiter.by_group[group]
        client = self.client
        if client is not None:
            limiter.by_client[client] -= 1
            if not limiter.by_client[client]:
                del limiter.by_client[client]
        try:
            super().__exit__(kind, *raised)
        except TimeoutError:
            raise OverdueError("the answer took too long") from None

    def cancel(self) -> None:
        """Cancel the read, unless its response has begun."""
        if not self._exchange.status:
            super().cancel()
