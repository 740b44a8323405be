"""Answers that say that the service, or a store, has failed: the operator hears of them too."""

import logging
from http import HTTPStatus
from typing import Final

from cachetools import TTLCache

from app.errors import ShardgateError
from app.seeing.outcomes import is_failure
from app.seeing.seen import mask_tokens, seen_now

_SELDOM_S: Final = 60.0
_KNOWN: Final = 1024
_log = logging.getLogger(__name__)


def tell_of_failure(status: HTTPStatus, error: ShardgateError, dataset: str = "") -> None:
    """Log why an answer has a *status* of failure; of private data only what kind it is."""
    if not is_failure(status):
        return
    seen = seen_now()
    is_told = (seen is not None and not seen.is_private) or _log.isEnabledFor(logging.DEBUG)
    of_what = dataset or (seen.dataset if seen is not None else "") or "no dataset"
    reason = mask_tokens(str(error)) if is_told else type(error).__name__
    _log.warning("%d, %s: %s", status, of_what, reason)


class Seldom(logging.Filter):
    """Lets the same line pass once a minute: a store that is down fails each request alike."""

    def __init__(self) -> None:
        super().__init__()
        self._told: TTLCache[str, bool] = TTLCache(_KNOWN, _SELDOM_S)

    def filter(self, record: logging.LogRecord) -> bool:
        """Tell whether *record* is one that was not told of late."""
        text = record.getMessage()
        if text in self._told:
            return False
        self._told[text] = True
        return True
