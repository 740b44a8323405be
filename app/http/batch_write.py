"""``PUT /{dataset}?batch``: many keys written in one request.

The body is framed as the answer to a batch of reads is: for each key a line of JSON, and behind
the line break as many bytes as its ``length`` says.
"""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, Field, ValidationError, model_validator

from app.errors import BadBodyError, ShardgateError, TooLargeError
from app.http.preconditions import parse_demand
from app.http.problems import status_of
from app.http.target import check_key
from app.resolve.writing import Given, Outcome
from app.storage.contract import ObjectHeaders

MAX_KEYS: Final = 10_000
_LONGEST_LINE: Final = 8 * 1024
_END: Final = b"\n"


class _Line(BaseModel, frozen=True, extra="forbid", strict=True):
    """What the line of a key says."""

    key: str
    length: Annotated[int, Field(ge=0)] | None = None
    delete: Literal[True] | None = None
    content_encoding: Literal["gzip", "identity"] | None = None
    if_match: str | None = None
    if_none_match: str | None = None

    @model_validator(mode="after")
    def _either_bytes_or_none(self) -> "_Line":
        if (self.length is None) == (self.delete is None):
            raise ValueError("it says either length or delete")
        return self


class Frames:
    """Takes the body of a batch apart as it arrives; no body is kept twice."""

    def __init__(self, *, most_nbytes: int) -> None:
        self._most_nbytes = most_nbytes
        self._given: list[Given] = []
        self._line: _Line | None = None
        """The key whose bytes arrive now."""
        self._buffer = bytearray()
        self._begun = 0
        """Lines that have been read."""

    def feed(self, piece: bytes) -> None:
        """Take what has arrived.

        Raises: `BadBodyError`, `BadKeyError`, `BadHeaderError`, `TooLargeError`.
        """
        self._buffer += piece
        at = 0
        while (end := self._frame_end(at)) is not None:
            at = end
        del self._buffer[:at]

    def finish(self) -> Sequence[Given]:
        """Tell what was given, once everything has arrived.

        Raises: `BadBodyError` where the last key is not complete.
        """
        if self._line is not None or self._buffer:
            told = f"the bytes of {self._line.key}" if self._line else "a line"
            raise BadBodyError(f"the batch ends in the middle of {told}")
        return self._given

    def _frame_end(self, at: int) -> int | None:
        """Take the line or the body that begins *at*, if all of it is there; give its end."""
        if self._line is not None:
            stop = at + (self._line.length or 0)
            if len(self._buffer) < stop:
                return None
            self._add(self._line, bytes(memoryview(self._buffer)[at:stop]))
            self._line = None
            return stop
        end = self._buffer.find(_END, at, at + _LONGEST_LINE)
        if end < 0:
            if len(self._buffer) - at >= _LONGEST_LINE:
                raise BadBodyError(f"line {self._begun + 1} of the batch is too long")
            return None
        self._begun += 1
        self._begin(_parse_line(bytes(self._buffer[at:end]), self._begun))
        return end + len(_END)

    def _begin(self, line: _Line) -> None:
        if len(self._given) == MAX_KEYS:
            raise BadBodyError(f"the batch has more than {MAX_KEYS} keys")
        if line.length is None:
            self._add(line, None)
        elif line.length > self._most_nbytes:
            raise TooLargeError(f"{line.key} is larger than {self._most_nbytes} bytes")
        else:
            self._line = line

    def _add(self, line: _Line, body: bytes | None) -> None:
        key = check_key(line.key)
        if not key or key.endswith("/"):
            raise BadBodyError(f"a batch names keys, and {key!r} is none")
        demand = parse_demand(line.if_match, line.if_none_match)
        headers = ObjectHeaders(is_gzip=line.content_encoding == "gzip")
        self._given.append(Given(key, body, headers, demand))


def _parse_line(data: bytes, number: int) -> _Line:
    try:
        return _Line.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        told = ": ".join([*map(str, first["loc"]), first["msg"]])
        raise BadBodyError(f"line {number} of the batch: {told}") from None


def describe(given: Sequence[Given], outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Tell what came of each key, in their order."""
    return [_result(*each) for each in zip(given, outcomes, strict=True)]


def _result(given: Given, outcome: Outcome) -> dict[str, Any]:
    if isinstance(outcome, ShardgateError):
        return {"key": given.key, "status": status_of(outcome), "detail": str(outcome)}
    status = HTTPStatus.NO_CONTENT if given.body is None else HTTPStatus.OK
    etag = {} if outcome is None else {"etag": outcome}
    return {"key": given.key, "status": status, **etag}
