"""Keys of sessions, ``@session.ID/a/c/0/0``, mapped to keys of session stores.

`SessionResolver`, `SessionWriter` and `SessionEraser` handle keys below ``@session.ID`` with an
inner resolver, writer or eraser over `SessionStores`, and all other keys themselves.
"""

from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from app.errors import ShardgateError
from app.formats.icechunk.keys import SESSION, names_session, session_prefix
from app.formats.icechunk.layout import RepositoryLayout
from app.formats.icechunk.session import node_path
from app.formats.listing import Name, Window
from app.model import ByteRequest, ETag, VirtualKey
from app.resolve.bodies import Choice, Entity, Opened
from app.resolve.budget import ByteReservation
from app.resolve.containers import Containers
from app.resolve.icechunk.session_store import SessionStore
from app.resolve.icechunk.sessions import Sessions
from app.resolve.listing import Page
from app.resolve.metadata_cache import ReadCache
from app.resolve.resolver import Dataset, Resolver
from app.resolve.write import Eraser, KeyWrite, Outcome, Writer
from app.storage.contract import NO_HEADERS, ObjectHeaders

_NO_STORE: Final = b"no-store"


class RoutedSession(NamedTuple):
    """Session that a key belongs to."""

    dataset: Dataset
    """Keys of the session as a dataset of plain Zarr."""
    lead: str
    store: SessionStore

    def rest(self, key: str) -> VirtualKey:
        return VirtualKey(key.removeprefix(self.lead))

    def inner(self, write: KeyWrite) -> KeyWrite:
        return write._replace(key=self.rest(write.key))


@dataclass(frozen=True, slots=True)
class SessionRouter:
    """Finds the session of a key."""

    sessions: Sessions
    containers: Containers
    fetch: ReadCache

    async def find(self, dataset: Dataset, key: str) -> RoutedSession | None:
        """Open the session that *key* belongs to; return `None` for all other keys."""
        if not names_session(key):
            return None
        claimed = await dataset.containers.claimed(dataset.root, VirtualKey(key), self.fetch)
        layout, rest = claimed or (None, VirtualKey(""))
        if not isinstance(layout, RepositoryLayout):
            return None
        segment = rest.partition("/")[0]
        lead = f"{key[: len(key) - len(rest)]}{segment}/"
        session_id = segment.removeprefix(SESSION)
        store = await self.sessions.open(layout.repository, session_id, self.fetch)
        name = f"{dataset.name}/{lead.rstrip('/')}"
        inner = replace(
            dataset, name=name, root=store.root, containers=self.containers, cache_control=_NO_STORE
        )
        return RoutedSession(inner, lead, store)


class SessionResolver(Resolver):
    """Resolver that looks up keys of sessions with *inner*."""

    def __init__(self, *parts: Any, router: SessionRouter, inner: Resolver, **bounds: Any) -> None:
        super().__init__(*parts, **bounds)
        self._router = router
        self._inner = inner

    def recall(self, dataset: Dataset, key: VirtualKey) -> Entity | None:
        return None if names_session(key) else super().recall(dataset, key)

    def open[C: Choice](
        self,
        dataset: Dataset,
        key: VirtualKey,
        choose: Callable[[Entity], C | None],
        reading: ByteRequest | None = None,
        held: ByteReservation | None = None,
    ) -> AbstractAsyncContextManager[Opened[C] | None]:
        if names_session(key):
            return self._open_routed(dataset, key, choose, reading, held)
        return super().open(dataset, key, choose, reading, held)

    @asynccontextmanager
    async def _open_routed[C: Choice](
        self, dataset: Dataset, key: VirtualKey, choose: Callable[[Entity], C | None], *more: Any
    ) -> AsyncGenerator[Opened[C] | None]:
        if (routed := await self._router.find(dataset, key)) is None:
            opening = super().open(dataset, key, choose, *more)
        else:
            opening = self._inner.open(routed.dataset, routed.rest(key), choose, *more)
        async with opening as opened:
            yield opened

    async def is_group(self, dataset: Dataset, key: VirtualKey) -> bool:
        if (routed := await self._router.find(dataset, f"{key}/")) is None:
            return await super().is_group(dataset, key)
        node = (await routed.store.session.view()).node(routed.rest(f"{key}/").rstrip("/"))
        return node is not None and node.grid is None

    async def list(self, dataset: Dataset, prefix: VirtualKey) -> AsyncGenerator[Name]:
        if (routed := await self._router.find(dataset, prefix)) is None:
            names = super().list(dataset, prefix)
        else:
            names = self._inner.list(routed.dataset, routed.rest(prefix))
        async for name in names:
            yield name

    async def page(self, dataset: Dataset, window: Window, limit: int) -> Page:
        """List keys; those of a session where the prefix names one."""
        routed = await self._router.find(dataset, window.prefix)
        if routed is None or not window.prefix.startswith(routed.lead):
            return await super().page(dataset, window, limit)
        lead = routed.lead
        if window.after > lead and not window.after.startswith(lead):
            return Page([], None)
        after = routed.rest(window.after) if window.after.startswith(lead) else ""
        inner = window._replace(prefix=routed.rest(window.prefix), after=after)
        page = await self._inner.page(routed.dataset, inner, limit)
        entries = [entry._replace(key=lead + entry.key) for entry in page.entries]
        return Page(entries, None if page.after is None else lead + page.after)


