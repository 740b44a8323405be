"""`shardgate.formats.icechunk.repo_info`: the file `repo`, built by hand and by the library."""

import json
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardgate.formats.icechunk.config import Config, VirtualContainer, read_yaml_config
from shardgate.formats.icechunk.ids import encode_id
from shardgate.formats.icechunk.repo_info import (
    Availability,
    RepoInfo,
    RepoInfoDecoder,
    Status,
)
from shardgate.formats.reading import DecodeError
from tests.support.formats.icechunk.building import Struct
from tests.support.formats.icechunk.building_repo import (
    FIRST,
    NOON,
    U8,
    U16,
    U64,
    Fields,
    Repo,
    U16s,
    item,
    ref,
    snapshot,
    update,
)
from tests.support.formats.icechunk.peer import logged
from tests.support.repositories import BUILDERS, Written, create

LIMIT = 1 << 20
NOON_UTC = datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)
SECOND, THIRD = b"second snaps", b"third snapsh"
CHAIN = (snapshot(FIRST), snapshot(SECOND, 0), snapshot(THIRD, 1))


def _decode(repo: Repo) -> RepoInfo:
    return RepoInfoDecoder(LIMIT)(repo.file())


def _ids(infos: Iterable[Any] | None) -> list[str]:
    assert infos is not None
    return [info.snapshot_id for info in infos]


def test_branches_and_tags_are_decoded() -> None:
    """Branches and tags of any name lead to their snapshots; the first of a name counts.

    A ref at an unlisted snapshot raises DecodeError.
    """
    names = ["", "..", "a/b", "main", "é\n"]
    branches = [*(ref(name, 1) for name in names), ref("main", 0)]
    repo = _decode(Repo(branches=branches, tags=[ref("main", 2), ref("v1", 0)], snapshots=CHAIN))

    assert dict(repo.branches) == dict.fromkeys(names, encode_id(SECOND))
    assert dict(repo.tags) == {"main": encode_id(THIRD), "v1": encode_id(FIRST)}
    with pytest.raises(DecodeError, match="there is no snapshot 3"):
        _decode(Repo(branches=[ref("main", 0), ref("broken", 3)], snapshots=CHAIN))


def test_optional_fields_are_empty_by_default() -> None:
    """Absent optional fields are decoded as empty, and a branch ``main`` is not required."""
    repo, empty = _decode(Repo()), _decode(Repo(branches=[], snapshots=[]))

    assert (repo.disabled_feature_flags(), repo.config) == ([], Config())
    assert repo.repo_before_updates is None
    assert (len(empty.branches), len(empty.tags), list(empty.snapshots())) == (0, 0, [])


def test_lazily_read_fields_are_decoded() -> None:
    """Deleted tags, disabled features, backups, and metadata of version 1 are decoded on access."""
    more = {8: "repo.123.ABC", 11: U16s([3, 5])}
    repo = _decode(Repo(deleted_tags=["v0", "v1"], more=more))
    packed = [item("k", msgpack.packb({"n": 1}))]
    old = _decode(Repo(version=1, snapshots=[snapshot(FIRST, more={4: packed})]))

    assert repo.deleted_tags() == ["v0", "v1"]
    assert repo.disabled_feature_flags() == [3, 5]
    assert repo.repo_before_updates == "repo.123.ABC"
    assert [info.metadata.decode() for info in old.snapshots()] == [{"k": {"n": 1}}]


@settings(max_examples=25)
@given(st.sets(st.binary(min_size=12, max_size=12), min_size=1, max_size=9))
def test_snapshots_and_ancestry_are_found_by_id(ids: set[bytes]) -> None:
    """Snapshots and their ancestry are found by id; an unknown id gives None.

    A parent of -1 is none, and an absent field is the first of the list.
    """
    first, *others = sorted(ids)
    repo = _decode(Repo(snapshots=[snapshot(first), *(snapshot(data, None) for data in others)]))

    assert _ids(repo.snapshots()) == [encode_id(data) for data in sorted(ids)]
    assert _ids(repo.ancestry(encode_id(first))) == [encode_id(first)]
    for data in others:
        assert _ids(repo.ancestry(encode_id(data))) == [encode_id(data), encode_id(first)]
    for unknown in ("", "main", encode_id(b"fourth snaps"), "é" * 20):
        assert repo.snapshot(unknown) is None
        assert repo.ancestry(unknown) is None


