"""What the page tells of the process that answers."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from app.http.start.text import spell_nbytes, spell_seconds
from app.observability.metrics import RequestMetrics
from app.resolve.chunks import ChunkReader
from app.resolve.metadata_cache import MetadataCache, SizedLRUCache


@dataclass(frozen=True, slots=True)
class Cached:
    """What a cache holds."""

    entries: int
    nbytes: int
    max_nbytes: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """What was asked for and answered since the start."""

    requests: int
    sent_nbytes: int
    hits: int
    """Chunks that were in the cache."""
    misses: int
    """Chunks that were read from stores."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Where one process is."""

    uptime_s: float
    indexes: Cached
    """Decoded indexes and metadata."""
    chunks: Cached
    """Encoded chunks."""
    traffic: Traffic


type Watch = Callable[[], Figures]


def watch(memory: MetadataCache, chunks: ChunkReader, requests: RequestMetrics) -> Watch:
    """Give what tells how full the caches are, and what was answered, from now on."""
    started_at = time.monotonic()

    def tell() -> Figures:
        answered, sent_nbytes = requests.totals()
        tally = chunks.counters
        traffic = Traffic(
            requests=answered,
            sent_nbytes=sent_nbytes,
            hits=tally.hits,
            misses=tally.misses + tally.joins,
        )
        uptime_s = time.monotonic() - started_at
        return Figures(uptime_s, _cached(memory), _cached(chunks.cache), traffic)

    return tell


def _cached(cache: SizedLRUCache[Any, Any]) -> Cached:
    return Cached(len(cache), int(cache.currsize), int(cache.maxsize))


def spell_figures(figures: Figures) -> list[tuple[str, str]]:
    """Write *figures*, each with its name."""
    return [
        ("Running for", spell_seconds(figures.uptime_s)),
        *_spell_traffic(figures.traffic),
        ("Indexes and metadata in memory", _spell_cached(figures.indexes)),
        ("Chunks in memory", _spell_cached(figures.chunks)),
    ]


def _spell_cached(cached: Cached) -> str:
    held = f"{spell_nbytes(cached.nbytes)} of {spell_nbytes(cached.max_nbytes)}"
    return f"{cached.entries:,} · {held}"


def _spell_traffic(traffic: Traffic) -> list[tuple[str, str]]:
    chunks = traffic.hits + traffic.misses
    share = f"{traffic.hits / chunks:.0%}" if chunks else "none"
    return [
        ("Requests", f"{traffic.requests:,}"),
        ("Sent", spell_nbytes(traffic.sent_nbytes)),
        ("Chunks from memory", f"{share} of {chunks:,}"),
    ]
