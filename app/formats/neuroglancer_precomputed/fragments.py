"""How long the fragments before each mesh manifest of a shard are: only the manifests tell."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from app.errors import DamagedError, VersionChangedError
from app.formats.neuroglancer_precomputed.coalescing import coalesce
from app.formats.neuroglancer_precomputed.mesh import ManifestDecoder
from app.formats.neuroglancer_precomputed.minishards import Numbers
from app.formats.neuroglancer_precomputed.survey import PrecomputedShard
from app.formats.reading import Fetch, Read
from app.model import ByteRange, ObjectRef, Version


@dataclass(frozen=True, slots=True)
class FragmentSizes:
    """Of each of some manifests, how many bytes of fragments lie before it, as int64."""

    data: bytes

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the sizes hold, and the places in the read that brought them."""
        return 3 * len(self.data)

    @property
    def sizes(self) -> Numbers:
        """The sizes."""
        return np.frombuffer(self.data, np.int64)


@dataclass(frozen=True, slots=True)
class ManifestsDecoder:
    """Decodes many manifests at once, of which no more is kept than `FragmentSizes`."""

    places: bytes
    """Where each begins and ends, as int64."""
    decode: ManifestDecoder

    def __call__(self, data: bytes) -> FragmentSizes:
        """Add the sizes of the fragments of each up.

        Raises: `DecodeError`.
        """
        places = np.frombuffer(self.places, np.int64).reshape(-1, 2).tolist()
        sizes = [self.decode(data[start:stop]).fragments_nbytes for start, stop in places]
        return FragmentSizes(np.array(sizes, np.int64).tobytes())


class ManifestReads(NamedTuple):
    """How manifests at *starts* to *stops*, which rise, are read: neighbours together."""

    ref: ObjectRef
    starts: Numbers
    stops: Numbers
    decode: ManifestDecoder

    @classmethod
    def of(cls, shard: PrecomputedShard, starts: Numbers, stops: Numbers) -> Self:
        """Describe the reads of *shard*.

        Raises: `DamagedError` for a manifest that is too long.
        """
        longest = int((stops - starts).max(initial=0))
        if longest > shard.most_nbytes:
            raise DamagedError(
                shard.ref, f"a manifest of {longest} bytes, over {shard.most_nbytes}"
            )
        decode = ManifestDecoder(shard.part.sharding.is_data_gzip, shard.most_nbytes)
        return cls(shard.ref, starts, stops, decode)

    def each(self) -> Iterator[tuple[slice, Read[FragmentSizes]]]:
        """Give the reads, of any version, each with the manifests that it is of."""
        for at in coalesce(self.starts, self.stops):
            start, stop = int(self.starts[at][0]), int(self.stops[at].max())
            inside = np.column_stack([self.starts[at], self.stops[at]]) - start
            decode = ManifestsDecoder(inside.tobytes(), self.decode)
            yield at, Read("mesh-manifest", self.ref, ByteRange(start, stop), decode)

    async def perform(self, version: Version, fetch: Fetch) -> Numbers:
        """Read all manifests of *version*; tell how long the fragments of each are.

        Raises: `DamagedError`, `VersionChangedError`.
        """
        sizes = np.zeros(len(self.starts), np.int64)
        for at, read in self.each():
            if (found := await fetch(read._replace(version=version))) is None:
                raise VersionChangedError(self.ref)
            sizes[at] = found.value.sizes
        return sizes
