"""Small pictures of arrays, which a worker process draws: the service itself decodes no chunk."""

import asyncio
import json
import logging
import struct
import sys
import time
import zlib
from asyncio.subprocess import PIPE
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from http import HTTPStatus
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NamedTuple

import cachetools

from shardgate.concurrency import SingleFlight, bounded_gather
from shardgate.errors import (
    BadKeyError,
    BadParameterError,
    DamagedError,
    ShardgateError,
    StorageError,
    VersionChangedError,
)
from shardgate.formats.documents import Json, parse_json
from shardgate.formats.icechunk.keys import parse_ref
from shardgate.formats.reading import DecodeError
from shardgate.formats.surveying import Stateful
from shardgate.icechunk.repository import open_repository
from shardgate.model import ETag, VirtualKey, join_path
from shardgate.read.bodies import Entity, Selection
from shardgate.read.budget import ByteBudget
from shardgate.read.containers import Dataset
from shardgate.read.resolver import Resolver
from shardgate.server.problems import RETRIED, status_of
from shardgate.server.request import check_key
from shardgate.web.nodes import NodeView, find_images, read_body, read_node, read_zarr
from shardgate.web.sections import ENOUGH, Drawing, UndrawableError, draw_volume, draw_zarr

_MOST_DOCUMENT_NBYTES: Final = 8 * 1024**2
_MOST_NBYTES: Final = 64 * 1024**2  # of all encoded chunks of a picture
_READS: Final = 16  # concurrent reads for one picture
_LONGEST_S: Final = 60.0
_CACHED_S: Final = 20.0  # time for which a picture is not compared with the store
_ATTEMPTS: Final = 3  # attempts to read all chunks of a picture while none of them is replaced
_RETRIED_S: Final = 2.0  # time for which a failure that may pass is remembered
_CACHED_NBYTES: Final = 32 * 1024**2
_OVERHEAD_NBYTES: Final = 8192
_WORKER: Final = Path(__file__).with_name("preview_worker.py")
_ENVIRONMENT: Final = {"MALLOC_ARENA_MAX": "2", "OPENBLAS_NUM_THREADS": "1"}
_log = logging.getLogger(__name__)

type _Name = tuple[str, VirtualKey]
"""Name of a dataset, and path."""


@dataclass(frozen=True, slots=True)
class Preview:
    """A picture, or the placeholder of an array that cannot be drawn."""

    png: bytes
    etag: ETag
    """Made of the ETags of all that was read for the picture."""
    contrast: tuple[float, float] | None = None
    """1st and 99th percentile of the finite values; `None` of a placeholder, of labels, colours
    and constants.
    """
    read_s: float | None = None
    """Time at which the last chunk was read: seconds since 1970; `None` of a placeholder."""
    is_mixed: bool = False
    """Whether chunks are of different moments, because others were written while it was made."""

    @property
    def is_placeholder(self) -> bool:
        """Return whether it shows nothing of the array."""
        return self is PLACEHOLDER


class _Look(NamedTuple):
    """A planned picture, and its chunks as they are located at one time."""

    path: VirtualKey
    """Of the node, in a repository as of a snapshot."""
    drawing: Drawing
    chunks: Mapping[str, Entity]

    @property
    def etag(self) -> ETag:
        """ETag of the picture."""
        return _etag_of(self.drawing, {name: each.etag for name, each in self.chunks.items()})

    @property
    def nbytes(self) -> int:
        """Bytes of all chunks, as stored."""
        return sum(each.length for each in self.chunks.values())


