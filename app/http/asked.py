"""A request that is not GET, HEAD or OPTIONS, and how what came of it is told."""

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qs

from app.errors import BadHeaderError, BadParameterError
from app.http.answer import ALLOW, NO_STORE, Answer, Headers
from app.http.bodies import Incoming
from app.http.payload import Coding
from app.http.preconditions import parse_demand
from app.http.s3_requests import uploading
from app.model import ETag, VirtualKey
from app.resolve.bodies import Demand
from app.resolve.budget import ByteBudget, ByteReservation
from app.resolve.resolver import Dataset
from app.storage.contract import ObjectHeaders
from app.storage.http_headers import METADATA, object_headers

_MAX_METADATA_NBYTES: Final = 1800
"""S3 takes 2,048, of which the service needs some for ids of writes."""


class Limits(NamedTuple):
    """Bounds on bodies."""

    max_chunk_nbytes: int
    timeout_s: float
    """Longest silence of a client that sends one."""


class Asked(NamedTuple):
    """One request, of whose body nothing has been read yet."""

    answer: Answer
    incoming: Incoming
    dataset: Dataset
    key: VirtualKey
    """Empty where the dataset itself is meant."""
    query: bytes
    names: frozenset[bytes]
    """Of the parameters in *query*."""
    budget: ByteBudget
    enter: Callable[[str], Awaitable[Dataset]]
    """Gives another dataset by its name, if who asks may read there."""

    @property
    def given(self) -> Mapping[bytes, bytes]:
        """The headers."""
        return self.answer.given

    @asynccontextmanager
    async def held(self) -> AsyncGenerator[ByteReservation]:
        """Hold bytes while the block lasts."""
        held = ByteReservation(self.budget)
        try:
            yield held
        finally:
            await held.release()

    def demand(self, prefix: bytes = b"") -> Demand | None:
        """Read the preconditions, from headers whose names begin with *prefix*.

        Raises: `BadHeaderError`.
        """
        if_match, if_none_match = prefix + b"if-match", prefix + b"if-none-match"
        return parse_demand(self._text(if_match), self._text(if_none_match))

    def headers(self) -> ObjectHeaders:
        """Read what the object is to be stored with.

        Raises: `BadHeaderError` for metadata that S3 does not take, `UnknownCodingError`.
        """
        headers = object_headers(self.given)
        named = sum(name.startswith(METADATA) for name in self.given)
        if len(headers.metadata) < named or headers.nbytes > _MAX_METADATA_NBYTES:
            raise BadHeaderError(
                "user metadata is ASCII, of 1,800 bytes at most, and not named shardgate-…"
            )
        return headers._replace(is_gzip=Coding.parse(self.given).is_gzip)

    def parameter(self, name: str) -> str:
        """Read the parameter *name*, which is given once.

        Raises: `BadParameterError`.
        """
        try:
            text = self.query.decode("ascii")
            given = parse_qs(text, keep_blank_values=True, errors="strict").get(name, ())
        except ValueError:
            raise BadParameterError("the query is not percent-encoded UTF-8") from None
        if len(given) != 1:
            raise BadParameterError(f"{name} is given once")
        return given[0]

    def refuse_parameters(self) -> None:
        """Raise where what means all of a dataset is asked of one key."""
        if b"prefix" in self.names:
            raise BadParameterError("prefix goes with a dataset, not with a key")

    async def tell_written(self, etag: ETag | None) -> None:
        """Answer as S3 does where an object is written."""
        headers: Headers = [(b"content-length", b"0"), NO_STORE]
        if etag is not None:
            headers.append((b"etag", etag.encode("latin-1")))
        await self.answer.send(HTTPStatus.OK, headers)

    async def tell(self, media_type: bytes, body: bytes) -> None:
        """Answer with a document that nobody should keep."""
        length = (b"content-length", b"%d" % len(body))
        await self.answer.send(
            HTTPStatus.OK, [(b"content-type", media_type), length, NO_STORE], body
        )

    async def tell_json(self, document: Any) -> None:
        """Answer with JSON."""
        await self.tell(b"application/json", json.dumps(document).encode())

    def _text(self, name: bytes) -> str | None:
        value = self.given.get(name)
        return None if value is None else value.decode("latin-1")


def allowed(
    dataset: Dataset | None, key: VirtualKey | None, names: frozenset[bytes] = frozenset()
) -> bytes:
    """List the methods that are served of *key*, or of the *dataset*, with the parameters *names*.

    Of keys that is POST only where they come in parts.
    """
    if dataset is None:
        return ALLOW
    writes = ["PUT", "DELETE"] if dataset.is_writable else []
    is_posted = uploading("POST", names) is not None if key else True
    posts = ["POST"] if writes and is_posted else []
    return ", ".join(["GET", "HEAD", *writes, *posts, "OPTIONS"]).encode()
