"""What traces of requests are to the rest of the service, which need not have OpenTelemetry."""

from collections.abc import Mapping
from typing import Final, Protocol

from app.errors import ConfigurationError
from app.resolve.fetch import Memory, ReadCache
from app.seeing.seen import Seen
from app.storage.contract import ObjectReader
from app.storage.traced import Call

_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


class Tracing(Protocol):
    """Makes spans: of requests, of described reads, and of calls of stores."""

    def begin(self, seen: Seen, traceparent: bytes | None) -> None:
        """Begin the span of a request."""
        ...

    def enter(self, seen: Seen) -> None:
        """Let what this task does belong to the span of a request."""
        ...

    def end(self, seen: Seen) -> None:
        """End the span of a request."""
        ...

    def on_call(self, call: Call) -> None:
        """Tell of a finished call of a store."""
        ...

    def read_cache(
        self, store: ObjectReader, memory: Memory, *, ttl_s: float, is_shared: bool = True
    ) -> ReadCache:
        """Build a cache that tells of each described read."""
        ...

    async def aclose(self) -> None:
        """Send what is not sent yet."""
        ...


def open_tracing(environ: Mapping[str, str]) -> Tracing | None:
    """Trace if OpenTelemetry's own variables say so.

    Raises: `ConfigurationError` where that needs an extra.
    """
    exporter = environ.get("OTEL_TRACES_EXPORTER", "")
    is_asked = bool(exporter) or any(environ.get(name) for name in _ENDPOINTS)
    is_off = environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or exporter == "none"
    if is_off or not is_asked:
        return None
    if exporter not in ("", "otlp"):
        raise ConfigurationError(f"OTEL_TRACES_EXPORTER: {exporter} is not served, only otlp")
    try:
        from app.seeing.spans import Spans, open_provider  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        need = "pip install 'shardgate[otel]'"
        raise ConfigurationError(f"OTEL_EXPORTER_OTLP_ENDPOINT: needs {need}") from error
    return Spans(open_provider())
