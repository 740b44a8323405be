"""Find the container of a key, its nearest ancestor that has a marker, and remember it."""

import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from shardgate.errors import DamagedError, MetadataMissingError, NotAllowedError, ReadOnlyError
from shardgate.formats.contract import (
    Document,
    Format,
    Layout,
    StoredObjects,
    Stray,
    Target,
    Translator,
    WalkedFormat,
)
from shardgate.formats.documents import DocumentFormat
from shardgate.formats.listing import PLAIN, UNIFORM, ListingRules
from shardgate.formats.members import MemberFormat, Members
from shardgate.formats.reading import Fetch, Opaque, Read
from shardgate.model import (
    MISSING,
    SHARDED,
    ByteRange,
    Location,
    ObjectRef,
    VirtualKey,
    VolatileBucket,
    Whole,
)
from shardgate.read.consistency import FreshnessTracker
from shardgate.read.metadata_cache import OVERHEAD_NBYTES, ReadCache

LIKE_A_CHUNK: Final = re.compile(r"(?:^|/)(?:c|c?\.?-?[0-9][0-9._:-]*(?:index)?)$", re.ASCII)
"""Ends of keys that may name chunks: ``c/0/1``, ``c.0.1``, ``0-64_0-64_-8-0``, ``7.index``."""
_ZARR2_KEY: Final = re.compile(r"(?:^|/)([0-9]+(?:[./][0-9]+)*)$", re.ASCII)
MAX_DEPTH: Final = 32
"""Directories searched for containers on the way to a key; each costs a read of every marker."""


@dataclass(frozen=True, slots=True)
class PassThrough(StoredObjects):
    """Layout of the keys outside of containers: names of objects."""

    is_everything: bool = False

    async def listing_rules(self, _: VirtualKey, __: Fetch) -> ListingRules:
        return PLAIN if self.is_everything else UNIFORM


@dataclass(frozen=True, slots=True)
class MissingArray(PassThrough):
    """Layout of a key named like a chunk that belongs to no array; no object is served for it."""

    fault: DamagedError | NotAllowedError | None = None
    """Raised for reads, where there should be an array, or its metadata are damaged."""

    async def locate(self, key: VirtualKey, _: Fetch) -> Location:  # noqa: ARG002
        """Return `MISSING`. Raises: `DamagedError` where there should be an array."""
        if self.fault is not None:
            raise self.fault
        return MISSING

    async def target(self, key: VirtualKey, _: Fetch) -> Target:
        return Stray(self.directory.join(key))


@dataclass(frozen=True, slots=True)
class MemberFolder(StoredObjects):
    """Layout of a folder in an archive without containers on the way to it."""

    def encloses(self, key: VirtualKey) -> bool:
        return "/" not in key


type Prefetch = Callable[[Read[Any]], None]
"""Starts a read whose result is likely to be asked for."""
type CheckAbsence = Callable[[ObjectRef], Awaitable[None]]
"""Raises `StorageError` for a root that has to exist."""


class Container(NamedTuple):
    """The container of a key."""

    layout: Layout
    rest: VirtualKey
    """The key within the container."""
    outer: Sequence[tuple[Layout, int]] = ()
    """Containers around it, none of which encloses the key, and where their keys begin in it."""
    members: Members | None = None
    """The members that it lies among, if the key leads into an archive."""

    @property
    def is_read_only(self) -> bool:
        """Return whether nothing in it can ever be written."""
        return self.members is not None or self.layout.is_read_only


