"""Whether our clock is right: a store tells when it took what we have just written."""

from typing import Final

from app.errors import ClockSkewError
from app.model import ObjectRef
from app.storage.contract import ObjectStore

SKEW_S: Final = 600
"""So far apart clocks may be; the library writes nothing either where they are further."""


async def demand_clock(store: ObjectStore, written: ObjectRef, now_s: float) -> None:
    """Return if the object *written*, which we began to write at *now_s*, has about that time.

    Raises: `ClockSkewError`, `StorageError`.
    """
    stat = await store.stat(written)
    if stat is None or stat.modified_s is None:
        return
    skew_s = stat.modified_s - int(now_s)
    if abs(skew_s) > SKEW_S:
        raise ClockSkewError(f"{written}: the store's clock is {skew_s} s ahead of ours")