def _grey_png(side: int, grey: int) -> bytes:
    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    rows = zlib.compress((b"\0" + bytes([grey]) * side) * side)
    chunks = (b"IHDR" + header, b"IDAT" + rows, b"IEND")
    parts = (struct.pack(f">I{len(c)}sI", len(c) - 4, c, zlib.crc32(c)) for c in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


PLACEHOLDER: Final = Preview(_grey_png(64, 0xDD), ETag('"placeholder"'))
PENDING: Final = Preview(b"", ETag('"pending"'))
"""There is no picture yet, since what it needs could not be read for a reason that may pass."""


def worker_command() -> Sequence[str] | None:
    """Return the command of the worker; `None` if the extra ``viewer`` is not installed."""
    if find_spec("tensorstore") is None or find_spec("PIL") is None:
        return None
    return sys.executable, "-IB", str(_WORKER)


class Previews:
    """Cache of previews, which are made on demand; `PLACEHOLDER` where nothing can be drawn.

    `PENDING` is returned until a store that fails for now can be read.
    Encoded chunks count in *budget* on their way to the *worker*, of which one runs at a time.
    """

    def __init__(
        self,
        resolver: Resolver,
        budget: ByteBudget,
        worker: Sequence[str] | None,
        *,
        longest_s: float = _LONGEST_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._resolver = resolver
        self._budget = budget
        self._worker = worker
        self._longest_s = longest_s
        self._clock = clock
        self._turn = asyncio.Semaphore(1)
        self._flights = SingleFlight[_Name]()
        self._cached = cachetools.LRUCache[_Name, tuple[Preview, float]](
            _CACHED_NBYTES, lambda entry: len(entry[0].png) + _OVERHEAD_NBYTES
        )

    async def get(self, dataset: Dataset, path: str, ref: str | None) -> Preview:
        """Return the preview of the array or multiscale at *path*, by default of the first one.

        In an Icechunk repository it is as of *ref*: ``branch.NAME``, ``tag.NAME``, or the id of a
        snapshot, by default ``branch.main``. Raises: `BadKeyError`, `BadParameterError`.
        """
        key = check_key(path.rstrip("/"))
        if self._worker is None:
            return PLACEHOLDER
        try:
            name = dataset.name, key if ref is None else await self._join_ref(dataset, key, ref)
        except StorageError as error:
            return PENDING if _may_pass(error) else PLACEHOLDER
        known, expires_at = self._cached.get(name, (PENDING, 0.0))
        if self._clock() < expires_at:
            return known
        return await self._flights.run(name, partial(self._make, dataset, name, known))

    async def _make(self, dataset: Dataset, name: _Name, known: Preview) -> Preview:
        made = PLACEHOLDER
        cached_s = _CACHED_S
        try:
            async with asyncio.timeout(self._longest_s):
                made = await self._draw(dataset, name[1], known)
        except (ShardgateError, ValueError, TimeoutError) as error:
            _log.debug("no preview of %s in %s: %s", name[1], dataset.name, error)
            if _may_pass(error):
                made = known
                cached_s = _RETRIED_S
        except Exception:  # noqa: BLE001 - a picture must not take its page along
            _log.exception("a preview of %s cannot be made", dataset.name)
        self._cached[name] = made, self._clock() + cached_s
        return made

    async def _join_ref(self, dataset: Dataset, path: VirtualKey, ref: str) -> VirtualKey:
        """Return *path* as of *ref*. Raises: `BadParameterError` outside of a repository."""
        key = VirtualKey(join_path(path, "zarr.json"))
        layout, rest, *_ = await self._resolver.find_container(dataset, key)
        if not isinstance(layout, Stateful) or rest.startswith("@"):
            raise BadParameterError("ref: the path has none, or does not lie in a repository")
        joined = join_path(_spell_ref(ref), rest.rpartition("/")[0])
        return check_key(join_path(key.removesuffix(rest).rstrip("/"), joined))

    async def _look(self, dataset: Dataset, path: VirtualKey) -> _Look:
        """Plan the picture of *path*, of a dataset or ref that of the first image that has one,
        and locate its chunks.
        """
        is_node = path and not path.rpartition("/")[2].startswith("@")
        async for each in find_images(self._resolver, dataset, path):
            try:
                pinned = await self._pin(dataset, VirtualKey(each))
                drawing = await self._plan(dataset, pinned)
            except (DecodeError, ShardgateError) as error:
                if is_node or _may_pass(error):
                    raise
            else:
                return _Look(pinned, drawing, await self._locate(dataset, drawing))
        raise UndrawableError("there is no array with two axes")

    async def _pin(self, dataset: Dataset, path: VirtualKey) -> VirtualKey:
        """Return *path*, in a repository as of the snapshot that its ref names now: all that is
        read for a picture is of that one.
        """
        key = VirtualKey(join_path(path, "zarr.json"))
        layout, rest, *_ = await self._resolver.find_container(dataset, key)
        if not isinstance(layout, Stateful):
            return path
        container = key.removesuffix(rest).rstrip("/")
        ref, _, below = rest.partition("/") if rest.startswith("@") else ("", "", rest)
        opened = await open_repository(self._resolver.root(dataset), container)
        inside = join_path(f"@{await opened.find(ref)}", below.rpartition("/")[0])
        return VirtualKey(join_path(container, inside))

    async def _plan(self, dataset: Dataset, path: VirtualKey) -> Drawing:
        key = VirtualKey(join_path(path, "zarr.json"))
        layout, rest, *_ = await self._resolver.find_container(dataset, key)
        container = key.removesuffix(rest)
        if (volume := draw_volume(layout, container, rest.rpartition("/")[0])) is not None:
            return volume
        node = await read_node(self._resolver, dataset, path)
        if node is None or not node.array.axes:
            raise UndrawableError("there is neither an array nor an image")
        return await self._plan_level(dataset, node)

    async def _plan_level(self, dataset: Dataset, node: NodeView) -> Drawing:
        """Plan the picture of the coarsest level of *node* that has enough pixels."""
        drawing = None
        fault: Exception = UndrawableError("there is no level")
        for level in reversed(node.levels or ("",)):
            try:
                directory = join_path(node.path, level)
                found = await read_zarr(self._resolver, dataset, directory, _MOST_DOCUMENT_NBYTES)
                if found is None:
                    raise UndrawableError(f"there is no array {directory}")
                drawing = draw_zarr(found, directory, node)
            except (DecodeError, DamagedError, BadKeyError) as error:  # others may be sound
                fault = error
            else:
                if drawing.extent >= ENOUGH:
                    break
        if drawing is None:
            raise fault
        return drawing

    async def _locate(self, dataset: Dataset, drawing: Drawing) -> Mapping[str, Entity]:
        """Locate the chunks of *drawing* that exist, by their names."""
        located: dict[str, Entity] = {}

        async def locate(name: str) -> None:
            key = VirtualKey(join_path(drawing.directory, name))
            async with self._resolver.open(dataset, key, _select_nothing) as opened:
                if opened is not None:
                    located[name] = opened.entity

        await bounded_gather(locate, drawing.chunks, limit=_READS)
        return located

    async def _draw(self, dataset: Dataset, path: VirtualKey, known: Preview) -> Preview:
        """Draw, unless *known* was made of the same bytes; begin again while any are replaced."""
        look = await self._look(dataset, path)
        if look.etag == known.etag and not known.is_mixed:
            return known
        attempts = 0
        while True:
            attempts += 1
            _check_size(look.nbytes)
            # Encoded chunks are held three times: apart, as one request, and in the pipe.
            async with self._budget.room(3 * look.nbytes):
                objects, etag = await self._read_chunks(dataset, look)
                read_s = time.time()
                again = await self._look(dataset, look.path)
                is_mixed = etag != again.etag
                if not is_mixed or attempts == _ATTEMPTS:
                    try:
                        contrast, png = await self._run_worker(look.drawing.request, objects)
                    except UndrawableError as error:
                        if is_mixed:  # chunks may not fit the metadata
                            raise VersionChangedError(dataset.root.join(look.path)) from error
                        raise
                    return Preview(png, etag, contrast, read_s, is_mixed)
            look = again

    async def _read_chunks(self, dataset: Dataset, look: _Look) -> tuple[Mapping[str, bytes], ETag]:
        """Read the objects for the worker, without content codings; return the ETag of a picture
        of them as well.
        """
        drawing = look.drawing
        nbytes = look.nbytes
        document_name, document = drawing.document
        objects = {document_name: document}
        etags: dict[str, ETag] = {}

        async def read_chunk(name: str) -> None:
            nonlocal nbytes
            key = VirtualKey(join_path(drawing.directory, name))
            found = await read_body(self._resolver, dataset, key, _MOST_NBYTES)
            if found is None:  # deleted since
                return
            version, data = found
            entity = look.chunks[name]
            nbytes += len(data) - entity.length
            _check_size(nbytes)
            objects[f"{drawing.inside}{name}"] = data
            # A body that was inflated for us has an ETag of its own.
            etags[name] = entity.etag if version in entity.names else version

        await bounded_gather(read_chunk, list(look.chunks), limit=_READS)
        return objects, _etag_of(drawing, etags)

    async def _run_worker(
        self, request: Mapping[str, Json], objects: Mapping[str, bytes]
    ) -> tuple[tuple[float, float] | None, bytes]:
        """Return contrast and PNG. Raises: `UndrawableError` if the worker fails."""
        sizes = [(name, len(data)) for name, data in objects.items()]
        line = json.dumps({**request, "objects": sizes}).encode()
        sent = b"".join([line, b"\n", *objects.values()])
        async with self._turn:
            process = await asyncio.create_subprocess_exec(
                *self._worker or (),
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                cwd="/",
                env=_ENVIRONMENT,
            )
            try:
                answer, complaint = await process.communicate(sent)
            finally:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        line, _, png = answer.partition(b"\n")
        match process.returncode, line and parse_json(line):
            case 0, {"contrast": [float(low), float(high)]}:
                return (low, high), png
            case 0, {"contrast": None}:
                return None, png
        reason = complaint[-1000:].decode(errors="replace")
        raise UndrawableError(f"the worker ended with {process.returncode}: {reason}")


def _spell_ref(ref: str) -> str:
    """Return *ref* as in keys. Raises: `BadParameterError`."""
    for _, segment in parse_ref(f"@{ref}") or parse_ref(ref):
        return segment
    raise BadParameterError(f"ref: {ref[:80]} is neither a branch, a tag nor a snapshot")


def _may_pass(error: Exception) -> bool:
    """Return whether the next attempt may succeed, so that the last picture is kept until then."""
    if isinstance(error, ShardgateError):
        return status_of(error) in RETRIED
    return isinstance(error, TimeoutError)


def _select_nothing(_: Entity) -> Selection:
    return Selection(HTTPStatus.OK)


def _check_size(nbytes: int) -> None:
    if nbytes > _MOST_NBYTES:
        raise UndrawableError(f"{nbytes} bytes of chunks, over {_MOST_NBYTES}")


def _etag_of(drawing: Drawing, chunks: Mapping[str, ETag]) -> ETag:
    revision = 1  # to be increased when pictures of the same bytes become others
    made_of = json.dumps([revision, drawing.version, drawing.request, chunks], sort_keys=True)
    return ETag(f'"{sha256(made_of.encode()).hexdigest()[:32]}"')
