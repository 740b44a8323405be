"""The counts of requests as Prometheus reads them."""

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.registry import Collector

from app.seeing.families import counter, gauge, histogram
from app.seeing.requests import Requests


class RequestFamilies(Collector):
    """What clients asked for, and what became of it."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    def collect(self) -> Iterator[Metric]:
        """Give the counts."""
        counts = self._requests.settle()
        datasets = counts.datasets.values()
        yield counter(
            "requests",
            "Requests that are answered, or whose client has gone; no dataset is all else",
            ["dataset", "method", "outcome"],
            (((each.name, *what), count) for each in datasets for what, count in each.each),
        )
        yield counter(
            "sent_bytes",
            "Bytes of bodies sent to clients",
            ["dataset"],
            (((each.name,), each.nbytes) for each in datasets),
        )
        yield histogram(
            "request_seconds",
            "Time from the head of a request to the end of its answer, if anything was waited for",
            ["method", "outcome"],
            counts.seconds.items(),
        )
        about = "Requests under way, which wait for a store, a client or their turn"
        yield gauge("requests_in_flight", about, [], [((), counts.in_flight)])
        about = "Connections of clients, busy and idle"
        yield gauge("connections", about, [], [((), counts.connections)])