@pytest.mark.parametrize("parent", [0, 1, 2, -2, 2**31 - 1])
def test_circular_or_missing_parent_raises_decode_error(parent: int) -> None:
    """Ancestry over a circular or missing parent raises DecodeError."""
    repo = _decode(Repo(snapshots=[snapshot(FIRST, parent), snapshot(SECOND, 0)]))

    with pytest.raises(DecodeError):
        _ids(repo.ancestry(encode_id(SECOND)))


UPDATES: list[tuple[int, Fields, str, Mapping[str, Any]]] = [
    (2, {0: U8(1), 1: U8(2)}, "repo_migrated", {"from_version": 1, "to_version": 2}),
    (3, {}, "config_changed", {}),
    (4, {}, "metadata_changed", {}),
    (5, {0: "t"}, "tag_created", {"name": "t"}),
    (6, {0: "t", 1: Struct(FIRST)}, "tag_deleted", {"name": "t", "previous_snap_id": FIRST}),
    (7, {0: "b"}, "branch_created", {"name": "b"}),
    (8, {0: "b", 1: Struct(FIRST)}, "branch_deleted", {"name": "b", "previous_snap_id": FIRST}),
    (9, {0: "b", 1: Struct(FIRST)}, "branch_reset", {"name": "b", "previous_snap_id": FIRST}),
    (10, {0: "b", 1: Struct(FIRST)}, "new_commit", {"branch": "b", "new_snap_id": FIRST}),
    (
        11,
        {0: "b", 1: Struct(FIRST), 2: Struct(THIRD)},
        "commit_amended",
        {"branch": "b", "previous_snap_id": FIRST, "new_snap_id": THIRD},
    ),
    (12, {0: Struct(FIRST)}, "new_detached_snapshot", {"new_snap_id": FIRST}),
    (13, {}, "gc_ran", {}),
    (14, {}, "expiration_ran", {}),
    (15, {0: U16(3), 1: U8(1), 2: U8(1)}, "feature_flag_changed", {"id": 3, "new_value": True}),
    (15, {0: U16(3), 1: U8(1)}, "feature_flag_changed", {"id": 3, "new_value": None}),
    (
        16,
        {0: {0: U8(2), 1: U64(NOON)}},
        "repo_status_changed",
        {"status": Status(Availability.OFFLINE, NOON_UTC, None)},
    ),
    (16, {}, "repo_status_changed", {"status": None}),
    (17, {0: "what"}, "unknown", {"number": 17}),
]


@pytest.mark.parametrize(("number", "body", "kind", "fields"), UPDATES)
def test_update_is_decoded(number: int, body: Fields, kind: str, fields: Mapping[str, Any]) -> None:
    """An update of each kind is decoded with its fields; an unknown kind as ``unknown``."""
    repo = _decode(Repo(updates=[update(number, body, "repo.1.A"), update(1, {})]))

    found, first = repo.updates()

    assert (found.kind, found.backup_path, found.updated_at) == (kind, "repo.1.A", NOON_UTC)
    assert found.fields == fields
    assert first.backup_path is None


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../repo", "a/b", "/a", "a\\b", "repo..x", "a\0", "a\n", "a" * 256]
)
def test_invalid_backup_name_is_refused(name: str) -> None:
    """A name of a backup that is no plain file name raises DecodeError."""
    with pytest.raises(DecodeError, match="no name of a backup"):
        _decode(Repo(more={8: name}))

    with pytest.raises(DecodeError, match="no name of a backup"):
        list(_decode(Repo(updates=[update(1, {}, name)])).updates())


@pytest.mark.parametrize(
    ("repo", "reason"),
    [
        (Repo(more={0: U8(3)}), "follows version 3"),
        (Repo(more={1: None}), "no tags"),
        (Repo(more={2: None}), "no branches"),
        (Repo(more={3: None}), "no deleted_tags"),
        (Repo(more={4: None}), "no snapshots"),
        (Repo(more={5: None}), "no status"),
        (Repo(more={7: None}), "no latest_updates"),
        (Repo(status={0: U8(3)}), "unknown availability 3"),
        (Repo(status={1: U64(2**64 - 1)}), "there is no time"),
        (Repo(tags=[{}]), "no name of a ref"),
    ],
)
def test_repo_without_a_required_field_is_refused(repo: Repo, reason: str) -> None:
    """A file without a required field, or with an invalid one, raises DecodeError."""
    with pytest.raises(DecodeError, match=reason):
        _decode(repo)


