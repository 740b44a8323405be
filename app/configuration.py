"""Reads the configuration: a TOML file, and ``SHARDGATE_SECTION__NAME`` over it.

Unknown names are refused, and no message repeats a value, which could be a secret.
"""

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from app.errors import ConfigurationError
from app.settings import TABLES, Settings

PREFIX: Final = "SHARDGATE_"
"""What the names of environment variables begin with."""

_SERVICE_LINK: Final = re.compile(
    r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
"""What Kubernetes tells every pod about a Service called ``shardgate`` or ``shardgate-web``."""


def load(
    path: Path | None,
    environ: Mapping[str, str],
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> Settings:
    """Read the file *path*, put *environ* over it, and *options* of the command line over both.

    Raises: `ConfigurationError` with one line that names the setting.
    """
    document = {} if path is None else _parse(path)
    variables = {}
    for variable, path_in_capitals in _variables(environ):
        names = _as_spelled(path_in_capitals, document)
        variables[".".join(names)] = variable
        _put(document, names, environ[variable])
    for section, values in (options or {}).items():
        for name, value in values.items():
            _put(document, (section, name), value)
    try:
        return Settings.model_validate(document)
    except ValidationError as error:
        # The cause would show the values, and with them secrets.
        wrong = error.errors(include_url=False, include_input=False)
        # A misspelled name also leaves another one missing: tell the misspelling.
        first = min(wrong, key=lambda details: details["type"] != "extra_forbidden")
        raise ConfigurationError(_complaint(first, variables)) from None


def _parse(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path}: is not UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{path}: {error}") from error


def _variables(environ: Mapping[str, str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Find our variables, with the path of the setting that each names."""
    for variable, value in environ.items():
        if not variable.startswith(PREFIX):
            continue
        rest = variable.removeprefix(PREFIX)
        if "__" in rest:
            section, _, rest = rest.lower().partition("__")
            yield variable, (section, *rest.rsplit("__", 1))
        elif not (_SERVICE_LINK.fullmatch(rest) or value.startswith(("tcp://", "udp://"))):
            raise ConfigurationError(f"{variable}: is no setting; write {PREFIX}SECTION__NAME")


def _as_spelled(names: tuple[str, ...], document: Mapping[str, Any]) -> tuple[str, ...]:
    """Take the file's spelling of a table that the environment can only name in capitals."""
    section, *table, name = names
    tables = document.get(section)
    spelled = {table.lower(): table for table in tables} if isinstance(tables, dict) else {}
    return (section, *(spelled.get(part, part) for part in table), name)


def _put(document: dict[str, Any], names: tuple[str, ...], value: Any) -> None:
    *tables, last = names
    table: Any = document
    for name in tables:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            return  # validation says that this is no table
    table[last] = value


def _complaint(details: ErrorDetails, variables: Mapping[str, str]) -> str:
    """Say in one line which setting is wrong, and why."""
    location = [str(part) for part in details["loc"] if part != "[key]"]
    reason = details["msg"].removeprefix("Value error, ")
    if not location:
        setting, _, reason = reason.partition(": ")
        location = [setting]
    match details["type"]:
        case "extra_forbidden":
            reason = f"is no setting{_suggestion(location)}"
        case "missing":
            reason = "is missing"
        case "byte_size" | "byte_size_unit":
            reason = "is not a size such as 256MiB"
    setting = ".".join(location)
    for name, variable in variables.items():
        if name == setting or name.startswith(f"{setting}."):
            setting = variable
    return f"{setting}: {reason}"


def _suggestion(location: list[str]) -> str:
    """Guess what an unknown name was meant to be."""
    table: type[BaseModel] = Settings if len(location) == 1 else TABLES[location[0]]
    close = difflib.get_close_matches(location[-1], table.model_fields, n=1)
    return f"; did you mean {close[0]}?" if close else ""
