"""Write the keys of a dataset as a reference set of kerchunk, which refers to the parts of objects
that the keys stand for: its readers need no service.
"""

import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from urllib.parse import quote, unquote

from shardgate.concurrency import bounded_gather, take
from shardgate.errors import ConfigurationError, DamagedError, NotAllowedError
from shardgate.formats.listing import Window
from shardgate.formats.references import inline_text
from shardgate.model import (
    MISSING,
    Coded,
    GuardedBucket,
    Inline,
    Location,
    Missing,
    ObjectRef,
    Part,
    Referenced,
    Stored,
    VirtualKey,
    Whole,
    encode_path,
)
from shardgate.read.listing import FoundKey, Root, Tree
from shardgate.read.member_store import resolve
from shardgate.storage.contract import Listed
from shardgate.storage.http_store import url_of
from shardgate.survey.key_part import ALL_KEYS, KeyPart

type Reference = str | Sequence[str | int]
"""A text, a whole object, or a part of one: URL, offset and length in bytes."""


async def write_references(
    root: Root, folder: str, write: Callable[[str], object], part: KeyPart = ALL_KEYS
) -> int:
    """Write all keys below *folder*, empty or with a final slash, in JSON of version 1, by calls of
    *write*; return their number. Raises: `ShardgateError`, also where no reference is possible.

    An inner chunk is of the *part* of the object of its shard, any other key of its own.
    """
    count = 0
    write('{"version": 1, "refs": {')
    async with aclosing(find_references(root, folder, part)) as references:
        async for key, reference in references:
            write(f"{',' if count else ''}\n{json.dumps(key)}: {json.dumps(reference)}")
            count += 1
    write("\n}}\n")
    return count


async def find_references(
    root: Root, folder: str = "", part: KeyPart = ALL_KEYS
) -> AsyncGenerator[tuple[str, Reference]]:
    """Yield the keys below *folder* that are of *part*, relative to it, and their references."""

    async def locate(found: FoundKey) -> Location | None:
        layout = found.layout
        inside = found.inside
        if layout is None:
            if not isinstance(found.found, Listed):
                return found.found and await resolve(found.found, root.fetch)
            # It is served as it is stored, perhaps in a container whose members lie elsewhere.
            key = VirtualKey(found.key)
            layout, inside, *_ = await root.containers.find(root.ref, key, root.fetch)
        try:
            place = await resolve(await layout.locate(inside, root.fetch), root.fetch)
        except NotAllowedError as error:  # without the key the set would read as fill value there
            raise NotAllowedError(f"{found.key}: {error}") from error
        is_listed = not isinstance(place, Whole) or isinstance(found.found, Listed)
        return place if is_listed else MISSING

    tree = Tree(root, Window(folder))
    async with aclosing(tree.walk()) as walk:
        while batch := await take(walk, 128):
            after = max(tree.window.after, *(found.key for found in batch))
            tree.window = tree.window._replace(after=after)
            own = [found for found in batch if await _is_own(root, found, part)]
            for found, place in zip(own, await bounded_gather(locate, own), strict=True):
                tree.misses = tree.misses + 1 if isinstance(place, Missing) else 0
                if not isinstance(place, Missing) and found.key.startswith(folder):
                    yield found.key.removeprefix(folder), _refer(found.key, place)


async def _is_own(root: Root, found: FoundKey, part: KeyPart) -> bool:
    if part.count > 1 and found.layout is not None:
        with suppress(DamagedError, NotAllowedError):  # told by the part of the key itself
            shard = await found.layout.holding(found.inside, root.fetch)
            if shard is not None:
                return part.holds_object(root.ref, shard.ref)
    return part.holds(found.key)


def _refer(key: str, place: Location | None) -> Reference:
    match place.place if isinstance(place, Referenced) else place:
        case Inline(data):
            return inline_text(data)
        case Whole(ref):
            return [url_of_object(ref)]
        case Stored(ref, (start, stop)) | Part(ref, (start, stop)) if ref.bucket:
            return [url_of_object(ref), start, stop - start]
        case Part():
            raise NotAllowedError(f"{key}: a virtual reference below no prefix of --allow-virtual")
        case Coded(_, coding):
            stored = coding.rstrip("0123456789 ")  # the size and checksum of raw DEFLATE
            reason = f"its bytes are stored with {stored}, which a reference cannot say"
            raise ConfigurationError(f"{key}: {reason}")
    raise ConfigurationError(f"{key}: it has no place")


def url_of_object(ref: ObjectRef) -> str:
    """Return the URL of an object as fsspec takes it: only those of web servers are encoded."""
    bucket = url_of(ref.bucket)
    key = ref.key
    if bucket.startswith("file://"):
        bucket = unquote(bucket)
    elif bucket.startswith(("http://", "https://")):
        key = encode_path(key) if isinstance(ref.bucket, GuardedBucket) else quote(key)
    return f"{bucket.rstrip('/')}/{key}"
