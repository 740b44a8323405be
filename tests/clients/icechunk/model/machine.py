"""All that can be done to a repository, by the service and by the library."""

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from tests.clients.icechunk.model import agreeing
from tests.clients.icechunk.model.comparison import Comparison
from tests.clients.icechunk.model.making import Making
from tests.clients.icechunk.model.refs import Refs
from tests.clients.icechunk.model.state import (
    BY,
    LIBRARY,
    NUMBER,
    POLICIES,
    REPLICA,
    SELDOM,
    Begun,
    choose,
)
from tests.clients.icechunk.model.trees import FEW, MOVES, STEPS, Step
from tests.clients.icechunk.model.upkeep import Upkeep
from tests.clients.icechunk.model.writers import edit_by_library


class Repository(Making, Refs, Upkeep, Comparison):
    """Changes one repository, and compares all that can be read of it after each step."""

    @rule(where=NUMBER, back=st.sampled_from([0, 0, 0, 1, 2, 3]), steps=STEPS, by=REPLICA,
          policy=POLICIES, amend=SELDOM)  # fmt: skip
    def commit_at_once(
        self, where: int, back: int, steps: list[Step], by: int, policy: str, *, amend: bool
    ) -> None:
        """Commit without a session, maybe against a parent that others have gone on from."""
        begun = self._begin(where, back)
        begun.draft.take(steps)
        self._commit_at_once(begun, by, policy, amend=self._amends(begun, amend=amend))

    @rule(where=NUMBER, steps=STEPS, amend=SELDOM)
    def commit_by_library(self, where: int, steps: list[Step], *, amend: bool) -> None:
        """Let the library commit."""
        begun = self._begin(where, 0)
        self._take_by_library(begun, steps)
        self._commit_by_library(begun, amend=self._amends(begun, amend=amend))

    @rule(where=NUMBER, steps=MOVES, amend=SELDOM)
    def move_by_library(self, where: int, steps: list[Step], *, amend: bool) -> None:
        """Let the library move nodes."""
        begun = self._begin(where, 0)
        begun.is_moving = True
        self._take_by_library(begun, steps)
        if begun.draft.edits:
            self._commit_by_library(begun, amend=self._amends(begun, amend=amend))

    @rule(where=NUMBER, steps=STEPS, by=REPLICA)
    def begin(self, where: int, steps: list[Step], by: int) -> None:
        """Begin a session of the service."""
        begun = self._begin(where, 0)
        told = self.replicas[0].begin(begun.branch)
        assert told["parent_id"] == begun.parent_id
        begun.session = told["session_id"]
        self.begun.append(begun)
        self._edit_session(begun, steps, by)

    @precondition(lambda self: self.begun)
    @rule(which=NUMBER, steps=STEPS, by=REPLICA)
    def go_on(self, which: int, steps: list[Step], by: int) -> None:
        """Write more to a session."""
        self._edit_session(choose(self.begun, which), steps, by)

    @precondition(lambda self: self.begun)
    @rule(which=NUMBER, by=REPLICA, policy=POLICIES, amend=SELDOM)
    def commit_session(self, which: int, by: int, policy: str, *, amend: bool) -> None:
        """Commit a session; one that does not go together with what others did stays open."""
        begun = choose(self.begun, which)
        if self._commit_session(begun, by, policy, amend=self._amends(begun, amend=amend)):
            self.begun.remove(begun)

    @rule(where=NUMBER, steps=STEPS | MOVES)
    def begin_by_library(self, where: int, steps: list[Step]) -> None:
        """Begin a session of the library."""
        begun = self._begin(where, 0)
        begun.is_moving = steps[0].what == "move"
        self._take_by_library(begun, steps)
        self.begun_by_library.append(begun)

    @precondition(lambda self: self.begun_by_library)
    @rule(which=NUMBER, policy=POLICIES)
    def rebase_by_library(self, which: int, policy: str) -> None:
        """Let the library put its session on top of what was committed since, if that can be."""
        begun = choose(self.begun_by_library, which)
        self.begun_by_library.remove(begun)
        self._rebase_by_library(begun, policy)

    @rule(where=NUMBER, first=BY, theirs=FEW, by=BY, ours=FEW | MOVES, policy=POLICIES,
          in_session=st.booleans())  # fmt: skip
    def overtake(  # noqa: PLR0917 - what is drawn
        self, where: int, first: int, theirs: list[Step], by: int, ours: list[Step], policy: str,
        *, in_session: bool
    ) -> None:  # fmt: skip
        """Make changes, and commit them after another one has committed; the library may move."""
        if ours[0].what == "move" and by != LIBRARY:
            return
        begun, other = self._begin(where, 0), self._begin(where, 0)
        begun.is_moving = ours[0].what == "move"
        if by == LIBRARY:
            self._take_by_library(begun, ours)
        elif in_session:
            begun.session = self.replicas[by].begin(begun.branch)["session_id"]
            self._edit_session(begun, ours, by)
        else:
            begun.draft.take(ours)
        if first == LIBRARY:
            self._take_by_library(other, theirs)
            self._commit_by_library(other, amend=False)
        else:
            other.draft.take(theirs)
            self._commit_at_once(other, first, "fail", amend=False)
        if by == LIBRARY:
            self._rebase_by_library(begun, policy)
        elif begun.session is not None:
            if not self._commit_session(begun, by, policy, amend=False):
                self.begun.append(begun)
        elif begun.draft.edits:
            self._commit_at_once(begun, by, policy, amend=False)

    def _take_by_library(self, begun: Begun, steps: list[Step]) -> None:
        begin = self.repo.rearrange_session if begun.is_moving else self.repo.writable_session
        begun.session = begin(begun.branch)
        edit_by_library(begun.session, begun.draft.take(steps))

    def _commit_session(self, begun: Begun, by: int, policy: str, *, amend: bool) -> bool:
        """Commit a session, and tell whether that was done; if so, ask again."""
        touched = begun.touched(is_session=True)
        expected = self._expect(begun, policy, touched, amend=amend)
        options = {"on_conflict": policy, "amend": amend, "allow_empty": True}
        answer = self.replicas[by].commit_session(begun.session, message=self._message(), **options)
        self._settle(begun, answer, expected, by, amend=amend)
        if expected is None:
            return False
        again = self.replicas[1 - by].commit_session(begun.session, message="again")
        assert again.json() == answer.json()
        return True

    def _edit_session(self, begun: Begun, steps: list[Step], by: int) -> None:
        self.replicas[by].edit_session(begun.session, begun.draft.take(steps))
        tree = begun.draft.after
        for replica in self.replicas:
            content = agreeing.by_service(replica, f"@session.{begun.session}", tree, listed=True)
            agreeing.compare_tree(content, tree)
