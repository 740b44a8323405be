"""Bytes of one answer become status, headers and body; nothing here waits."""

from typing import Final

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from app.storage.http1.errors import BadAnswerError

_HEAD_BYTES: Final = 64 * 1024
_SWITCHING: Final = 101
_FINAL: Final = 200


class AnswerParser:
    """Parses with httptools; most of a body of known length need not pass through it."""

    __slots__ = (
        "_fed_bytes",
        "_is_bodiless",
        "_is_interim",
        "_left",
        "_parser",
        "_pieces",
        "buffered",
        "has_head",
        "headers",
        "is_complete",
        "is_reusable",
        "is_until_close",
        "length",
        "status",
    )

    def __init__(self, *, is_bodiless: bool) -> None:
        """Expect no body where *is_bodiless*, whatever the headers say: the answer to a HEAD."""
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.length: int | None = None
        self.buffered = 0
        """Bytes of the body that were parsed and not taken yet."""
        self.has_head = False
        self.is_complete = False
        self.is_until_close = False
        """Whether the end of the connection is the end of the body."""
        self.is_reusable = False
        """Whether another answer may follow this one."""
        self._parser = HttpResponseParser(self)
        self._pieces: list[bytes] = []
        self._fed_bytes = 0
        self._is_bodiless = is_bodiless
        self._is_interim = False
        self._left: int | None = None

    @property
    def has_begun(self) -> bool:
        """Whether any of it has arrived."""
        return self._fed_bytes > 0

    def feed(self, data: bytes) -> None:
        """Parse what arrived.

        Raises: `BadAnswerError`, after which no more may come.
        """
        if self._left is not None:
            self.on_body(data)
            return
        self._fed_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            self.is_reusable = False
            if not self.is_complete:
                reason = error.__context__ or error  # what a callback raised
                raise BadAnswerError(f"no HTTP/1.1: {reason}") from error
        if not self.has_head and self._fed_bytes > _HEAD_BYTES:
            raise BadAnswerError("too large a head")

    def take(self) -> bytes:
        """Give away what there is of the body."""
        pieces, self._pieces, self.buffered = self._pieces, [], 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def on_message_begin(self) -> None:
        """Refuse a second answer, which nobody asked for."""
        if self.is_complete:
            raise BadAnswerError("another answer follows")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Note a header; what comes behind the body is none."""
        if not self.has_head:
            self.headers[name.lower()] = value.rstrip()

    def on_headers_complete(self) -> None:
        """Tell how the body ends."""
        self.status = self._parser.get_status_code()
        self._is_interim = self.status < _FINAL
        if self._is_interim:
            if self.status == _SWITCHING:
                raise BadAnswerError("another protocol")
            self.headers.clear()
            return
        coding = self.headers.get(b"transfer-encoding")
        if coding is not None and coding.lower() != b"chunked":
            raise BadAnswerError("an unknown transfer coding")
        self.has_head = True
        self.is_reusable = self._parser.should_keep_alive()
        length = self.headers.get(b"content-length")
        if length is not None:
            self.length = int(length)
        if self._is_bodiless:
            self.is_complete = True
        else:
            self._left = self.length
            self.is_until_close = coding is None and length is None

    def on_body(self, data: bytes) -> None:
        """Keep a piece of the body."""
        if self._left is not None:
            surplus = len(data) - self._left
            if surplus > 0:
                data, self.is_reusable = data[: self._left], False
            self._left -= len(data)
            self.is_complete = not self._left
        elif self.is_complete or not self.has_head:
            raise BadAnswerError("a body that nobody asked for")
        self._pieces.append(data)
        self.buffered += len(data)

    def on_message_complete(self) -> None:
        """End the answer, unless another was only announced."""
        self.is_complete = not self._is_interim
