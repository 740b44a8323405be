"""Branches and tags of the model."""

from hypothesis import strategies as st
from hypothesis.stateful import rule

from tests.clients.icechunk.model.state import (
    ABSENT_ID,
    BY,
    LIBRARY,
    NAMES_OF_BRANCHES,
    NUMBER,
    SELDOM,
    State,
    choose,
    quoted,
)


class Refs(State):
    """Makes branches and tags, and takes them away."""

    @rule(what=st.sampled_from(["create", "reset", "delete"]), name=NAMES_OF_BRANCHES, at=NUMBER,
          by=BY, is_late=SELDOM)  # fmt: skip
    def change_branch(self, what: str, name: str, at: int, by: int, *, is_late: bool) -> None:
        """Make a branch, put it elsewhere, or take it away, but never ``main``."""
        snapshot_id = choose(list(self.commits), at)
        match what:
            case "create":
                self._create_branch(name, snapshot_id, by)
            case "reset" if name in self.branches:
                self._reset_branch(name, snapshot_id, by, is_late=is_late)
            case "delete" if name in self.branches:
                self._delete_branch(name, by)

    @rule(what=st.sampled_from(["create", "delete"]), name=st.sampled_from(["v1", "v 2", "x"]),
          at=NUMBER, by=BY)  # fmt: skip
    def change_tag(self, what: str, name: str, at: int, by: int) -> None:
        """Make a tag, once, or take it away."""
        if what == "create":
            self._create_tag(name, choose(list(self.commits), at), by)
        elif name in self.tags:
            self._delete_tag(name, by)

    def _create_branch(self, name: str, snapshot_id: str, by: int) -> None:
        is_new = name not in self.branches
        if by != LIBRARY:
            body = {"name": name, "snapshot_id": snapshot_id}
            answer = self.replicas[by].send("POST", "/branches", body)
            assert answer.status_code == (201 if is_new else 409), answer.text
        elif is_new:
            self.repo.create_branch(name, snapshot_id)
        if is_new:
            self.branches[name] = snapshot_id
            self._did("branch_created", by)

    def _reset_branch(self, name: str, snapshot_id: str, by: int, *, is_late: bool) -> None:
        tip = ABSENT_ID if is_late else self.branches[name]
        if by != LIBRARY:
            route, body = f"/branches/{quoted(name)}", {"snapshot_id": snapshot_id}
            answer = self.replicas[by].send("PUT", route, body, if_match=f'"{tip}"')
            assert answer.status_code == (412 if is_late else 200), answer.text
        elif not is_late:
            self.repo.reset_branch(name, snapshot_id)
        if not is_late:
            self.branches[name] = snapshot_id
            self._did("branch_reset", by)

    def _delete_branch(self, name: str, by: int) -> None:
        is_main = name == "main"
        if by != LIBRARY:
            answer = self.replicas[by].send("DELETE", f"/branches/{quoted(name)}")
            assert answer.status_code == (409 if is_main else 204), answer.text
        elif not is_main:
            self.repo.delete_branch(name)
        if not is_main:
            del self.branches[name]
            self._did("branch_deleted", by)

    def _create_tag(self, name: str, snapshot_id: str, by: int) -> None:
        is_new = name not in self.tags and name not in self.deleted
        if by != LIBRARY:
            body = {"name": name, "snapshot_id": snapshot_id}
            answer = self.replicas[by].send("POST", "/tags", body)
            assert answer.status_code == (201 if is_new else 409), answer.text
        elif is_new:
            self.repo.create_tag(name, snapshot_id)
        if is_new:
            self.tags[name] = snapshot_id
            self._did("tag_created", by)

    def _delete_tag(self, name: str, by: int) -> None:
        if by != LIBRARY:
            answer = self.replicas[by].send("DELETE", f"/tags/{quoted(name)}")
            assert answer.status_code == 204, answer.text
        else:
            self.repo.delete_tag(name)
        del self.tags[name]
        self.deleted.add(name)
        self._did("tag_deleted", by)
