"""The XML with which clients of S3 complete an upload."""

import re
from typing import Final

from app.errors import BadBodyError, BadPartError, PartOrderError
from app.http.s3_xml import Path, read_xml
from app.resolve.uploads import PartName

MAX_PARTS: Final = 10_000
"""As in S3."""
MAX_NBYTES: Final = 4 * 1024**2

_ROOT: Final = ("CompleteMultipartUpload",)
_PART: Final = (*_ROOT, "Part")
_NUMBER: Final = (*_PART, "PartNumber")
_ETAG: Final = (*_PART, "ETag")
_MD5: Final = re.compile('"?([0-9a-f]{32})"?')
_DIGITS: Final = re.compile("[0-9]{1,5}")


def parse_parts(body: bytes) -> list[PartName]:
    """Read *body*; checksums of parts, which were checked when those came, are passed over.

    Raises: `BadBodyError`, `BadPartError`, `PartOrderError`.
    """
    reader = _Reader()
    read_xml(body, reader)
    if not reader.found:
        raise BadBodyError("the body names no part")
    return reader.found


def parse_number(text: str) -> int | None:
    """Read the number of a part; `None` if it is none."""
    number = int(text) if _DIGITS.fullmatch(text) else 0
    return number if 1 <= number <= MAX_PARTS else None


class _Reader:
    """Hears of each part."""

    def __init__(self) -> None:
        self.found: list[PartName] = []
        self._texts: dict[Path, str] = {}

    def begin(self, path: Path) -> None:
        """Refuse what does not belong there."""
        if path not in (_ROOT, _PART) and path[:-1] != _PART:
            raise BadBodyError(f"the body has an element {path[-1]} where none belongs")
        if path == _PART:
            self._texts = {}

    def end(self, path: Path, text: str) -> None:
        """Take a part when all of it was heard."""
        self._texts[path] = text.strip()
        if path != _PART:
            return
        number = parse_number(self._texts.get(_NUMBER, ""))
        if number is None:
            raise BadBodyError(f"a part has a number from 1 to {MAX_PARTS}")
        if self.found and number <= self.found[-1].number:
            raise PartOrderError(f"part {number} is not told in its order")
        if (md5 := _MD5.fullmatch(self._texts.get(_ETAG, ""))) is None:
            raise BadPartError(f"part {number} has not the ETag of a part")
        self.found.append(PartName(number, md5[1]))
