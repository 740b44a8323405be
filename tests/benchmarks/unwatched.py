"""The service without metrics and access log, for comparison."""

from typing import Any

from shardgate import processes
from shardgate.cli import main
from shardgate.main import create_app
from shardgate.settings import Settings


def _make_app(settings: Settings) -> Any:
    app = create_app(settings)
    gateway = app.app.app
    app.cached = gateway.cached
    app.respond = gateway.respond
    app.refuse = gateway.refuse
    return processes.tune_memory(app)


def serve() -> None:
    """Run the command."""
    processes.make_app = _make_app
    main()
