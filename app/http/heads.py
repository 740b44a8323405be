"""Heads of answers, as HTTP/1.1 writes them."""

from collections.abc import Iterable, Sequence

type _Headers = Sequence[tuple[bytes, bytes]]


def written(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Write *headers*, each on its line (RFC 9112 §5)."""
    return b"".join([part for name, value in headers for part in (name, b": ", value, b"\r\n")])


class Again:
    """Writes headers that many answers in a row have in common, once."""

    def __init__(self) -> None:
        self._last: tuple[_Headers, bytes] = (), b""

    def written(self, headers: _Headers) -> bytes:
        """Write *headers*, unless they are the object that was written last."""
        last, head = self._last
        if headers is not last:
            head = written(headers)
            self._last = headers, head
        return head
