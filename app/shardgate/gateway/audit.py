"""Audit log: a line of JSON for each change that a request makes or is refused."""

import logging
import os
import re
import select
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from shardgate.auditing import AuditedChange, current_changes
from shardgate.errors import ConfigurationError
from shardgate.gateway.s3_dialect import parameter_names, upload_step
from shardgate.gateway.write import COPY_SOURCE
from shardgate.observability.logging import PAUSE_S, LineWriter, dump_json, timestamp
from shardgate.observability.metrics import (
    NO_DATASET,
    RequestContext,
    current_request,
    mask_tokens,
    outcome_of,
)
from shardgate.server.request import Application, Exchange, Request
from shardgate.settings import RESERVED, SIGN_IN

_CHANGING: Final = frozenset({"PUT", "POST", "DELETE"})
_LONGEST: Final = 1024  # characters of a text, as many as the bytes of a key
_LONGEST_NAME: Final = 256
# A segment of a path that may be a token, as where one is revoked by itself and not by its id.
_LIKE_A_TOKEN: Final = re.compile(r"[^/]{64,}")
_failures_log: Final = logging.getLogger("shardgate.failures")


class AuditLog(LineWriter[bytes]):
    """Appends lines to a file, which may be renamed or removed, or to standard output.

    Lines that cannot be written, as to a full disk, are tried again until too many wait.
    """

    def __init__(self, path: str, on_loss: Callable[[int], None]) -> None:
        """Open *path*, ``-`` for standard output; *on_loss* is called with a number of lines.

        Raises: `ConfigurationError`.
        """
        self._path = None if path == "-" else Path(path)
        self._on_loss = on_loss
        try:
            descriptor = sys.stdout.fileno() if self._path is None else _open(self._path)
        except OSError as error:
            reason = error.strerror
            raise ConfigurationError(f"server.audit_log: {path}: {reason}") from error
        super().__init__("audit-log", bytes, descriptor, pause_s=0)

    def log(self, line: AuditedChange) -> None:
        """Write *line* soon, or report that it is lost, as too many wait."""
        if self._is_closing.is_set() or not self.add(dump_json(line) + b"\n"):
            self._lose(1)

    def close(self) -> None:
        """Write the queued lines, for up to a second, and close the file."""
        super().close()
        if self._thread.is_alive():
            self._lose(self._queue.qsize())  # whose last entry is no line; one is being written
        elif self._path is not None:
            os.close(self._descriptor)

    def _write(self, lines: bytes) -> None:
        while lines:
            try:
                self._follow()
                count = os.write(self._descriptor, lines)
            except BlockingIOError:
                select.select([], [self._descriptor], [])
                continue
            except OSError as error:
                _failures_log.error("the audit log cannot be written: %s", error.strerror)
                if self._is_closing.wait(PAUSE_S):
                    self._lose(lines.lstrip().count(b"\n"))
                    return
                continue
            # The end of a torn line would come behind lines of other processes: it is repeated.
            begin = lines.rfind(b"\n", 0, count) + 1
            lines = lines[begin:] if begin == count else b"\n" + lines[begin:]

    def _follow(self) -> None:
        """Open the file anew if another one, or none, has its name by now."""
        if self._path is None:
            return
        with suppress(FileNotFoundError):
            if os.path.samestat(self._path.stat(), os.fstat(self._descriptor)):
                return
        before = self._descriptor
        self._descriptor = _open(self._path)
        os.close(before)

    def _lose(self, count: int) -> None:
        self._on_loss(count)
        _failures_log.error("lines of the audit log are lost")


def _open(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
    size = os.fstat(descriptor).st_size
    with suppress(OSError):  # of a full disk
        # A process that was ended may have left a part of a line.
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            os.write(descriptor, b"\n")
    return descriptor


class AuditedApp:
    """Logs what requests to *app* change, and passes on all others."""

    def __init__(self, app: Application, log: AuditLog) -> None:
        self.cached = app.cached
        self.refuse = app.refuse
        self._app = app
        self._log = log

    def respond(self, request: Request, exchange: Exchange) -> Coroutine[Any, Any, None]:
        """Send the response."""
        context = current_request.get()
        if context is None or request.method not in _CHANGING:
            return self._app.respond(request, exchange)
        return self._respond(request, exchange, context)

    async def _respond(self, request: Request, exchange: Exchange, context: RequestContext) -> None:
        changes: list[AuditedChange] = []
        current_changes.set(changes)
        try:
            await self._app.respond(request, exchange)
        finally:  # also of a change whose answer nobody gets
            if request.name not in SIGN_IN or _concerns_rights(context, exchange):
                for change in changes or [{}]:
                    self._log.log(_line(request, exchange, context, change))


def _concerns_rights(context: RequestContext, exchange: Exchange) -> bool:
    """Return whether a request to sign in or out has a caller by now, or was refused as such."""
    refused = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
    return bool(context.caller) or exchange.status in refused


def _line(
    request: Request, exchange: Exchange, context: RequestContext, change: AuditedChange
) -> AuditedChange:
    noted: AuditedChange = {
        name: value[:_LONGEST] if isinstance(value, str) else value
        for name, value in change.items()
    }
    status = noted.pop("status", exchange.status)  # of the key, if it has one of its own
    dataset = "" if request.dataset in RESERVED else mask_tokens(request.dataset)
    line: AuditedChange = {
        "time": timestamp(int(time.time() * 1000)),
        "request_id": request.id.decode(),
        "caller": context.caller[:_LONGEST_NAME],
        "credentials": _credentials(request),
        "client": context.client.decode(errors="replace"),
        "action": request.method,
        "dataset": dataset[:_LONGEST_NAME],
        "status": status,
        "outcome": outcome_of(status) if exchange.response_complete else "gone",
        "bytes": 0 if request.body is None else request.body.received_nbytes,
    }
    if request.key and context.dataset != NO_DATASET:
        line["action"] = _action_of_key(request)
        # The key of a caller who is not known may have a token in a wrong place.
        is_known = context.caller or exchange.status in range(200, 400)
        line["key"] = request.key if is_known else mask_tokens(request.key)
    else:
        path = mask_tokens(request.raw_path.decode("latin-1"))
        line["path"] = _LIKE_A_TOKEN.sub("~", path)[:_LONGEST]
    return line | noted


def _action_of_key(request: Request) -> str:
    if step := upload_step(request.method, parameter_names(request.query)):
        return step
    is_copy = request.method == "PUT" and COPY_SOURCE in request.headers
    return "CopyObject" if is_copy else request.method


def _credentials(request: Request) -> str:
    """Return the kind of the credentials that were sent, whether or not they are valid."""
    authorization = request.headers.get(b"authorization", b"")
    if request.segment is not None:
        return "path"
    if authorization[:7].lower() == b"bearer ":
        return "bearer"
    if authorization:
        return "signature" if authorization.startswith(b"AWS4-") else "other"
    if b"X-Amz-Signature=" in request.query:
        return "presigned"
    return "cookie" if b"cookie" in request.headers else "none"
