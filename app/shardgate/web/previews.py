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
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import cachetools
from pydantic import BaseModel, Field, FiniteFloat, NonNegativeInt

from shardgate.concurrency import SingleFlight, bounded_gather
from shardgate.errors import BadParameterError, ShardgateError, StorageError, VersionChangedError
from shardgate.formats.documents import Json
from shardgate.model import ETag, VirtualKey, join_path
from shardgate.read.bodies import Entity
from shardgate.read.budget import ByteBudget
from shardgate.read.containers import Dataset
from shardgate.read.resolver import Resolver
from shardgate.server.request import check_key
from shardgate.web.looks import READS, PictureName, Planner, may_pass
from shardgate.web.nodes import read_body
from shardgate.web.sections import Drawing, Indices, UndrawableError

_MOST_NBYTES: Final = 64 * 1024**2  # of all encoded chunks of a picture
_ATTEMPTS: Final = 3  # attempts to read all chunks of a picture while none of them is replaced
_NOWHERE: Final[Indices] = {}
_log = logging.getLogger(__name__)


class Histogram(BaseModel, frozen=True):
    """Values of a picture, or of a channel in it, without those that are not finite."""

    low: FiniteFloat
    high: FiniteFloat
    counts: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1, max_length=64)]
    """Of equal parts of the range from *low* to *high*."""
    shown: tuple[FiniteFloat, FiniteFloat] | None
    """Values that are drawn black, and in full brightness."""
    color: Annotated[str, Field(pattern="^[0-9A-Fa-f]{6}$")] | None = None
    """`None` for shades of grey."""


class PlaneValues(BaseModel, frozen=True):
    """Numbers of the values that a picture is made of."""

    contrast: tuple[FiniteFloat, FiniteFloat] | None = None
    """1st and 99th percentile of the finite values, of several channels those of the first; `None`
    of labels, colours and constants.
    """
    count: NonNegativeInt = 0
    histograms: Annotated[tuple[Histogram, ...], Field(max_length=8)] = ()
    labels: tuple[NonNegativeInt, NonNegativeInt, NonNegativeInt] | None = None
    """Number of different labels other than 0, the least and the greatest of them."""


_UNKNOWN: Final = PlaneValues()


@dataclass(frozen=True, slots=True)
class Preview:
    """A picture, or the placeholder of an array that cannot be drawn."""

    png: bytes
    etag: ETag
    """Made of the ETags of all that was read for the picture."""
    values: PlaneValues = _UNKNOWN
    read_s: float | None = None
    """Time at which the last chunk was read: seconds since 1970; `None` of a placeholder."""
    is_mixed: bool = False
    """Whether chunks are of different moments, because others were written while it was made."""


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
# There is no picture yet, since what it needs could not be read for a reason that may pass.
PENDING: Final = Preview(b"", ETag('"pending"'))


