"""Load the settings: a TOML file, ``SHARDGATE_SECTION__NAME`` variables, and the command line,
which may name roots instead of a file.

All faults are told at once, each with its variable or its path in the file; no message repeats a
value, which could be a secret.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path, PurePosixPath
from shlex import quote
from typing import Any, Final, NamedTuple

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from shardgate.errors import ConfigurationError
from shardgate.formats.members import ARCHIVE_SUFFIXES, SET_FOLDER_SUFFIXES, SET_SUFFIXES
from shardgate.settings import TABLES, Settings, VirtualPrefix, dataset_name

_PREFIX: Final = "SHARDGATE_"
# Variables that Kubernetes sets for a Service called ``shardgate`` or ``shardgate-web``.
_SERVICE_LINK: Final = re.compile(
    r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_MISSING: Final = "is missing"
_ANONYMOUS: Final = "anonymous"  # store of public buckets
# Ends of the names of roots that tell the format.
_ENDINGS: Final = re.compile(
    f"(\\.zarr|\\.precomputed|\\.icechunk)?({'|'.join(map(re.escape, ARCHIVE_SUFFIXES))})?$",
    re.IGNORECASE,
)


class _Complaint(NamedTuple):
    setting: str
    """Its path, such as ``datasets.em.url``."""
    reason: str

    @property
    def table(self) -> str:
        return self.setting.rpartition(".")[0]


def load(
    path: Path | None,
    environ: Mapping[str, str],
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> Settings:
    """Read the file *path*, overridden by *environ*, and both by *options* of the command line.

    Raises: `ConfigurationError` with a line for each wrong setting.
    """
    document = {} if path is None else _parse(path)
    complaints = []
    variables = {}
    for variable, path_in_capitals in _variables(environ):
        if not path_in_capitals:
            complaints.append(f"{variable}: is no setting; write {_PREFIX}SECTION__NAME")
            continue
        names = _as_spelled(path_in_capitals, document)
        variables[".".join(names)] = variable
        _put(document, names, environ[variable])
    for section, values in (options or {}).items():
        for name, value in values.items():
            _put(document, (section, name), value)
    complaints += [
        f"{_spell(setting, variables)}: {reason}" for setting, reason in _find_faults(document)
    ]
    if complaints:
        raise ConfigurationError(*complaints)
    return Settings.model_validate(document)


def _find_faults(document: dict[str, Any]) -> list[_Complaint]:
    """Return all that is wrong in *document*, and take it away.

    A fault hides others, as checks across tables need valid tables. So the rest is validated again;
    what that shows of settings known to be wrong is left out.
    """
    faults: list[_Complaint] = []
    # Wrong are values, then tables of valid values, what these leave missing, and tables together.
    for _ in range(4):
        try:
            Settings.model_validate(document)
            break
        except ValidationError as error:
            wrong = error.errors(include_url=False, include_input=False)  # which can be secrets
        known = [fault.setting for fault in faults]
        faults += [
            fault
            for fault in chain.from_iterable(map(_faults_of, wrong))
            if not any(_is_related(fault.setting, setting) for setting in known)
        ]
        for details in reversed(wrong):  # from the end, as positions in lists change behind one
            _take_away(document, details)
    # A misspelled name leaves another one missing: the misspelling is told.
    misspelled = {fault.table for fault in faults if "did you mean" in fault.reason}
    return [fault for fault in faults if fault.reason != _MISSING or fault.table not in misspelled]


def _parse(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path}: is not UTF-8") from error
    except (ValueError, RecursionError) as error:  # also of a number of 5,000 digits
        raise ConfigurationError(f"{path}: {error}") from error


def _variables(environ: Mapping[str, str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the variables of the service, with the path of the setting that each names, if any."""
    for variable, value in environ.items():
        if not variable.startswith(_PREFIX):
            continue
        name = variable.removeprefix(_PREFIX)
        if "__" in name:
            section, _, setting = name.lower().partition("__")
            # What stands between the section and the setting names a table, such as a dataset.
            yield variable, (section, *setting.rsplit("__", 1))
        elif not (_SERVICE_LINK.fullmatch(name) or value.startswith(("tcp://", "udp://"))):
            yield variable, ()


def _as_spelled(names: tuple[str, ...], document: Mapping[str, Any]) -> tuple[str, ...]:
    # Variables are in capitals, tables as somebody has written them in the file.
    section, *table, name = names
    tables = document.get(section)
    spelled = {each.lower(): each for each in tables} if isinstance(tables, dict) else {}
    return (section, *(spelled.get(part, part) for part in table), name)


def _put(document: dict[str, Any], names: tuple[str, ...], value: Any) -> None:
    *tables, last = names
    table: Any = document
    for name in tables:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            return  # validation says that this is no table
    table[last] = value


