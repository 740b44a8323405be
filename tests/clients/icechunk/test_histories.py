"""Sessions of the service decide as those of the library, whatever happens before the commit."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from shardgate.settings import DatasetSettings, Settings
from tests.support.clients.icechunk.histories import (
    COPY,
    EVENT,
    OURS,
    STEP,
    Decision,
    ServiceSession,
    Step,
    content,
    create,
    decide,
    edit,
    happen,
)
from tests.support.serving import client_of

POLICIES: Final = ("fail", "ours", "theirs")
STRICTER: Final = frozenset(
    {
        "parent_not_in_history",
        "chunks_updated_in_updated_array",
        "delete_of_updated_group",
        "new_node_conflicts_with_existing_node",
        "new_node_in_invalid_group",
    }
)
"""Kinds of conflicts where the library may commit; see docs/icechunk.md."""
UNDONE: Final = frozenset(
    {
        "delete_of_updated_array",
        "delete_of_updated_group",
        "new_node_conflicts_with_existing_node",
    }
)
"""Kinds that the library finds in one commit, though a later one deleted the node."""

type Events = Sequence[tuple[str, Sequence[Step]]]


@dataclass(frozen=True)
class Lab:
    """A service in front of a folder of repositories."""

    folder: Path
    client: httpx.Client

    def both(self, policy: str, steps: Sequence[Step], events: Events) -> tuple[Decision, Decision]:
        """Return the decisions of service and library on *steps*, made before *events*."""
        name = uuid4().hex
        repo = create(self.folder / name)
        session, by_service = repo.writable_session(COPY), ServiceSession.begin(self.client, name)
        by_service.send(edit(session, steps, content(repo, OURS)))
        for what, theirs in events:
            happen(repo, what, theirs)
        return by_service.commit(repo, policy), decide(repo, session, policy)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Generator[Lab]:
    """Serve a folder."""
    folder = tmp_path_factory.mktemp("histories")
    datasets = {"data": DatasetSettings(url=folder.as_uri(), writable=True)}
    with client_of(Settings(datasets=datasets)) as client:
        yield Lab(folder, client)


def compare(lab: Lab, policy: str, steps: Sequence[Step], events: Events) -> None:
    """Assert that both decide alike, but where the service is stricter."""
    ours, library = lab.both(policy, steps, events)
    if ours.kinds and not library.kinds:
        assert ours.kinds & STRICTER
    elif library.kinds and not ours.kinds:  # a later commit deleted the node
        assert library.kinds <= UNDONE
        assert len(events) > 1
    if not ours.kinds | library.kinds:
        assert ours.content == library.content


@pytest.mark.parametrize(
    "examples", [5, pytest.param(600, marks=pytest.mark.soak)], ids=["few", "many"]
)
def test_random_histories_end_as_with_the_library(lab: Lab, examples: int) -> None:
    """A session commits, or conflicts, as one of the library with the same changes does."""

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        st.sampled_from(POLICIES),
        st.lists(STEP, min_size=1, max_size=5),
        st.lists(EVENT, max_size=3),
    )
    # An array that we delete was made anew in its place, and written.
    @example("fail", [Step("remove", 2, 0)], [("commit", [Step("reshape", 0, 0)])])
    def check(policy: str, steps: list[Step], events: Any) -> None:
        compare(lab, policy, steps, events)

    check()


_ABSENT: Final = Step("erase", 0, 3)
_WRITE: Final = ("commit", [Step("write", 0, 3)])
_NOTE: Final = ("commit", [Step("note", 2, 1)])
_REGRID: Final = [Step("regrid", 2, 0), Step("regrid", 2, 3)]
"""A rectilinear array loses all chunks but the first, and gets them back."""


@pytest.mark.parametrize(
    ("steps", "event", "kinds"),
    [
        ([_ABSENT], _WRITE, {"chunk_double_update"}),
        ([Step("write", 0, 3), _ABSENT], _WRITE, {"chunk_double_update"}),
        ([Step("same", 0, 1)], ("commit", [Step("write", 0, 1)]), {"chunk_double_update"}),
        ([_ABSENT], ("shift", [Step("write", 0, 4)]), {"chunk_double_update"}),
        ([_ABSENT], _NOTE, {"chunks_updated_in_updated_array"}),
        ([Step("erase", 3, 3)], ("commit", [Step("erase", 3, 3)]), {"chunk_double_update"}),
        ([Step("note", 2, 1), Step("note", 2, 0)], _NOTE, {"zarr_metadata_double_update"}),
        ([Step("same note", 2, 0)], _NOTE, set()),
        ([Step("resize", 0, 1), Step("resize", 0, 4)], _NOTE, {"zarr_metadata_double_update"}),
        ([Step("resize", 2, 1), Step("resize", 2, 4)], ("commit", [Step("write", 2, 3)]), set()),
        ([Step("remake", 2, 0)], _WRITE, {"delete_of_updated_array"}),
        ([Step("remake", 2, 0), Step("remove", 2, 0)], _WRITE, {"delete_of_updated_array"}),
        ([Step("remake", 0, 0)], ("commit", [Step("write", 1, 3)]), {"delete_of_updated_array"}),
        ([Step("reshape", 0, 2)], _WRITE, {"delete_of_updated_array"}),
        ([_ABSENT, Step("clear", 0, 0)], _WRITE, {"chunk_double_update"}),
        ([Step("clear", 0, 0)], _WRITE, set()),
        (_REGRID, ("commit", [Step("write", 2, 3)]), set()),
        ([Step("erase", 2, 3)], ("commit", _REGRID), {"chunks_updated_in_updated_array"}),
        ([Step("create", 4, 0), Step("remove", 4, 0)], ("commit", [Step("create", 4, 0)]), set()),
    ],
)
def test_session_conflicts_by_all_that_was_done_in_it(
    lab: Lab, steps: list[Step], event: tuple[str, list[Step]], kinds: set[str]
) -> None:
    """A session conflicts as the library's by writes that leave the parent as it is."""
    ours, library = lab.both("fail", steps, [event])

    assert ours.kinds == library.kinds == kinds
    assert not kinds or ours.content.keys() == library.content.keys()


@pytest.mark.parametrize("policy", ["ours", "theirs"])
def test_policy_decides_on_a_deletion_of_an_absent_chunk(lab: Lab, policy: str) -> None:
    """The deletion of an absent chunk wins with ``ours``, and yields with ``theirs``."""
    ours, library = lab.both(policy, [_ABSENT], [_WRITE])

    assert not ours.kinds | library.kinds
    assert ("a/c/3" in ours.content) == ("a/c/3" in library.content) == (policy == "theirs")
