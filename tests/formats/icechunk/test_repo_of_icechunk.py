"""What the real library wrote is understood as the library itself understands it."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import icechunk
import pytest
import zarr
from zarr.core.buffer import default_buffer_prototype

from app.formats.icechunk.config import Config, VirtualContainer, YamlConfigDecoder
from app.formats.icechunk.ids import encode_id
from app.formats.icechunk.repo_info import RepoInfo, RepoInfoDecoder, SnapshotInfo, Status, Update
from app.formats.icechunk.transaction_log import TransactionLog, TransactionLogDecoder

LIMIT = 1 << 24
FIXTURES = Path("../shared/fixtures")
FIXTURE_NAMES = (
    "icechunk-test-repo-v2",
    "icechunk-split-repo-v2",
    "icechunk-expire-repo-v2-by-working-copy",
)
METADATA: dict[str, Any] = {
    "ключ 🧊": {"b": [1, 2, None, "é🧊", 2**64 - 1, -5, 1.5, True, 1e300, 0.1], "": {}},
    "numbers": [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5], [-1, 2]],
    "floats": [[0.1], [0.1, 0.2], [1.5, 2.5, 0.1], [1.5] * 4, [1e300] * 6],
    "bools": [[True], [True, False], [False] * 9],
    "empty": [],
    "deep": [[[[[[["x" * 70000]]]]]]],
}
CONTAINERS = {
    VirtualContainer("lab", "s3://lab/", "s3"),
    VirtualContainer(None, "file:///data/", "local_file_system"),
}


def _config() -> icechunk.RepositoryConfig:
    config = icechunk.RepositoryConfig(num_updates_per_repo_info_file=5)
    s3 = icechunk.s3_store(region="us-east-1")
    config.set_virtual_chunk_container(icechunk.VirtualChunkContainer("s3://lab/", s3, name="lab"))
    folder = icechunk.local_filesystem_store("/data")
    config.set_virtual_chunk_container(icechunk.VirtualChunkContainer("file:///data/", folder))
    return config


@dataclass(frozen=True)
class Written:
    """A repository of the library, and the folder it is in."""

    repo: icechunk.Repository
    folder: Path

    @property
    def info(self) -> RepoInfo:
        """The file `repo` as we decode it."""
        return self.backup(None)

    def backup(self, name: str | None) -> RepoInfo:
        """Decode the file `repo`, or what it was before."""
        path = self.folder / "repo" if name is None else self.folder / "overwritten" / name
        return RepoInfoDecoder(LIMIT)(path.read_bytes())

    def log(self, snapshot_id: str) -> TransactionLog:
        """Decode the transaction log of a snapshot."""
        data = (self.folder / "transactions" / snapshot_id).read_bytes()
        return TransactionLogDecoder(snapshot_id, LIMIT)(data)

    def commit(self, message: str, change: Callable[[Any], None], **more: Any) -> str:
        """Commit a change of `main`."""
        session = self.repo.writable_session("main")
        change(session.store)
        return session.commit(message, **more)


def _create(folder: Path, **more: Any) -> Written:
    storage = icechunk.local_filesystem_storage(str(folder))
    written = Written(icechunk.Repository.create(storage, config=_config(), **more), folder)
    written.repo.save_config()
    return written


def _begin(store: Any) -> None:
    group = zarr.create_group(store)
    group.create_array("a", shape=(6,), chunks=(2,), dtype="u1")[:] = 1
    group.create_array("scalar", shape=(), dtype="u1")[...] = 5
    below = group.create_group("b")
    below.create_array("x", shape=(4, 4), chunks=(2, 2), dtype="u1")[:] = 1


def _change_metadata(store: Any) -> None:
    zarr.open_group(store).attrs["n"] = 2
    zarr.open_array(store, path="b/x").attrs["n"] = 2


def _change_chunk(store: Any) -> None:
    zarr.open_array(store, path="a")[0] = 9


def _delete(store: Any) -> None:
    del zarr.open_group(store)["c"]
    zarr.open_array(store, path="a").resize((2,))


def _eventful(folder: Path) -> Written:
    written = _create(folder)
    repo = written.repo
    first = written.commit("one", _begin, metadata=METADATA)
    second = written.commit("two é🧊", _change_metadata)
    session = repo.writable_session("main")
    _change_chunk(session.store)
    third = session.amend("amended")
    for name, tip in {"main": first, "": first, "..": second, "a/b": third}.items():
        repo.create_tag(name, tip)
    repo.delete_tag("..")
    repo.create_branch("a\n", first)
    repo.reset_branch("a\n", third)
    repo.create_branch("gone", first)
    repo.delete_branch("gone")
    session = repo.rearrange_session("main")
    session.move("/b", "/c")
    session.commit("moved")
    written.commit("deleted", _delete)
    session = repo.writable_session("main")
    _change_chunk(session.store)
    session.flush("on no branch")
    repo.set_metadata({"n": {"k": [1]}})
    repo.set_feature_flag("create_tag", setting=False)
    repo.set_feature_flag("create_tag", setting=None)
    repo.set_feature_flag("move_node", setting=False)
    return written


def _expired(folder: Path) -> Written:
    written = _eventful(folder)
    written.repo.expire_snapshots(datetime.now(UTC))
    written.repo.garbage_collect(datetime.now(UTC) - timedelta(days=1))
    read_only = icechunk.RepoAvailability.read_only
    written.repo.set_status(icechunk.RepoStatus(read_only, limited_availability_reason="moving"))
    return written


def _migrated(folder: Path) -> Written:
    written = _create(folder, spec_version=1)
    first = written.commit("one", _begin, metadata=METADATA)
    written.repo.create_tag("it works!", first)
    upgraded = Written(icechunk.upgrade_icechunk_repository(written.repo, dry_run=False), folder)
    upgraded.commit("two", _change_metadata, metadata=METADATA)
    return upgraded


def _fixture(name: str) -> Written:
    folder = FIXTURES / name
    if not folder.exists():
        pytest.skip(f"there is no {folder}")
    return Written(
        icechunk.Repository.open(icechunk.local_filesystem_storage(str(folder.resolve()))), folder
    )


BUILDERS = {"eventful": _eventful, "expired": _expired, "migrated": _migrated}


@pytest.fixture(scope="module", params=[*BUILDERS, *FIXTURE_NAMES])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Give repositories with all kinds of history."""
    if (build := BUILDERS.get(request.param)) is None:
        return _fixture(request.param)
    return build(tmp_path_factory.mktemp(request.param))


