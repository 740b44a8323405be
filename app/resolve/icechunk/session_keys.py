"""Keys of sessions, ``@session.ID/a/c/0/0``: the one place where they turn into keys of stores."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from app.errors import ShardgateError
from app.formats.icechunk.keys import SESSION, find_ref, names_session, session_prefix
from app.formats.icechunk.layout import RepositoryLayout
from app.formats.icechunk.session import node_path
from app.formats.listing import Name, Window
from app.model import ByteRequest, ETag, VirtualKey
from app.resolve.bodies import Choice, Entity, Opened
from app.resolve.budget import ByteReservation
from app.resolve.containers import Containers
from app.resolve.icechunk.session_store import SessionStore
from app.resolve.icechunk.sessions import Sessions, root_of
from app.resolve.listing import Page
from app.resolve.metadata_cache import ReadCache
from app.resolve.resolver import Dataset, Resolver
from app.resolve.write import Eraser, KeyWrite, Outcome, Writer
from app.storage.contract import NO_HEADERS, ObjectHeaders

_NO_STORE: Final = b"no-store"


def is_of_session(key: str) -> bool:
    """Tell whether *key* names a session, without looking for it."""
    return names_session(key)


def session_of(key: str) -> str | None:
    """Give *key* up to the session that it names, and with it, without looking for that."""
    return session_prefix(key)


class Entered(NamedTuple):
    """A session that a key leads into."""

    dataset: Dataset
    """Its keys, as a dataset of plain Zarr."""
    lead: str
    """How the keys begin that lead into it; a slash is at the end."""
    store: SessionStore

    def rest(self, key: str) -> VirtualKey:
        """Give *key* as it is in the session."""
        return VirtualKey(key.removeprefix(self.lead))


@dataclass(frozen=True, slots=True)
class Doors:
    """Leads from the keys of a dataset into sessions of the repositories in it."""

    sessions: Sessions
    containers: Containers
    """Of what is in sessions."""
    fetch: ReadCache
    """Of what is around them."""

    async def enter(self, dataset: Dataset, key: str) -> Entered | None:
        """Find the session that *key* leads into, as it is now; `None` if it leads into none.

        Raises: `UnknownSessionError`, `DamagedError`, `StorageError`.
        """
        if not names_session(key):
            return None
        claimed = await dataset.containers.claimed(dataset.root, VirtualKey(key), self.fetch)
        layout, rest = claimed or (None, VirtualKey(""))
        if not isinstance(layout, RepositoryLayout):
            return None
        segment = rest.partition("/")[0]
        lead = f"{key[: len(key) - len(rest)]}{segment}/"
        session_id = segment.removeprefix(SESSION)
        session = await self.sessions.find(layout.repository, session_id, self.fetch)
        root = root_of(layout.repository, session_id)
        stores = self.sessions.stores
        store = stores.find(root) or stores.add(root, SessionStore(session))
        name = f"{dataset.name}/{lead.rstrip('/')}"
        entered = replace(
            dataset, name=name, root=root, containers=self.containers, cache_control=_NO_STORE
        )
        return Entered(entered, lead, store)


class SessionResolver(Resolver):
    """A resolver that looks up the keys of sessions with another one."""

    def __init__(self, *parts: Any, doors: Doors, inner: Resolver, **bounds: Any) -> None:
        super().__init__(*parts, **bounds)
        self._doors = doors
        self._inner = inner

    def recall(self, dataset: Dataset, key: VirtualKey) -> Entity | None:
        """Know nothing of sessions without waiting."""
        return None if names_session(key) else super().recall(dataset, key)

    def open[C: Choice](
        self,
        dataset: Dataset,
        key: VirtualKey,
        choose: Callable[[Entity], C | None],
        reading: ByteRequest | None = None,
        held: ByteReservation | None = None,
    ) -> AbstractAsyncContextManager[Opened[C] | None]:
        """Look *key* up where it leads."""
        if names_session(key):
            return self._open(dataset, key, choose, reading, held)
        return super().open(dataset, key, choose, reading, held)

    @asynccontextmanager
    async def _open[C: Choice](
        self,
        dataset: Dataset,
        key: VirtualKey,
        choose: Callable[[Entity], C | None],
        reading: ByteRequest | None,
        held: ByteReservation | None,
    ) -> AsyncGenerator[Opened[C] | None]:
        if (entered := await self._doors.enter(dataset, key)) is None:
            opening = super().open(dataset, key, choose, reading, held)
        else:
            opening = self._inner.open(entered.dataset, entered.rest(key), choose, reading, held)
        async with opening as opened:
            yield opened

    async def is_group(self, dataset: Dataset, key: VirtualKey) -> bool:
        """Tell whether *key* is that of a group."""
        if (entered := await self._doors.enter(dataset, f"{key}/")) is None:
            return await super().is_group(dataset, key)
        node = (await entered.store.session.view()).node(entered.rest(f"{key}/").rstrip("/"))
        return node is not None and node.grid is None

    async def list(self, dataset: Dataset, prefix: VirtualKey) -> AsyncGenerator[Name]:
        """Name what is right below *prefix*."""
        entered = await self._doors.enter(dataset, prefix)
        if entered is None:
            names = super().list(dataset, prefix)
        else:
            names = self._inner.list(entered.dataset, entered.rest(prefix))
        async for name in names:
            yield name

    async def page(self, dataset: Dataset, window: Window, limit: int) -> Page:
        """List keys; those of a session where the prefix names one."""
        entered = await self._doors.enter(dataset, window.prefix)
        if entered is None or not window.prefix.startswith(entered.lead):
            return await super().page(dataset, window, limit)
        lead = entered.lead
        if window.after > lead and not window.after.startswith(lead):
            return Page([], None)
        after = entered.rest(window.after) if window.after.startswith(lead) else ""
        inside = window._replace(prefix=entered.rest(window.prefix), after=after)
        page = await self._inner.page(entered.dataset, inside, limit)
        entries = [entry._replace(key=lead + entry.key) for entry in page.entries]
        return Page(entries, None if page.after is None else lead + page.after)


class SessionWriter(Writer):
    """A writer that writes the keys of sessions with another one."""

    def __init__(self, *parts: Any, doors: Doors, inner: Writer) -> None:
        super().__init__(*parts)
        self._doors = doors
        self._inner = inner

    async def put(self, dataset: Dataset, given: KeyWrite) -> ETag | None:
        """Write *given* where its key leads."""
        if (entered := await self._doors.enter(dataset, given.key)) is None:
            return await super().put(dataset, given)
        inside = _inside(entered, given)
        if await entered.store.is_whole_chunk(inside.key):
            return await self._inner.put_whole(entered.dataset, inside)
        return await self._inner.put(entered.dataset, inside)

    async def demand_place(
        self, dataset: Dataset, key: VirtualKey, headers: ObjectHeaders = NO_HEADERS
    ) -> None:
        """Raise what `put` would of *key*."""
        if (entered := await self._doors.enter(dataset, key)) is None:
            await super().demand_place(dataset, key, headers)
        else:
            await self._inner.demand_place(entered.dataset, entered.rest(key), headers)

    async def put_each(self, dataset: Dataset, given: Sequence[KeyWrite]) -> list[Outcome]:
        """Write many keys; of those in a session documents first, as the chunks need them."""
        outcomes: dict[VirtualKey, Outcome] = {}
        plain: list[KeyWrite] = []
        by_lead: dict[str, list[KeyWrite]] = {}
        for each in given:
            if names_session(each.key):
                segments = each.key[: find_ref(each.key)] + SESSION
                rest = each.key.removeprefix(segments).partition("/")[0]
                by_lead.setdefault(f"{segments}{rest}/", []).append(each)
            else:
                plain.append(each)
        for each, outcome in zip(plain, await super().put_each(dataset, plain), strict=True):
            outcomes[each.key] = outcome
        for lead, some in by_lead.items():
            outcomes |= await self._put_some(dataset, lead, some)
        return [outcomes[each.key] for each in given]

    async def _put_some(
        self, dataset: Dataset, lead: str, given: Sequence[KeyWrite]
    ) -> dict[VirtualKey, Outcome]:
        """Write keys of one session."""
        try:
            entered = await self._doors.enter(dataset, lead)
        except ShardgateError as error:
            return {each.key: error for each in given}
        if entered is None:
            written = await super().put_each(dataset, given)
            return {each.key: outcome for each, outcome in zip(given, written, strict=True)}
        outcomes: dict[VirtualKey, Outcome] = {}
        for is_document in (True, False):
            some = [each for each in given if (node_path(each.key) is not None) is is_document]
            inside = [_inside(entered, each) for each in some]
            written = await self._inner.put_each(entered.dataset, inside)
            outcomes |= {each.key: outcome for each, outcome in zip(some, written, strict=True)}
        return outcomes


class SessionEraser(Eraser):
    """An eraser that takes what is in sessions away with another one."""

    def __init__(self, *parts: Any, doors: Doors, inner: Eraser) -> None:
        super().__init__(*parts)
        self._doors = doors
        self._inner = inner

    async def erase(self, dataset: Dataset, prefix: VirtualKey) -> int:
        """Take all keys away that begin with *prefix*; of a session nodes are counted."""
        if (entered := await self._doors.enter(dataset, prefix)) is None:
            return await super().erase(dataset, prefix)
        rest = entered.rest(prefix)
        if count := await entered.store.erase(rest.rstrip("/")):
            return count
        return await self._inner.erase(entered.dataset, rest) if rest else 0


def _inside(entered: Entered, given: KeyWrite) -> KeyWrite:
    return given._replace(key=entered.rest(given.key))
