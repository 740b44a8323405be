"""Whether anybody may have collected garbage, as the operations of the real library tell."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from app.formats.icechunk.collecting import may_have_collected
from app.formats.icechunk.repo_info import RepoInfoDecoder
from tests.writable_repositories import new_place

HOUR = timedelta(hours=1)


@pytest.mark.parametrize("is_collected", [False, True])
@pytest.mark.parametrize(("most", "is_told"), [(1000, True), (2, False)])
def test_what_is_not_told_may_have_been(
    tmp_path: Path, most: int, *, is_told: bool, is_collected: bool
) -> None:
    """Where few operations are kept in the file older ones are in others."""
    place = new_place(tmp_path)
    repo = place.create(num_updates_per_repo_info_file=most)
    if is_collected:
        repo.garbage_collect(datetime(2020, 1, 1, tzinfo=UTC))
    for name in "abc":
        repo.create_tag(name, repo.lookup_branch("main"))
    info = RepoInfoDecoder(2**20)((place.folder / "repo").read_bytes())

    assert may_have_collected(info, HOUR) == (is_collected or not is_told)
    assert not may_have_collected(info, timedelta(0))
