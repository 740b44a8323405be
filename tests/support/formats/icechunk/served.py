"""Repositories in a watched store, read by virtual key."""

from collections.abc import Mapping

from shardgate.formats.icechunk.layout import Icechunk, RepositoryLayout
from shardgate.formats.references import Allowed, parse_prefix
from shardgate.model import ObjectRef, Referenced
from tests.support.formats.case import Container
from tests.support.formats.zarr.building import LITTLE, array_metadata

TTL_S = 60.0
LINE = array_metadata([8], [2], [LITTLE])
"""Metadata of an array of four chunks."""
ARCHIVE = ObjectRef("memory://archive", "era5")
DATA = b"0123456789"
SECRET = b"what may not be read"
ALLOWED = (
    Allowed(parse_prefix("s3://archive/era5/"), ARCHIVE),
    Allowed(parse_prefix("s3://archive/era5/inner/"), ObjectRef("memory://inner", "")),
)


class Served(Container):
    """A repository beside an archive that it may refer to, with a clock set by hand."""

    def __init__(self, objects: Mapping[str, bytes], limit_nbytes: int = 2**20) -> None:
        formats = (Icechunk(limit_nbytes, 2**20, ALLOWED),)
        super().__init__(objects, formats=formats, ttl_s=TTL_S, chunk_bytes=0)
        self.etag = self.store.place(ARCHIVE.join("a.nc"), DATA, modified_s=1000)
        self.store.place(ObjectRef("memory://inner", "b.nc"), DATA[::-1])
        for bucket in ("memory://archive", "memory://bucket"):
            for key in ("secret", "a.nc"):
                self.store.place(ObjectRef(bucket, key), SECRET)

    async def open(self) -> RepositoryLayout:
        """Open the repository."""
        found = await super().open()
        assert isinstance(found, RepositoryLayout)
        return found

    async def locate(self, key: str) -> Referenced:
        """Locate *key*, which must exist."""
        found = await super().locate(key)
        assert isinstance(found, Referenced)
        return found
