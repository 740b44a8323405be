"""Repositories written by the Icechunk library, in each version of its specification."""

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import icechunk
import numpy as np
import zarr
import zarr.codecs
from icechunk import Repository, RepositoryConfig, VirtualChunkContainer, VirtualChunkSpec
from zarr.core.buffer import default_buffer_prototype

from tests.support.clients.arrays import BY_NAME
from tests.support.clients.writing import Case, by_zarr_v2, counted, quiet, write
from tests.support.deferred import Deferred
from tests.support.repositories import BUILDERS
from tests.support.seaweedfs import SeaweedFS

xarray: Any = Deferred("xarray")

VERSIONS: Final = ("v1", "v2", "migrated")
"""Version 2 mixes snapshots and manifests of version 1 with its own once it is migrated."""
INLINE_NBYTES: Final = 40
"""Largest chunk that is inline in its manifest."""
ODD_TAGS: Final = (
    "it works!", "a/b", "é", "%2F", "a%2Fb", "..", ".", "", " ", "a\n", "@tag.x", "+",
)  # fmt: skip
"""Unusual names of tags, allowed since version 2."""
SHARDED: Final = (
    "index/zarr_start_big_crc", "index/tensorstore_end_little_plain", "transpose/both",
    "nested/three", "after/crc_after_both", "after/gzip", "inside/blosc",
    "shape/one_element_of_a_large_shard", "shape/zero_length", "shape/0d_default", "fill/nan",
    "dtype/string", "document/unknown_member", "plain/v3", "plain/transposed",
)  # fmt: skip
"""Arrays that are part of every repository."""
STORABLE: Final = tuple(
    case.name
    for case in BY_NAME.values()
    if case.write is not by_zarr_v2
    and case.key_encoding.get("name") == "default"
    and case.key_encoding.get("configuration", {}).get("separator", "/") == "/"
    and not any(isinstance(lengths, int) for lengths in case.edges or ())
)
"""Arrays that the library can store: it supports one encoding of keys, and lists of lengths."""


def storage(folder: Path) -> icechunk.Storage:
    """Return the library's storage in a folder."""
    return icechunk.local_filesystem_storage(str(folder))


def spec(version: str) -> int:
    """Return the format version that a repository starts with."""
    return 2 if version == "v2" else 1


def create(folder: Path, version: str, config: RepositoryConfig | None = None) -> Repository:
    """Create a repository, at version 1 if it will be migrated."""
    config = config or RepositoryConfig(inline_chunk_threshold_bytes=INLINE_NBYTES)
    return Repository.create(storage(folder), config=config, spec_version=spec(version))


def migrate(repo: Repository, version: str) -> Repository:
    """Upgrade the repository if *version* is ``migrated``."""
    if version != "migrated":
        return repo
    return icechunk.upgrade_icechunk_repository(repo, dry_run=False, delete_unused_v1_files=True)


def commit(
    repo: Repository, message: str, change: Callable[[Any], object], on: str = "main"
) -> str:
    """Commit the changes that *change* makes to a session's store."""
    session = repo.writable_session(on)
    with quiet():
        change(session.store)
    return session.commit(message)


def put(store: Any, files: Mapping[str, bytes]) -> None:
    """Set keys of *store*."""
    prototype = default_buffer_prototype()

    async def set_all() -> None:
        for key, data in files.items():
            await store.set(key, prototype.buffer.from_bytes(data))

    asyncio.run(set_all())


def files_of(case: Case, folder: Path) -> dict[str, bytes]:
    """Write *case* below *folder* once; return its files by key, metadata first."""
    path = folder / case.name
    if not path.exists():
        write(case, path)
    return {
        f"{case.name}/{file.relative_to(path).as_posix()}": file.read_bytes()
        for file in sorted(path.rglob("*"), key=lambda file: file.name != "zarr.json")
        if file.is_file()
    }


