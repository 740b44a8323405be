"""The file `repo` as specified, as the library writes it, and as damage leaves it."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardgate.formats.icechunk.config import Config, VirtualContainer, YamlConfigDecoder
from shardgate.formats.icechunk.ids import encode_id
from shardgate.formats.icechunk.repo_info import (
    Availability,
    RepoInfo,
    RepoInfoDecoder,
    Status,
    Update,
)
from shardgate.formats.reading import DecodeError
from tests.formats.icechunk.building import Struct
from tests.formats.icechunk.building_repo import (
    FIRST,
    NOON,
    U8,
    U64,
    Fields,
    Repo,
    U16s,
    item,
    ref,
    snapshot,
    update,
)
from tests.formats.icechunk.peer import logged
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


def test_refs_lead_to_snapshots() -> None:
    """Any text is a name, and a branch and a tag can have the same."""
    names = ["", "..", "a/b", "main", "é\n"]
    repo = _decode(
        Repo(
            branches=[ref(name, 1) for name in names],
            tags=[ref("main", 2), ref("v1", 0)],
            snapshots=CHAIN,
        )
    )

    assert dict(repo.branches) == dict.fromkeys(names, encode_id(SECOND))
    assert dict(repo.tags) == {"main": encode_id(THIRD), "v1": encode_id(FIRST)}
    assert repo.branches.get("v1") is None


def test_what_a_repository_need_not_tell_is_empty() -> None:
    """No configuration of its own is none, and not even the branch main has to exist."""
    repo, empty = _decode(Repo()), _decode(Repo(branches=[], snapshots=[]))

    assert (repo.disabled_feature_flags(), repo.config) == ([], Config())
    assert repo.repo_before_updates is None
    assert (len(empty.branches), len(empty.tags), list(empty.snapshots())) == (0, 0, [])


def test_the_first_ref_of_a_name_counts_and_each_has_a_snapshot() -> None:
    """One at a snapshot that is not listed is damage of the file."""
    repo = _decode(Repo(branches=[ref("main", 0), ref("main", 1)], snapshots=CHAIN))

    assert dict(repo.branches) == {"main": encode_id(FIRST)}
    with pytest.raises(DecodeError, match="there is no snapshot 1"):
        _decode(Repo(branches=[ref("main", 0), ref("broken", 1)]))


def test_the_rest_is_read_when_asked_for() -> None:
    """Tags that were, features that are off, metadata, which are MessagePack in version 1."""
    more = {8: "repo.123.ABC", 11: U16s([3, 5])}
    repo = _decode(Repo(deleted_tags=["v0", "v1"], more=more))
    packed = [item("k", msgpack.packb({"n": 1}))]
    old = _decode(Repo(version=1, snapshots=[snapshot(FIRST, more={4: packed})]))

    assert repo.deleted_tags() == ["v0", "v1"]
    assert repo.disabled_feature_flags() == [3, 5]
    assert repo.repo_before_updates == "repo.123.ABC"
    assert [info.metadata.decode() for info in old.snapshots()] == [{"k": {"n": 1}}]


@given(st.sets(st.binary(min_size=12, max_size=12), min_size=1, max_size=9))
def test_snapshots_are_found_by_their_ids(ids: set[bytes]) -> None:
    """Their list is sorted. No parent is -1, and the field's default is the first of the list."""
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
def test_ancestry_ends_or_is_an_error(parent: int) -> None:
    """A snapshot can be neither its own ancestor nor have a parent that is not there."""
    repo = _decode(Repo(snapshots=[snapshot(FIRST, parent), snapshot(SECOND, 0)]))

    with pytest.raises(DecodeError):
        _ids(repo.ancestry(encode_id(SECOND)))


