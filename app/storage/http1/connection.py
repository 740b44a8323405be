"""One connection: it writes requests, one after the other, and hands on what arrives."""

import asyncio
from collections.abc import Callable
from typing import cast

from app.storage.http1.errors import BadAnswerError, NoAnswerError
from app.storage.http1.response import Response


class Connection(asyncio.Protocol):
    """Carries one exchange at a time, and ends it when the server is silent for *silence_s*."""

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._response: Response | None = None
        self._on_end: Callable[[Connection], None] | None = None
        self._heard_at = 0.0
        self._is_paused = False
        self._alarm: asyncio.TimerHandle | None = None
        self.closed = self._loop.create_future()
        """Done once the connection is closed."""

    @property
    def is_open(self) -> bool:
        """Whether a request can be written."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def idle_s(self) -> float:
        """How long ago the server was last heard."""
        return self._loop.time() - self._heard_at

    def send(
        self, message: bytes, response: Response, on_end: Callable[["Connection"], None]
    ) -> None:
        """Write a request, and let *response* hear the answer.

        *on_end* is called when the exchange has ended; another may follow if it `is_open`.
        """
        self._response, self._on_end = response, on_end
        self._heard_at = self._loop.time()
        if self._transport is None or self._transport.is_closing():
            self._break(NoAnswerError("the connection closed at once"))
            return
        self._transport.write(message)
        if self._alarm is None:
            self._alarm = self._loop.call_later(self._silence_s, self._listen)

    def close(self) -> None:
        """Close at once; an exchange that is under way fails."""
        if self._transport is not None:
            self._transport.abort()
        if (response := self._response) is not None:
            response.close(ConnectionAbortedError("closed from here"))
            self.end(response)

    def pause(self) -> None:
        """Let nothing more arrive for now."""
        if self._transport is not None and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Let more arrive."""
        if self._transport is not None and self._is_paused:
            self._is_paused = False
            self._heard_at = self._loop.time()
            self._transport.resume_reading()

    def end(self, response: Response) -> None:
        """Free the connection from *response*, and close it unless that is complete."""
        if response is not self._response:
            return
        self._response = None
        if not response.is_reusable:
            self.close()
        if self._on_end is not None:
            self._on_end(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Hand on what arrived; what nobody asked for ends the connection."""
        self._heard_at = self._loop.time()
        if (response := self._response) is None:
            self.close()
            return
        try:
            response.feed(data)
        except BadAnswerError as error:
            self._break(error)
        if response.is_complete:
            self.end(response)

    def connection_lost(self, error: Exception | None) -> None:
        """Tell whoever waits."""
        self._transport = None
        if self._alarm is not None:
            self._alarm.cancel()
        if not self.closed.done():
            self.closed.set_result(None)
        if (response := self._response) is not None:
            response.close(error)
            self.end(response)

    def _listen(self) -> None:
        """Look, once in a while instead of for each request, whether the server is silent."""
        self._alarm = None
        if self._response is None:
            return
        left = self._silence_s if self._is_paused else self._silence_s - self.idle_s
        if left > 0:
            self._alarm = self._loop.call_later(left, self._listen)
        else:
            self._break(TimeoutError("the server is silent"))

    def _break(self, error: Exception) -> None:
        if (response := self._response) is not None:
            response.fail(error)
            self.end(response)
