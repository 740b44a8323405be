"""Expiration and garbage collection of the model."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import icechunk
from hypothesis import strategies as st
from hypothesis.stateful import rule
from typer.testing import CliRunner

from app.cli import app
from tests.clients.icechunk.model import agreeing
from tests.clients.icechunk.model.state import NUMBER, SELDOM, State, choose
from tests.collecting import age


class Upkeep(State):
    """Lets what is old expire, and what is unused go."""

    @rule(
        at=NUMBER,
        branches=SELDOM,
        tags=SELDOM,
        what=st.sampled_from(["nothing", "nothing", "expire", "gc"]),
        by_library=st.booleans(),
    )
    def keep_up(self, at: int, what: str, *, branches: bool, tags: bool, by_library: bool) -> None:
        """Let snapshots expire, or collect the garbage; mostly do nothing."""
        match what, by_library:
            case "expire", True:
                _expire(self.repo, self._moment(at), branches=branches, tags=tags)
                self._reload()
            case "expire", False:
                self._expire(self._moment(at), branches=branches, tags=tags)
            case "gc", True:
                self._collect_by_library()
            case "gc", False:
                self._collect()

    def _moment(self, at: int) -> datetime:
        """Choose a time right after a snapshot."""
        info = self.repo.lookup_snapshot(choose(list(self.commits), at))
        return info.written_at + timedelta(microseconds=1)

    def _expire(self, moment: datetime, *, branches: bool, tags: bool) -> None:
        """Do by the command what the library does to a copy, unless a session needs more."""
        flags = ["--delete-expired-branches"] * branches + ["--delete-expired-tags"] * tags
        with _copied(self.folder) as copy:
            run("expire", self.folder, "--older-than", moment.isoformat(), "--execute", *flags)
            self._reload()
            if not self.begun:
                _expire(copy, moment, branches=branches, tags=tags)
                assert _left(copy) == _left(self.repo)

    def _collect_by_library(self) -> None:
        """Collect all that is old, which are all sessions too."""
        for begun in self.begun:
            answer = self.replicas[0].send("DELETE", f"/sessions/{begun.session}")
            assert answer.status_code == 204, answer.text
        self.begun, self.begun_by_library = [], []
        self.repo.garbage_collect(datetime.now(UTC) + timedelta(seconds=2))
        self._reload()

    def _collect(self) -> None:
        """Collect by the command, which leaves what sessions of the service need."""
        self.begun_by_library = []
        if not self.begun:
            age(self.folder)
        run("gc", self.folder, "--older-than", "0s", "--execute")
        self._reload()
        tips = [*self.branches.values(), *self.tags.values()]
        needed = {each for tip in tips for each in self._ancestors(tip)}
        if not self.begun:
            assert self.commits.keys() == needed
            names = {file.name for file in (self.folder / "snapshots").iterdir()}
            assert names == needed
        run("verify", self.folder, "--chunks")

    def _reload(self) -> None:
        """Take over what the library has left."""
        info = self.repo.inspect_repo_info()
        kept = {each["id"]: each.get("parent_id") for each in info["snapshots"]}
        assert kept.keys() <= self.commits.keys()
        self.commits = {
            at: replace(
                each, parent_id=kept[at], is_joined=each.is_joined or each.parent_id != kept[at]
            )
            for at, each in self.commits.items()
            if at in kept
        }
        branches, tags = info["branches"], info["tags"]
        assert branches.items() <= self.branches.items()
        assert tags.items() <= self.tags.items()
        self.deleted |= self.tags.keys() - tags.keys()
        self.branches, self.tags = dict(branches), dict(tags)
        known = len(self.kinds)
        kinds = [agreeing.kind_of(each) for each in self.repo.ops_log()][::-1]
        assert kinds[:known] == self.kinds
        self.kinds = kinds


def run(command: str, folder: Path, *arguments: str) -> None:
    """Run a command of ours, which must succeed."""
    done = CliRunner().invoke(app, [command, str(folder), *arguments])
    assert done.exit_code == 0, (done.output, done.exception)


@contextmanager
def _copied(folder: Path) -> Iterator[icechunk.Repository]:
    with TemporaryDirectory() as place:
        shutil.copytree(folder, f"{place}/copy")
        storage = icechunk.local_filesystem_storage(f"{place}/copy")
        yield icechunk.Repository.open(storage)


def _expire(repo: icechunk.Repository, moment: datetime, *, branches: bool, tags: bool) -> None:
    repo.expire_snapshots(moment, delete_expired_branches=branches, delete_expired_tags=tags)


def _left(repo: icechunk.Repository) -> dict[str, Any]:
    """Tell what expiration changes."""
    info = repo.inspect_repo_info()
    names = ("branches", "tags", "deleted_tags", "snapshots")
    return {name: info[name] for name in names}
