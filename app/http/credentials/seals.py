"""Signatures of the frames of a body, each over the one before; the first over the request's."""

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from app.errors import SignatureError

_OF_NOTHING: Final = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True, slots=True)
class Seal:
    """What the frames of a body are signed with."""

    key: bytes = field(repr=False)
    timestamp: str
    scope: str
    seed: str = field(repr=False)
    """The signature of the request."""
    is_trailed: bool
    """Whether trailers are signed too; where they are not there are none."""

    def chain(self) -> "Chain":
        """Begin to check a body."""
        return Chain(self)


def seal_of(scope: Mapping[str, Any]) -> Seal | None:
    """Give what the body of a request is signed with, if it is known who signed the request."""
    signed = scope.get("signed")
    return None if signed is None else signed.seal


class Chain:
    """Checks frame after frame."""

    def __init__(self, seal: Seal) -> None:
        self.is_trailed = seal.is_trailed
        self._seal = seal
        self._last = seal.seed

    def check_chunk(self, data: bytes | memoryview, signature: bytes) -> None:
        """Return if *signature* is that of the next chunk.

        Raises: `SignatureError`.
        """
        self._check("PAYLOAD", f"{_OF_NOTHING}\n{hashlib.sha256(data).hexdigest()}", signature)

    def check_trailers(self, lines: bytes, signature: bytes) -> None:
        """Return if *signature* is that of the trailers, each ``name:value`` and a line feed.

        Raises: `SignatureError`.
        """
        self._check("TRAILER", hashlib.sha256(lines).hexdigest(), signature)

    def _check(self, kind: str, digests: str, signature: bytes) -> None:
        seal = self._seal
        text = f"AWS4-HMAC-SHA256-{kind}\n{seal.timestamp}\n{seal.scope}\n{self._last}\n{digests}"
        expected = hmac.digest(seal.key, text.encode(), "sha256").hex()
        if not hmac.compare_digest(expected.encode(), signature):
            raise SignatureError(
                "SignatureDoesNotMatch", f"a signature in the body, of its {kind}, is not right"
            )
        self._last = expected
