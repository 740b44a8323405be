"""Bodies of requests to the control plane: announced, bounded, in time, as in the data plane."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from fastapi import Request

from app.errors import ShardgateError, UnknownCodingError
from app.http.answer import combined
from app.http.bodies import Incoming
from app.http.payload import Coding, read_payload
from app.resolve.budget import ByteBudget, ByteReservation


class Taker:
    """Takes bodies; what of them has arrived counts as in flight in *budget*."""

    def __init__(self, budget: ByteBudget, *, timeout_s: float) -> None:
        self._budget = budget
        self._timeout_s = timeout_s

    @asynccontextmanager
    async def taken(self, request: Request, most_nbytes: int) -> AsyncGenerator[bytes]:
        """Hold the body of *request*, of up to *most_nbytes*, while the block lasts.

        Raises: `LengthRequiredError`, `TooLargeError`, `UnknownCodingError`, `SlowBodyError`,
        `DigestError`, `SignatureError`, `BusyError`.
        """
        given = combined(request.headers.raw)
        incoming = Incoming(request.receive, given, timeout_s=self._timeout_s, scope=request.scope)
        held = ByteReservation(self._budget)
        try:
            if Coding.parse(given).is_gzip:
                raise UnknownCodingError("the body comes without Content-Encoding")
            payload = await read_payload(incoming, given, held, most_nbytes=most_nbytes)
            yield payload.body
        except ShardgateError:
            await incoming.drain()
            raise
        finally:
            await held.release()
