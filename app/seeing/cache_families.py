"""What caches hold and how often they help, as Prometheus reads it."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Metric
from prometheus_client.registry import Collector

from app.resolve.budget import ByteBudget
from app.resolve.tally import Tally
from app.resolve.weighed import WeighedCache
from app.seeing.families import Labelled, counter, gauge


@dataclass(slots=True)
class _Watched:
    """Caches of one name: what they hold, and who asks them."""

    entries: dict[int, WeighedCache[Any, Any]] = field(default_factory=dict)
    tallies: list[Tally] = field(default_factory=list)


class CacheFamilies(Collector):
    """The caches, and the memory of bodies under way; empty until it is told of them."""

    def __init__(self) -> None:
        self._caches: defaultdict[str, _Watched] = defaultdict(_Watched)
        self._budgets: dict[str, ByteBudget] = {}

    def watch(self, name: str, entries: WeighedCache[Any, Any], tally: Tally) -> None:
        """Tell of *entries*, which others may ask as well, and of what comes of asking."""
        self._caches[name].entries[id(entries)] = entries
        self._caches[name].tallies.append(tally)

    def watch_budget(self, use: str, budget: ByteBudget) -> None:
        """Tell of *budget*, which is for that *use*."""
        self._budgets[use] = budget

    def collect(self) -> Iterator[Metric]:
        """Give the counts."""
        yield from self._of_look_ups()
        yield from self._of_entries()
        yield from self._of_budgets()

    def _of_look_ups(self) -> Iterator[Metric]:
        about = "Look-ups: at hand, on the way for others (joined), or asked of a store (miss)"
        yield counter("cache_lookups", about, ["cache", "result"], self._results())
        about = "Chunks that came with a read that was begun for a neighbour"
        tallies = [tally for each in self._caches.values() for tally in each.tallies]
        yield counter("coalesced_chunks", about, [], [((), sum(each.merged for each in tallies))])

    def _results(self) -> Labelled[float]:
        for name, watched in self._caches.items():
            for result, each in ("hit", "hits"), ("joined", "joins"), ("miss", "misses"):
                yield (name, result), sum(getattr(tally, each) for tally in watched.tallies)

    def _of_entries(self) -> Iterator[Metric]:
        def measured(
            measure: Callable[[WeighedCache[Any, Any]], int],
        ) -> Labelled[float]:
            for name, watched in self._caches.items():
                yield (name,), sum(map(measure, watched.entries.values()))

        yield gauge("cache_entries", "Entries held", ["cache"], measured(len))
        about = "Weight of the entries held"
        yield gauge("cache_bytes", about, ["cache"], measured(lambda each: each.nbytes))
        about = "Weight that the entries may have"
        yield gauge("cache_max_bytes", about, ["cache"], measured(lambda each: each.max_bytes))
        about = "Entries that made room for others"
        yield counter("cache_evictions", about, ["cache"], measured(lambda each: each.evictions))

    def _of_budgets(self) -> Iterator[Metric]:
        budgets = self._budgets.items()
        about = "Bytes held for requests under way"
        held = [((use,), budget.held_bytes) for use, budget in budgets]
        yield gauge("in_flight_bytes", about, ["use"], held)
        about = "Bytes that may be held for requests under way"
        most = [((use,), budget.max_bytes) for use, budget in budgets]
        yield gauge("in_flight_max_bytes", about, ["use"], most)
