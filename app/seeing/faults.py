"""Faults that no request hears of."""

import asyncio
import logging
from typing import Any

_log = logging.getLogger(__name__)


def tell_of_fault(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log what an event loop found; asyncio itself would write out the arguments, keys too."""
    message = "a callback failed" if "handle" in context else context["message"]
    _log.error("%s", message, exc_info=context.get("exception"))
