"""Counts of what stores were asked for."""

import asyncio
from collections import defaultdict
from typing import Final

from app.errors import RangeNotSatisfiedError, ShardgateError
from app.model import ObjectRef
from app.resolve.tally import kind_of_read
from app.seeing.histogram import Histogram
from app.storage.traced import Call

OTHER_ERROR: Final = "other"
_NO_ERRORS: Final = (RangeNotSatisfiedError, asyncio.CancelledError, GeneratorExit)
"""What an empty object, a short one, or a client that has left comes to."""


class CallCounts:
    """The calls of one method for one kind of bytes."""

    __slots__ = ("nbytes", "seconds")

    def __init__(self) -> None:
        self.nbytes = 0
        self.seconds = Histogram()


class UpstreamCounts:
    """What was asked of stores, by store, method and kind; each attempt counts."""

    def __init__(self) -> None:
        self.calls: defaultdict[tuple[str, str, str], CallCounts] = defaultdict(CallCounts)
        self.errors: defaultdict[tuple[str, str], int] = defaultdict(int)

    def on_call(self, call: Call) -> None:
        """Count *call*."""
        store = store_of(call.ref)
        counts = self.calls[store, call.method, kind_of_read.get()]
        counts.nbytes += call.nbytes
        counts.seconds.observe(call.seconds)
        if call.error is not None and not isinstance(call.error, _NO_ERRORS):
            self.errors[store, error_of(call.error)] += 1


def store_of(ref: ObjectRef) -> str:
    """Name the store of *ref*: its scheme, and the name that it has in the settings.

    That is ``file``, ``s3+lab``, or ``guarded+https`` where virtual references lead.
    """
    return ref.bucket.partition("://")[0]


def error_of(error: BaseException) -> str:
    """Name the class of *error* if it is ours."""
    return type(error).__name__ if isinstance(error, ShardgateError) else OTHER_ERROR
