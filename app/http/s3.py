"""What clients of S3 ask for, and the XML that they are answered with."""

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Self
from urllib.parse import parse_qsl, quote
from xml.etree import ElementTree as ET

from app.errors import BadHeaderError
from app.formats.listing import Window
from app.http.dates import is_date
from app.http.target import check_key
from app.resolve.listing import Page

MEDIA_TYPE: Final = b"application/xml"
_MAX_KEYS: Final = 1000
_COUNT: Final = re.compile("[0-9]{1,18}")
_SPACE: Final = 32
NAMESPACE: Final = "http://s3.amazonaws.com/doc/2006-03-01/"


@dataclass(frozen=True, slots=True)
class ListRequest:
    """The query of ListObjectsV2, or of ListObjects, which has no list-type."""

    window: Window
    limit: int
    given: Mapping[str, str]

    @classmethod
    def parse(cls, query_string: bytes) -> Self:
        """Read a query.

        Raises: `BadHeaderError` for one that cannot be answered, `BadKeyError` for a prefix in a
        folder that no key can be in.
        """
        try:
            text = query_string.decode("ascii")
            given = dict(parse_qsl(text, keep_blank_values=True, errors="strict"))
        except ValueError:
            raise BadHeaderError("the query is not percent-encoded UTF-8") from None
        if given.get("list-type", "2") != "2":
            raise BadHeaderError("list-type is 2 for ListObjectsV2, and absent for ListObjects")
        is_encoded = given.get("encoding-type") == "url"
        if not is_encoded and any(ord(letter) < _SPACE for letter in "".join(given.values())):
            raise BadHeaderError("control characters go with encoding-type=url only")
        if (delimiter := given.get("delimiter", "")) not in ("", "/"):
            raise BadHeaderError("keys can be folded at '/' only")
        limit = given.get("max-keys", str(_MAX_KEYS))
        if not _COUNT.fullmatch(limit):
            raise BadHeaderError("max-keys is no number")
        if "list-type" not in given:
            after = given.get("marker", "")
        elif (token := given.get("continuation-token")) is None:
            after = given.get("start-after", "")
        else:
            after = _read_token(token)
        prefix = given.get("prefix", "")
        check_key(prefix[: prefix.rfind("/") + 1])
        window = Window(prefix, after, delimiter)
        return cls(window, min(int(limit), _MAX_KEYS), given)

    def answer(self, bucket: str, page: Page) -> bytes:
        """Write the XML that tells of *page*."""
        spell = quote if self.given.get("encoding-type") == "url" else str
        root = ET.Element("ListBucketResult", xmlns=NAMESPACE)
        told = {
            "Name": bucket,
            "Prefix": spell(self.window.prefix),
            "Delimiter": self.window.delimiter or None,
            "EncodingType": self.given.get("encoding-type"),
            "MaxKeys": str(self.limit),
            "IsTruncated": "false" if page.after is None else "true",
        }
        if "list-type" in self.given:
            told |= {
                "StartAfter": spell(self.given.get("start-after", "")) or None,
                "ContinuationToken": self.given.get("continuation-token"),
                "KeyCount": str(len(page.entries)),
                "NextContinuationToken": page.after and _write_token(page.after),
            }
        else:
            # S3 has NextMarker with a delimiter only, but a page may end behind its last key.
            told |= {
                "Marker": spell(self.given.get("marker", "")),
                "NextMarker": page.after and spell(page.after),
            }
        add(root, told)
        for key, nbytes, etag, modified_s in page.entries:
            if nbytes is None:
                add(ET.SubElement(root, "CommonPrefixes"), {"Prefix": spell(key)})
                continue
            contents = {
                "Key": spell(key),
                "LastModified": write_time(modified_s or 0),
                "ETag": etag,
                "Size": str(nbytes),
                "StorageClass": "STANDARD",
            }
            add(ET.SubElement(root, "Contents"), contents)
        text: bytes = ET.tostring(root, encoding="utf-8", xml_declaration=True)
        return text


def add(parent: ET.Element, texts: Mapping[str, str | None]) -> None:
    """Put elements that hold *texts* into *parent*; `None` is none."""
    for name, text in texts.items():
        if text is not None:
            ET.SubElement(parent, name).text = text


def write_time(epoch_s: float) -> str:
    """Write a time as S3 does, in whole seconds like ``Last-Modified``; what is no date as 1970."""
    known_s = int(epoch_s) if is_date(epoch_s) else 0
    text = datetime.fromtimestamp(known_s, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def _write_token(key: str) -> str:
    return base64.urlsafe_b64encode(key.encode()).decode()


def _read_token(token: str) -> str:
    try:
        return base64.b64decode(token, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        raise BadHeaderError("the continuation-token is none of ours") from None
