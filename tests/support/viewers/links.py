"""States of Neuroglancer in links of the service."""

import json
from typing import Any
from urllib.parse import unquote

import httpx


def linked_state(url: str) -> dict[str, Any]:
    """Return the state that a link of the service leads to."""
    location = httpx.get(url, timeout=120).headers["location"]
    state: dict[str, Any] = json.loads(unquote(location.partition("#!")[2]))
    return state
