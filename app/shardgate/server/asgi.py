"""ASGI at the edge: for all requests but plain GETs, and for other applications and servers."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from typing import Any, Final, Self
from urllib.parse import quote

from starlette.routing import Router

from shardgate.observability.logging import log_loop_exception
from shardgate.server.body import ClientGoneError, IncomingBody
from shardgate.server.instrumentation import InstrumentedApp
from shardgate.server.request import (
    Asgi,
    Headers,
    PathPrefix,
    Request,
    Response,
    combine_headers,
    peer_of,
    strip_prefix,
)

BY_NAME: Final = "shardgate.headers"
"""Member of a scope with the headers by name, where the server has them so."""
_BODY: Final = "http.response.body"
_NO_PREFIX: Final = PathPrefix()


class AsgiApp:
    """The service as an ASGI application, which another one may mount below a path.

    `GatewayProtocol` calls `cached`, `respond` and `refuse`, those of *app*, without ASGI.
    """

    def __init__(
        self,
        app: InstrumentedApp,
        lifespan: Callable[[], AbstractAsyncContextManager[None]],
        prefix: PathPrefix,
        *,
        timeout_s: float,
    ) -> None:
        """*timeout_s* is the longest silence of a client that sends a body."""
        self.app = app
        self.prefix = prefix
        self.metrics = app.metrics
        self.cached = app.cached
        self.respond = app.respond
        self.refuse = app.refuse
        self._lifespan = lifespan
        self._timeout_s = timeout_s
        self._others = Router(lifespan=self.lifespan)  # runs the lifespan, and closes WebSockets
        self._is_open = False
        self._unclosed = AsyncExitStack()

    @asynccontextmanager
    async def lifespan(self, _: object = None) -> AsyncGenerator[None]:
        """Open the service, and close it: for the lifespan of an application that mounts it."""
        self._is_open = True
        async with self._lifespan():
            yield

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Speak ASGI; without a lifespan the first request opens the service."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":  # this is the only application of the loop
                asyncio.get_running_loop().set_exception_handler(log_loop_exception)
            await self._others(scope, receive, send)
            return
        if not self._is_open:
            await self._unclosed.enter_async_context(self.lifespan())
        headers = scope.get(BY_NAME)
        if headers is None:
            headers = combine_headers(list(scope["headers"]))
        body = IncomingBody(receive, headers, timeout_s=self._timeout_s)
        is_read = scope["method"] in {"GET", "HEAD", "OPTIONS"}
        # Our own server adds the header to all responses, refusals included.
        more = [] if BY_NAME in scope else [(b"x-content-type-options", b"nosniff")]
        exchange = AsgiExchange(send, None if is_read else body, more)
        asgi = Asgi(scope, receive, exchange.send)
        request = request_of(scope, headers, body, asgi, self.prefix)
        response = None if request.needs_asgi else self.cached(request)
        with suppress(ClientGoneError):
            if response is not None:
                await exchange.write(response)
            elif is_read:
                async with UntilDisconnect(receive):
                    await self.respond(request, exchange)
            else:
                await self.respond(request, exchange)


def request_of(
    scope: Mapping[str, Any],
    headers: Mapping[bytes, bytes],
    body: IncomingBody | None = None,
    asgi: Asgi | None = None,
    prefix: PathPrefix = _NO_PREFIX,
) -> Request:
    """Return the request of a *scope* with *headers*."""
    # Servers may leave out the path as it was sent.
    sent_path = scope.get("raw_path") or quote(scope["path"]).encode()
    mount = scope.get("root_path", "").rstrip("/")
    peer = peer_of(scope.get("client"))
    outer, raw_path = prefix.split(strip_prefix(sent_path, mount), headers, peer)
    if f"{mount}/".startswith(f"{outer}/"):  # the server of the other application knows it too
        outer = ""
    request = Request(scope["method"], raw_path, list(scope["headers"]), headers, peer)
    request.query = scope["query_string"]
    request.body = body
    request.asgi = asgi
    request.root_path = outer + mount
    request.sent_path = sent_path
    return request


class AsgiExchange:
    """A response to an ASGI server, which closes the connection if *body* is unread."""

    def __init__(self, send: Any, body: IncomingBody | None, more: Headers) -> None:
        """Add the headers *more* to every response."""
        self.status = self.sent_nbytes = 0
        self.response_complete = False
        self._send = send
        self._body = body
        self._more = more

    async def send(self, message: Mapping[str, Any]) -> None:
        """Pass on a message of an ASGI application, with the headers of every response."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            await self._send({**message, "headers": [*message["headers"], *self._more]})
            return
        await self._send(message)
        self.sent_nbytes += len(message.get("body", b""))
        self.response_complete = not message.get("more_body")

    async def write(self, response: Response) -> None:
        """Write *response*, and drop an unread body before the end: the client may read late."""
        headers = response.headers
        if isinstance(headers, bytes):
            pairs = (line.partition(b": ") for line in headers.split(b"\r\n")[:-1])
            headers = [(name, value) for name, _, value in pairs]
        unread = self._body if self._body is not None and self._body.is_unread else None
        if unread is not None:
            headers = [*headers, (b"connection", b"close")]
        start = {"type": "http.response.start", "status": response.status, "headers": headers}
        await self.send(start)
        body = response.body
        if isinstance(body, bytes) and unread is None:
            await self.send({"type": _BODY, "body": body})
            return
        if isinstance(body, bytes):
            await self.send({"type": _BODY, "body": body, "more_body": True})
        else:
            async for piece in body:
                await self.send({"type": _BODY, "body": piece, "more_body": True})
        if unread is not None:
            await unread.drain()
        await self.send({"type": _BODY, "body": b""})


class UntilDisconnect:
    """Cancels the block on ``http.disconnect``. Raises: `ClientGoneError`, out of the block."""

    def __init__(self, receive: Any) -> None:
        self._receive = receive
        self._watcher: asyncio.Task[None] | None = None
        self._has_gone = False

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._owner = asyncio.current_task()
        # A watcher costs 10 µs: work that ends soon has none.
        self._start = loop.call_later(0.05, self._watch)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._start.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
        if self._has_gone and self._owner is not None:
            self._owner.uncancel()  # the request ends, not the task of the server
            raise ClientGoneError

    def _watch(self) -> None:
        self._watcher = asyncio.get_running_loop().create_task(self._wait())

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if self._owner is not None:
            self._has_gone = True
            self._owner.cancel()