@dataclass(frozen=True, slots=True)
class Containers:
    """Opens containers below a root; *fetch* caches markers, absent ones too.

    The search descends from the root and ends at the first container that encloses the key, so
    that chunk keys, however deep, cost no look-ups of their own. The nearest marker decides: a
    damaged one hides no container below it.
    """

    formats: Sequence[Format]
    format: str = "auto"
    """The configured format. Below a named one, keys like those of chunks name no objects."""
    member_formats: Sequence[MemberFormat] = ()
    """The formats of containers with members, among which those of `formats` are found too."""
    check_absence: CheckAbsence | None = None
    """Called with each directory that none of `member_formats` opens."""
    walked: WalkedFormat | None = None
    """The format of arrays that walks look for in directories that are no containers."""
    is_sharded: bool = False
    """True if all containers are served as they are stored; see `Layout.as_stored`."""

    @property
    def marker_names(self) -> Sequence[str]:
        """The names of the objects that mark containers of `formats`."""
        nowhere = ObjectRef("", "")
        return [read.ref.key for fmt in self.formats for read in fmt.markers(nowhere)]

    @property
    def markers(self) -> str:
        """The names of the objects that mark containers, for people."""
        patterns = (each for fmt in self.member_formats for each in fmt.patterns)
        return ", ".join([*self.marker_names, *patterns])

    def is_archive(self, name: str) -> bool:
        """Return whether an object of this name may be a container by itself."""
        return any(fmt.is_container(name) for fmt in self.member_formats)

    def may_enter_archive(self, key: str) -> bool:
        """Return whether a folder on the way to *key* is named like an archive."""
        return any(map(self.is_archive, key.split("/")[:-1]))

    @property
    def inside_archives(self) -> "Containers":
        """Containers among members: no archives, nor repositories, which refer to whole objects."""
        formats = [fmt for fmt in self.formats if isinstance(fmt, DocumentFormat)]
        return Containers(formats, walked=self.walked, is_sharded=self.is_sharded)

    def split_sharded(self, key: str) -> "tuple[Containers, str]":
        """Return the containers as they are stored and the rest of a *key* that begins with
        `SHARDED`; of any other key, or where all is served as it is stored, these and *key*.
        """
        # Behind the first one it is the name of a stored folder.
        if self.is_sharded or not key.startswith(SHARDED) or not self.formats:
            return self, key
        return replace(self, is_sharded=True), key.removeprefix(SHARDED)

    def _face(self, layout: Layout) -> Layout:
        return layout.as_stored() if self.is_sharded else layout

    async def find(
        self, root: ObjectRef, key: VirtualKey, fetch: Fetch, prefetch: Prefetch = lambda _: None
    ) -> Container:
        """Return the container of *key*, and those around it.

        *prefetch* is called with reads of markers that are likely to follow.
        """
        claimed = await self.open_claimed(root, key, fetch)
        if claimed is not None:
            return claimed
        archive = await self.find_archive(root, key, fetch)
        if archive is None:
            return await self._find_nearest(root, key, fetch, prefetch)
        members, start = archive
        name = VirtualKey(key[start:])
        found = await self.inside_archives.find(members.root, name, fetch)
        if type(found.layout) is PassThrough:  # and not one of its subclasses
            folder, _, rest = name.rpartition("/")
            found = Container(MemberFolder(members.root.join(folder)), VirtualKey(rest))
        outer = [(each, start + begin) for each, begin in found.outer]
        return found._replace(outer=outer, members=members)

    async def _find_nearest(
        self, root: ObjectRef, key: VirtualKey, fetch: Fetch, prefetch: Prefetch
    ) -> Container:
        """Return the nearest container. Raises: the fault of metadata that *key* depends on."""
        container, fault = await self._descend(root, key, fetch, prefetch)
        layout = container.layout
        if self.is_sharded:
            return container._replace(layout=layout.as_stored())
        is_like_a_chunk = not layout.encloses(container.rest) and LIKE_A_CHUNK.search(key)
        # Faults of an archive at the root have its name, which is that of the empty key too.
        if key and not isinstance(fault, NotAllowedError | None) and fault.ref == root.join(key):
            raise fault
        if isinstance(fault, MetadataMissingError):
            if is_like_a_chunk:
                raise fault
        elif is_like_a_chunk and (fault or await self._is_stray(root, key, layout, fetch)):
            return Container(MissingArray(root, fault=fault), key)
        return container

    async def _descend(
        self, root: ObjectRef, key: VirtualKey, fetch: Fetch, prefetch: Prefetch
    ) -> tuple[Container, MetadataMissingError | DamagedError | NotAllowedError | None]:
        """Open the containers on the way to *key*, down to one that encloses it; return the last
        one, and the fault of metadata below it.
        """
        found = self.passthrough(root)
        formats: Sequence[Format] = self.formats
        rest = key
        fault: MetadataMissingError | DamagedError | NotAllowedError | None = None
        is_total = False
        outer: list[tuple[Layout, int]] = []
        directory = root
        start = 0
        for _ in range(MAX_DEPTH):
            nests = bool(outer) or self.format == "zarr"
            for read in _likely_markers(formats, root, key, start, nests=nests):
                prefetch(read)
            try:
                opened, damage = await self._try_formats(directory, fetch)
            except MetadataMissingError as error:
                if self.translator(error.ref) is None:
                    raise
                opened = damage = None
                fault = error
                is_total = False
            if opened is not None:
                fmt, found = opened
                formats = (fmt,)
                rest = VirtualKey(key[start:])
                is_total = False
                fault = damage and damage[1]
                outer.append((found, start))
            elif damage is not None:
                fmt, fault = damage
                is_total = not isinstance(fmt, DocumentFormat)
            elif any(each.expects(key[begin : start - 1]) for each, begin in outer):
                reason = "has no metadata, though consolidated metadata describe an array there"
                fault = fault or DamagedError(directory, reason)
            slash = key.find("/", start)
            if found.encloses(rest) or slash < 0:
                break
            start = slash + 1
            directory = root.join(key[:slash])
        if fault is not None and is_total and key[start:]:
            raise fault  # a repository has no keys that do not depend on it
        return Container(found, rest, outer[:-1]), fault

    async def open(self, directory: ObjectRef, fetch: Fetch) -> Layout | None:
        """Open *directory* if it is a container. Raises: `DamagedError`, `MetadataMissingError`."""
        opened, damage = await self._try_formats(directory, fetch)
        if opened is not None:
            return self._face(opened[1])
        if damage is not None:
            raise damage[1]
        return None

    async def _try_formats(
        self, directory: ObjectRef, fetch: Fetch
    ) -> tuple[tuple[Format, Layout] | None, tuple[Format, DamagedError | NotAllowedError] | None]:
        """Open *directory* by the first format that can, and return the damage that another met, or
        the refusal to follow a reference.
        """
        damage = None
        for fmt in self.formats:
            try:
                if (layout := await fmt.open(directory, fetch)) is not None:
                    return (fmt, layout), damage
            except (DamagedError, NotAllowedError) as damaged:
                damage = damage or (fmt, damaged)
        return None, damage

    async def find_archive(
        self, root: ObjectRef, key: str, fetch: Fetch
    ) -> tuple[Members, int] | None:
        """Open the first object on the way to *key* that is a container by itself, if there is one;
        return where the names of its members begin in *key*. Raises: `DamagedError`.
        """
        start = 0
        if not self.member_formats:
            return None
        for _ in range(MAX_DEPTH):
            members = await self.open_archive(root.join(key[:start].rstrip("/")), fetch)
            if members is not None:
                return members, start
            if not (start := key.find("/", start) + 1):
                break
        return None

    async def open_archive(self, ref: ObjectRef, fetch: Fetch) -> Members | None:
        """Open *ref* if it is a container of members. Raises: `DamagedError`."""
        for fmt in self.member_formats:
            if (members := await fmt.open(ref, fetch)) is not None:
                return members
        if self.check_absence is not None:
            await self.check_absence(ref)
        return None

    def passthrough(self, root: ObjectRef) -> Layout:
        """Return the layout of the keys outside of all containers below *root*."""
        return PassThrough(root, is_everything=not self.formats)

    async def open_claimed(
        self, root: ObjectRef, key: VirtualKey, fetch: Fetch
    ) -> Container | None:
        """Open the container that the spelling of *key* names (``@branch.main``), if any."""
        for fmt in self.formats:
            if (start := fmt.claim(key)) is not None:
                directory = root.join(key[: max(0, start - 1)])
                if (layout := await fmt.open(directory, fetch)) is not None:
                    return Container(self._face(layout), VirtualKey(key[start:]))
        return None

    def find_claim(self, key: VirtualKey) -> int | None:
        """Return where the first claim of a format on *key* begins; see `Format.claim`."""
        return next((at for fmt in self.formats if (at := fmt.claim(key)) is not None), None)

    def translator(self, ref: ObjectRef) -> Translator | None:
        """Return the translator of the document *ref*, if it needs one."""
        path, _, name = ref.key.rpartition("/")
        directory = ObjectRef(ref.bucket, path)
        for fmt in self.formats:
            if (translator := fmt.translator(directory, name)) is not None:
                return translator
        return None

    async def _is_stray(
        self, root: ObjectRef, key: VirtualKey, found: Layout, fetch: Fetch
    ) -> bool:
        """Return whether *key*, named like a chunk, belongs to no array (if a format is set)."""
        if self.format == "auto" or not self.formats:
            return False
        if self.format != "zarr":
            return isinstance(found, PassThrough)
        coords = _ZARR2_KEY.search(key)
        start = coords.start(1) if coords else 0
        for _ in range(MAX_DEPTH if coords else 0):
            marker = root.join(key[:start].rstrip("/")).join(".zarray")
            read = Read("metadata", marker, ByteRange(0, 1), Opaque, is_marker=True)
            if await fetch(read) is not None:
                return False
            if not (start := key.find("/", start) + 1):
                break
        return True


