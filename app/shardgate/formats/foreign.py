"""Files of formats that are served by reference sets only: what one is, and what to do with it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from shardgate.errors import DamagedError
from shardgate.formats.members import Members
from shardgate.formats.reading import Fetch, Opaque, Read
from shardgate.model import ByteRange, ObjectRef

FILE_SUFFIXES: Final = (
    ".nc", ".nc4", ".cdf", ".h5", ".hdf5", ".hdf", ".he5", ".tif", ".tiff", ".grib", ".grib2",
)  # fmt: skip
"""Usual ends of their names, in small letters."""
BEGIN_NBYTES: Final = 8
"""First bytes of a file that tell its format."""
_FORMATS: Final[Mapping[bytes, str]] = {
    b"\x89HDF\r\n\x1a\n": "an HDF5 file, as those of NetCDF-4 are",
    b"CDF\x01": "a classic NetCDF file",
    b"CDF\x02": "a classic NetCDF file",
    b"CDF\x05": "a classic NetCDF file",
    b"II*\x00": "a TIFF file",
    b"MM\x00*": "a TIFF file",
    b"II+\x00": "a BigTIFF file",
    b"MM\x00+": "a BigTIFF file",
    b"GRIB": "a GRIB file",
}


def explain_file(begin: bytes) -> str:
    """Return what a file is that begins so, and what to do with it; empty if that is unknown."""
    for magic, name in _FORMATS.items():
        if begin.startswith(magic):
            return f"{name}: make a reference set of it, and serve that (docs/netcdf.md)"
    return ""


@dataclass(frozen=True, slots=True)
class ForeignFile:
    """Format of a *root* that is such a file: its keys fail, and say why."""

    root: ObjectRef

    @property
    def patterns(self) -> Sequence[str]:
        return ()

    def is_container(self, _: str) -> bool:
        return False

    async def open(self, ref: ObjectRef, fetch: Fetch) -> Members | None:
        if ref != self.root:
            return None
        request = ByteRange(0, BEGIN_NBYTES)
        found = await fetch(Read("metadata", ref, request, Opaque, is_marker=True))
        if found is not None and (reason := explain_file(found.value.data)):
            raise DamagedError(ref, f"is {reason}")
        return None
