"""OpenTelemetry spans of requests and of calls of stores; imports the extra when configured."""

import asyncio
import time
from collections.abc import Mapping
from typing import Final

from shardgate.errors import ConfigurationError, install_command
from shardgate.observability.metrics import RequestContext, error_label, store_of
from shardgate.storage.wrappers import Call

_NAME: Final = "shardgate"


class Tracing:
    """Makes and sends spans, with keys of public data only."""

    def __init__(self) -> None:
        """Import OpenTelemetry; `ModuleNotFoundError` if the extra is not installed."""
        from opentelemetry import context, trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._api = trace
        self._attach = context.attach
        self._propagator = TraceContextTextMapPropagator()
        named = OTELResourceDetector().detect().attributes
        resource = Resource.create({"service.name": _NAME, **named})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer(_NAME)

    def begin(self, request: RequestContext, traceparent: bytes | None) -> None:
        """Begin the span of a request, within that of the client if it has one."""
        carrier = {} if traceparent is None else {"traceparent": traceparent.decode("latin-1")}
        span = self._tracer.start_span(
            f"{request.method} {request.dataset}".rstrip(),
            self._propagator.extract(carrier),
            self._api.SpanKind.SERVER,
            {"http.request.method": request.method, "shardgate.dataset": request.dataset},
        )
        if not request.is_private:
            span.set_attribute("shardgate.key", request.key)
        request.span = span
        request.trace_id = f"{span.get_span_context().trace_id:032x}"

    def enter(self, request: RequestContext) -> None:
        """Make the span of a request the parent of all that this task does."""
        self._attach(self._api.set_span_in_context(request.span))

    def end(self, request: RequestContext) -> None:
        """End the span of a request."""
        span = request.span
        span.set_attribute("http.response.status_code", request.status)
        span.set_attribute("shardgate.outcome", request.outcome)
        span.set_attribute("shardgate.bytes", request.nbytes)
        span.set_attribute("shardgate.request_id", request.request_id.decode())
        if request.outcome == "failed":
            span.set_status(self._api.StatusCode.ERROR)
        span.end()

    def on_call(self, call: Call) -> None:
        """Make the span of a finished call of a store."""
        ended_ns = time.time_ns()
        store = store_of(call.ref.bucket)
        span = self._tracer.start_span(
            f"{call.method} {store}",
            kind=self._api.SpanKind.CLIENT,
            start_time=ended_ns - int(call.seconds * 1e9),
        )
        span.set_attribute("shardgate.store", store)
        span.set_attribute("shardgate.kind", call.kind)
        span.set_attribute("shardgate.bytes", call.nbytes)
        if call.error is not None:
            span.set_attribute("error.type", error_label(call.error))
        span.end(ended_ns)

    async def aclose(self) -> None:
        """Send the last spans."""
        await asyncio.to_thread(self._provider.shutdown)


def open_tracing(environ: Mapping[str, str]) -> Tracing | None:
    """Return the tracing of OpenTelemetry's variables. Raises: `ConfigurationError`."""
    exporter = environ.get("OTEL_TRACES_EXPORTER", "")
    endpoints = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    is_wanted = bool(exporter) or any(environ.get(name) for name in endpoints)
    is_off = environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or exporter == "none"
    if is_off or not is_wanted:
        return None
    if exporter not in ("", "otlp"):
        raise ConfigurationError(f"OTEL_TRACES_EXPORTER: {exporter} is not served, only otlp")
    try:
        return Tracing()
    except ModuleNotFoundError as error:
        text = f"OTEL_EXPORTER_OTLP_ENDPOINT: needs {install_command('otel')} in the checkout"
        raise ConfigurationError(text) from error
