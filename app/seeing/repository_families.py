"""Counts of what was done in Icechunk repositories, as Prometheus reads them."""

from collections import Counter
from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.registry import Collector

from app.seeing.families import counter


class RepositoryFamilies(Collector):
    """Commits and sessions."""

    def __init__(self) -> None:
        self.commits = Counter(made=0, conflict=0, failed=0)
        """By what became of them."""
        self.sessions = Counter(begun=0, discarded=0)

    def collect(self) -> Iterator[Metric]:
        """Give the counts."""
        about = "Commits to Icechunk repositories, by what became of them"
        commits = (((outcome,), count) for outcome, count in self.commits.items())
        yield counter("commits", about, ["outcome"], commits)
        about = "Sessions of Icechunk repositories that were begun, and discarded"
        sessions = (((event,), count) for event, count in self.sessions.items())
        yield counter("sessions", about, ["event"], sessions)
