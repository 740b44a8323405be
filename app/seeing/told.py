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


type Kind = tuple[float, int, str, str, Details | None]
"""What requests in a row have in common: when they were over, by the clock of the event loop;
status, dataset, caller; and details of all but plain GETs that were at hand."""

FIELDS: Final = 3
"""So many are told of each request of a run."""


class Run(NamedTuple):
    """Requests in a row that are of one kind."""

    kind: Kind
    fields: tuple[Any, ...]
    """Of each in turn: its id, how many bytes of its body were sent, and the address of its client;
    the texts as `bytes`."""

    @property
    def ids(self) -> tuple[bytes, ...]:
        """Give the id of each."""
        return self.fields[::FIELDS]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Give the bytes of the body of each."""
        return self.fields[1::FIELDS]


_HIT: Final = Details("GET", "hit", None)
_NOT_MODIFIED: Final = Details("GET", "not_modified", None)


def details_at_hand(status: int) -> Details:
    """Give the details of a GET that was at hand, which are told of none."""
    return _NOT_MODIFIED if status == HTTPStatus.NOT_MODIFIED else _HIT
