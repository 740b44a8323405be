"""Spans of OpenTelemetry. Who imports this needs the extra ``otel``."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Final

from opentelemetry.context import attach
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, set_span_in_context, use_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from app.formats.reading import Read
from app.model import ObjectRef
from app.resolve.fetch import Memory, ReadCache, Remembered
from app.resolve.tally import kind_of_read
from app.seeing.seen import Seen
from app.seeing.upstream_counts import error_of, store_of
from app.storage.contract import ObjectReader
from app.storage.traced import Call

_NAME: Final = "shardgate"
_FROM_CLIENT: Final = TraceContextTextMapPropagator()


def open_provider() -> TracerProvider:
    """Send spans where OpenTelemetry's variables say, in the background."""
    named = OTELResourceDetector().detect().attributes
    provider = TracerProvider(resource=Resource.create({"service.name": _NAME, **named}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


class Spans:
    """Makes spans; see `Tracing`. Keys are attributes only where everybody may read."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer(_NAME)

    def begin(self, seen: Seen, traceparent: bytes | None) -> None:
        """Begin the span of a request, within the client's if it has one."""
        carrier = {} if traceparent is None else {"traceparent": traceparent.decode("latin-1")}
        span = self._tracer.start_span(
            f"{seen.method} {seen.dataset}".rstrip(),
            _FROM_CLIENT.extract(carrier),
            SpanKind.SERVER,
            {"http.request.method": seen.method, "shardgate.dataset": seen.dataset},
        )
        if not seen.is_private:
            span.set_attribute("shardgate.key", seen.key)
        seen.span = span
        seen.trace_id = f"{span.get_span_context().trace_id:032x}"

    def enter(self, seen: Seen) -> None:
        """Let what this task does belong to the span of a request."""
        attach(set_span_in_context(seen.span))

    def end(self, seen: Seen) -> None:
        """End the span of a request."""
        span: Span = seen.span
        span.set_attributes(
            {
                "http.response.status_code": seen.status,
                "shardgate.outcome": seen.outcome,
                "shardgate.bytes": seen.nbytes,
                "shardgate.request_id": seen.request_id.decode(),
            }
        )
        if seen.outcome == "failed":
            span.set_status(StatusCode.ERROR)
        span.end()

    def on_call(self, call: Call) -> None:
        """Make the span of a finished call of a store."""
        ended_ns = time.time_ns()
        span = self._tracer.start_span(
            f"{call.method} {store_of(call.ref)}",
            kind=SpanKind.CLIENT,
            start_time=ended_ns - int(call.seconds * 1e9),
            attributes={
                "shardgate.store": store_of(call.ref),
                "shardgate.kind": kind_of_read.get(),
                "shardgate.bytes": call.nbytes,
            },
        )
        if call.error is not None:
            span.set_attribute("error.type", error_of(call.error))
        span.end(ended_ns)

    def read_cache(
        self, store: ObjectReader, memory: Memory, *, ttl_s: float, is_shared: bool = True
    ) -> ReadCache:
        """Build a cache that makes a span of each described read."""
        return _TracedReads(self._tracer, store, memory, ttl_s=ttl_s, is_shared=is_shared)

    async def aclose(self) -> None:
        """Send what is not sent yet."""
        await asyncio.to_thread(self._provider.shutdown)


class _TracedReads(ReadCache):
    """Makes a span of each described read, with what came of asking the cache."""

    def __init__(self, tracer: Tracer, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tracer = tracer

    def _note_hit(self, key: Hashable) -> None:
        super()._note_hit(key)
        self._begin(key, "hit").end()

    async def _share(
        self, key: Hashable, ref: ObjectRef, call: Callable[[], Coroutine[Any, Any, Remembered]]
    ) -> Remembered:
        is_joined = (key, self._forgotten_at(ref)) in self._flights
        span = self._begin(key, "joined" if is_joined else "miss")
        with use_span(span, end_on_exit=True, record_exception=False):
            return await super()._share(key, ref, call)

    def _begin(self, key: Hashable, result: str) -> Span:
        kind, ref = (key.kind, key.ref) if isinstance(key, Read) else ("stat", key)
        store = store_of(ref) if isinstance(ref, ObjectRef) else ""
        attributes = {"shardgate.kind": kind, "shardgate.store": store, "shardgate.cache": result}
        return self._tracer.start_span(f"read {kind}", attributes=attributes)
