"""Snapshots expire as they do in the library."""

import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.formats.icechunk.expiring import Expiring, plan_expiration
from app.formats.icechunk.fields import EPOCH
from app.formats.icechunk.moments import moment_after
from app.formats.icechunk.ops_log_writing import newest_us
from app.formats.icechunk.repo_changes import ExpirationRan
from app.formats.icechunk.repo_writing import rewrite_repo
from tests.formats.icechunk.histories import (
    STEPS,
    History,
    Step,
    copied,
    info_of,
    opened,
    told_of,
    written_at,
)

_MICROSECOND = timedelta(microseconds=1)


def _expire(folder: Path, expiring: Expiring) -> ExpirationRan:
    info = info_of(folder)
    change = plan_expiration(info, expiring)
    newest = newest_us(info.root())
    backup = "repo.30708361837061.1PNJFB71M8T88VJQEZ30"
    data = rewrite_repo(info, change, moment_after(newest, newest), backup)
    (folder / "overwritten" / backup).write_bytes((folder / "repo").read_bytes())
    (folder / "repo").write_bytes(data)
    return change


@settings(max_examples=40)
@given(
    steps=STEPS,
    number=st.integers(0, 99),
    after=st.booleans(),
    branches=st.booleans(),
    tags=st.booleans(),
)
def test_what_expires_is_what_the_library_lets_expire(
    steps: Sequence[Step], number: int, *, after: bool, branches: bool, tags: bool
) -> None:
    """Whatever was done before, ``repo`` becomes what the library makes of it."""
    with tempfile.TemporaryDirectory() as folder:
        history = History(Path(folder) / "repository")
        history.take(steps)
        times = written_at(history.folder)
        limit = times[number % len(times)] + after * _MICROSECOND
        ours, theirs = copied(history.folder, "ours"), copied(history.folder, "theirs")

        _expire(ours, Expiring((limit - EPOCH) // _MICROSECOND, branches, tags))
        opened(theirs).expire_snapshots(
            limit, delete_expired_branches=branches, delete_expired_tags=tags
        )

        assert told_of(ours) == told_of(theirs)


def test_expired_snapshots_can_expire_again(tmp_path: Path) -> None:
    """Nothing more is lost where the limit is the same."""
    history = History(tmp_path / "repository")
    history.take([Step("commit", "main", number) for number in range(6)])
    limit_us = (written_at(history.folder)[4] - EPOCH) // _MICROSECOND
    first = _expire(history.folder, Expiring(limit_us))
    (tmp_path / "repository" / "overwritten").joinpath("x").write_bytes(b"")

    again = plan_expiration(info_of(history.folder), Expiring(limit_us))

    assert len(first.dropped) == 3
    assert not again.dropped
    assert not again.reparented


@pytest.mark.parametrize("flag", ["branches", "tags"])
def test_main_and_the_first_snapshot_stay(tmp_path: Path, flag: str) -> None:
    """However old they are."""
    history = History(tmp_path / "repository")
    info = info_of(history.folder)
    tip = info.branches["main"]

    change = plan_expiration(info, Expiring(2**62, **{flag: True}))

    assert not change.dropped
    assert not change.deleted_branches
    assert info.snapshot(tip) is not None
