"""`app.http.start.figures`: what the page tells of the process."""

from app.http.start.figures import Cached, Figures, Traffic, spell_figures, watch
from app.model import ByteRange, ETag, ObjectRef, Stored
from app.observability.metrics import Metrics
from app.storage.memory import MemoryStore
from tests.resolving import reading

NONE = Traffic(0, 0, 0, 0)


def test_caches_are_told() -> None:
    """Each with its entries, bytes and bound."""
    figures = Figures(61, Cached(3, 1536, 2**20), Cached(0, 0, 0), NONE)

    assert spell_figures(figures) == [
        ("Running for", "1 min 1 s"),
        ("Requests", "0"),
        ("Sent", "0 bytes"),
        ("Chunks from memory", "none of 0"),
        ("Indexes and metadata in memory", "3 · 1.5 KiB of 1.0 MiB"),
        ("Chunks in memory", "0 · 0 bytes of 0 bytes"),
    ]


def test_traffic_is_told() -> None:
    """With the share of chunks that took no read."""
    figures = Figures(0, Cached(0, 0, 0), Cached(0, 0, 0), Traffic(1200, 2**21, 30, 10))

    assert spell_figures(figures)[1:4] == [
        ("Requests", "1,200"),
        ("Sent", "2.0 MiB"),
        ("Chunks from memory", "75% of 40"),
    ]


async def test_watches_the_caches_and_what_is_answered() -> None:
    """What is in them now is told, and what has been sent."""
    opened, requests = reading(MemoryStore(), index_bytes=7, chunk_bytes=2000), Metrics([]).requests
    tell = watch(opened.fetch.cache, opened.chunks, requests)
    chunk = Stored(ObjectRef("memory://b", "k"), ByteRange(0, 3), ETag('"1"'))
    opened.chunks.cache.put(chunk, b"abc")
    assert opened.chunks.cached(chunk) is not None
    requests.count("em", "GET", "hit", 3)
    requests.count("", "GET", "absent", 4, 0.1)

    figures = tell()

    assert figures.indexes == Cached(0, 0, 7)
    assert figures.chunks == Cached(1, int(opened.chunks.cache.currsize), 2000)
    assert figures.traffic == Traffic(requests=2, sent_nbytes=7, hits=1, misses=0)
    assert 0 <= figures.uptime_s < 60
