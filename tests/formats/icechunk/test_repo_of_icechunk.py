"""Files that the real library wrote are understood as the library understands them."""

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from zarr.core.buffer import default_buffer_prototype

from app.formats.icechunk.config import Config, VirtualContainer, YamlConfigDecoder
from app.formats.icechunk.ids import encode_id
from app.formats.icechunk.repo_info import RepoInfo, RepoInfoDecoder, SnapshotInfo, Status, Update
from app.formats.icechunk.transaction_log import TransactionLog, TransactionLogDecoder
from tests.repositories import BUILDERS, FIXTURE_NAMES, Written, array, create, open_fixture

LIMIT = 1 << 24
CONTAINERS = {
    VirtualContainer("lab", "s3://lab/", "s3"),
    VirtualContainer(None, "file:///data/", "local_file_system"),
}
NAMES = [name for name in (*BUILDERS, *FIXTURE_NAMES) if "1" not in name]
"""Repositories of version 2."""


@pytest.fixture(scope="module", params=NAMES)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Give repositories with all kinds of history."""
    if (build := BUILDERS.get(request.param)) is not None:
        return build(tmp_path_factory.mktemp(request.param))
    if (fixture := open_fixture(request.param)) is None:
        pytest.skip(f"there is no {request.param}")
    return fixture


@pytest.fixture(scope="module")
def info(written: Written) -> RepoInfo:
    """Decode ``repo``."""
    return decode(written, None)


def decode(written: Written, backup: str | None) -> RepoInfo:
    """Decode ``repo``, or a backup of it."""
    path = written.folder / ("repo" if backup is None else f"overwritten/{backup}")
    return RepoInfoDecoder(LIMIT)(path.read_bytes())


def log_of(written: Written, snapshot_id: str) -> TransactionLog:
    """Decode the transaction log of a snapshot."""
    data = (written.folder / "transactions" / snapshot_id).read_bytes()
    return TransactionLogDecoder(snapshot_id, LIMIT)(data)


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


def test_the_repo_file_says_the_same(written: Written, info: RepoInfo) -> None:
    """Refs, snapshots with their metadata, the latest operations, status, configuration."""
    expected: dict[str, Any] = json.loads(json.dumps(written.repo.inspect_repo_info()))
    status, containers = written.repo.status, written.repo.config.virtual_chunk_containers or {}

    assert dict(info.branches) == expected["branches"]
    assert dict(info.tags) == expected["tags"]
    assert info.deleted_tags() == expected["deleted_tags"]
    assert list(map(_snapshot, info.snapshots())) == expected["snapshots"]
    assert info.metadata() == expected["metadata"]
    assert list(map(_update, info.updates())) == list(map(_flat, expected["latest_updates"]))
    assert info.repo_before_updates == expected.get("repo_before_updates")
    assert info.status.set_at == status.set_at
    assert info.status.reason == status.limited_availability_reason
    availability = info.status.availability.name.replace("_", "")
    assert availability in repr(status.availability).upper().replace("_", "")
    assert isinstance(info.config, Config)
    assert {(c.name, c.url_prefix) for c in info.config.containers} == {
        (c.name, c.url_prefix) for c in containers.values()
    }


def test_ancestry_is_the_same(written: Written, info: RepoInfo) -> None:
    """From each snapshot."""
    for start in info.snapshots():
        ancestors = info.ancestry(start.snapshot_id)
        assert ancestors is not None
        assert [(a.snapshot_id, a.parent_id, a.flushed_at, a.message) for a in ancestors] == [
            (a.id, a.parent_id, a.written_at, a.message)
            for a in written.repo.ancestry(snapshot_id=start.snapshot_id)
        ]


def test_the_whole_ops_log_is_the_same(written: Written) -> None:
    """It continues in backups of ``repo``."""
    found: list[tuple[str, datetime, str | None]] = []
    name: str | None = None
    while True:
        info = decode(written, name)
        found += [(u.kind, u.updated_at, u.backup_path or name) for u in info.updates()]
        if (name := info.repo_before_updates) is None:
            break

    assert found == [
        (_kind(type(u.kind).__name__.removeprefix("UpdateType_")), u.updated_at, u.backup_path)
        for u in written.repo.ops_log()
    ]


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


def test_transaction_logs_say_the_same(written: Written, info: RepoInfo) -> None:
    """Those of version 1 too; where ancestors were pruned, the library tells of them together."""
    compared = 0
    for each in info.snapshots():
        if not (written.folder / "transactions" / each.snapshot_id).exists():
            assert each.parent_id is None  # version 1 writes none for the first snapshot
            continue
        expected = written.repo.inspect_transaction_log(each.snapshot_id)
        expected.pop("header")
        expected["moved_from"] = [move["from"] for move in expected.pop("moved_nodes")]
        pruned = expected.pop("synthetic_composite", {}).get("merged_pruned_ancestor_tx_logs", [])
        assert list(map(encode_id, each.pruned_ancestor_tx_logs)) == pruned
        if not pruned:
            assert _log(log_of(written, each.snapshot_id)) == expected
            compared += 1
    assert compared


def test_containers_of_both_versions_are_the_same(tmp_path: Path) -> None:
    """One has them in YAML, the other in ``repo``."""
    yaml = (create(tmp_path / "v1", spec_version=1).folder / "config.yaml").read_bytes()
    config = decode(create(tmp_path / "v2"), None).config

    assert isinstance(config, Config)
    assert set(YamlConfigDecoder(LIMIT)(yaml).containers) == CONTAINERS
    assert set(config.containers) == CONTAINERS


async def test_keys_of_the_wrong_ndim_are_logged_apart(tmp_path: Path) -> None:
    """The library takes them for chunks."""
    written = create(tmp_path)
    written.commit("one", array("a"))
    session = written.repo.writable_session("main")
    for key in ("a/c/0/1", "a/c/2"):
        await session.store.set(key, default_buffer_prototype().buffer.from_bytes(b"xx"))
    log = log_of(written, session.commit("two"))

    (batches,) = log.updated_chunks.values()
    assert [batch.tolist() for batch in batches] == [[[0, 1]], [[2]]]
