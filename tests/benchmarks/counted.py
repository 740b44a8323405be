"""The service, sending itself requests and printing the calls in `app/` of each."""

import http.client
import json
import os
import signal
import sys
import time
from collections import Counter
from threading import Thread
from types import CodeType
from typing import Any, Final

from tests.support.processes import ROOT

_TOOL: Final = 4
_APP: Final = f"{ROOT}/app/"
_entered: Counter[tuple[str, str]] = Counter()


def serve(port: int, *paths: str) -> None:
    """Run the command, and request *paths* in turn over one connection to *port*."""
    monitoring = sys.monitoring
    monitoring.use_tool_id(_TOOL, "calls")
    monitoring.register_callback(_TOOL, monitoring.events.PY_START, _note)
    Thread(target=_ask_and_end, args=(port, paths), daemon=True).start()
    from shardgate.cli import main  # noqa: PLC0415 - modules are imported before functions count

    main()


def _note(code: CodeType, _offset: int) -> Any:
    file = code.co_filename
    if not file.startswith(_APP) or code.co_name == "<module>":
        return sys.monitoring.DISABLE
    _entered[file, code.co_qualname] += 1
    return None


def _ask_and_end(port: int, paths: tuple[str, ...]) -> None:
    try:
        print(json.dumps(_ask(port, paths)), flush=True)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)


def _ask(port: int, paths: tuple[str, ...]) -> list[dict[str, int]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    while True:
        try:
            connection.connect()
            break
        except OSError:
            time.sleep(0.05)
    counts = []
    for path in ("/readyz", *paths):
        _entered.clear()
        sys.monitoring.set_events(_TOOL, sys.monitoring.events.PY_START)
        connection.request("GET", path)
        answer = connection.getresponse()
        answer.read()
        time.sleep(0.05)  # what follows the answer belongs to the request
        sys.monitoring.set_events(_TOOL, 0)
        if answer.status != http.HTTPStatus.OK:
            raise RuntimeError(f"{path}: {answer.status}")
        files = {file for file, _ in _entered}
        counts.append({"calls": _entered.total(), "files": len(files)})
    return counts[1:]
