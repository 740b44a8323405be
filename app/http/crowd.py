"""How many requests are answered at once, of all clients and of each, and how long they wait."""

import asyncio
from collections import Counter
from types import TracebackType
from typing import Final, Self

from app.errors import BusyError, OverdueError, TooManyRequestsError
from app.http.answer import combined
from app.http.clients import Networks, name_client
from app.http.credentials.door import Request

_SWEPT_S: Final = 1.0
_READING: Final = ("GET", "HEAD")


class Crowd:
    """Lets up to *most* requests in, and of one client up to *most_of_one*, if that is not 0.

    A read whose answer has not begun after *longest_s* is given up.
    """

    def __init__(self, *, most: int, most_of_one: int, longest_s: float, proxies: Networks) -> None:
        self._most = most
        self._most_of_one = most_of_one
        self._longest_s = longest_s
        self._proxies = proxies
        self._inside = 0
        self._by_client: Counter[str] = Counter()
        self._waiting: dict[Place, float] = {}
        """Whose answers have not begun, longest first, and since when they wait."""
        self._sweeping: asyncio.TimerHandle | None = None

    def place_of(self, scope: Request) -> "Place":
        """Make a place for a request."""
        client = None
        if self._most_of_one and scope["client"] is not None:
            given = combined(scope["headers"])
            client = name_client(scope["client"][0], given, self._proxies)
        return Place(self, client, is_read=scope["method"] in _READING)

    def place_of_read(self) -> "Place | None":
        """Make a place for a read, if there is one now, and it does not matter whose."""
        if self._most_of_one or self._inside >= self._most:
            return None
        return Place(self, None, is_read=True)

    def come(self, place: "Place") -> None:
        """Let somebody in.

        Raises: `BusyError`, `TooManyRequestsError`.
        """
        if self._inside >= self._most:
            raise BusyError(f"{self._inside} other requests are being answered")
        if place.client is not None:
            if self._by_client[place.client] >= self._most_of_one:
                raise TooManyRequestsError(f"{self._most_of_one} others of yours are answered")
            self._by_client[place.client] += 1
        self._inside += 1
        if place.is_read:
            loop = asyncio.get_running_loop()
            self._waiting[place] = loop.time()
            if self._sweeping is None:
                self._sweeping = loop.call_later(_SWEPT_S, self._sweep)

    def go(self, place: "Place") -> None:
        """Let somebody out."""
        self._inside -= 1
        self.served(place)
        if place.client is not None:
            self._by_client[place.client] -= 1
            if not self._by_client[place.client]:
                del self._by_client[place.client]

    def served(self, place: "Place") -> None:
        """Note that the answer has begun."""
        self._waiting.pop(place, None)

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        for place, since in list(self._waiting.items()):
            if since > loop.time() - self._longest_s:
                break
            self.served(place)
            place.give_up()
        self._sweeping = loop.call_later(_SWEPT_S, self._sweep) if self._waiting else None


class Place:
    """Is taken while the block lasts, in which one request is answered.

    Raises: `OverdueError` out of the block where the answer has not begun in time; on entering
    `BusyError`, `TooManyRequestsError`.
    """

    __slots__ = ("_crowd", "_is_given_up", "_task", "client", "is_read")

    def __init__(self, crowd: Crowd, client: str | None, *, is_read: bool) -> None:
        self._crowd = crowd
        self._task: asyncio.Task[object] | None = None
        self._is_given_up = False
        self.client = client
        self.is_read = is_read

    def __enter__(self) -> Self:
        self._crowd.come(self)
        self._task = asyncio.current_task()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._crowd.go(self)
        if self._is_given_up and self._task is not None:
            self._task.uncancel()
            raise OverdueError("the answer took too long") from error

    def served(self) -> None:
        """Note that the answer has begun."""
        self._crowd.served(self)

    def give_up(self) -> None:
        """End the work for the answer."""
        if self._task is not None:
            self._is_given_up = True
            self._task.cancel()