def _begin(store: Any) -> None:
    root = zarr.create_group(store, attributes={"title": "µ", "consolidated": [1, None]})
    root.create_array("native", data=counted((7, 5), "<i8"), chunks=(3, 4), compressors=None)
    root.create_array("inline", data=counted((7, 5), "u1"), chunks=(3, 4), compressors=None)
    root.create_array(
        "big",
        data=counted((3, 40), ">f8"),
        chunks=(2, 8),
        dimension_names=["y", None],
        serializer=zarr.codecs.BytesCodec(endian="big"),
        compressors=None,
    )
    root.create_array("scalar", shape=(), dtype="f4")[...] = 2.5
    root.create_array("empty", shape=(9, 9), chunks=(2, 2), dtype="i2", fill_value=7)
    root.create_array("no_length", shape=(0, 5), chunks=(2, 2), dtype="i2")
    partly = root.create_array("partly", shape=(40,), chunks=(4,), dtype="f8", fill_value=np.nan)
    partly[8:13] = 1.5
    group = root.create_group("group", attributes={"depth": 1})
    group.create_array("x", shape=(6,), chunks=(2,), dtype="u2")[...] = counted((6,))
    root.create_array("group-x", shape=(6,), chunks=(5,), dtype="u2")[...] = counted((6,))
    deep = group.create_group("below").create_group("é 日本")
    deep.create_array("y", shape=(5, 5), chunks=(2, 2), dtype="u1", shards=(4, 4))[...] = 9
    for name in ("grown", "shrunk", "deleted", "replaced", "moved"):
        array = root.create_array(name, shape=(12,), chunks=(3,), dtype="i8", compressors=None)
        array[...] = np.arange(12) + 1


def _change(store: Any) -> None:
    root: Any = zarr.open_group(store)
    root["native"][0, 0] = -1
    root["group"].attrs["depth"] = 2
    root["grown"].resize((20,))
    root["grown"][18:] = 5
    root["shrunk"].resize((4,))
    del root["deleted"]
    del root["replaced"]
    root.create_array("replaced", shape=(4, 4), chunks=(2, 2), dtype="u1")[:2] = 3


def _again(store: Any) -> None:
    root: Any = zarr.open_group(store)
    root["group/x"][:] = 11
    root["shrunk"].resize((12,))
    root["group/below/é 日本/y"][4, 4] = 1


