"""Work for threads, which take what has come together meanwhile."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import NamedTuple


class _Waiting[A, T](NamedTuple):
    item: A
    done: "asyncio.Future[T]"


class Together[A, T]:
    """Has *call* do things in threads, alone where few are asked for, and else several at a time.

    *at_once* calls are under way at most, each of up to *most* things. What *call* gives for a
    thing is what its caller gets; an exception is raised there.
    """

    def __init__(
        self,
        threads: Executor,
        call: Callable[[Sequence[A]], Sequence[T | Exception]],
        *,
        at_once: int,
        most: int,
    ) -> None:
        self._threads = threads
        self._call = call
        self._at_once = at_once
        self._most = most
        self._under_way = 0
        self._waiting: deque[_Waiting[A, T]] = deque()

    async def do(self, item: A) -> T:
        """Have *item* done; who leaves before it is begun takes it back."""
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(item, done))
        if self._under_way < self._at_once:
            self._begin()
        return await done

    def close(self) -> None:
        """Cancel what has not begun."""
        while self._waiting:
            self._waiting.popleft().done.cancel()

    def _begin(self) -> None:
        taken = list[_Waiting[A, T]]()
        while self._waiting and len(taken) < self._most:
            if not (waiting := self._waiting.popleft()).done.done():
                taken.append(waiting)
        if not taken:
            return
        items = [each.item for each in taken]
        try:
            called = asyncio.get_running_loop().run_in_executor(self._threads, self._call, items)
        except RuntimeError as ended:  # there are no threads any more
            for each in taken:
                _tell(each.done, ended)
            return
        self._under_way += 1
        called.add_done_callback(lambda _: self._end(taken, called))

    def _end(
        self,
        taken: Sequence[_Waiting[A, T]],
        called: "asyncio.Future[Sequence[T | Exception]]",
    ) -> None:
        self._under_way -= 1
        if called.cancelled():
            for each in taken:
                each.done.cancel()
        else:
            failed = called.exception()
            results = called.result() if failed is None else [failed] * len(taken)
            for each, result in zip(taken, results, strict=True):
                _tell(each.done, result)
        if self._waiting:
            self._begin()


def _tell[T](done: "asyncio.Future[T]", result: T | BaseException) -> None:
    """Tell who waits, unless nobody does any more."""
    if done.done():
        return
    if isinstance(result, BaseException):
        done.set_exception(result)
    else:
        done.set_result(result)
