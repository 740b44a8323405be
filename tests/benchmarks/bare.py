"""The ceiling: an ASGI application that answers everything with the same 64 KiB."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

_BODY: Final = bytes(64 * 1024)
_HEADERS: Final = [
    (b"content-type", b"application/octet-stream"),
    (b"content-length", b"%d" % len(_BODY)),
]

type Message = MutableMapping[str, Any]


async def app(
    scope: Message,
    receive: Callable[[], Awaitable[Message]],
    send: Callable[[Message], Awaitable[None]],
) -> None:
    """Send the constant body."""
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await send({"type": "http.response.body", "body": _BODY})
