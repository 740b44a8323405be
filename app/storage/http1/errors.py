"""What can go wrong with one exchange; besides, there are `TimeoutError` and `OSError`."""


class ExchangeError(Exception):
    """A request without a proper answer. No text repeats a URL, which may hold a signature."""


class ForbiddenError(ExchangeError):
    """Where a request would lead is no place that may be asked."""


class BadUrlError(ExchangeError):
    """A text is no URL that can be asked."""


class BadAnswerError(ExchangeError):
    """What the server sent is not HTTP/1.1, or more than is taken."""


class NoAnswerError(ExchangeError):
    """The connection closed before there was a head."""


class CutOffError(ExchangeError):
    """The connection closed in the middle of the body."""