def write_kinds(store: Any) -> None:
    """Write arrays of two stored chunks, native and inline, sharded and not."""
    root = zarr.create_group(store)
    for name, length in (("native", 100), ("inline", 4)):
        values = counted((2 * length,), "u1")
        root.create_array(name, data=values, chunks=(length,), compressors=None)
    for name, length in (("sharded", 200), ("small", 4)):
        values, chunks = np.full(2 * length, 5, "u1"), (length // 2,)
        root.create_array(name, data=values, chunks=chunks, shards=(length,), compressors=None)


def write_eventful(folder: Path, version: str, cases: Path) -> None:
    """Write a repository with all kinds of nodes, and commits that change them."""
    repo = create(folder, version)
    first = commit(repo, "begin", _begin)
    commit(repo, "sharded", lambda store: put_cases(store, cases, SHARDED[:5]))
    repo.create_tag("first", first)
    repo = migrate(repo, version)
    changed = commit(repo, "change", _change)
    repo.create_branch("reset", commit(repo, "again", _again))
    repo.reset_branch("reset", changed)


HISTORIES: Final = {
    "v1": BUILDERS["version-1-expired"],
    "v2": BUILDERS["expired"],
    "migrated": BUILDERS["migrated"],
}
"""Builders of repositories with every kind of operation in their history."""


def put_cases(store: Any, folder: Path, names: tuple[str, ...]) -> None:
    """Copy arrays written by other libraries into *store*."""
    for name in names:
        put(store, files_of(BY_NAME[name], folder))
    for name in sorted({name.partition("/")[0] for name in names}):
        zarr.create_group(store, path=name)


def write_placed(folder: Path, version: str, cases: Path, names: tuple[str, ...]) -> None:
    """Write a repository with inline chunks on `main` and native ones on another branch."""
    repo = create(folder, version)
    commit(repo, "root", zarr.create_group)
    repo.create_branch("native", repo.lookup_branch("main"))
    commit(_opened(folder, 2**16 - 1), "inline", lambda store: put_cases(store, cases, names))
    commit(_opened(folder, 0), "native", lambda store: put_cases(store, cases, names), "native")
    migrate(Repository.open(storage(folder)), version)


def _opened(folder: Path, inline_nbytes: int) -> Repository:
    config = RepositoryConfig(inline_chunk_threshold_bytes=inline_nbytes)
    return Repository.open(storage(folder), config=config)


def write_split(folder: Path, version: str) -> None:
    """Write a repository with arrays that are split into many manifests."""
    rows: Any = {icechunk.ManifestSplitDimCondition.Axis(0): 2}
    any_axis: Any = {icechunk.ManifestSplitDimCondition.Any(): 3}
    splitting = icechunk.ManifestSplittingConfig.from_dict(
        {
            icechunk.ManifestSplitCondition.name_matches("by_row"): rows,
            icechunk.ManifestSplitCondition.AnyArray(): any_axis,
        }
    )
    config = RepositoryConfig(
        inline_chunk_threshold_bytes=0, manifest=icechunk.ManifestConfig(splitting=splitting)
    )
    repo = create(folder, version, config)

    def fill(store: Any) -> None:
        root = zarr.create_group(store)
        for name in ("by_row", "by_block"):
            array = root.create_array(name, shape=(9, 11), chunks=(1, 2), dtype="u1")
            array[...] = counted((9, 11), "u1")

    def change(store: Any) -> None:
        root: Any = zarr.open_group(store)
        root["by_row"][4] = 200
        root["by_block"].resize((12, 11))
        root["by_block"][11] = 201

    commit(repo, "split", fill)
    repo = migrate(repo, version)
    commit(repo, "change", change)


def write_dataset(folder: Path) -> None:
    """Write a repository with xarray: a tagged dataset, and rows appended since."""
    repo = create(folder, "v2")
    rain = xarray.DataArray(counted((4, 6), "f4"), dims=("t", "x"))
    coords = {"t": np.arange(4), "x": np.arange(6) * 0.5}
    first = xarray.Dataset({"rain": rain}, coords, {"title": "weather"})

    def save(store: Any) -> None:
        first.to_zarr(store, consolidated=False, zarr_format=3)

    def append(store: Any) -> None:
        later = first.isel(t=slice(2)).assign_coords(t=[4, 5])
        later.to_zarr(store, consolidated=False, zarr_format=3, append_dim="t")

    repo.create_tag("v1", commit(repo, "save", save))
    commit(repo, "append", append)


DATA: Final = bytes((7 * at + at // 256) % 256 for at in range(5000))
"""Content of ``data.bin``, which virtual references lead to."""
MANY: Final = 1200
"""Number of references for which the library compresses locations with a dictionary."""
REFERRED: Final = (
    "transpose/both", "after/crc_after_both", "shape/0d_default", "plain/v3",
)  # fmt: skip
UNREAD: Final = ("file/etag", "http/etag", "file/many", "s3/many", "http/many")
"""Arrays that are not compared: the library sends unquoted ETags, or they are too large."""


@dataclass(frozen=True)
class Elsewhere:
    """A place that references lead to, as service and library address it."""

    prefix: str
    """URL with a final slash."""
    etag: str
    """ETag of ``data.bin`` without quotes."""
    modified: datetime
    """Time at which ``data.bin`` was already stored."""
    store: Any
    """The library's object store of the place."""
    credentials: Any


def write_sources(folder: Path) -> None:
    """Write the objects that references lead to."""
    (folder / "data.bin").write_bytes(DATA)
    os.utime(folder / "data.bin", (1e9, 1e9))  # checksums are whole seconds, times of files not
    for case in REFERRED:
        files_of(BY_NAME[case], folder)


def in_folder(folder: Path, etag: str) -> Elsewhere:
    """Return a place in a folder."""
    return Elsewhere(
        f"{folder.as_uri()}/",
        etag,
        datetime.now(UTC),
        icechunk.local_filesystem_store(str(folder)),
        icechunk.Credentials.LocalFileSystemAccess(),
    )


def in_bucket(seaweedfs: SeaweedFS, prefix: str, etag: str) -> Elsewhere:
    """Return a place in SeaweedFS."""
    store = icechunk.s3_store(
        region=seaweedfs.region,
        endpoint_url=seaweedfs.endpoint_url,
        allow_http=True,
        s3_compatible=True,
        force_path_style=True,
    )
    credentials = icechunk.s3_static_credentials(
        access_key_id=seaweedfs.access_key_id, secret_access_key=seaweedfs.secret_access_key
    )
    return Elsewhere(
        f"s3://{seaweedfs.bucket}/{prefix}/", etag, datetime.now(UTC), store, credentials
    )


def in_web(url: str, etag: str) -> Elsewhere:
    """Return a place on a plain HTTP server."""
    store = icechunk.http_store(opts={"allow_http": "true"})
    july = datetime(2026, 7, 6, 12, tzinfo=UTC)  # the server's dates are the 6th and the 7th
    return Elsewhere(f"{url}/", etag, july, store, icechunk.Credentials.HttpAccess())


def authorized(places: Mapping[str, Elsewhere]) -> Any:
    """Return credentials by which the library follows references to *places*."""
    return icechunk.containers_credentials(
        {place.prefix: place.credentials for place in places.values()}
    )


def configuration(places: Mapping[str, Elsewhere]) -> RepositoryConfig:
    """Return a configuration with a virtual container for each of *places*."""
    config = RepositoryConfig(inline_chunk_threshold_bytes=0)
    for name, place in places.items():
        config.set_virtual_chunk_container(
            VirtualChunkContainer(place.prefix, place.store, name=name)
        )
    return config


def write_virtual(
    folder: Path, version: str, places: Mapping[str, Elsewhere], cases: Path
) -> Repository:
    """Write a repository with a group of references for each of *places*."""
    repo = Repository.create(
        storage(folder),
        config=configuration(places),
        spec_version=spec(version),
        authorize_virtual_chunk_access=authorized(places),
    )
    repo.save_config()

    def refer(store: Any) -> None:
        zarr.create_group(store)
        for name, place in places.items():
            _refer(store, name, place, cases)

    commit(repo, "references", refer)
    repo.create_tag("v1", repo.lookup_branch("main"))
    migrate(repo, version)
    return open_virtual(storage(folder), places)


def open_virtual(where: icechunk.Storage, places: Mapping[str, Elsewhere]) -> Repository:
    """Open a repository so that the library follows references."""
    return Repository.open(where, authorize_virtual_chunk_access=authorized(places))


OFFSETS: Final = (7, 8, len(DATA) - 4)
"""Offsets of the chunks of the arrays ``none``, ``etag`` and ``modified``."""


def refer_to_parts(store: Any, path: str, container: str, place: Elsewhere) -> zarr.Group:
    """Write a group with one array of references for each kind of checksum."""
    group = zarr.create_group(store, path=path)
    locations = (f"{place.prefix}data.bin", f"vcc://{container}/data.bin")
    for kind, checksum in {"none": None, "etag": place.etag, "modified": place.modified}.items():
        _array(group, kind, len(OFFSETS))
        for at, offset in enumerate(OFFSETS):
            key, where = f"{path}/{kind}/c/{at}".lstrip("/"), locations[at % 2]
            store.set_virtual_ref(key, where, offset=offset, length=4, checksum=checksum)
    return group


def _refer(store: Any, name: str, place: Elsewhere, cases: Path) -> None:
    group = refer_to_parts(store, name, name, place)
    location = f"{place.prefix}data.bin"
    _array(group, "many", MANY)
    chunks = [VirtualChunkSpec([at], location, 4 * at, 4) for at in range(MANY)]
    store.set_virtual_refs(f"{name}/many", chunks)
    for case in REFERRED:
        for key, data in files_of(BY_NAME[case], cases).items():
            if key.endswith("zarr.json"):
                put(store, {f"{name}/{key}": data})
            else:
                whole = f"{place.prefix}{key}"
                store.set_virtual_ref(f"{name}/{key}", whole, offset=0, length=len(data))
    for parent in sorted({case.partition("/")[0] for case in REFERRED}):
        zarr.create_group(store, path=f"{name}/{parent}")


def _array(group: zarr.Group, name: str, count: int) -> None:
    group.create_array(name, shape=(4 * count,), chunks=(4,), dtype=np.uint8, compressors=None)


ZARR, VOLUME = "index/zarr_end_little_crc", "bits/identity_1_2_3"


def bare(quoted: str | None) -> str:
    """Remove the quotes of an ETag."""
    assert quoted is not None
    return quoted.strip('"')
