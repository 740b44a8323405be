"""All that can be read, compared after each step."""

from hypothesis.stateful import invariant

from tests.clients.icechunk.model import agreeing
from tests.clients.icechunk.model.state import State, quoted
from tests.clients.icechunk.model.writers import Replica


class Comparison(State):
    """Reads through the service and with the library."""

    @invariant()
    def agree(self) -> None:
        """Compare all that can be read, by the library and through the service, with the model."""
        found = {name: self.repo.lookup_branch(name) for name in self.repo.list_branches()}
        assert found == self.branches
        found = {name: self.repo.lookup_tag(name) for name in self.repo.list_tags()}
        assert found == self.tags
        self._agree(self.replicas[0])
        if self.wrote == 1:
            self._agree(self.replicas[1])
        self.wrote = None

    def teardown(self) -> None:
        """Leave nothing open."""
        for begun in self.begun:
            self.replicas[0].send("DELETE", f"/sessions/{begun.session}")

    def _agree(self, replica: Replica) -> None:
        told = {
            kind: {each["name"]: each["snapshot_id"] for each in replica.tell(f"/{kind}")[kind]}
            for kind in ("branches", "tags")
        }
        assert told == {"branches": self.branches, "tags": self.tags}
        assert set(replica.tell("/tags")["deleted"]) == self.deleted
        kinds = agreeing.compare_operations(replica, self.repo)
        assert kinds == self.kinds[::-1]
        refs = self._refs()
        contents = {at: self._content(at) for at in set(refs.values())}
        for ref, snapshot_id in refs.items():
            tree, expected = self.commits[snapshot_id].tree, contents[snapshot_id]
            content = agreeing.by_service(replica, ref, tree, listed=True)
            agreeing.compare_tree(content, tree)
            for key, data in content.items():
                assert key == "zarr.json" or data == expected[key], (ref, key)
        for name, tip in self.branches.items():
            ancestry = list(self.repo.ancestry(branch=name))
            assert [each.id for each in ancestry] == self._ancestors(tip)
            agreeing.compare_history(replica, f"@branch.{quoted(name)}", ancestry)

    def _content(self, snapshot_id: str) -> agreeing.Content:
        """Read a snapshot with the library."""
        tree = self.commits[snapshot_id].tree
        session = self.repo.readonly_session(snapshot_id=snapshot_id)
        content = agreeing.by_library(session, tree)
        agreeing.compare_tree(content, tree)
        return content

    def _refs(self) -> dict[str, str]:
        branches = {f"@branch.{quoted(at)}": tip for at, tip in self.branches.items()}
        tags = {f"@tag.{quoted(at)}": snapshot for at, snapshot in self.tags.items()}
        named = {*self.branches.values(), *self.tags.values()}
        others = [each for each in self.commits if each not in named][-2:]
        return branches | tags | {f"@{each}": each for each in others}