@pytest.mark.parametrize(
    ("repo", "look"),
    [
        (Repo(snapshots=[snapshot(FIRST, more={2: U64(2**63)})]), RepoInfo.snapshots),
        (Repo(snapshots=[{0: Struct(FIRST)}]), RepoInfo.snapshots),
        (Repo(updates=[{0: U8(1)}]), RepoInfo.updates),
        (Repo(updates=[update(5, {})]), RepoInfo.updates),
        (Repo(updates=[update(12, {})]), RepoInfo.updates),
        (Repo(updates=[update(1, {}, at=2**60)]), RepoInfo.updates),
    ],
)
def test_damage_of_a_lazily_read_field_is_raised_on_access(
    repo: Repo, look: Callable[[RepoInfo], Any]
) -> None:
    """Damage of snapshots or updates raises DecodeError on access; branches are decoded."""
    decoded = _decode(repo)

    assert "main" in decoded.branches
    with pytest.raises(DecodeError):
        list(look(decoded))


@pytest.mark.parametrize("config", [b"", bytes(2**20 + 1)])
def test_damaged_configuration_leaves_refs_readable(config: bytes) -> None:
    """A damaged or too large configuration is a DecodeError; branches are decoded."""
    decoded = RepoInfoDecoder(1 << 22)(Repo(more={9: config}).file())

    assert "main" in decoded.branches
    assert isinstance(decoded.config, DecodeError)


def test_size_of_a_repo_includes_payload_and_refs() -> None:
    """The counted size of a file `repo` includes its payload and each ref."""
    small, large = _decode(Repo()), _decode(Repo(tags=[ref(str(i), 0) for i in range(100)]))

    assert small.nbytes > len(small.payload)
    assert large.nbytes - len(large.payload) > 100 * 20


WRITTEN_LIMIT = 1 << 24
CONTAINERS = {VirtualContainer("lab", "s3://lab/"), VirtualContainer(None, "file:///data/")}
NAMES = [name for name in BUILDERS if "1" not in name]
"""Builders of repositories of version 2."""


@pytest.fixture(scope="module", params=NAMES)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Return each repository of version 2 that the library writes."""
    return BUILDERS[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def info(written: Written) -> RepoInfo:
    """Decode ``repo``."""
    return decode(written, None)


def decode(written: Written, backup: str | None) -> RepoInfo:
    """Decode ``repo``, or a backup of it."""
    path = written.folder / ("repo" if backup is None else f"overwritten/{backup}")
    return RepoInfoDecoder(WRITTEN_LIMIT)(path.read_bytes())


def test_decoded_repo_agrees_with_the_library(written: Written, info: RepoInfo) -> None:
    """Deleted tags, snapshots, status and configuration agree with what the library reads."""
    expected: dict[str, Any] = json.loads(json.dumps(written.repo.inspect_repo_info()))
    status, containers = written.repo.status, written.repo.config.virtual_chunk_containers or {}

    assert info.deleted_tags() == expected["deleted_tags"]
    assert _ids(info.snapshots()) == [each["id"] for each in expected["snapshots"]]
    assert info.repo_before_updates == expected.get("repo_before_updates")
    assert info.status.set_at == status.set_at
    assert info.status.reason == status.limited_availability_reason
    availability = info.status.availability.name.replace("_", "")
    assert availability in repr(status.availability).upper().replace("_", "")
    assert isinstance(info.config, Config)
    assert {(c.name, c.url_prefix) for c in info.config.containers} == {
        (c.name, c.url_prefix) for c in containers.values()
    }


def test_moves_and_pruned_logs_agree_with_the_library(written: Written, info: RepoInfo) -> None:
    """Moved nodes and pruned ancestor logs agree with the library."""
    for each in info.snapshots():
        if not (written.folder / "transactions" / each.snapshot_id).exists():
            assert each.parent_id is None  # version 1 writes none for the first snapshot
            continue
        expected = written.repo.inspect_transaction_log(each.snapshot_id)
        pruned = expected.get("synthetic_composite", {}).get("merged_pruned_ancestor_tx_logs", [])
        assert list(map(encode_id, each.pruned_ancestor_tx_logs)) == pruned
        if not pruned:
            moved = [(move["from"], move["to"]) for move in expected["moved_nodes"]]
            found = logged(written.folder, each.snapshot_id).moves
            assert [(move.source, move.target) for move in found] == moved


def test_containers_of_both_versions_are_equal(tmp_path: Path) -> None:
    """Virtual containers are equal from version 1's YAML and version 2's ``repo``."""
    yaml = (create(tmp_path / "v1", spec_version=1).folder / "config.yaml").read_bytes()
    config = decode(create(tmp_path / "v2"), None).config

    assert isinstance(config, Config)
    assert set(read_yaml_config(yaml).containers) == CONTAINERS
    assert set(config.containers) == CONTAINERS