def _faults_of(details: ErrorDetails) -> Iterator[_Complaint]:
    location = [str(part) for part in details["loc"] if part != "[key]"]
    reasons = details["msg"].removeprefix("Value error, ").splitlines()
    match details["type"]:
        case "extra_forbidden":
            reasons = [f"is no setting{_suggestion(location)}"]
        case "missing":
            reasons = [_MISSING]
        case "byte_size" | "byte_size_unit":
            reasons = ["is not a size such as 256MiB"]
    for reason in reasons:
        if location:
            yield _Complaint(".".join(location), reason)
        else:  # of a check across tables, which begins with the setting
            setting, _, rest = reason.partition(": ")
            yield _Complaint(setting, rest)


def _is_related(setting: str, other: str) -> bool:
    return f"{setting}.".startswith(f"{other}.") or other.startswith(f"{setting}.")


def _take_away(document: dict[str, Any], details: ErrorDetails) -> None:
    """Take a wrong value out of *document*: a table is emptied, a missing value gets a stand-in."""
    # A fault between tables has no location.
    *path, last = [part for part in details["loc"] if part != "[key]"] or [""]
    table: Any = document
    try:
        for part in path:
            if not isinstance(table[part], dict | list):
                last = part
                break
            table = table[part]
        if details["type"] == "missing":
            table[last] = "https://stand-in.example"  # valid for all required settings
        elif isinstance(table[last], dict) and details["type"] == "value_error":
            table[last] = {}
        else:
            del table[last]
    except (LookupError, TypeError):
        return  # a list in a variable, or taken away already


def _spell(setting: str, variables: Mapping[str, str]) -> str:
    """Return the variable that *setting* comes from, else its path in the file."""
    for name, variable in variables.items():
        if name == setting or name.startswith(f"{setting}."):
            return variable
    return setting


def _suggestion(location: list[str]) -> str:
    *path, name = location
    table: type[BaseModel] = TABLES[path[0]] if path else Settings
    if "virtual_chunk_prefixes" in path[1:]:
        table = VirtualPrefix
    close = difflib.get_close_matches(name, table.model_fields, n=1)
    return f"; did you mean {close[0]}?" if close else ""


class RootOptions(NamedTuple):
    """Options for all roots of the command line."""

    allow_virtual: Sequence[str] = ()
    anonymous: bool = False
    writable: bool = False

    def tables(self, roots: Mapping[str, str]) -> dict[str, dict[str, Any]]:
        """Return the tables `stores` and `datasets` of the settings for *roots*, URLs by name."""
        datasets = {name: self._with_store({"url": url}) for name, url in roots.items()}
        for table in datasets.values():
            if table["url"].rstrip("/").lower().endswith((*SET_SUFFIXES, *SET_FOLDER_SUFFIXES)):
                table["format"] = "kerchunk"
            if self.writable:
                table["writable"] = True
            if self.allow_virtual:
                table["virtual_chunk_prefixes"] = [
                    self._with_store({"url": prefix}) for prefix in self.allow_virtual
                ]
        stores = {_ANONYMOUS: {"anonymous": True}} if self.anonymous else {}
        return {"stores": stores, "datasets": datasets}

    def _with_store(self, table: dict[str, Any]) -> dict[str, Any]:
        is_cloud = table["url"].startswith(("s3://", "gs://", "az://"))
        return {**table, "store": _ANONYMOUS} if self.anonymous and is_cloud else table


def load_settings(
    roots: Sequence[str], options: Mapping[str, Any], of_roots: RootOptions
) -> Settings:
    """Load the configuration of the command line, and of the file it names."""
    server_options = {name: value for name, value in options.items() if value is not None}
    if len(roots) == 1 and roots[0].endswith(".toml"):
        for name, value in of_roots._asdict().items():
            if value:
                option = name.replace("_", "-")
                raise ConfigurationError(
                    f"--{option} cannot be combined with a configuration file; set it there"
                )
        return load(Path(roots[0]), os.environ, {"server": server_options})
    return load(None, os.environ, {"server": server_options, **of_roots.tables(_named(roots))})


def _named(roots: Sequence[str]) -> dict[str, str]:
    """Return the URLs of *roots* by the names of their datasets."""
    urls: dict[str, str] = {}
    for root in roots:
        if root.endswith(".toml"):
            raise ConfigurationError(f"{root}: a configuration file goes without roots beside it")
        name, url = _split_name(root)
        try:
            dataset_name(name)
        except ValueError as error:
            suggested = str(error).rpartition(" ")[2]  # its last word
            reason = f"is not a name for a dataset; write {suggested}={quote(url)}"
            raise ConfigurationError(f"datasets.{name}: {reason}") from error
        if name in urls:
            raise ConfigurationError(f"two datasets are called {name}: write NAME={url}")
        urls[name] = url
    return urls


def _split_name(root: str) -> tuple[str, str]:
    """Split ``NAME=URL``; an existing path, and what looks like one, may hold ``=`` too."""
    name, _, url = root.partition("=")
    # `Path.exists` would raise for what is too long for a name.
    is_path = name.startswith(("/", ".", "~")) or "://" in name or os.path.exists(root)  # noqa: PTH110
    if not url or is_path:
        return _default_name(root), root
    return name, url


def _default_name(url: str) -> str:
    path = url if "://" in url else os.path.abspath(os.path.expanduser(url))  # noqa: PTH100, PTH111
    return _ENDINGS.sub("", PurePosixPath(path).name, count=1)
