"""Times as logs tell them."""

from datetime import UTC, datetime


def timestamp(now_ms: int) -> str:
    """Write milliseconds since 1970 began as RFC 3339 does, in UTC."""
    second, milliseconds = divmod(now_ms, 1000)
    spelled = datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{spelled}.{milliseconds:03d}Z"
