"""Shardgate: chunks of sharded arrays over HTTP.

`create_app` builds the ASGI application from `Settings`; it can be mounted in another one, and
called without a server by ``httpx.ASGITransport``. `open_session` writes to an Icechunk repository
through a running service.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardgate.client import Session, SessionError, open_session
    from shardgate.errors import CommitConflictError
    from shardgate.main import create_app
    from shardgate.settings import Settings

__all__ = [
    "CommitConflictError",
    "Session",
    "SessionError",
    "Settings",
    "create_app",
    "open_session",
]

_MODULES = {
    "CommitConflictError": "shardgate.errors",
    "Session": "shardgate.client",
    "SessionError": "shardgate.client",
    "Settings": "shardgate.settings",
    "create_app": "shardgate.main",
    "open_session": "shardgate.client",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is used: the command starts faster."""
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
