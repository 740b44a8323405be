"""Header sections as HTTP/1.1 writes them."""

from collections.abc import Iterable


def encode_headers(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return *headers*, each on a line of its own (RFC 9112 §5)."""
    return b"".join([part for name, value in headers for part in (name, b": ", value, b"\r\n")])
