"""Any run of changes by this service and by the library equals a model of dictionaries."""

import shutil
from datetime import UTC, datetime
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import icechunk
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from app.formats.icechunk.ids import decode_id, encode_id
from app.formats.icechunk.metadata_items import encode_metadata
from app.formats.icechunk.repo_info import Availability, SnapshotInfo
from app.formats.icechunk.repo_writer import (
    Amended,
    BranchCreated,
    BranchDeleted,
    BranchReset,
    NewCommit,
    RepoChange,
    StatusChanged,
    TagCreated,
    TagDeleted,
)
from tests.formats.icechunk.test_repo_writer import decode, do
from tests.repositories import ROOT_ID

NAMES = st.sampled_from(["a", "b", "é", "a/b", "🧊", "z" * 40])
METADATA = st.dictionaries(
    st.text(st.characters(codec="utf-8"), max_size=5),
    st.integers(-9, 2**64 - 1) | st.text(st.characters(codec="utf-8"), max_size=9) | st.none(),
    max_size=4,
)
_UPDATES = 3
IDS = st.binary(min_size=12, max_size=12)


def raw(text: str) -> bytes:
    """Decode an id."""
    found = decode_id(text)
    assert found is not None
    return found


class Changes(RuleBasedStateMachine):
    """Changes a repository in a folder."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(mkdtemp())
        storage = icechunk.local_filesystem_storage(str(self.folder))
        config = icechunk.RepositoryConfig(num_updates_per_repo_info_file=_UPDATES)
        self.repo = icechunk.Repository.create(storage, config=config)
        self.branches = {"main": ROOT_ID}
        self.tags: dict[str, str] = {}
        self.deleted: set[str] = set()
        root = {"__icechunk": {"is_root": True}}
        self.snapshots: dict[str, tuple[str | None, str, Any]] = {
            ROOT_ID: (None, "Repository initialized", root)
        }
        self.metadata: dict[str, Any] = {}
        self.is_moving = True
        self.operations = 1

    def teardown(self) -> None:
        """Leave nothing."""
        shutil.rmtree(self.folder)

    def change(self, change: RepoChange) -> None:
        """Do it as the service does."""
        self.repo = do(self.folder, change)
        self.operations += 1

    @rule(name=NAMES, data=st.data(), ours=st.booleans())
    def create_branch(self, name: str, data: st.DataObject, *, ours: bool) -> None:
        """Either of us makes a branch."""
        at = data.draw(st.sampled_from(sorted(self.snapshots)))
        if name in self.branches:
            return
        if ours:
            self.change(BranchCreated(name, raw(at)))
        else:
            self.repo.create_branch(name, at)
            self.operations += 1
        self.branches[name] = at

    @rule(data=st.data(), ours=st.booleans())
    def reset_branch(self, data: st.DataObject, *, ours: bool) -> None:
        """Either of us puts a branch elsewhere."""
        name = data.draw(st.sampled_from(sorted(self.branches)))
        at = data.draw(st.sampled_from(sorted(self.snapshots)))
        if ours:
            self.change(BranchReset(name, raw(at)))
        else:
            self.repo.reset_branch(name, at)
            self.operations += 1
        self.branches[name] = at

    @precondition(lambda self: len(self.branches) > 1)
    @rule(data=st.data(), ours=st.booleans())
    def delete_branch(self, data: st.DataObject, *, ours: bool) -> None:
        """Either of us takes a branch away."""
        name = data.draw(st.sampled_from(sorted(set(self.branches) - {"main"})))
        if ours:
            self.change(BranchDeleted(name))
        else:
            self.repo.delete_branch(name)
            self.operations += 1
        del self.branches[name]

    @rule(name=NAMES, data=st.data(), ours=st.booleans())
    def create_tag(self, name: str, data: st.DataObject, *, ours: bool) -> None:
        """Either of us makes a tag."""
        at = data.draw(st.sampled_from(sorted(self.snapshots)))
        if name in self.tags or name in self.deleted:
            return
        if ours:
            self.change(TagCreated(name, raw(at)))
        else:
            self.repo.create_tag(name, at)
            self.operations += 1
        self.tags[name] = at

    @precondition(lambda self: self.tags)
    @rule(data=st.data(), ours=st.booleans())
    def delete_tag(self, data: st.DataObject, *, ours: bool) -> None:
        """Either of us takes a tag away."""
        name = data.draw(st.sampled_from(sorted(self.tags)))
        if ours:
            self.change(TagDeleted(name))
        else:
            self.repo.delete_tag(name)
            self.operations += 1
        del self.tags[name]
        self.deleted.add(name)

    @rule(data=st.data(), object_id=IDS, message=st.text(max_size=9), metadata=METADATA)
    def commit(
        self, data: st.DataObject, object_id: bytes, message: str, metadata: dict[str, Any]
    ) -> None:
        """List a snapshot: on a branch, or in place of its tip."""
        if encode_id(object_id) in self.snapshots:
            return
        name = data.draw(st.sampled_from(sorted(self.branches)))
        is_amended = data.draw(st.booleans())
        tip = self.branches[name]
        parent = self.snapshots[tip][0] if is_amended else tip
        if parent is None:
            return
        moment = int(datetime.now(UTC).timestamp() * 1e6)
        new = SnapshotInfo(object_id, raw(parent), moment, message, encode_metadata(metadata))
        self.change(Amended(name, new) if is_amended else NewCommit(name, new))
        self.snapshots[encode_id(object_id)] = parent, message, metadata
        self.branches[name] = encode_id(object_id)

    @rule(metadata=METADATA)
    def set_metadata(self, metadata: dict[str, Any]) -> None:
        """Let the library say something of the repository."""
        self.repo.set_metadata(metadata)
        self.operations += 1
        self.metadata = metadata

    @rule(value=st.sampled_from([True, False, None]))
    def set_flag(self, value: bool | None) -> None:  # noqa: FBT001 - three values
        """Let the library allow moves, or forbid them."""
        self.repo.set_feature_flag("move_node", setting=value)
        self.operations += 1
        self.is_moving = value is not False

    @rule()
    def lock(self) -> None:
        """Let nobody write for a moment."""
        self.change(StatusChanged(Availability.READ_ONLY, "moment"))
        assert self.repo.get_status().limited_availability_reason == "moment"
        self.change(StatusChanged(Availability.ONLINE))

    @invariant()
    def agree(self) -> None:
        """Compare what the library tells, and our own reader, with the model."""
        told = self.repo.inspect_repo_info()
        info = decode((self.folder / "repo").read_bytes())
        assert told["branches"] == dict(info.branches) == self.branches
        assert told["tags"] == dict(info.tags) == self.tags
        assert set(told["deleted_tags"]) == self.deleted
        assert {
            each["id"]: (each.get("parent_id"), each["message"], each.get("metadata") or {})
            for each in told["snapshots"]
        } == self.snapshots
        assert self.repo.get_metadata() == self.metadata
        forbidden = self.repo.disabled_feature_flags()
        assert ("move_node" in [each.name for each in forbidden]) != self.is_moving
        assert info.disabled_feature_flags() == sorted(each.id for each in forbidden)
        assert len(info.updates()) <= _UPDATES
        assert len(list(self.repo.ops_log())) == self.operations
        for branch, tip in self.branches.items():
            assert next(each.id for each in self.repo.ancestry(branch=branch)) == tip


TestChanges = Changes.TestCase
TestChanges.settings = settings(max_examples=15, stateful_step_count=25)
