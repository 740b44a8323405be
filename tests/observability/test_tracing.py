"""`shardgate.observability.tracing`: OpenTelemetry's environment variables enable tracing."""

import pytest

from shardgate.errors import ConfigurationError
from shardgate.observability.tracing import open_tracing

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_SERVICE_NAME": "shardgate"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_TRACES_EXPORTER": "none", **ENDPOINT},
        {"OTEL_SDK_DISABLED": "true", **ENDPOINT},
    ],
)
def test_tracing_is_off_by_default(environ: dict[str, str]) -> None:
    """Tracing is off without an endpoint or exporter, and if the SDK or exporter is disabled."""
    assert open_tracing(environ) is None


@pytest.mark.parametrize(
    "environ",
    [
        ENDPOINT,
        {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:9/v1/traces"},
        {"OTEL_TRACES_EXPORTER": "otlp"},
    ],
)
async def test_endpoint_or_exporter_enables_tracing(environ: dict[str, str]) -> None:
    """An OTLP endpoint or exporter enables tracing."""
    tracing = open_tracing(environ)

    assert tracing is not None
    await tracing.aclose()


def test_another_exporter_is_refused() -> None:
    """Another exporter than OTLP raises ConfigurationError."""
    with pytest.raises(ConfigurationError, match="OTEL_TRACES_EXPORTER: zipkin"):
        open_tracing({"OTEL_TRACES_EXPORTER": "zipkin"})
