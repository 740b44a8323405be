"""Shardgate: chunks of sharded arrays over HTTP.

`create_app` builds the ASGI application from `Settings`; it can be mounted in another one, and
called without a server by ``httpx.ASGITransport``.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardgate.main import create_app
    from shardgate.settings import Settings

__all__ = ["Settings", "create_app"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is used: the command starts faster."""
    if name == "create_app":
        from shardgate.main import create_app  # noqa: PLC0415

        return create_app
    if name == "Settings":
        from shardgate.settings import Settings  # noqa: PLC0415

        return Settings
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
