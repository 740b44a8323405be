"""The command ``shardgate``."""

import asyncio
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from itertools import chain
from pathlib import Path, PurePosixPath
from shlex import quote
from typing import Annotated, Any, Final

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from shardgate import demo as examples
from shardgate import server
from shardgate.configuration import load
from shardgate.datasets import RootOptions, make_folders, open_root, with_root
from shardgate.errors import ConfigurationError, DamagedError, ShardgateError, StorageError
from shardgate.formats.surveying import Description, RefDescription, Report
from shardgate.model import VirtualKey
from shardgate.read.listing import Root, explain_emptiness
from shardgate.settings import LogLevel, Settings, dataset_name
from shardgate.storage.stores import Stores
from shardgate.survey.inspect import (
    ChunkReport,
    DamageReport,
    IndexReport,
    inspect_key,
    inspect_refs,
    inspect_root,
    inspect_shard,
)
from shardgate.survey.verify import verify as verify_root

app = typer.Typer(
    help="Serve the chunks of sharded arrays over HTTP.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

_PIPED_COLUMNS: Final = 500
_NO_COLLECTIONS: Final = "no arrays or other collections in the containers found"

Host = Annotated[str | None, typer.Option(help="Address to listen on.")]
Port = Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")]
Level = Annotated[LogLevel | None, typer.Option("--log-level", help="Least severity logged.")]
Workers = Annotated[int | None, typer.Option(help="Processes; each has caches of its own.")]
AllowVirtual = Annotated[
    list[str] | None,
    typer.Option(metavar="PREFIX", help="Follow virtual references of Icechunk below this URL."),
]
Anonymous = Annotated[
    bool, typer.Option("--anonymous", help="Send no credentials to S3, GCS or Azure.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Write JSON, for programs.")]


def _show_version(wanted: bool) -> None:  # noqa: FBT001  the signature of typer
    if wanted:
        typer.echo(f"shardgate {version('shardgate')}")
        raise typer.Exit


@app.callback()
def common(
    *,
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Take options that need no command."""


@app.command()
def serve(
    roots: Annotated[
        list[str] | None,
        typer.Argument(metavar="CONFIG.toml | [NAME=]URL ...", help="What to serve."),
    ] = None,
    *,
    host: Host = None,
    port: Port = None,
    log_level: Level = None,
    workers: Workers = None,
    anonymous: Anonymous = False,
    allow_virtual: AllowVirtual = None,
    writable: Annotated[
        bool, typer.Option("--writable", help="Let clients write below the roots options here.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Do not start unless every root can be reached.")
    ] = False,
) -> None:
    """Serve the datasets of a configuration file, or roots without a file."""
    options = {"host": host, "port": port, "log_level": log_level, "workers": workers}
    of_roots = RootOptions(allow_virtual or (), anonymous=anonymous, writable=writable)
    settings = _settings(roots or [], options, of_roots)
    if not settings.datasets:
        raise ConfigurationError("there is no dataset to serve: name a file or a URL")
    warnings = make_folders(settings)
    if strict:
        asyncio.run(_reach(settings))
    for warning in warnings:
        typer.echo(f"shardgate: warning: {warning}", err=True)
    server.run(settings, lambda base: _announce(settings, base))


@app.command()
def demo(
    *,
    folder: Annotated[Path, typer.Option("--dir", help="Where the examples are kept.")] = Path(
        "demo-data"
    ),
    host: Host = None,
    port: Port = None,
) -> None:
    """Write small example datasets to a folder, serve them, and print what to open."""
    written = examples.write(folder)
    roots = [f"{name}={path}" for name, path in written.items()]
    settings = _settings(roots, {"host": host, "port": port}, RootOptions())
    server.run(settings, lambda base: typer.echo(examples.guide(base)))


@app.command()
def inspect(
    url: Annotated[str, typer.Argument(help="A root, as `serve` takes it.")],
    key: Annotated[str | None, typer.Argument(help="A virtual key below it.")] = None,
    *,
    as_shard: Annotated[
        bool, typer.Option("--shard", help="KEY is the name of a shard object.")
    ] = False,
    anonymous: Anonymous = False,
    allow_virtual: AllowVirtual = None,
    as_json: AsJson = False,
) -> None:
    """Show the arrays of a root, the location of a key, or the index of a shard.

    The exit code is 1 if anything shown is damaged, or nothing is found.
    """

    async def describe(root: Root) -> tuple[list[Any], list[Any], str]:
        if nothing := await explain_emptiness(root):
            return [], [], nothing
        return await inspect_root(root), await inspect_refs(root), ""

    async def locate(root: Root) -> ChunkReport | IndexReport:
        return await (inspect_shard if as_shard else inspect_key)(root, VirtualKey(key or ""))

    options = RootOptions(allow_virtual or (), anonymous=anonymous)
    document: dict[str, Any]
    nothing, is_damaged = "", False
    if key is None:
        arrays, refs, nothing = asyncio.run(with_root(url, describe, options))
        document = {"arrays": list(map(asdict, arrays)), "refs": list(map(asdict, refs))}
        drawn = Group(_draw_table(arrays), *([_draw_table(refs)] if refs else []))
        is_damaged = any(isinstance(each, DamageReport) for each in (*arrays, *refs))
    else:
        document = asdict(asyncio.run(with_root(url, locate, options)))
        drawn = Group(_draw_facts(document))
        if document.get("state") == "absent":
            nothing = f"{key}: {document['reason']}"
    if as_json:
        typer.echo(json.dumps(document, indent=2))
    elif key is None and not any(document.values()):
        typer.echo("" if nothing else _NO_COLLECTIONS, nl=not nothing)
    else:
        # Piped output is not wrapped: a program or a pager reads it.
        Console(width=None if sys.stdout.isatty() else _PIPED_COLUMNS).print(drawn)
    _finish(nothing, is_damaged=is_damaged)


@app.command()
def verify(
    url: Annotated[str, typer.Argument(help="A root, as `serve` takes it.")],
    *,
    chunks: Annotated[
        bool, typer.Option("--chunks", help="Read every inner chunk, not only the indexes.")
    ] = False,
    ref: Annotated[
        str, typer.Option(help="Which ref of an Icechunk repository: a branch, @tag.NAME, an id.")
    ] = "main",
    anonymous: Anonymous = False,
    allow_virtual: AllowVirtual = None,
    as_json: AsJson = False,
) -> None:
    """Check every index, and every reference of a ref.

    The exit code is 1 if anything is damaged, or nothing is found.
    """
    with _progress("{task.completed} checked, {task.fields[damaged]} damaged") as progress:
        task = progress.add_task("", total=None, damaged=0)

        def on_shard(report: Report) -> None:
            checked = report.shards + sum(report.counts.values())
            progress.update(task, completed=checked, damaged=len(report.damages))

        async def check(root: Root) -> tuple[Report, str]:
            if nothing := await explain_emptiness(root):
                return Report(), nothing
            report = await verify_root(root, chunks=chunks, ref=ref, on_shard=on_shard)
            return report, ""

        options = RootOptions(allow_virtual or (), anonymous=anonymous)
        report, nothing = asyncio.run(with_root(url, check, options))
    if as_json:
        typer.echo(json.dumps(asdict(report), indent=2))
    elif not nothing:
        typer.echo(_draw_report(report))
    _finish(nothing, is_damaged=bool(report.damages))


def main() -> None:
    """Run the command; each error is one line, and exit code 2."""
    try:
        code = app(sys.argv[1:] or ["--help"], prog_name="shardgate", standalone_mode=False)
    except typer.Abort:
        sys.exit(130)
    except (ShardgateError, typer.TyperException) as error:
        match error:
            case typer.TyperException():
                _print_error(error.format_message())
            case ConfigurationError(args=lines):
                for line in lines:
                    _print_error(str(line))
            case _:
                _print_error(str(error))
        sys.exit(1 if isinstance(error, DamagedError) else 2)
    sys.exit(code or 0)


def _finish(nothing: str, *, is_damaged: bool) -> None:
    """End with exit code 1 if there is damage, or nothing, whose reason is printed."""
    if nothing:
        _print_error(nothing)
    if nothing or is_damaged:
        raise typer.Exit(1)


def _print_error(message: str) -> None:
    line = "".join(c if c.isprintable() else " " for c in message)
    typer.echo(f"shardgate: error: {line}", err=True)


def _settings(roots: list[str], options: dict[str, Any], of_roots: RootOptions) -> Settings:
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


def _named(roots: list[str]) -> dict[str, str]:
    """Return the URLs of *roots* by the names of their datasets."""
    urls: dict[str, str] = {}
    for root in roots:
        if root.endswith(".toml"):
            raise ConfigurationError(f"{root}: a configuration file goes without roots beside it")
        name, url = _split_name(root)
        try:
            dataset_name(name)
        except ValueError as error:
            suggested = str(error).rpartition(" ")[2]
            reason = f"is not a name for a dataset; write {suggested}={quote(url)}"
            raise ConfigurationError(f"datasets.{name}: {reason}") from error
        if name in urls:
            raise ConfigurationError(f"two datasets are called {name}: write NAME={url}")
        urls[name] = url
    return urls


def _split_name(root: str) -> tuple[str, str]:
    """Split ``NAME=URL``; an existing path, and what looks like one, may hold ``=`` too."""
    name, separator, url = root.partition("=")
    is_path = name.startswith(("/", ".", "~")) or "://" in name or Path(root).exists()
    return (name, url) if separator and url and not is_path else (_default_name(root), root)


def _default_name(url: str) -> str:
    """Return the last part of the path, without the extension of a format."""
    path = url if "://" in url else str(Path(url).expanduser().absolute())
    name = PurePosixPath(path).name
    for ending in (".zarr", ".precomputed", ".icechunk"):
        name = name.removesuffix(ending)
    return name


async def _reach(settings: Settings) -> None:
    """Raise unless the root of every dataset can be reached."""
    async with Stores(settings.limits) as stores:
        for name in settings.datasets:
            try:
                await stores.check_reachable(open_root(stores, settings, name))
            except StorageError as error:
                raise ConfigurationError(f"datasets.{name}.url: {error}") from error


def _progress(text: str) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn(text),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )


def _announce(settings: Settings, base: str) -> None:
    for name, dataset in settings.datasets.items():
        typer.echo(f"{base}/{name}/  serves  {dataset.url}")


def _draw_table(reports: Iterable[Description | RefDescription | DamageReport]) -> Table:
    rows = list(map(_cells, reports))
    names = list(dict.fromkeys(chain.from_iterable(rows)))
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in names:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(Text(row.get(name, "")) for name in names))
    return table


def _draw_facts(document: Mapping[str, Any]) -> Table:
    """Draw a line for each member that is known; an object has a table of its own."""
    table = Table.grid(padding=(0, 2))
    for name, value in document.items():
        if isinstance(value, dict):
            table.add_row(name, _draw_facts(value))
        elif value is not None:
            table.add_row(name, Text(f"{value:,}" if isinstance(value, int) else value))
    return table


def _draw_report(report: Report) -> str:
    """Format the totals, a line for each damage, and the extent of the check."""
    if not (report.arrays or report.counts or report.not_checked or report.damages):
        return _NO_COLLECTIONS
    lines = [f"not checked: {path or '.'}: {why}" for path, why in report.not_checked.items()]
    lines.append(
        f"{_count(report.arrays, 'collections')}, {_count(report.shards, 'shards')}, "
        f"{_count(report.chunks, 'inner chunks')} of {_count(report.nbytes, 'bytes')}: "
        f"{len(report.damages) or 'none'} damaged"
    )
    if report.counts:
        lines.append(", ".join(_count(number, things) for things, number in report.counts.items()))
    lines += [f"damaged: {d.object}: {d.key}: {d.reason}" for d in report.damages]
    chunks = f" and {_count(report.chunks, 'chunks')}" if report.reads_chunks else ""
    lines.append(f"checked the indexes of {_count(report.shards, 'shards')}{chunks}")
    return "\n".join(lines)


def _count(number: int, things: str) -> str:
    """Format a number of *things*, whose plural ends in ``s``."""
    return f"{number:,} {things.removesuffix('s') if number == 1 else things}"


def _cells(report: Description | RefDescription | DamageReport) -> dict[str, str]:
    match report:
        case DamageReport(path, name, reason):
            return {"path": path or ".", "kind": f"damaged: {name}: {reason}"}
        case RefDescription(path, ref, snapshot_id):
            return {"path": path or ".", "ref": ref, "snapshot": snapshot_id}
    shards = _by(report.shard_shape) or report.sharding or report.why_sharded or "not sharded"
    return {
        "path": report.path or ".",
        "kind": f"{report.format} {report.kind}",
        "shape": "" if report.shape is None else _axes(report.shape, report.dimension_names),
        "type": report.data_type or "",
        "inner chunk": _by(report.inner_chunk_shape),
        "shard": shards,
        "per shard": _by(report.chunks_per_shard),
        "index": ", ".join(report.index_location),
        "codecs": " ".join(report.codecs),
    }


def _axes(shape: Sequence[int], names: Sequence[str | None] | None) -> str:
    named = zip(names or (None,) * len(shape), shape, strict=False)
    return " ".join(f"{name}={n}" if name else str(n) for name, n in named) or "()"


def _by(shape: Sequence[int] | None) -> str:
    return "" if shape is None else "x".join(map(str, shape)) or "()"
