"""Stores of `zarr.json` documents."""

import json
from typing import Any, Final

from shardgate.storage.memory import MemoryStore
from tests.support.formats.zarr.building import LITTLE, array_metadata
from tests.support.resolving import ROOT

ARRAY: Final = array_metadata([4, 6], [2, 3], [LITTLE])


def filled[S: MemoryStore](store: S, **documents: Any) -> S:
    """Store ``zarr.json`` documents in folders."""
    for path, document in documents.items():
        key = f"{path.strip('_').replace('__', '/')}/zarr.json".lstrip("/")
        store.place(ROOT.join(key), json.dumps(document).encode())
    return store
