"""Whether our clock is right: a store tells when it took what we have just written."""

import secrets
from typing import Final

from app.errors import ClockSkewError
from app.model import ObjectRef
from app.storage.contract import ABSENT, ObjectStore

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


async def try_clock(store: ObjectStore, folder: ObjectRef, now_s: float) -> None:
    """Return if our clock is right, as an object tells that is put into *folder* and removed.

    Raises: `ClockSkewError`, `StorageError`.
    """
    trial = folder.join(f"clock-{secrets.token_hex(8)}")
    await store.put(trial, [b"?"], expected=ABSENT)
    try:
        await demand_clock(store, trial, now_s)
    finally:
        await store.delete(trial, expected=None)
