"""Removes one version of an object, and finds out whether that was done."""

from typing import Final

from app.errors import StorageError, StorageUnavailableError
from app.model import ETag, ObjectRef
from app.storage.contract import CONFLICT, Conflict
from app.storage.patience import Patience
from app.storage.refusals import Refusal
from app.storage.s3.client import S3Client
from app.storage.s3.look import failure, is_refused, look, may_pass

_NO_CONTENT: Final = 204


class Removal:
    """Sends one DELETE, until it is known what became of it."""

    def __init__(
        self, client: S3Client, patience: Patience, ref: ObjectRef, expected: ETag | None
    ) -> None:
        self._client = client
        self._patience = patience
        self._ref = ref
        self._expected = expected
        self._in_doubt = False

    async def run(self) -> bool | Conflict:
        """Tell whether the object is gone.

        Raises: `StorageError` if nobody knows.
        """
        try:
            return await self._patience.run(self._ref, self._attempt, may_pass=may_pass)
        except StorageError:
            if not self._in_doubt or await self._is_there():
                raise
            return True

    async def _attempt(self) -> bool | Conflict:
        was_in_doubt = self._in_doubt
        if was_in_doubt:
            seen = await look(self._client, self._ref)
            if seen is None:
                return True
            if self._expected is not None and seen.etag != self._expected:
                return CONFLICT
        self._in_doubt = True
        condition = {} if self._expected is None else {"IfMatch": str(self._expected)}
        answer = await self._client.ask(self._ref, "delete_object", **condition)
        if not isinstance(answer, Refusal):
            status = answer["ResponseMetadata"]["HTTPStatusCode"]
            if status == _NO_CONTENT:
                return True
            raise StorageUnavailableError(self._ref, f"a DELETE was answered {status}, not 204")
        if is_refused(answer):
            gone = await look(self._client, self._ref) is None
            return True if gone else CONFLICT  # gone, by whomever: a request may be sent twice
        error = failure(self._ref, answer)
        self._in_doubt = was_in_doubt or may_pass(error)
        raise error

    async def _is_there(self) -> bool:
        """Look a last time; who cannot tell says yes."""
        try:
            return await look(self._client, self._ref) is not None
        except StorageError:
            return True