def _text(moment: datetime) -> str:
    """Spell a time as the library does: in whole seconds, milliseconds or microseconds."""
    unit = "microseconds" if moment.microsecond % 1000 else "milliseconds"
    spelled = moment.isoformat(timespec=unit if moment.microsecond else "seconds")
    return spelled.replace("+00:00", "Z")


def _snapshot(info: SnapshotInfo) -> dict[str, Any]:
    parent = {} if info.parent_id is None else {"parent_id": info.parent_id}
    return {
        "id": info.snapshot_id,
        **parent,
        "flushed_at": _text(info.flushed_at),
        "message": info.message,
        "metadata": info.metadata.decode(),
    }


def _field(value: Any) -> Any:
    if isinstance(value, bytes):
        return encode_id(value)
    if isinstance(value, Status):
        return {
            "availability": value.availability.name.title().replace("_", ""),
            "limited_availability_reason": value.reason,
            "set_at": _text(value.set_at),
        }
    return value


def _update(update: Update) -> dict[str, Any]:
    backup = {} if update.backup_path is None else {"backup_path": update.backup_path}
    fields = {name: _field(value) for name, value in update.fields.items()}
    if update.kind == "repo_migrated":
        fields = {name: f"{version}.0" for name, version in fields.items()}
    return {"kind": update.kind, **fields, "updated_at": _text(update.updated_at), **backup}


def _kind(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z][a-z])", "_", name.removesuffix("Update")).lower()


def _flat(update: dict[str, Any]) -> dict[str, Any]:
    """Bring an update into the form of ours."""
    fields = update.pop("update_type")
    return {"kind": _kind(fields.pop("type")), **fields, **update}


def test_the_repo_file_says_the_same(written: Written) -> None:
    """Refs, snapshots with their metadata, the latest operations."""
    expected: dict[str, Any] = json.loads(json.dumps(written.repo.inspect_repo_info()))
    info = written.info

    assert dict(info.branches) == expected["branches"]
    assert dict(info.tags) == expected["tags"]
    assert info.deleted_tags() == expected["deleted_tags"]
    assert list(map(_snapshot, info.snapshots())) == expected["snapshots"]
    assert info.metadata() == expected["metadata"]
    assert list(map(_update, info.updates())) == list(map(_flat, expected["latest_updates"]))
    assert info.repo_before_updates == expected.get("repo_before_updates")


def test_the_status_is_the_same(written: Written) -> None:
    """Also its time and the reason."""
    status, found = written.repo.status, written.info.status

    assert (found.set_at, found.reason) == (status.set_at, status.limited_availability_reason)
    assert found.availability.name.lower() in repr(status.availability).lower().replace(
        "readonly", "read_only"
    )


def test_disabled_features_are_the_same(written: Written) -> None:
    """By their numbers."""
    expected = sorted(flag.id for flag in written.repo.disabled_feature_flags())

    assert written.info.disabled_feature_flags() == expected