def _likely_markers(
    formats: Sequence[Format], root: ObjectRef, key: VirtualKey, start: int, *, nests: bool
) -> Iterator[Read[Any]]:
    """Yield the markers of the directory before *start*; if containers nest, those below it too.

    Chunks of Zarr arrays follow the directory ``c`` or lie in that of the array itself.
    """
    if len(formats) == 1 and not nests:
        return
    last = f"/{key}".rfind("/c/", start)
    if last < 0:
        last = key.rfind("/") + 1
    # Each directory costs a read of every marker, and all are read at once.
    for _ in range(8 if nests else 1):
        directory = root.join(key[: max(0, start - 1)])
        for fmt in formats:
            yield from fmt.markers(directory)
        if start >= last:
            return
        start = key.find("/", start) + 1


@dataclass(frozen=True, slots=True)
class Dataset:
    """A root by its name; see `ServedDataset`."""

    name: str
    root: ObjectRef
    containers: Containers
    format: str
    """The configured format, such as ``zarr``, or ``auto``."""


def split_sharded[D: Dataset](dataset: D, key: VirtualKey) -> tuple[D, VirtualKey]:
    """Return *dataset* as it is stored, under a name of its own, and the rest of a *key* below
    `SHARDED`; else *dataset* and *key*.
    """
    containers, rest = dataset.containers.split_sharded(key)
    if containers is dataset.containers:
        return dataset, key
    name = f"{dataset.name}/{SHARDED}"
    return replace(dataset, name=name, containers=containers), VirtualKey(rest)


