"""Small JSON bodies of the control plane: announced, bounded, in time, and as a model has them."""

from collections.abc import Mapping
from functools import cache
from typing import Any, Final

from fastapi import Request
from pydantic import BaseModel, ValidationError

from app.errors import BadBodyError
from app.http.answer import combined
from app.http.bodies import is_announced
from app.http.checksums import check
from app.http.credentials.seals import seal_of
from app.http.taking import Taker
from app.resolve.budget import ByteBudget

_MOST_NBYTES: Final = 64 * 1024


class Document(BaseModel, use_attribute_docstrings=True, extra="forbid", strict=True):
    """A body; members that are not known are refused."""


class DocumentReader:
    """Reads bodies of so many bytes, of clients that are never silent for *timeout_s*."""

    def __init__(
        self, budget: ByteBudget, timeout_s: float, most_nbytes: int = _MOST_NBYTES
    ) -> None:
        self._taker = Taker(budget, timeout_s=timeout_s)
        self._most_nbytes = most_nbytes

    async def read[M: Document](self, request: Request, model: type[M]) -> M:
        """Read the body of *request*; one without a body says nothing of what has a default.

        Raises: `BadBodyError`, and what `Taker` raises.
        """
        try:
            given = combined(request.scope["headers"])
            if not is_announced(given):
                check(b"", b"", given)
                if seal_of(request.scope) is not None:
                    raise BadBodyError("the body is missing whose frames are signed")
                return model.model_validate_json(b"{}")
            async with self._taker.taken(request, self._most_nbytes) as body:
                return model.model_validate_json(body)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the body"
            raise BadBodyError(f"{where}: {first['msg']}") from None


@cache
def documented(model: type[Document]) -> Mapping[str, Any]:
    """Describe in OpenAPI a body that is read like this."""
    content = {"application/json": {"schema": model.model_json_schema()}}
    is_required = any(field.is_required() for field in model.model_fields.values())
    return {"requestBody": {"required": is_required, "content": content}}
