"""A shard that is to be written, opened: its indexes, and the chunks that can be kept."""

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np

from app.errors import ConflictError, DamagedError
from app.formats.neuroglancer_precomputed.encoded import Minishard as EncodedMinishard
from app.formats.neuroglancer_precomputed.index import MinishardIndexDecoder
from app.formats.neuroglancer_precomputed.keys import Ids
from app.formats.neuroglancer_precomputed.minishards import Numbers
from app.formats.neuroglancer_precomputed.planning import Kept
from app.formats.neuroglancer_precomputed.shards import Minishard
from app.formats.neuroglancer_precomputed.survey import PrecomputedShard, PrecomputedSurvey
from app.formats.reading import DecodeError, Fetch
from app.formats.writing import Entry
from app.model import ByteRange, ETag, ObjectRef, Stored, etag_of

_ZERO: Final = np.empty(0, np.int64)
NOTHING: Final = Kept(np.empty(0, np.uint64), _ZERO, _ZERO)
"""What is kept where there was no shard."""


async def survey_to_write(shard: PrecomputedShard, fetch: Fetch) -> PrecomputedSurvey | None:
    """Read all indexes of *shard*; `None` if there is no such shard.

    Raises: `DamagedError`, and `ConflictError` for a shard in two objects.
    """
    if (opened := await shard.open(fetch)) is None:
        return None
    if opened.index_ref != opened.region.ref:
        raise ConflictError(
            f"{shard.ref}: the shard is stored in two objects, .index and .data, as was usual"
            " once, and is not written"
        )
    survey = await shard.read(fetch, opened)
    if survey.faults:
        raise DamagedError(shard.ref, survey.faults[0])
    return survey


@dataclass(frozen=True, eq=False)
class OpenedShard:
    """The indexes of one version of a shard."""

    survey: PrecomputedSurvey
    _decoded: dict[int, Minishard | None] = field(default_factory=dict)

    @property
    def etag(self) -> ETag:
        """The version of the object."""
        return etag_of(self.survey.whole.version)

    @property
    def size(self) -> int:
        """Of the object, in bytes."""
        return self.survey.whole.byte_range.stop

    def lookup(self, entry: Entry) -> ByteRange | None:
        """Find a chunk by its id, the first number of *entry*.

        Raises: `DamagedError`.
        """
        chunk_id = entry[0]
        _, number = self.survey.shard.part.sharding.address(chunk_id)
        if number not in self._decoded:
            encoded = self.survey.minishards.find(number)
            self._decoded[number] = None if encoded is None else self._decode(encoded)
        minishard = self._decoded[number]
        found = None if minishard is None else minishard.locate(chunk_id)
        return None if found is None else found.byte_range

    @cached_property
    def chunks(self) -> Kept:
        """All chunks.

        Raises: `DamagedError` where one cannot be right: what is stored of it would be lost.
        """
        found, _, faults = self.survey.entries()
        if faults:
            raise DamagedError(self._ref, faults[0].reason)
        ids = np.asarray(found.ids, np.uint64)
        starts, stops = (np.asarray(each, np.int64) for each in (found.starts, found.stops))
        self._check_places(ids, starts, stops)
        return Kept(ids, starts, stops)

    def keep(self, without: Collection[int]) -> Kept:
        """Give all chunks but those whose ids are in *without*.

        Raises: `DamagedError`.
        """
        kept = self.chunks
        stays = ~np.isin(kept.ids, np.array(list(without), np.uint64))
        return Kept(kept.ids[stays], kept.starts[stays], kept.stops[stays])

    def _check_places(self, ids: Ids, starts: Numbers, stops: Numbers) -> None:
        """Return if no chunk lies where a minishard index does.

        Raises: `DamagedError`.
        """
        places, first = self.survey.minishards.places, self.survey.region.start
        begins = np.append(places.starts + first, 2**63 - 1)
        ends = places.stops + first
        next_begins = begins[np.searchsorted(ends, starts, side="right")]
        wrong = np.flatnonzero((next_begins < stops) & (starts < stops))
        if wrong.size:
            raise DamagedError(self._ref, f"chunk {ids[wrong[0]]} overlaps a minishard index")

    @property
    def _ref(self) -> ObjectRef:
        return self.survey.whole.ref

    def _decode(self, minishard: EncodedMinishard) -> Minishard:
        number, place, encoded = minishard
        shard, whole = self.survey.shard, self.survey.whole
        decode = MinishardIndexDecoder(
            shard.part.sharding.is_minishard_index_gzip, shard.most_nbytes
        )
        try:
            index = decode(encoded)
        except DecodeError as error:
            raise DamagedError(self._ref, f"minishard index {number}: {error}") from error
        return Minishard(place, index, Stored(whole.ref, self.survey.region, whole.version))
