"""`shardgate.observability.tracing`: OpenTelemetry's own variables say whether there are traces."""

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
def test_it_is_off_unless_they_say_so(environ: dict[str, str]) -> None:
    """Other variables, or empty ones, start no traces."""
    assert open_tracing(environ) is None


@pytest.mark.parametrize(
    "environ",
    [
        ENDPOINT,
        {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:9/v1/traces"},
        {"OTEL_TRACES_EXPORTER": "otlp"},
    ],
)
async def test_an_endpoint_or_an_exporter_is_enough(environ: dict[str, str]) -> None:
    """Either is enough."""
    tracing = open_tracing(environ)

    assert tracing is not None
    await tracing.aclose()


def test_another_exporter_is_refused() -> None:
    """The start fails, instead of sending nothing."""
    with pytest.raises(ConfigurationError, match="OTEL_TRACES_EXPORTER: zipkin"):
        open_tracing({"OTEL_TRACES_EXPORTER": "zipkin"})
