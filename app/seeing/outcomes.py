"""What became of requests, in few words: the labels of metrics and fields of logs."""

from http import HTTPStatus
from typing import Final, Literal, get_args

type Outcome = Literal["hit", "answered", "not_modified", "absent", "refused", "failed", "gone"]
"""``hit`` was at hand and needed no waiting; ``answered`` is all other success; ``absent`` is 404,
``refused`` any other 4xx, and 501; ``failed`` any other 5xx, or an answer that broke off; ``gone``
is a client that left before it had its answer."""

OUTCOMES: Final[tuple[str, ...]] = get_args(Outcome.__value__)

_METHODS: Final = frozenset({"GET", "HEAD", "PUT", "POST", "DELETE", "OPTIONS"})
OTHER: Final = "other"


def outcome_of(status: int) -> Outcome:
    """Name what an answer with *status* is that took some waiting."""
    if status < HTTPStatus.BAD_REQUEST:
        return "not_modified" if status == HTTPStatus.NOT_MODIFIED else "answered"
    if status == HTTPStatus.NOT_FOUND:
        return "absent"
    return "failed" if is_failure(status) else "refused"


def is_failure(status: int) -> bool:
    """Tell whether *status* is a fault of ours, or of a store; what nobody serves is none."""
    return status >= HTTPStatus.INTERNAL_SERVER_ERROR and status != HTTPStatus.NOT_IMPLEMENTED


def known_method(method: str) -> str:
    """Name *method* if it is served, since clients may invent any number."""
    return method if method in _METHODS else OTHER
