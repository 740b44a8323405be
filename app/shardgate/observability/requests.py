"""One request as metrics, logs and traces describe it."""

import re
import time
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any, Final, Literal

type Outcome = Literal["hit", "answered", "not_modified", "absent", "refused", "failed", "gone"]
"""``hit`` is a response from memory, ``answered`` other success, ``absent`` 404, ``refused`` any
other 4xx and 501, ``failed`` 424, any other 5xx or a response that broke off, ``gone`` a client
that left before the end."""

OTHER_METHOD: Final = "other"
NO_DATASET: Final = ""
"""Label of the control plane, and of names that are no configured dataset."""

_METHODS: Final = frozenset({"GET", "HEAD", "PUT", "POST", "DELETE", "OPTIONS"})
_TOKEN: Final = re.compile(r"(?:~|%(?:25)*7[Ee])[^/\s]*")
"""A possible token in a path, wherever it stands, percent-encoded any number of times."""


class RequestContext:
    """A request in progress, and its response as far as it is known."""

    __slots__ = (
        "_key", "caller", "client", "dataset", "is_private", "method", "nbytes", "outcome",
        "request_id", "span", "started_at", "status", "trace_id",
    )  # fmt: skip

    def __init__(
        self, method: str, dataset: str, key: str, client: bytes, *, is_private: bool
    ) -> None:
        """Record the start time; logs withhold the texts of errors if *is_private*."""
        self.started_at = time.perf_counter()
        self.method, self.dataset, self._key = method, dataset, key
        self.client, self.is_private = client, is_private
        self.request_id, self.caller, self.trace_id = b"", "", ""
        self.span: Any = None
        self.status = self.nbytes = 0
        self.outcome: Outcome = "gone"

    @property
    def key(self) -> str:
        """The key, without tokens."""
        return mask_tokens(self._key)


current_request: Final = ContextVar[RequestContext | None]("current_request", default=None)
"""The request that this task, and the tasks it starts, work for."""


def note_caller(name: str) -> None:
    """Set the authenticated caller of the current request."""
    if (context := current_request.get()) is not None:
        context.caller = name


def outcome_of(status: int) -> Outcome:
    """Return the outcome of a complete response that took some waiting."""
    if status < HTTPStatus.BAD_REQUEST:
        return "not_modified" if status == HTTPStatus.NOT_MODIFIED else "answered"
    if status == HTTPStatus.NOT_FOUND:
        return "absent"
    return "failed" if is_failure(status) else "refused"


def is_failure(status: int) -> bool:
    """Return whether the service or a store is at fault: 424, and any 5xx but 501."""
    if status == HTTPStatus.FAILED_DEPENDENCY:
        return True
    return status >= HTTPStatus.INTERNAL_SERVER_ERROR and status != HTTPStatus.NOT_IMPLEMENTED


def method_label(method: str) -> str:
    """Return *method* if it is served, else ``other``: clients may invent any number."""
    return method if method in _METHODS else OTHER_METHOD


def mask_tokens(text: str) -> str:
    """Replace every segment of a path in *text* that may be a token by ``~``."""
    return _TOKEN.sub("~", text) if "~" in text or "%" in text else text
