"""Answers that are put together of many reads, begun anew until these are of one time."""

from collections.abc import Awaitable, Callable
from typing import Final

from app.errors import DamagedError, VersionChangedError
from app.resolve.fetch import ReadCache
from app.resolve.noting import Noting

_ATTEMPTS: Final = 4


async def settled[T](fetch: ReadCache, attempt: Callable[[Noting], Awaitable[T]]) -> T:
    """Give what *attempt* returns once nothing that it was told has changed under it.

    Damage is believed once everything about it has been asked for just now, and indexes that were
    read anew only beside metadata that are as new.

    Raises: `VersionChangedError` only where objects never hold still.
    """
    for _ in range(_ATTEMPTS - 1):
        noting = Noting(fetch)
        try:
            found = await attempt(noting)
        except VersionChangedError as changed:
            fetch.forget(changed.ref, noting.began_at)
        except DamagedError as damaged:
            fetch.forget(damaged.ref, noting.began_at)
            if not noting.old:
                raise
            for ref in noting.old:
                fetch.forget(ref, noting.began_at)
        else:
            outdated = [read for read in noting.outdated if read.kind == "metadata"]
            if not any([await fetch.has_changed(read) for read in outdated]):
                return found
    return await attempt(Noting(fetch))
