"""What is told of a request that is over."""

from http import HTTPStatus
from operator import itemgetter
from typing import Final, NamedTuple

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


type Kind = tuple[int, str, str, str, Details | None]
"""What many requests in a row have in common: status, dataset, caller, client; and details of
all but plain GETs that were at hand."""

type Told = tuple[float, bytes, int, Kind]
"""When a request was over by the event loop, its id, the bytes of the body that was sent, and
its kind."""

kind_of: Final = itemgetter(3)

_HIT: Final = Details("GET", "hit", None)
_NOT_MODIFIED: Final = Details("GET", "not_modified", None)


def details_at_hand(status: int) -> Details:
    """Give the details of a GET that was at hand, which are told of none."""
    return _NOT_MODIFIED if status == HTTPStatus.NOT_MODIFIED else _HIT
