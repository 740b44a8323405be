"""Expiration and garbage collection by the library, while the service runs."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from hypothesis import strategies as st
from hypothesis.stateful import rule
from typer.testing import CliRunner

from app.cli import app
from tests.clients.icechunk.model import agreeing
from tests.clients.icechunk.model.state import NUMBER, SELDOM, State, choose


class Upkeep(State):
    """Lets what is old expire, and what is unused go."""

    @rule(
        at=NUMBER,
        branches=SELDOM,
        tags=SELDOM,
        what=st.sampled_from(["nothing", "nothing", "expire", "gc"]),
    )
    def keep_up(self, at: int, what: str, *, branches: bool, tags: bool) -> None:
        """Let snapshots expire, or collect the garbage; mostly do nothing."""
        match what:
            case "expire":
                self.repo.expire_snapshots(
                    self._moment(at), delete_expired_branches=branches, delete_expired_tags=tags
                )
                self._reload()
            case "gc":
                self._collect()

    def _moment(self, at: int) -> datetime:
        """Choose a time right after a snapshot."""
        info = self.repo.lookup_snapshot(choose(list(self.commits), at))
        return info.written_at + timedelta(microseconds=1)

    def _collect(self) -> None:
        """Collect all that nothing leads to, however young: so sessions end before."""
        for begun in self.begun:
            answer = self.replicas[0].send("DELETE", f"/sessions/{begun.session}")
            assert answer.status_code == 204, answer.text
        self.begun, self.begun_by_library = [], []
        self.repo.garbage_collect(datetime.now(UTC) + timedelta(seconds=2))
        self._reload()
        for branch in self.branches:
            done = CliRunner().invoke(
                app, ["verify", str(self.folder), "--ref", branch, "--chunks"]
            )
            assert done.exit_code == 0, (done.output, done.exception)

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
