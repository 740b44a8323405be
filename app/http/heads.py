"""Heads of answers, as HTTP/1.1 writes them."""

from collections.abc import Iterable


def written(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Write *headers*, each on its line (RFC 9112 §5)."""
    return b"".join([part for name, value in headers for part in (name, b": ", value, b"\r\n")])
