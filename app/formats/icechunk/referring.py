"""Whether what a commit refers to may be referred to; nothing is asked of any store."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from app.errors import BadBodyError, NotAllowedError
from app.formats.icechunk.change_set import ChangeSet
from app.formats.icechunk.config import VirtualContainer
from app.formats.icechunk.ids import encode_id
from app.formats.icechunk.payloads import Kind
from app.formats.icechunk.references import Native
from app.formats.icechunk.virtual import Allowed, resolve
from app.formats.reading import DecodeError


def demand_of_natives(changes: ChangeSet) -> Mapping[bytes, int]:
    """Tell how many bytes each chunk file must have at least."""
    wanted: dict[bytes, int] = {}
    for changed in changes.chunks.values():
        payloads = changed.payloads
        rows = payloads.rows[payloads.of_kind(Kind.NATIVE)]
        stops = np.zeros(len(payloads.told), np.int64)
        np.maximum.at(stops, rows["told"], rows["stop"])
        for number in np.flatnonzero(stops).tolist():
            chunk_id = payloads.told[number]
            wanted[chunk_id] = max(wanted.get(chunk_id, 0), int(stops[number]))
    return wanted


def check_natives(changes: ChangeSet, lengths: Mapping[bytes, int]) -> None:
    """Return if all native references lie inside of chunk files that have these *lengths*.

    Raises: `BadBodyError`, which names the first that does not.
    """
    for changed in changes.chunks.values():
        for row, payload in zip(changed.coords, changed.payloads, strict=True):
            if not isinstance(payload, Native):
                continue
            chunk_id, byte_range = payload
            if (length := lengths.get(chunk_id)) is None:
                found = "does not exist"
            elif length < byte_range.stop:
                found = f"has {length} bytes"
            else:
                continue
            chunk = f"chunk {row.tolist()} refers to {byte_range} of {encode_id(chunk_id)}"
            raise BadBodyError(f"{chunk}, which {found}")


def check_inlaid(changes: ChangeSet, most_nbytes: int) -> None:
    """Return if no chunk has more than *most_nbytes* in the manifest itself.

    Raises: `BadBodyError`.
    """
    for data in _told_by(Kind.INLAID, changes):
        if len(data) > most_nbytes:
            raise BadBodyError(
                f"a chunk of {len(data)} bytes is inline, and the repository keeps "
                f"{most_nbytes} at most there: POST it to /chunks"
            )


def check_virtual(
    changes: ChangeSet, allowed: Sequence[Allowed], containers: Sequence[VirtualContainer]
) -> None:
    """Return if all virtual references may be followed, here and by the library.

    That reads only what begins like one of the *containers* of the repository.

    Raises: `NotAllowedError`, `BadBodyError`.
    """
    named = {each.name: each.url_prefix for each in containers if each.name is not None}
    prefixes = tuple(each.url_prefix for each in containers)
    locations = {each.decode() for each in _told_by(Kind.VIRTUAL, changes)}
    for location in sorted(locations):
        try:
            resolve(location, allowed, named)
        except DecodeError as error:
            raise BadBodyError(str(error)) from None
        if not location.startswith(("vcc://", *prefixes)):
            raise NotAllowedError(
                f"no virtual chunk container of the repository holds {location[:200]!r}, so that "
                "no library would read it"
            )


def _told_by(kind: Kind, changes: ChangeSet) -> Iterator[bytes]:
    for changed in changes.chunks.values():
        yield from changed.payloads.told_by(kind)
