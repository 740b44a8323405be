"""The `neuroglancer` package reads the annotations of the service, and sees no shards."""

from itertools import product
from pathlib import Path
from typing import Any, Final

import pytest
from neuroglancer.read_precomputed_annotations import AnnotationReader

from tests.clients.conftest import from_each_store
from tests.clients.precomputed.annotations import COLLECTIONS, COUNT, LAST_ID, SEGMENTS
from tests.clients.precomputed.conftest import Written

ABSENT: Final = 2


def readers(service: str, written: Written, name: str) -> tuple[Any, Any]:
    """Open what is served, and the twin on disk."""
    path = Path("annotations") / name
    return (
        AnnotationReader(f"{service}/bucket/{path}/"),
        AnnotationReader(f"file://{written.twins / path}/"),
    )


def said(annotation: Any) -> str:
    """Spell all members out, so that annotations can be compared."""
    related = [list(map(int, ids)) for ids in annotation.segments or []]
    return f"{annotation.to_json()} {related}"


@from_each_store
@pytest.mark.parametrize("name", COLLECTIONS)
def test_annotations_by_id(service: str, written: Written, name: str) -> None:
    """Each annotation reads with its properties and relationships."""
    served, twin = readers(service, written, name)
    ids = [int(file.name) for file in (written.twins / f"annotations/{name}/by_id").iterdir()]

    assert len(ids) == COUNT
    assert LAST_ID in ids
    for number in ids:
        assert said(served.by_id[number]) == said(twin.by_id[number])
    with pytest.raises(KeyError):
        served.by_id[ABSENT]


@from_each_store
@pytest.mark.parametrize("name", COLLECTIONS)
def test_annotations_by_relationship(service: str, written: Written, name: str) -> None:
    """The annotations of each segment read, in their order."""
    served, twin = readers(service, written, name)

    assert list(served.relationships) == list(COLLECTIONS[name].relationships)
    for relationship in served.relationships:
        for segment in SEGMENTS:
            found, expected = (
                [said(a) for a in reader.relationships[relationship][segment]]
                for reader in (served, twin)
            )
            assert found == expected
        with pytest.raises(KeyError):
            served.relationships[relationship][ABSENT]


@from_each_store
@pytest.mark.parametrize("name", COLLECTIONS)
def test_annotations_by_cell(service: str, written: Written, name: str) -> None:
    """Each cell of each spatial level reads, or is absent as in the twin; none is lost."""
    served, twin = readers(service, written, name)
    seen = 0
    for level, grid in enumerate(COLLECTIONS[name].grids):
        for cell in product(*map(range, grid)):
            found, expected = (_in_cell(reader.spatial[level], cell) for reader in (served, twin))
            assert found == expected
            seen += len(found)

    assert seen == COUNT


def _in_cell(level: Any, cell: tuple[int, ...]) -> list[str]:
    return [said(a) for a in level[cell]] if cell in level else []
