"""A repository with a virtual reference to an object beside it."""

from pathlib import Path
from typing import NamedTuple

from tests.support.files import write_files
from tests.support.formats.icechunk.building import Ref
from tests.support.formats.icechunk.building_repo import ref
from tests.support.formats.icechunk.repositories import lab


class VirtualLab(NamedTuple):
    """A repository, and the object ``x`` to which its chunk ``a/c/0`` refers."""

    folder: Path
    source: Path

    @property
    def prefix(self) -> str:
        """The prefix that allows the reference."""
        return self.source.parent.as_uri()


def virtual_lab(folder: Path) -> VirtualLab:
    """Write a repository with a tag, and the object beside it, below *folder*."""
    made = VirtualLab(folder / "lab.icechunk", folder / "beside" / "x")
    write_files({"x": b"...xy"}, made.source.parent)
    reference = Ref(index=[0], location=made.source.as_uri(), offset=3, length=2)
    write_files(lab(reference).build(tags=[ref("v 1", 0)]), made.folder)
    return made
