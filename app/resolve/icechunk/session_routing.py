"""Keys of sessions, ``@session.ID/a/c/0/0``: routed to readers and writers of their own.

Requests whose key has `SESSION` come here; the readers and writers of all other keys know nothing
of sessions. A session is read and written as a dataset of plain Zarr over `SessionStores`.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from app.errors import ShardgateError
from app.formats.icechunk.keys import SESSION, names_session, session_prefix
from app.formats.icechunk.layout import RepositoryLayout
from app.formats.icechunk.session import node_path
from app.formats.listing import Window
from app.model import ETag, VirtualKey
from app.resolve.containers import Containers, Dataset
from app.resolve.icechunk.session_store import SessionStore
from app.resolve.icechunk.sessions import Sessions
from app.resolve.listing import Page
from app.resolve.metadata_cache import ReadCache
from app.resolve.resolver import Resolver
from app.resolve.write import Eraser, KeyWrite, Outcome, Writer
from app.storage.contract import NO_HEADERS, ObjectHeaders

_NO_STORE: Final = b"no-store"


class KeyHandlers(NamedTuple):
    """Reader and writers of keys."""

    resolver: Resolver
    writer: Writer
    eraser: Eraser


class RoutedKey(NamedTuple):
    """A key, with the dataset and the reader that it belongs to."""

    resolver: Resolver
    dataset: Dataset
    key: VirtualKey


class _RoutedSession(NamedTuple):
    dataset: Dataset
    """Keys of the session as a dataset of plain Zarr."""
    lead: str
    """Beginning of the keys of the session, with the slash."""
    store: SessionStore

    def rest(self, key: str) -> VirtualKey:
        return VirtualKey(key.removeprefix(self.lead))

    def inside(self, write: KeyWrite) -> KeyWrite:
        return write._replace(key=self.rest(write.key))


@dataclass(frozen=True, slots=True)
class KeyRouter:
    """Sends keys of sessions to the handlers *of_sessions*, and all others to those of *plain*."""

    plain: KeyHandlers
    of_sessions: KeyHandlers
    sessions: Sessions
    containers: Containers
    fetch: ReadCache

    async def route(self, dataset: Dataset, key: VirtualKey) -> RoutedKey:
        """Return the reader of *key*, with the dataset and the key that it takes."""
        if (routed := await self._find(dataset, key)) is None:
            return RoutedKey(self.plain.resolver, dataset, key)
        return RoutedKey(self.of_sessions.resolver, routed.dataset, routed.rest(key))

    async def page(self, dataset: Dataset, window: Window, limit: int) -> Page:
        """List keys as `Resolver.page` does; those of a session where the prefix names one."""
        routed = await self._find(dataset, window.prefix)
        if routed is None or not window.prefix.startswith(routed.lead):
            return await self.plain.resolver.page(dataset, window, limit)
        lead = routed.lead
        if window.after > lead and not window.after.startswith(lead):
            return Page([], None)
        after = routed.rest(window.after) if window.after.startswith(lead) else ""
        inner = window._replace(prefix=routed.rest(window.prefix), after=after)
        page = await self.of_sessions.resolver.page(routed.dataset, inner, limit)
        entries = [entry._replace(key=lead + entry.key) for entry in page.entries]
        return Page(entries, None if page.after is None else lead + page.after)

    async def put(self, dataset: Dataset, write: KeyWrite) -> ETag | None:
        """Write one key as `Writer.put` does."""
        if (routed := await self._find(dataset, write.key)) is None:
            return await self.plain.writer.put(dataset, write)
        inside, writer = routed.inside(write), self.of_sessions.writer
        if await routed.store.is_whole_chunk(inside.key):
            return await writer.put_whole(routed.dataset, inside)
        return await writer.put(routed.dataset, inside)

    async def demand_place(
        self, dataset: Dataset, key: VirtualKey, headers: ObjectHeaders = NO_HEADERS
    ) -> None:
        """Raise what `put` would for *key*, whatever the body."""
        if (routed := await self._find(dataset, key)) is None:
            await self.plain.writer.demand_place(dataset, key, headers)
        else:
            writer = self.of_sessions.writer
            await writer.demand_place(routed.dataset, routed.rest(key), headers)

    async def put_each(self, dataset: Dataset, writes: Sequence[KeyWrite]) -> list[Outcome]:
        """Write many keys; in sessions documents come first, since chunks need their array."""
        by_session: defaultdict[str | None, list[KeyWrite]] = defaultdict(list)
        for each in writes:
            by_session[session_prefix(each.key)].append(each)
        outcomes: dict[VirtualKey, Outcome] = {}
        for prefix, some in by_session.items():
            try:
                routed = prefix and await self._find(dataset, f"{prefix}/")
            except ShardgateError as error:
                outcomes |= {each.key: error for each in some}
                continue
            if not routed:
                outcomes |= _by_key(some, await self.plain.writer.put_each(dataset, some))
                continue
            for is_document in (True, False):
                part = [each for each in some if (node_path(each.key) is not None) is is_document]
                writer, inside = self.of_sessions.writer, list(map(routed.inside, part))
                outcomes |= _by_key(part, await writer.put_each(routed.dataset, inside))
        return [outcomes[each.key] for each in writes]

    async def erase(self, dataset: Dataset, prefix: VirtualKey) -> int:
        """Delete all keys below *prefix*; in a session return the number of nodes if any."""
        if (routed := await self._find(dataset, prefix)) is None:
            return await self.plain.eraser.erase(dataset, prefix)
        rest = routed.rest(prefix)
        if count := await routed.store.erase(rest.rstrip("/")):
            return count
        return await self.of_sessions.eraser.erase(routed.dataset, rest) if rest else 0

    async def _find(self, dataset: Dataset, key: str) -> _RoutedSession | None:
        """Open the session that *key* belongs to; return `None` for all other keys."""
        if not names_session(key):
            return None
        claimed = await dataset.containers.claimed(dataset.root, VirtualKey(key), self.fetch)
        if claimed is None or not isinstance(layout := claimed.layout, RepositoryLayout):
            return None
        rest = claimed.rest
        segment = rest.partition("/")[0]
        lead = f"{key[: len(key) - len(rest)]}{segment}/"
        session_id = segment.removeprefix(SESSION)
        store = await self.sessions.open(layout.repository, session_id, self.fetch)
        name = f"{dataset.name}/{lead.rstrip('/')}"
        inner = replace(
            dataset, name=name, root=store.root, containers=self.containers, cache_control=_NO_STORE
        )
        return _RoutedSession(inner, lead, store)


def _by_key(writes: Sequence[KeyWrite], outcomes: Sequence[Outcome]) -> dict[VirtualKey, Outcome]:
    return {each.key: outcome for each, outcome in zip(writes, outcomes, strict=True)}
