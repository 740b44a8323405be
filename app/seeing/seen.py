"""The request that something is done for, as logs and traces name it."""

import re
import time
from contextvars import ContextVar
from typing import Any, Final

from app.seeing.outcomes import Outcome, outcome_of

_TOKEN: Final = re.compile(r"(?:~|%(?:25)*7[Ee])[^/\s]*")
"""What could be one in a path, where it belongs or not, percent-encoded any number of times."""


class Seen:
    """A request under way, and its answer as far as it is known."""

    __slots__ = (
        "began", "caller", "client", "dataset", "is_private", "key", "method", "nbytes",
        "outcome", "request_id", "span", "status", "trace_id",
    )  # fmt: skip

    def __init__(
        self, method: str, dataset: str, key: str, client: bytes, *, is_private: bool
    ) -> None:
        """Begin; the *key* is in no line of the log but those for debugging."""
        self.began = time.perf_counter()
        self.method = method
        self.dataset = dataset
        self.key = key
        self.client = client
        self.is_private = is_private
        """Whether not everybody may know what was asked for."""
        self.request_id = b""
        self.caller = ""
        self.trace_id = ""
        self.span: Any = None
        self.status = 0
        self.nbytes = 0
        self.outcome: Outcome = "gone"

    @property
    def seconds(self) -> float:
        """How long ago it began."""
        return time.perf_counter() - self.began

    def end(self) -> None:
        """Name what became of it, now that the whole answer is sent."""
        self.outcome = outcome_of(self.status)


_seen: Final = ContextVar[Seen | None]("seen", default=None)


def begin_seeing(seen: Seen) -> None:
    """Let all that this task does, and the tasks that it begins, be for the request *seen*."""
    _seen.set(seen)


def seen_now() -> Seen | None:
    """Tell which request something is done for."""
    return _seen.get()


def mask_tokens(text: str) -> str:
    """Replace each part of a path in *text* that could be a token by ``~``."""
    return _TOKEN.sub("~", text) if "~" in text or "%" in text else text


def note_request_id(request_id: bytes) -> None:
    """Tell logs the id of the request."""
    if (seen := _seen.get()) is not None:
        seen.request_id = request_id


def note_caller(name: str) -> None:
    """Tell logs who asks."""
    if (seen := _seen.get()) is not None:
        seen.caller = name
