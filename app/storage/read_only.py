"""The writing side of stores that can only be read."""

from collections.abc import Sequence
from typing import NoReturn

from app.errors import UnwritableError
from app.model import ETag, ObjectRef, Piece
from app.storage.contract import NO_HEADERS, Expected, ObjectHeaders


class ReadOnly:
    """Refuses every write."""

    async def demand_safety(self, root: ObjectRef) -> NoReturn:
        """Refuse."""
        raise _refusal(root)

    def keeps_headers(self, ref: ObjectRef) -> bool:  # noqa: ARG002  the contract's argument
        """Say no: nothing is stored."""
        return False

    async def put(
        self,
        ref: ObjectRef,
        pieces: Sequence[Piece],  # noqa: ARG002  the contract's argument
        *,
        expected: Expected,  # noqa: ARG002
        headers: ObjectHeaders = NO_HEADERS,  # noqa: ARG002
    ) -> NoReturn:
        """Refuse."""
        raise _refusal(ref)

    async def delete(self, ref: ObjectRef, *, expected: ETag | None) -> NoReturn:  # noqa: ARG002
        """Refuse."""
        raise _refusal(ref)


def _refusal(ref: ObjectRef) -> UnwritableError:
    return UnwritableError(f"{ref}: can only be read from there")
