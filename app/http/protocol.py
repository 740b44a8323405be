"""uvicorn's HTTP/1.1 protocol, with a short way for GETs of the data plane.

A chunk in the cache needs no task, no scope, no checks of headers that are our own and no timer
of its own: written straight from the parser's callback it costs 20 µs less of the 45 that a
request takes. A chunk that must be read first gets a task, but neither scope nor checks: 29 µs
less of 104. All else goes uvicorn's way. What is used of `HttpToolsProtocol` beyond
`asyncio.Protocol` is in this file alone.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any, Final

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from app.errors import ShardgateError
from app.http.answer import AtHand, Body, Headers, Later

_CLOSE: Final = (b"connection", b"close")
_STALLED_S: Final = 30.0
"""A client that takes nothing for so long holds memory and connections in vain."""

_log = logging.getLogger(__name__)


class GatewayProtocol(HttpToolsProtocol):
    """Lets the application begin to answer before it is asked by ASGI."""

    app: Any
    cycle: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_begun = False
        self._running: Any = None
        """What answers now: an `_Exchange`, or uvicorn's cycle, which need not be the newest."""
        self._alarm: asyncio.TimerHandle | None = None
        self._is_resting = False
        """Whether the timer for idle connections is ours, which outlasts requests."""
        self._idle_since: float | None = None

    def on_message_begin(self) -> None:
        """Begin a request; uvicorn's scope is made when uvicorn answers it."""
        self.url, self.headers, self.expect_100_continue = b"", [], False
        self._idle_since = None

    def on_headers_complete(self) -> None:
        """Answer, or begin to, if nothing else is under way on this connection."""
        self._is_begun = self._is_simple() and self._begin()
        if not self._is_begun:
            self._stop_resting()
            url, headers, is_expecting = self.url, self.headers, self.expect_100_continue
            super().on_message_begin()
            self.url, self.headers, self.expect_100_continue = url, headers, is_expecting
            self.scope["headers"] = headers
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
        if self._running is not None:
            self._running.disconnected = True
            self._running.message_event.set()
        self._trust()
        self._stop_resting()

    def pause_writing(self) -> None:
        """Wait for a client that reads slowly, but not for one that does not read."""
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        """Write on."""
        super().resume_writing()
        self._trust()

    def _watch(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._alarm = self.loop.call_later(_STALLED_S, self._give_up, left)

    def _trust(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()

    def _give_up(self, left: int) -> None:
        if self.transport.get_write_buffer_size() < left:
            self._watch()
        else:
            self.transport.abort()

    def _rest(self) -> None:
        """Await the next request as `on_response_complete` does, but set no timer for each."""
        self.server_state.total_requests += 1
        self._idle_since = self.loop.time()
        if not self._is_resting:
            self._is_resting = True
            self._wake_in(self.timeout_keep_alive)

    def _wake_in(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(seconds, self._wake)

    def _wake(self) -> None:
        if self._idle_since is None:  # a request is arriving
            self._stop_resting()
        elif (left := self._idle_since + self.timeout_keep_alive - self.loop.time()) > 0:
            self._wake_in(left)
        else:
            self.timeout_keep_alive_handler()

    def _stop_resting(self) -> None:
        self._is_resting = False
        self._unset_keepalive_if_required()

    def _unset_keepalive_if_required(self) -> None:
        if not self._is_resting:
            super()._unset_keepalive_if_required()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

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
        url = httptools.parse_url(self.url)
        if url.query:
            return False
        begun: AtHand | Later | None = self.app.begin(url.path, self.headers)
        if begun is None:
            return False
        if isinstance(begun, AtHand):
            self.write_head(*begun)
            self._rest()
        else:
            self._stop_resting()
            self.cycle = self._running = _Exchange(self, begun)
        return True


class _Exchange:
    """An answer under way.

    It takes the place of uvicorn's cycle: uvicorn reads `response_complete`, takes `keep_alive`
    back when it is told to stop, and sets `disconnected` and the event when the client has gone.
    """

    def __init__(self, protocol: GatewayProtocol, begun: Later) -> None:
        self._protocol = protocol
        self.response_complete = False
        self.keep_alive = True
        self.disconnected = False
        self.message_event = self
        self._task = protocol.loop.create_task(self._run(begun))
        protocol.tasks.add(self._task)
        self._task.add_done_callback(protocol.tasks.discard)

    def set(self) -> None:
        """Cancel what is still done for a client that has gone."""
        self._task.cancel()

    async def _run(self, begun: Later) -> None:
        """Answer; a connection whose answer broke off can only be closed."""
        try:
            await begun(self.write)
        except ShardgateError:
            pass  # it is logged
        except Exception:  # noqa: BLE001  nobody else would tell of it
            _log.exception("an answer broke off")
        finally:
            if not self.response_complete:
                self._protocol.transport.close()

    async def write(self, status: HTTPStatus, headers: Headers, body: Body) -> None:
        """Write an answer, and return when the client has taken most of it."""
        await self._writable()
        if not self.keep_alive:
            headers.append(_CLOSE)
        if isinstance(body, bytes):
            self._protocol.write_head(status, headers, body)
        else:
            self._protocol.write_head(status, headers, b"")
            await self._write_pieces(body, int(dict(headers)[b"content-length"]))
        await self._writable()
        self.response_complete = True
        if not self.keep_alive:
            self._protocol.transport.close()
        self._protocol.on_response_complete()

    async def _write_pieces(self, pieces: AsyncIterator[bytes], length: int) -> None:
        async for piece in pieces:
            await self._writable()
            length -= len(piece)
            if length < 0:
                break
            self._protocol.transport.write(piece)
        if length:
            raise RuntimeError(f"{length} bytes of the body are missing")

    async def _writable(self) -> None:
        if self._protocol.flow.write_paused:
            await self._protocol.flow.drain()
