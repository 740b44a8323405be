"""Which tests each process of a run takes next."""

from pathlib import Path
from typing import Final

import pytest
from xdist.scheduler import LoadFileScheduling

_TESTS: Final = Path(__file__).parent
_FIRST: Final = (_TESTS, _TESTS / "viewers")
_TOGETHER: Final = ("tests/clients", "tests/clients/icechunk", "tests/clients/precomputed")


class ByFile(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """Keeps files together, and folders whose data take long to write."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        folder = file.rpartition("/")[0]
        return folder if folder in _TOGETHER else file


def turn(item: pytest.Item) -> bool:
    """Let files of the whole service and of browsers be first: some alone take a minute."""
    return item.path.parent not in _FIRST
