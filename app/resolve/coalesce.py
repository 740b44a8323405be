"""Reads of neighbouring ranges that are asked for at the same moment become one."""

from collections.abc import Iterable

from app.model import ByteRange


def plan_reads(
    ranges: Iterable[ByteRange], *, max_gap_bytes: int, max_span_bytes: int
) -> list[ByteRange]:
    """Merge neighbours whose gap is cheaper to read than another request.

    Every range lies in one of the spans that come back, in order of their start. A span is at
    most *max_span_bytes* long, unless a single range is longer.
    """
    spans: list[ByteRange] = []
    for wanted in sorted(set(ranges)):
        if spans:
            last = spans[-1]
            stop = max(last.stop, wanted.stop)
            near = wanted.start - last.stop <= max_gap_bytes
            if wanted.stop <= last.stop or (near and stop - last.start <= max_span_bytes):
                spans[-1] = ByteRange(last.start, stop)
                continue
        spans.append(wanted)
    return spans


def span_of(wanted: ByteRange, spans: Iterable[ByteRange]) -> ByteRange:
    """Find the span that holds *wanted*."""
    return next(s for s in spans if s.start <= wanted.start and wanted.stop <= s.stop)
