"""The XML with which clients of S3 delete many keys at once."""

from dataclasses import dataclass, field
from typing import Final

from app.errors import BadBodyError, UnsupportedError
from app.http.s3_xml import Path, read_xml

MAX_KEYS: Final = 1000
MAX_NBYTES: Final = 4 * 1024**2

_ROOT: Final = ("Delete",)
_OBJECT: Final = (*_ROOT, "Object")
_KEY: Final = (*_OBJECT, "Key")
_ETAG: Final = (*_OBJECT, "ETag")
_QUIET: Final = (*_ROOT, "Quiet")
_UNSERVED: Final = frozenset((*_OBJECT, name) for name in ("VersionId", "Size", "LastModifiedTime"))
_KNOWN: Final = frozenset({_ROOT, _OBJECT, _KEY, _ETAG, _QUIET})


@dataclass
class Deletion:
    """The keys to delete, each with the ETag that it must have, if one is told."""

    keys: list[tuple[str, str | None]] = field(default_factory=list)
    is_quiet: bool = False


def parse_deletion(body: bytes) -> Deletion:
    """Read *body*; what is not known in it is refused when it begins, as is a DTD.

    Raises: `BadBodyError`, `UnsupportedError`.
    """
    reader = _Reader()
    read_xml(body, reader)
    if not reader.found.keys:
        raise BadBodyError("the body names no key")
    return reader.found


class _Reader:
    """Hears of each key."""

    def __init__(self) -> None:
        self.found = Deletion()
        self._texts: dict[Path, str] = {}

    def begin(self, path: Path) -> None:
        """Refuse what is not served, or does not belong there."""
        if path in _UNSERVED:
            raise UnsupportedError(f"DeleteObjects by {path[-1]} is not served")
        if path not in _KNOWN:
            raise BadBodyError(f"the body has an element {path[-1]} where none belongs")
        if path == _OBJECT:
            self._texts = {}

    def end(self, path: Path, text: str) -> None:
        """Take an object when all of it was heard."""
        self._texts[path] = text
        if path == _OBJECT:
            if not self._texts.get(_KEY):
                raise BadBodyError("the body has an object without a key")
            self.found.keys.append((self._texts[_KEY], self._texts.get(_ETAG)))
            if len(self.found.keys) > MAX_KEYS:
                raise BadBodyError(f"the body names more than {MAX_KEYS} keys")
        elif path == _QUIET:
            self.found.is_quiet = text.strip() == "true"
