"""Which container a key belongs to: the nearest ancestor that holds a marker."""

from collections.abc import Sequence
from dataclasses import dataclass

from app.formats.contract import Fetch, Format, Layout
from app.model import Location, ObjectRef, VirtualKey, Whole


@dataclass(frozen=True, slots=True)
class PassThrough:
    """What lies in no container: objects, as they are."""

    root: ObjectRef
    encloses: bool = False

    async def locate(self, key: VirtualKey, _: Fetch) -> Location:
        """Take *key* for the name of an object."""
        return Whole(self.root.join(key))

    def shows(self, _: VirtualKey) -> bool:
        """Hide nothing."""
        return True


@dataclass(frozen=True, slots=True)
class Containers:
    """Opens containers below a root; what was found, absence too, *fetch* keeps.

    The search goes down from the root and ends at a container that can hold no other, so that
    chunk keys, however deep, cost no look-ups of their own.
    """

    formats: Sequence[Format]

    async def find(
        self, root: ObjectRef, key: VirtualKey, fetch: Fetch
    ) -> tuple[Layout, VirtualKey]:
        """Find the container of *key*, and the rest of *key* in it."""
        found: Layout = PassThrough(root)
        rest = key
        directory, start = root, 0
        while True:
            for fmt in self.formats:
                if (layout := await fmt.open(directory, fetch)) is not None:
                    found, rest = layout, VirtualKey(key[start:])
                    break
            slash = key.find("/", start)
            if found.encloses or slash < 0:
                return found, rest
            start = slash + 1
            directory = root.join(key[:slash])
