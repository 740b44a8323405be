"""Ids of writes, which objects carry: so that a write whose answer was lost is found again.

An object tells the id of the write that made it and of the last few before that, for others may
have written on top of it by the time that it is looked for.
"""

import re
import secrets
from collections import OrderedDict
from collections.abc import Mapping
from typing import Final, NamedTuple

from app.model import ETag, ObjectRef

_KEY: Final = "shardgate-writes"
_KEPT: Final = 8
_KNOWN: Final = 4096
_ID: Final = re.compile("[0-9a-f]{16}")

type WriteIds = tuple[str, ...]
"""The newest first."""


def next_ids(before: WriteIds) -> WriteIds:
    """Make an id for a write that takes the place of those *before*."""
    return (secrets.token_hex(8), *before)[: _KEPT + 1]


def metadata_of(ids: WriteIds) -> dict[str, str]:
    """Write *ids* as the user metadata of an object."""
    return {_KEY: " ".join(ids)}


def parse_ids(metadata: Mapping[str, str]) -> WriteIds:
    """Take what is an id out of user metadata, which may be anybody's."""
    return tuple(each for each in metadata.get(_KEY, "").split() if _ID.fullmatch(each))


class _Written(NamedTuple):
    etag: ETag
    ids: WriteIds


class Lineage:
    """What was written last here, of a bounded number of objects."""

    def __init__(self) -> None:
        self._written: OrderedDict[ObjectRef, _Written] = OrderedDict()

    def keep(self, ref: ObjectRef, etag: ETag, ids: WriteIds) -> None:
        """Remember the ids that the version *etag* carries."""
        self._written[ref] = _Written(etag, ids)
        self._written.move_to_end(ref)
        if len(self._written) > _KNOWN:
            self._written.popitem(last=False)

    def find(self, ref: ObjectRef, etag: ETag) -> WriteIds | None:
        """Tell the ids that the version *etag* carries, if it was written here."""
        written = self._written.get(ref)
        return None if written is None or written.etag != etag else written.ids
