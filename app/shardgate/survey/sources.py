"""Follow all references of a reference set, and check the objects that references lead to."""

from collections import Counter
from collections.abc import AsyncGenerator

from shardgate.concurrency import yield_to_loop
from shardgate.errors import DamagedError, NotAllowedError, StorageError
from shardgate.formats.members import Members
from shardgate.formats.reading import Fetch, Opaque, Read
from shardgate.formats.surveying import (
    Finding,
    MissingBytes,
    NeededObject,
    Report,
    Unreadable,
    misfit,
)
from shardgate.model import ByteRange, ObjectRef, Part
from shardgate.read.metadata_cache import uncached_reads
from shardgate.storage.contract import ObjectReader


class Sources:
    """The objects that the references of a set lead to, each with the furthest of its parts."""

    def __init__(self, members: Members, references: ObjectRef, fetch: Fetch) -> None:
        """Take *references*, the object with those of *members*."""
        self._members = members
        self._references = references
        self._fetch = fetch
        self._furthest: dict[ObjectRef, NeededObject] = {}
        self._refused: Counter[str] = Counter()
        self._examples: dict[str, str] = {}

    async def findings(self) -> AsyncGenerator[Finding]:
        count = 0
        try:
            async for name, _ in self._members.below("", "", "", self._fetch):
                count += 1
                await yield_to_loop(count)
                if (damage := await self._follow(name)) is not None:
                    yield damage
        except DamagedError as error:
            if error.ref == self._references:
                yield Report(not_checked={"": error.reason})
            else:
                yield Report.of_damage(error.ref, "", error.reason)
        yield Report(counts={"references": count})
        for needed in self._furthest.values():
            yield needed
        for reason, number in self._refused.items():
            some = f"{number} of its references, such as {self._examples[reason]}"
            yield Report(not_checked={"": f"{some}: {reason}"})

    async def _follow(self, name: str) -> Report | None:
        try:
            place = await self._members.find(name, self._fetch)
        except NotAllowedError as error:
            self._refused[str(error)] += 1
            self._examples.setdefault(str(error), name)
        except (DamagedError, StorageError) as error:
            if isinstance(error.reason, MissingBytes):  # one finding for all that refers to it
                needed = NeededObject(name, Part(error.ref, ByteRange(0, 0)))
                self._furthest.setdefault(error.ref, needed)
                return None
            is_invalid = error.ref == self._references
            ref = self._members.ref.join(name) if is_invalid else error.ref
            kind = Unreadable if isinstance(error, StorageError) else Report
            return kind.of_damage(ref, name, error.reason.removeprefix(f"{name}: "))
        else:
            if isinstance(place, Part) and place.byte_range.length:
                known = self._furthest.get(place.ref)
                if known is None or known.place.byte_range.stop < place.byte_range.stop:
                    self._furthest[place.ref] = NeededObject(name, place)
        return None


async def check_object(store: ObjectReader, expected: NeededObject) -> Report:
    """Check that the object exists in the expected version, and is long enough."""
    ref, byte_range, version = expected.place
    try:
        found = await uncached_reads(store)(Read("chunk", ref, ByteRange(0, 1), Opaque, version))
    except (StorageError, DamagedError) as error:
        return Report.of_damage(ref, expected.key, error.reason)
    if found is not None and found.size >= byte_range.stop:
        return Report()
    reason = misfit(None if found is None else found.size, byte_range.stop)
    return Report.of_damage(ref, expected.key, reason)
