"""`shardgate.observability.tracing`: OpenTelemetry's environment variables enable tracing."""

import pytest

from shardgate.errors import ConfigurationError
from shardgate.observability.tracing import open_tracing

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}


@pytest.mark.parametrize(
    ("environ", "is_enabled"),
    [
        ({}, False),
        ({"OTEL_SERVICE_NAME": "shardgate"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        ({"OTEL_TRACES_EXPORTER": "none", **ENDPOINT}, False),
        ({"OTEL_SDK_DISABLED": "true", **ENDPOINT}, False),
        (ENDPOINT, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:9/v1/traces"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
    ],
)
async def test_endpoint_or_exporter_enables_tracing(
    environ: dict[str, str], *, is_enabled: bool
) -> None:
    """An OTLP endpoint or exporter enables tracing, unless the SDK or exporter is disabled."""
    tracing = open_tracing(environ)

    assert (tracing is not None) is is_enabled
    if tracing is not None:
        await tracing.aclose()


def test_another_exporter_is_refused() -> None:
    """Another exporter than OTLP raises ConfigurationError."""
    with pytest.raises(ConfigurationError, match="OTEL_TRACES_EXPORTER: zipkin"):
        open_tracing({"OTEL_TRACES_EXPORTER": "zipkin"})
