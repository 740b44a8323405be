"""Counts of requests: plain integers, since a cached chunk is answered in 30 µs."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from http import HTTPStatus
from typing import Final

from app.seeing.histogram import Histogram
from app.seeing.outcomes import Outcome
from app.seeing.told import Run

_UNCHANGED: Final = HTTPStatus.NOT_MODIFIED

NO_DATASET: Final = ""
"""The label of all that is ours, and of names that are not served."""


class DatasetCounts:
    """The requests of one dataset, by method and outcome."""

    __slots__ = ("hits", "name", "nbytes", "requests", "unmodified")

    def __init__(self, name: str) -> None:
        self.name = name
        self.hits = 0
        """GETs that were at hand."""
        self.unmodified = 0
        """GETs of what the client has, which was known at once."""
        self.requests: defaultdict[tuple[str, Outcome], int] = defaultdict(int)
        self.nbytes = 0
        """Of the bodies that were sent."""

    @property
    def each(self) -> Iterator[tuple[tuple[str, Outcome], int]]:
        """Give the numbers of requests."""
        at_hand = Counter[tuple[str, Outcome]]()
        at_hand["GET", "hit"] = self.hits
        at_hand["GET", "not_modified"] = self.unmodified
        yield from (at_hand + Counter(self.requests)).items()


class RequestCounts:
    """The requests of all *datasets*, and of what is no dataset."""

    def __init__(self, datasets: Iterable[str]) -> None:
        self.datasets = {name: DatasetCounts(name) for name in (NO_DATASET, *datasets)}
        self.seconds: defaultdict[tuple[str, Outcome], Histogram] = defaultdict(Histogram)
        self.in_flight = 0
        """Requests that wait for something."""
        self.connections = 0
        """Connections of clients, busy and idle."""

    def count(self, runs: Iterable[Run]) -> None:
        """Count requests that are over; what waited for nothing is not timed."""
        for run in runs:
            _, status, dataset, _, details = run.kind
            sizes = run.sizes
            counts = self.datasets[dataset]
            counts.nbytes += sum(sizes)
            if details is not None:
                what = details.method, details.outcome
                counts.requests[what] += len(sizes)
                if details.seconds is not None:
                    for _ in sizes:
                        self.seconds[what].observe(details.seconds)
            elif status == _UNCHANGED:
                counts.unmodified += len(sizes)
            else:
                counts.hits += len(sizes)
