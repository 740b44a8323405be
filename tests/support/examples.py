"""The examples of the demo, as its command serves them."""

from collections.abc import Mapping
from pathlib import Path

from shardgate import demo
from shardgate.settings import DatasetSettings


def datasets_of(paths: Mapping[str, Path]) -> dict[str, DatasetSettings]:
    """Return the settings of examples at *paths*, all of them in one folder."""
    (folder,) = {path.parent for path in paths.values()}
    tables = demo.options(folder).tables({name: str(path) for name, path in paths.items()})
    return {name: DatasetSettings(**table) for name, table in tables["datasets"].items()}
