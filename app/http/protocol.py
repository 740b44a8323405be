"""uvicorn's HTTP/1.1 protocol, with a short way for GETs of the data plane.

A chunk in the cache needs no task, no scope and no checks of headers that are our own: written
straight from the parser's callback it costs 20 µs less of the 45 that a request takes. A chunk
that must be read first gets a task, but neither scope nor checks: 20 µs less of 145. All else
goes uvicorn's way. What is used of `HttpToolsProtocol` beyond `asyncio.Protocol` is in this
file alone.
"""

import asyncio
from http import HTTPStatus
from typing import Any, Final

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from app.http.answer import AtHand, Body, Headers, Respond

_CLOSE: Final = (b"connection", b"close")
_nobody: Final = asyncio.Event()


class GatewayProtocol(HttpToolsProtocol):
    """Lets the application begin to answer before it is asked by ASGI."""

    app: Any
    cycle: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_begun = False
        self._exchange: _Exchange | None = None

    def on_headers_complete(self) -> None:
        """Answer, or begin to, if nothing else is under way on this connection."""
        self._is_begun = self._is_simple() and self._begin()
        if not self._is_begun:
            # An answer to an earlier request of the same packet has set the timer.
            self._unset_keepalive_if_required()
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Drop the body of a GET."""
        if not self._is_begun:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request that goes uvicorn's way."""
        if not self._is_begun:
            super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop working for a client that has gone."""
        super().connection_lost(exc)
        if self._exchange is not None:
            self._exchange.abandon()

    def write_head(self, status: HTTPStatus, headers: Headers, body: bytes) -> None:
        """Write the head of an answer, and the body as far as it is there."""
        head = [STATUS_LINE[status]]
        for name, value in (*self.server_state.default_headers, *headers):
            head += (name, b": ", value, b"\r\n")
        head.append(b"\r\n")
        self.transport.writelines((b"".join(head), body))

    def _is_simple(self) -> bool:
        is_idle = self.cycle is None or self.cycle.response_complete
        return (
            is_idle
            and not self.flow.write_paused
            and not self.expect_100_continue
            and self.parser.get_method() == b"GET"
            and self.parser.get_http_version() == "1.1"
            and self.parser.should_keep_alive()
            and not self.parser.should_upgrade()
        )

    def _begin(self) -> bool:
        exchange = _Exchange(self)
        begun: AtHand | Respond | None = self.app.begin(
            httptools.parse_url(self.url).path, self.headers, exchange.write
        )
        if begun is None:
            return False
        if isinstance(begun, AtHand):
            self.write_head(*begun)
            self.on_response_complete()
        else:
            self._unset_keepalive_if_required()
            self.cycle = self._exchange = exchange
            exchange.task = self.loop.create_task(exchange.run(begun))
            self.tasks.add(exchange.task)
            exchange.task.add_done_callback(self.tasks.discard)
        return True


class _Exchange:
    """An answer under way, in the place of uvicorn's cycle and with its attributes that count."""

    def __init__(self, protocol: GatewayProtocol) -> None:
        self._protocol = protocol
        self.task: asyncio.Task[None] | None = None
        self.response_complete = False
        self.keep_alive = True
        """uvicorn takes it back when the server is told to stop."""
        self.disconnected = False
        self.message_event = _nobody

    def abandon(self) -> None:
        """Cancel what is still done for the answer."""
        if self.task is not None:
            self.task.cancel()

    async def run(self, respond: Respond) -> None:
        """Answer; a connection whose answer broke off can only be closed."""
        try:
            await respond()
        except Exception:  # noqa: BLE001, S110  the application has logged it
            pass
        finally:
            if not self.response_complete:
                self._protocol.transport.close()

    async def write(self, status: HTTPStatus, headers: Headers, body: Body) -> None:
        """Write an answer, at the client's pace."""
        await self._writable()
        if not self.keep_alive:
            headers.append(_CLOSE)
        if isinstance(body, bytes):
            self._protocol.write_head(status, headers, body)
        else:
            self._protocol.write_head(status, headers, b"")
            left = int(dict(headers)[b"content-length"])
            async for piece in body:
                await self._writable()
                self._protocol.transport.write(piece)
                left -= len(piece)
            if left:
                raise RuntimeError(f"the body ended {left} bytes too soon")
        self._complete()

    async def _writable(self) -> None:
        if self._protocol.flow.write_paused:
            await self._protocol.flow.drain()

    def _complete(self) -> None:
        self.response_complete = True
        if not self.keep_alive:
            self._protocol.transport.close()
        self._protocol.on_response_complete()
