"""The keys of chunks that have ids: of meshes, skeletons and annotations.

Neither shards nor minishards have them in the order of their texts. So all indexes are read for
each page of keys, and of what they name the first is kept.
"""

import re
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from itertools import batched
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.formats.naming import Candidate, Item, Means, Wanted
from app.formats.neuroglancer_precomputed.keys import IdNames
from app.formats.neuroglancer_precomputed.metadata import Kind, Part
from app.formats.neuroglancer_precomputed.survey import (
    PrecomputedShard,
    PrecomputedShards,
    PrecomputedSurvey,
)
from app.formats.reading import Fetch
from app.model import ByteRange, Gzipped, Stored

type Texts = NDArray[np.bytes_]

_KEPT: Final = 1001
"""One more than any page has."""
_AT_A_TIME: Final = 8
"""So many shards' indexes are held encoded."""
_ID: Final = re.compile(rb"[0-9]*")
_BEHIND_DIGITS: Final = b":"


class Named(NamedTuple):
    """Chunks by the texts of their ids, which rise."""

    texts: Texts
    places: NDArray[np.uint64]
    """Where each begins and ends."""
    owners: NDArray[np.int64]
    """Which of the shards holds each."""


@dataclass(frozen=True, slots=True)
class IdWalk:
    """Walks the chunks of *part*, and the fragments that manifests tell of."""

    part: Part
    beside: Sequence[Part]
    """All parts in the same directory: a name is of the first that takes it."""
    shards: PrecomputedShards
    fetch: Fetch

    async def __call__(self, wanted: Wanted, means: Means) -> AsyncIterator[Item | Candidate]:
        """Give the wanted keys; see `Walk`."""
        lead = self.shards.prefix
        rest = wanted.rest(lead).encode()
        if not wanted.meets(lead) or rest[:1] >= _BEHIND_DIGITS:
            return
        numbers = sorted(await self.shards.stored(means.look))
        shards = [self.shards.numbered(number) for number in numbers]
        low, is_after = self._low(rest), False
        while True:
            named, wholes = await self._first(shards, low, means, is_after=is_after)
            for text, (start, stop), owner in zip(*map(np.ndarray.tolist, named), strict=True):
                whole = wholes[owner]
                place = whole._replace(byte_range=ByteRange(start, stop))
                for item in self._items(lead, text.decode(), place):
                    yield item
                if not wanted.meets(lead):
                    return
            if len(named.texts) < _KEPT:
                return
            low, is_after = bytes(named.texts[-1]), True

    def _items(self, lead: str, text: str, place: Stored) -> Iterator[Item | Candidate]:
        """Give the keys of one id."""
        part = self.part
        if part.kind is Kind.MANIFESTS and self._owner(text) is Kind.FRAGMENTS:
            yield Candidate(lead + text, text)
        name = text + part.names.suffix if isinstance(part.names, IdNames) else text
        if self._owner(name) is part.kind:
            yield Item(lead + name, Gzipped(place) if part.sharding.is_data_gzip else place)

    def _owner(self, name: str) -> Kind | None:
        """Tell what *name* is taken for, if that is in these shards."""
        for part in self.beside:
            if part.names.parse(name) is not None:
                return part.kind if part.member is self.part.member else None
        return None

    def _low(self, rest: bytes) -> bytes:
        """Find the first text of an id whose keys may be *rest* or come behind it."""
        if not isinstance(self.part.names, IdNames):
            return rest
        found = _ID.match(rest)
        digits = found[0] if found else b""
        return digits + _BEHIND_DIGITS if rest[len(digits) :][:1] >= _BEHIND_DIGITS else digits

    async def _first(
        self, shards: Sequence[PrecomputedShard], low: bytes, means: Means, *, is_after: bool
    ) -> tuple[Named, list[Stored]]:
        """Read all indexes, and keep the first chunks from *low* on, or behind it."""
        kept = Named(np.empty(0, "S1"), np.empty((0, 2), np.uint64), np.empty(0, np.int64))
        wholes: list[Stored] = []

        async def read(shard: PrecomputedShard) -> PrecomputedSurvey | None:
            return await shard.survey(self.fetch)

        for some in batched(shards, _AT_A_TIME):
            for survey in await means.abreast(read, some):
                if survey is not None:
                    kept = await means.aside(self._keep, kept, survey, len(wholes), low, is_after)
                    wholes.append(survey.whole)
        return kept, wholes

    def _keep(
        self,
        kept: Named,
        survey: PrecomputedSurvey,
        owner: int,
        low: bytes,
        is_after: bool,  # noqa: FBT001  called in a thread
    ) -> Named:
        ids, places = survey.columns()
        texts = self._texts(ids)
        wanted = texts > low if is_after else texts >= low
        texts, places = texts[wanted], places[wanted]
        owners = np.full(len(texts), owner, np.int64)
        texts = np.concatenate([kept.texts, texts])
        order = np.argsort(texts, kind="stable")[:_KEPT]
        return Named(
            texts[order],
            np.concatenate([kept.places, places])[order],
            np.concatenate([kept.owners, owners])[order],
        )

    def _texts(self, ids: NDArray[np.uint64]) -> Texts:
        if isinstance(self.part.names, IdNames):
            return ids.astype("S20")
        spelled = [self.part.names.format(each).encode() for each in ids.tolist()]
        return np.array(spelled, "S") if spelled else np.empty(0, "S1")
