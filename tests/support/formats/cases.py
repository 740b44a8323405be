"""The containers of all formats."""

import importlib
from collections.abc import Iterator
from pathlib import Path

import shardgate.formats
from tests.support.formats.case import Case

FOLDERS = sorted(
    path.name
    for path in Path(shardgate.formats.__path__[0]).iterdir()
    if path.is_dir() and not path.name.startswith("_")
)


def _cases() -> Iterator[Case]:
    for folder in FOLDERS:
        yield from importlib.import_module(f"tests.support.formats.{folder}.case").CASES


CASES = list(_cases())
