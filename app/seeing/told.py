"""What is told of a request that is over."""

from http import HTTPStatus
from typing import Any, Final, NamedTuple

from app.seeing.outcomes import Outcome


class Details(NamedTuple):
    """What is told of few requests, or differs between them."""

    method: str
    outcome: Outcome
    seconds: float | None
    """How long it took, if anything was waited for."""
    key: str = ""
    """If the log has keys."""
    trace_id: str = ""


type Kind = tuple[float, int, str, str, str, Details | None]
"""What requests in a row have in common: when they were over by the event loop, status, dataset,
caller, client; and details of all but plain GETs that were at hand."""


class Run(NamedTuple):
    """Requests in a row that differ in two fields only."""

    kind: Kind
    fields: tuple[Any, ...]
    """The id of each, as `bytes`, and how many bytes of its body were sent, in turn."""

    @property
    def ids(self) -> tuple[bytes, ...]:
        """Give the id of each."""
        return self.fields[::2]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Give the bytes of the body of each."""
        return self.fields[1::2]


_HIT: Final = Details("GET", "hit", None)
_NOT_MODIFIED: Final = Details("GET", "not_modified", None)


def details_at_hand(status: int) -> Details:
    """Give the details of a GET that was at hand, which are told of none."""
    return _NOT_MODIFIED if status == HTTPStatus.NOT_MODIFIED else _HIT