UPDATES: list[tuple[int, Fields, str, Mapping[str, Any]]] = [
    (3, {}, "config_changed", {}),
    (4, {}, "metadata_changed", {}),
    (8, {0: "b", 1: Struct(FIRST)}, "branch_deleted", {"name": "b", "previous_snap_id": FIRST}),
    (9, {0: "b", 1: Struct(FIRST)}, "branch_reset", {"name": "b", "previous_snap_id": FIRST}),
    (
        11,
        {0: "b", 1: Struct(FIRST), 2: Struct(THIRD)},
        "commit_amended",
        {"branch": "b", "previous_snap_id": FIRST, "new_snap_id": THIRD},
    ),
    (12, {0: Struct(FIRST)}, "new_detached_snapshot", {"new_snap_id": FIRST}),
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
def test_an_update_tells_what_was_done(
    number: int, body: Fields, kind: str, fields: Mapping[str, Any]
) -> None:
    """What only a newer specification knows is unknown; the library logs other kinds below."""
    repo = _decode(Repo(updates=[update(number, body, "repo.1.A"), update(1, {})]))

    found, first = repo.updates()

    assert (found.kind, found.backup_path, found.updated_at) == (kind, "repo.1.A", NOON_UTC)
    assert found.fields == fields
    assert first.backup_path is None


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../repo", "a/b", "/a", "a\\b", "repo..x", "a\0", "a\n", "a" * 256]
)
def test_the_name_of_a_backup_leads_nowhere_else(name: str) -> None:
    """It is a file in one folder."""
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
def test_a_file_that_lacks_what_it_must_have_is_damaged(repo: Repo, reason: str) -> None:
    """Refs that cannot be read are not absent."""
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
def test_damage_in_the_rest_is_told_when_it_is_looked_at(
    repo: Repo, look: Callable[[RepoInfo], Any]
) -> None:
    """The refs of such a file can be used."""
    decoded = _decode(repo)

    assert "main" in decoded.branches
    with pytest.raises(DecodeError):
        list(look(decoded))


@pytest.mark.parametrize("config", [b"", bytes(2**20 + 1)])
def test_a_damaged_configuration_is_told_as_such(config: bytes) -> None:
    """Or one that is too large to be one; the refs of such a file can be used."""
    decoded = RepoInfoDecoder(1 << 22)(Repo(more={9: config}).file())

    assert "main" in decoded.branches
    assert isinstance(decoded.config, DecodeError)


def test_it_weighs_what_it_holds() -> None:
    """The payload, and something for each ref."""
    small, large = _decode(Repo()), _decode(Repo(tags=[ref(str(i), 0) for i in range(100)]))

    assert small.nbytes > len(small.payload)
    assert large.nbytes - len(large.payload) > 100 * 20


WRITTEN_LIMIT = 1 << 24
CONTAINERS = {
    VirtualContainer("lab", "s3://lab/"),
    VirtualContainer(None, "file:///data/"),
}
NAMES = [name for name in BUILDERS if "1" not in name]
"""Repositories of version 2."""


@pytest.fixture(scope="module", params=NAMES)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Return repositories with all kinds of history."""
    return BUILDERS[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def info(written: Written) -> RepoInfo:
    """Decode ``repo``."""
    return decode(written, None)


def decode(written: Written, backup: str | None) -> RepoInfo:
    """Decode ``repo``, or a backup of it."""
    path = written.folder / ("repo" if backup is None else f"overwritten/{backup}")
    return RepoInfoDecoder(WRITTEN_LIMIT)(path.read_bytes())


def _text(moment: datetime) -> str:
    """Spell a time as the library does: in whole seconds, milliseconds or microseconds."""
    unit = "microseconds" if moment.microsecond % 1000 else "milliseconds"
    spelled = moment.isoformat(timespec=unit if moment.microsecond else "seconds")
    return spelled.replace("+00:00", "Z")


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
    """Of the latest operations, status, and configuration; refs and history are told by the API."""
    expected: dict[str, Any] = json.loads(json.dumps(written.repo.inspect_repo_info()))
    status, containers = written.repo.status, written.repo.config.virtual_chunk_containers or {}

    assert info.deleted_tags() == expected["deleted_tags"]
    assert _ids(info.snapshots()) == [each["id"] for each in expected["snapshots"]]
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


def test_moves_and_pruned_ancestors_are_told(written: Written, info: RepoInfo) -> None:
    """In transaction logs of both versions, and in ``repo``."""
    for each in info.snapshots():
        if not (written.folder / "transactions" / each.snapshot_id).exists():
            assert each.parent_id is None  # version 1 writes none for the first snapshot
            continue
        expected = written.repo.inspect_transaction_log(each.snapshot_id)
        pruned = expected.get("synthetic_composite", {}).get("merged_pruned_ancestor_tx_logs", [])
        assert list(map(encode_id, each.pruned_ancestor_tx_logs)) == pruned
        if not pruned:
            moved = [move["from"] for move in expected["moved_nodes"]]
            assert list(logged(written.folder, each.snapshot_id).former_paths) == moved


def test_containers_of_both_versions_are_the_same(tmp_path: Path) -> None:
    """One has them in YAML, the other in ``repo``."""
    yaml = (create(tmp_path / "v1", spec_version=1).folder / "config.yaml").read_bytes()
    config = decode(create(tmp_path / "v2"), None).config

    assert isinstance(config, Config)
    assert set(YamlConfigDecoder(WRITTEN_LIMIT)(yaml).containers) == CONTAINERS
    assert set(config.containers) == CONTAINERS