def worker_command() -> Sequence[str] | None:
    """Return the command of the worker; `None` if the extra ``viewer`` is not installed."""
    if find_spec("tensorstore") is None or find_spec("PIL") is None:
        return None
    return sys.executable, "-IB", str(Path(__file__).with_name("preview_worker.py"))


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
        longest_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._resolver = resolver
        self._budget = budget
        self._worker = worker
        self._longest_s = longest_s
        self._clock = clock
        self._turn = asyncio.Semaphore(1)
        self._planner = Planner(resolver)
        self._flights = SingleFlight[PictureName]()
        # 32 MiB of pictures; with each come about 8 KiB of other things.
        self._cached = cachetools.LRUCache[PictureName, tuple[Preview, float]](
            32 * 1024**2, lambda entry: len(entry[0].png) + 8192
        )

    async def get(
        self, dataset: Dataset, path: str, ref: str | None = None, at: Indices = _NOWHERE
    ) -> Preview:
        """Return the preview of the array or multiscale at *path*, by default of the first one,
        *at* positions along axes that it does not show.

        In an Icechunk repository it is as of *ref*: ``branch.NAME``, ``tag.NAME``, or the id of a
        snapshot, by default ``branch.main``. Raises: `BadKeyError`, `BadParameterError`.
        """
        if self._worker is None:
            check_key(path.rstrip("/"))
            return PLACEHOLDER
        try:
            name = await self._planner.name(dataset, path, ref, at)
        except StorageError as error:
            return PENDING if may_pass(error) else PLACEHOLDER
        known, expires_at = self._cached.get(name, (PENDING, 0.0))
        if self._clock() < expires_at:
            return known
        return await self._flights.run(name, partial(self._make, dataset, name, known))

    async def _make(self, dataset: Dataset, name: PictureName, known: Preview) -> Preview:
        made = PLACEHOLDER
        cached_s = 20.0  # time for which a picture is not compared with the store
        try:
            async with asyncio.timeout(self._longest_s):
                made = await self._draw(dataset, name, known)
        except BadParameterError:
            raise
        except (ShardgateError, ValueError, TimeoutError) as error:
            _log.debug("no preview of %s in %s: %s", name.path, dataset.name, error)
            if may_pass(error):
                made = known
                cached_s = 2.0
        except Exception:  # noqa: BLE001 - a picture must not take its page along
            _log.exception("a preview of %s cannot be made", dataset.name)
        self._cached[name] = made, self._clock() + cached_s
        return made

    async def _look(self, dataset: Dataset, name: PictureName) -> _Look:
        path, drawing = await self._planner.plan(dataset, name)
        drawing.check()
        return _Look(path, drawing, await self._planner.locate(dataset, drawing))

    async def _draw(self, dataset: Dataset, name: PictureName, known: Preview) -> Preview:
        """Draw, unless *known* was made of the same bytes; begin again while any are replaced."""
        look = await self._look(dataset, name)
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
                again = await self._look(dataset, name._replace(path=look.path))
                is_mixed = etag != again.etag
                if not is_mixed or attempts == _ATTEMPTS:
                    try:
                        values, png = await self._run_worker(look.drawing.request, objects)
                    except UndrawableError as error:
                        if is_mixed:  # chunks may not fit the metadata
                            raise VersionChangedError(dataset.root.join(look.path)) from error
                        raise
                    return Preview(png, etag, values, read_s, is_mixed)
            look = again

    async def _read_chunks(self, dataset: Dataset, look: _Look) -> tuple[Mapping[str, bytes], ETag]:
        """Read the objects for the worker, without codings, and the ETag of their picture."""
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

        await bounded_gather(read_chunk, list(look.chunks), limit=READS)
        return objects, _etag_of(drawing, etags)

    async def _run_worker(
        self, request: Mapping[str, Json], objects: Mapping[str, bytes]
    ) -> tuple[PlaneValues, bytes]:
        """Return the values and the PNG. Raises: `UndrawableError` if the worker fails."""
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
                env={"MALLOC_ARENA_MAX": "2", "OPENBLAS_NUM_THREADS": "1"},
            )
            try:
                answer, complaint = await process.communicate(sent)
            finally:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        line, _, png = answer.partition(b"\n")
        if process.returncode:
            reason = complaint[-1000:].decode(errors="replace")
            raise UndrawableError(f"the worker ended with {process.returncode}: {reason}")
        return PlaneValues.model_validate_json(line), png


def _check_size(nbytes: int) -> None:
    if nbytes > _MOST_NBYTES:
        raise UndrawableError(f"{nbytes} bytes of chunks, over {_MOST_NBYTES}")


def _etag_of(drawing: Drawing, chunks: Mapping[str, ETag]) -> ETag:
    revision = 2  # to be increased when pictures of the same bytes become others
    made_of = json.dumps([revision, drawing.version, drawing.request, chunks], sort_keys=True)
    return ETag(f'"{sha256(made_of.encode()).hexdigest()[:32]}"')