def test_ancestry_is_the_same(written: Written) -> None:
    """From each snapshot that there is."""
    info = written.info

    for start in info.snapshots():
        ancestors = info.ancestry(start.snapshot_id)
        assert ancestors is not None
        assert [(a.snapshot_id, a.parent_id, a.flushed_at, a.message) for a in ancestors] == [
            (a.id, a.parent_id, a.written_at, a.message)
            for a in written.repo.ancestry(snapshot_id=start.snapshot_id)
        ]


def test_the_whole_ops_log_is_the_same(written: Written) -> None:
    """It goes on in the files that `repo` was before."""
    found: list[tuple[str, datetime, str | None]] = []
    name: str | None = None
    while True:
        info = written.backup(name)
        found += [(u.kind, u.updated_at, u.backup_path or name) for u in info.updates()]
        if (name := info.repo_before_updates) is None:
            break

    assert found == [
        (_kind(type(u.kind).__name__.removeprefix("UpdateType_")), u.updated_at, u.backup_path)
        for u in written.repo.ops_log()
    ]


def test_containers_are_those_of_the_config(written: Written) -> None:
    """With their names and prefixes."""
    containers = written.repo.config.virtual_chunk_containers or {}

    assert isinstance(written.info.config, Config)
    assert {(c.name, c.url_prefix) for c in written.info.config.containers} == {
        (c.name, c.url_prefix) for c in containers.values()
    }


def _nodes(ids: frozenset[bytes]) -> list[str]:
    return sorted(map(encode_id, ids))


def _log(log: TransactionLog) -> dict[str, Any]:
    chunks = {
        encode_id(node_id): [coords for batch in batches for coords in batch.tolist()]
        for node_id, batches in log.updated_chunks.items()
    }
    return {
        "new_groups": _nodes(log.new_groups),
        "new_arrays": _nodes(log.new_arrays),
        "deleted_groups": _nodes(log.deleted_groups),
        "deleted_arrays": _nodes(log.deleted_arrays),
        "updated_groups": _nodes(log.updated_groups),
        "updated_arrays": _nodes(log.updated_arrays),
        "updated_chunks": [{"node_id": n, "chunks": c} for n, c in sorted(chunks.items())],
        "moved_from": list(log.moved_paths),
    }


def test_transaction_logs_say_the_same(written: Written) -> None:
    """Those of version 1 too; where ancestors were pruned, the library tells of them together."""
    compared = 0
    for info in written.info.snapshots():
        if not (written.folder / "transactions" / info.snapshot_id).exists():
            assert info.parent_id is None  # version 1 writes none for the first snapshot
            continue
        expected = written.repo.inspect_transaction_log(info.snapshot_id)
        expected.pop("header")
        expected["moved_from"] = [move["from"] for move in expected.pop("moved_nodes")]
        pruned = expected.pop("synthetic_composite", {}).get("merged_pruned_ancestor_tx_logs", [])
        assert list(map(encode_id, info.pruned_ancestor_tx_logs)) == pruned
        if not pruned:
            assert _log(written.log(info.snapshot_id)) == expected
            compared += 1
    assert compared


def test_pruned_ancestors_are_told_of(tmp_path: Path) -> None:
    """Expiration leaves them behind, and nothing else does."""
    info = _expired(tmp_path).info

    assert any(snapshot.pruned_ancestor_tx_logs for snapshot in info.snapshots())


def test_containers_of_both_versions_are_the_same(tmp_path: Path) -> None:
    """One has them in YAML, the other in `repo`."""
    yaml = (_create(tmp_path / "v1", spec_version=1).folder / "config.yaml").read_bytes()
    config = _create(tmp_path / "v2").info.config

    assert isinstance(config, Config)
    assert set(YamlConfigDecoder(LIMIT)(yaml).containers) == CONTAINERS
    assert set(config.containers) == CONTAINERS


def test_metadata_comes_back_as_it_was_given(tmp_path: Path) -> None:
    """The library packs lists of numbers in many ways."""
    written = _create(tmp_path)
    first = written.commit("one", _begin, metadata=METADATA)

    info = written.info.snapshot(first)
    assert info is not None
    assert info.metadata.decode() == METADATA


def test_metadata_of_version_1_comes_back_as_it_was_given(tmp_path: Path) -> None:
    """A migrated `repo` has it anew, as FlexBuffers."""
    info = _migrated(tmp_path).info

    tip = info.snapshot(info.tags["it works!"])
    assert tip is not None
    assert tip.metadata.decode() == METADATA


async def test_keys_of_the_wrong_ndim_are_told_of_apart(tmp_path: Path) -> None:
    """The library takes them for chunks."""
    written = _create(tmp_path)
    written.commit("one", _begin)
    session = written.repo.writable_session("main")
    for key in ("a/c/0/1", "a/c/2"):
        await session.store.set(key, default_buffer_prototype().buffer.from_bytes(b"xx"))
    log = written.log(session.commit("two"))

    (batches,) = log.updated_chunks.values()
    assert [batch.tolist() for batch in batches] == [[[0, 1]], [[2]]]
