"""All sessions behind one store: each has a bucket of its own."""

from collections import OrderedDict
from typing import Final
from weakref import WeakValueDictionary

from app.errors import StorageUnavailableError
from app.model import ObjectRef
from app.resolve.icechunk.session_store import SessionStore
from app.storage.wrappers import StoreWrapper

_MOST_KNOWN: Final = 1024
_MOST_NBYTES: Final = 64 * 1024**2


class SessionStores(StoreWrapper):
    """The sessions that somebody has asked for of late."""

    def __init__(self) -> None:
        self._known = OrderedDict[str, SessionStore]()
        self._alive = WeakValueDictionary[str, SessionStore]()
        """Those too that are kept by nobody but the requests that are under way."""

    def find(self, root: ObjectRef) -> SessionStore | None:
        """Find the session whose keys are below *root*."""
        if root.bucket in self._known:
            self._known.move_to_end(root.bucket)
        return self._alive.get(root.bucket)

    def add(self, root: ObjectRef, store: SessionStore) -> SessionStore:
        """Know a session whose keys are below *root*, and others no more if they are too many."""
        self._known[root.bucket] = self._alive[root.bucket] = store
        while len(self._known) > 1 and self._is_full():
            self._known.popitem(last=False)
        return store

    def _is_full(self) -> bool:
        """Tell whether too much is held; what several build on counts once."""
        sessions = [store.session for store in self._known.values()]
        parents = {id(parent): parent.nbytes for each in sessions if (parent := each.parent)}
        nbytes = sum(each.nbytes for each in sessions) + sum(parents.values())
        return len(sessions) > _MOST_KNOWN or nbytes > _MOST_NBYTES

    def store_of(self, ref: ObjectRef) -> SessionStore:
        """Find the session that *ref* is a key of."""
        if (store := self._alive.get(ref.bucket)) is None:
            raise StorageUnavailableError(ref, "the session was not asked for")
        return store

    async def aclose(self) -> None:
        """Have nothing to give back: others close the store."""
