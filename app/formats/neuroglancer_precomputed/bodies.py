"""What clients send for a chunk, and what a shard holds of it."""

from dataclasses import dataclass

from app.errors import BadBodyError
from app.formats.compression import deflate, inflate
from app.formats.reading import DecodeError


@dataclass(frozen=True, slots=True)
class ChunkEncoder:
    """Checks and encodes chunks of one kind."""

    is_gzip: bool
    """Whether shards hold them as gzip."""
    most_nbytes: int
    """What holds more once it is inflated is refused."""

    def encode(self, body: bytes, *, is_gzip: bool, nbytes: int | None = None) -> bytes:
        """Give what is stored for *body*, which came as gzip or not.

        Gzip is stored as it came, once it was seen to inflate. *nbytes* is the only size that the
        chunk can have, if that is known.

        Raises: `BadBodyError`.
        """
        plain = self._inflate(body) if is_gzip else body
        if not plain:
            raise BadBodyError("the body is empty, and no chunk is")
        if nbytes is not None and len(plain) != nbytes:
            raise BadBodyError(f"{len(plain)} bytes of a chunk that has {nbytes}")
        if not self.is_gzip:
            return plain
        return body if is_gzip else deflate(plain)

    def _inflate(self, body: bytes) -> bytes:
        try:
            return inflate(body, self.most_nbytes)
        except DecodeError as error:
            raise BadBodyError(f"the body: {error}") from error