class SessionWriter(Writer):
    """Writer that writes keys of sessions with *inner*."""

    def __init__(self, *parts: Any, router: SessionRouter, inner: Writer) -> None:
        super().__init__(*parts)
        self._router = router
        self._inner = inner

    async def put(self, dataset: Dataset, write: KeyWrite) -> ETag | None:
        if (routed := await self._router.find(dataset, write.key)) is None:
            return await super().put(dataset, write)
        inner = routed.inner(write)
        if await routed.store.is_whole_chunk(inner.key):
            return await self._inner.put_whole(routed.dataset, inner)
        return await self._inner.put(routed.dataset, inner)

    async def demand_place(
        self, dataset: Dataset, key: VirtualKey, headers: ObjectHeaders = NO_HEADERS
    ) -> None:
        if (routed := await self._router.find(dataset, key)) is None:
            await super().demand_place(dataset, key, headers)
        else:
            await self._inner.demand_place(routed.dataset, routed.rest(key), headers)

    async def put_each(self, dataset: Dataset, writes: Sequence[KeyWrite]) -> list[Outcome]:
        """Write many keys; in sessions documents come first, since chunks need their array."""
        by_session: defaultdict[str | None, list[KeyWrite]] = defaultdict(list)
        for each in writes:
            by_session[session_prefix(each.key)].append(each)
        outcomes: dict[VirtualKey, Outcome] = {}
        for prefix, some in by_session.items():
            try:
                routed = prefix and await self._router.find(dataset, f"{prefix}/")
            except ShardgateError as error:
                outcomes |= {each.key: error for each in some}
                continue
            if not routed:
                outcomes |= _by_key(some, await super().put_each(dataset, some))
                continue
            for is_document in (True, False):
                part = [each for each in some if (node_path(each.key) is not None) is is_document]
                written = await self._inner.put_each(routed.dataset, list(map(routed.inner, part)))
                outcomes |= _by_key(part, written)
        return [outcomes[each.key] for each in writes]


class SessionEraser(Eraser):
    """Eraser that deletes keys of sessions with *inner*."""

    def __init__(self, *parts: Any, router: SessionRouter, inner: Eraser) -> None:
        super().__init__(*parts)
        self._router = router
        self._inner = inner

    async def erase(self, dataset: Dataset, prefix: VirtualKey) -> int:
        """Delete all keys below *prefix*; in a session return the number of nodes if any."""
        if (routed := await self._router.find(dataset, prefix)) is None:
            return await super().erase(dataset, prefix)
        rest = routed.rest(prefix)
        if count := await routed.store.erase(rest.rstrip("/")):
            return count
        return await self._inner.erase(routed.dataset, rest) if rest else 0


def _by_key(writes: Sequence[KeyWrite], outcomes: Sequence[Outcome]) -> dict[VirtualKey, Outcome]:
    return {each.key: outcome for each, outcome in zip(writes, outcomes, strict=True)}