type _Name = tuple[str, bool, str]
"""Name of a dataset, whether the keys claim their container, and its directory with the slash."""


class _Route(NamedTuple):
    container: Container
    """As found for one key."""
    tracker: FreshnessTracker
    """The reads that led to the container."""

    @property
    def nbytes(self) -> int:
        return OVERHEAD_NBYTES + self.tracker.nbytes


class Routes:
    """Finds containers of keys; remembers them by dataset and directory in the cache of *reads*.

    A route is good until one of the reads that led to it expires, or turns out to be outdated. It
    leads only to a container that encloses the key, and to no folder around an archive of the key.
    """

    def __init__(self, reads: ReadCache) -> None:
        self._reads = reads

    async def find(self, dataset: Dataset, key: VirtualKey, tracker: FreshnessTracker) -> Container:
        """Return the container of *key*: *tracker* adopts the reads of a route, or searches."""
        if key.startswith(SHARDED):
            dataset, key = split_sharded(dataset, key)
        containers = dataset.containers
        for name in _names(dataset, key):
            route: _Route | None = self._reads.cache.get(name)
            if route is None or not route.tracker.is_current:
                continue
            layout, _, outer, members = route.container
            rest = VirtualKey(key[len(name[2]) :])
            around = [each for each, start in outer if each.encloses(VirtualKey(key[start:]))]
            # Of several archives on the way to a key the first one has it.
            # Names of archives have a dot, which is a cheap test.
            is_hiding = members is None and "." in rest and containers.may_enter_archive(rest)
            if layout.encloses(rest) and not around and not is_hiding:
                tracker.adopt(route.tracker)
                return Container(layout, rest, members=members)
        return await self._search(dataset, key, tracker)

    async def target(self, dataset: Dataset, key: VirtualKey, tracker: FreshnessTracker) -> Target:
        """Return where *key* is written; see `Layout.target`."""
        dataset, key = split_sharded(dataset, key)
        containers = dataset.containers
        ref = dataset.root.join(key)
        try:
            container = await self.find(dataset, key, tracker)
            if container.members is not None:
                raise ReadOnlyError(f"{container.members.ref}: what lies in it is read only")
            target = await container.layout.target(container.rest, tracker)
        except (MetadataMissingError, DamagedError) as error:
            if error.ref != ref or containers.translator(ref) is None:
                raise
            target = Whole(ref)
        if not isinstance(target, Whole) or containers.is_sharded:
            return target
        translator = containers.translator(ref)
        return target if translator is None else Document(target.ref, translator)

    async def _search(
        self, dataset: Dataset, key: VirtualKey, tracker: FreshnessTracker
    ) -> Container:
        find = dataset.containers.find
        found = await find(dataset.root, key, tracker, self._reads.prefetch)
        if found.layout.encloses(found.rest) and tracker.is_current:
            directory = key[: len(key) - len(found.rest)]
            for name in _names(dataset, key):
                if name[2] == directory:
                    tracker.kept = tracker.copy()
                    self._reads.cache.put(name, _Route(found, tracker.kept))
        return found


def _names(dataset: Dataset, key: VirtualKey) -> Iterator[_Name]:
    """Yield the names of routes that may lead to *key*, outer directories first.

    There are none to a volatile bucket, whose state expires at once.
    """
    if isinstance(dataset.root.bucket, VolatileBucket):
        return
    claim = dataset.containers.find_claim(key) if "@" in key else None
    if claim is not None:
        yield dataset.name, True, key[:claim]
        return
    end = 0
    for _ in range(MAX_DEPTH):
        yield dataset.name, False, key[:end]
        if not (end := key.find("/", end) + 1):
            return
