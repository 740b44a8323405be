"""The command ``shardgate``.

Its help, its version and errors of usage come at once: each command imports what it needs.
"""

import gc
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from shardgate.errors import ConfigurationError, DamagedError, ShardgateError
from shardgate.model import LogLevel, VirtualKey
from shardgate.survey.key_part import ALL_KEYS, KeyPart

app = typer.Typer(
    help="Serve the chunks of sharded arrays over HTTP.",
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@contextmanager
def _importing() -> Generator[None]:
    """Keep the garbage collector off for the duration of imports, and from what they made."""
    gc.disable()  # imports take a fifth less time
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _show_version(wanted: bool) -> None:  # noqa: FBT001  the signature of typer
    if wanted:
        from importlib.metadata import version

        typer.echo(f"shardgate {version('shardgate')}")
        raise typer.Exit


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
AsReferences = Annotated[
    bool,
    typer.Option("--references", help="Write the keys below KEY as a reference set of kerchunk."),
]
PartOfKeys = Annotated[
    KeyPart | None,
    typer.Option(
        parser=KeyPart.parse, metavar="K/N", help="One part of the shards, K from 0 to N - 1."
    ),
]
Output = Annotated[
    Path | None, typer.Option(help="File for --references, in place of standard output.")
]
Version = Annotated[
    bool,
    typer.Option(
        "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
    ),
]


@app.callback()
def common(*, _version: Version = False) -> None:
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
    _version: Version = False,
) -> None:
    """Serve the datasets of a configuration file, or roots without a file."""
    with _importing():
        import asyncio

        from shardgate import processes
        from shardgate.configuration import RootOptions, load_settings
        from shardgate.datasets import check_reachable, make_folders

    options = {"host": host, "port": port, "log_level": log_level, "workers": workers}
    of_roots = RootOptions(allow_virtual or (), anonymous=anonymous, writable=writable)
    settings = load_settings(roots or [], options, of_roots)
    if not settings.datasets:
        raise ConfigurationError("there is no dataset to serve: name a file or a URL")
    warnings = make_folders(settings)
    is_typed = roots and not roots[0].endswith(".toml")
    if is_typed and warnings:  # misspelled, rather than late
        raise ConfigurationError(*warnings)
    if strict:
        asyncio.run(check_reachable(settings))
    for warning in warnings:
        typer.echo(f"shardgate: warning: {warning}", err=True)

    def announce(base: str) -> None:
        for name, dataset in settings.datasets.items():
            typer.echo(f"{base}/{name}/  serves  {dataset.url}")

    processes.run(settings, announce)


@app.command()
def demo(
    *,
    folder: Annotated[Path, typer.Option("--dir", help="Where the examples are kept.")] = Path(
        "demo-data"
    ),
    host: Host = None,
    port: Port = None,
    _version: Version = False,
) -> None:
    """Write small example datasets to a folder, serve them, and print what to open."""
    with _importing():
        from shardgate import demo as examples
        from shardgate import processes
        from shardgate.configuration import load_settings

    written = examples.write(folder)
    roots = [f"{name}={path}" for name, path in written.items()]
    settings = load_settings(roots, {"host": host, "port": port}, examples.options(folder))
    processes.run(settings, lambda base: typer.echo(examples.guide(base)))


@app.command()
def inspect(
    url: Annotated[str, typer.Argument(help="A root, as `serve` takes it.")],
    key: Annotated[str | None, typer.Argument(help="A virtual key below it.")] = None,
    *,
    as_shard: Annotated[
        bool, typer.Option("--shard", help="KEY is the name of a shard object.")
    ] = False,
    references: AsReferences = False,
    output: Output = None,
    part: PartOfKeys = None,
    anonymous: Anonymous = False,
    allow_virtual: AllowVirtual = None,
    as_json: AsJson = False,
    _version: Version = False,
) -> None:
    """Show the arrays of a root, the location of a key, the index of a shard, or all references.

    The exit code is 1 if anything shown is damaged, or nothing is found.
    """
    with _importing():
        import asyncio
        import json
        from dataclasses import asdict
        from functools import partial

        from shardgate.configuration import RootOptions
        from shardgate.datasets import with_root
        from shardgate.survey import display
        from shardgate.survey import inspect as survey

    options = RootOptions(allow_virtual or (), anonymous=anonymous)
    if references:
        _write_references(url, key or "", output, part or ALL_KEYS, options)
        return
    if part is not None:
        raise ConfigurationError("--part of `inspect` needs --references")
    nothing = ""
    is_damaged = False
    if key is None:
        arrays, refs, nothing = asyncio.run(with_root(url, survey.inspect_all, options))
        document: dict[str, Any] = {"arrays": [*map(asdict, arrays)], "refs": [*map(asdict, refs)]}
        drawn = [display.draw_table(arrays)]
        if refs:
            drawn.append(display.draw_table(refs))
        is_damaged = any(isinstance(each, survey.DamageReport) for each in (*arrays, *refs))
    else:
        locate: Any = survey.inspect_shard if as_shard else survey.inspect_key
        found = asyncio.run(with_root(url, partial(locate, key=VirtualKey(key)), options))
        document = asdict(found)
        drawn = [display.draw_facts(document)]
        if document.get("state") == "absent":
            nothing = f"{key}: {document['reason']}"
    if as_json:
        typer.echo(json.dumps(document, indent=2))
    elif key is not None or any(document.values()):
        display.show(*drawn)
    elif not nothing:
        typer.echo(display.NO_COLLECTIONS)
    _finish(nothing, is_damaged=is_damaged)


def _write_references(
    url: str, folder: str, output: Path | None, part: KeyPart, options: Any
) -> None:
    """Write a reference set to *output*, which is replaced once all is written."""
    import asyncio

    from shardgate.datasets import with_root
    from shardgate.read.listing import Root
    from shardgate.read.walking import explain_emptiness
    from shardgate.survey.reference_set import write_references

    async def write(root: Root) -> str:
        if nothing := await explain_emptiness(root):
            return nothing
        prefix = f"{folder.rstrip('/')}/" if folder else ""
        if output is None:
            await write_references(root, prefix, sys.stdout.write, part)
            return ""
        partial = output.with_name(f".{output.name}.partial")
        try:
            with partial.open("w") as file:
                await write_references(root, prefix, file.write, part)
            partial.replace(output)
        finally:
            partial.unlink(missing_ok=True)
        return ""

    _finish(asyncio.run(with_root(url, write, options)), is_damaged=False)


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
    part: PartOfKeys = None,
    anonymous: Anonymous = False,
    allow_virtual: AllowVirtual = None,
    as_json: AsJson = False,
    _version: Version = False,
) -> None:
    """Check every index, and every reference of a ref.

    The exit code is 1 if anything is damaged, or nothing is found.
    """
    with _importing():
        import asyncio
        import json
        from dataclasses import asdict

        from shardgate.configuration import RootOptions
        from shardgate.datasets import with_root
        from shardgate.formats.surveying import Report
        from shardgate.read.listing import Root
        from shardgate.read.walking import explain_emptiness
        from shardgate.survey import display
        from shardgate.survey.verify import verify as verify_root

    text = "{task.completed} checked, {task.fields[damaged]} damaged"
    with display.make_progress(text) as progress:
        task = progress.add_task("", total=None, damaged=0)

        def on_shard(report: Report) -> None:
            checked = report.shards + sum(report.counts.values())
            progress.update(task, completed=checked, damaged=len(report.damages))

        async def check(root: Root) -> tuple[Report, str]:
            if nothing := await explain_emptiness(root):
                return Report(), nothing
            report = await verify_root(
                root, chunks=chunks, ref=ref, part=part or ALL_KEYS, on_shard=on_shard
            )
            return report, ""

        options = RootOptions(allow_virtual or (), anonymous=anonymous)
        report, nothing = asyncio.run(with_root(url, check, options))
    if as_json and part is not None:
        typer.echo(json.dumps({"part": str(part), **asdict(report)}))
    elif as_json:
        typer.echo(json.dumps(asdict(report), indent=2))
    elif not nothing:
        typer.echo(display.draw_report(report, is_part=part is not None))
    _finish(nothing, is_damaged=bool(report.damages))


@app.command()
def login(
    url: Annotated[str, typer.Argument(help="The service, such as https://chunks.example.")],
    *,
    no_browser: Annotated[
        bool, typer.Option("--no-browser", help="Sign in by a code in a browser elsewhere.")
    ] = False,
    _version: Version = False,
) -> None:
    """Sign in by a browser, keep the token for this user, and print the header to send.

    A token that was kept is printed while the service takes it.
    """
    with _importing():
        from shardgate.signing_in import TokenFile, is_accepted, long_lines, sign_in

    def tell(text: str) -> None:
        typer.echo(text, err=True)

    def ask() -> str:
        typer.echo("Code: ", nl=False, err=True)  # `typer.prompt` writes to the output, too
        with long_lines():
            if not (line := sys.stdin.readline()):
                raise typer.Abort
        return line

    file = TokenFile(Path(typer.get_app_dir("shardgate")) / "tokens.json")
    token = file.get(url)
    if token is None or not is_accepted(url, token):
        token = sign_in(url, tell, ask if no_browser else None)
        try:
            file.put(url, token)
        except ConfigurationError as error:
            tell(f"The token is not kept: {error}")
    typer.echo(f"Authorization: Bearer {token.token}")


def main() -> None:
    """Run the command; each error is one line, and exit code 2."""
    try:
        code = app(sys.argv[1:] or ["--help"], prog_name="shardgate", standalone_mode=False)
    except typer.Abort:
        sys.exit(130)  # as shells have it for SIGINT
    except (ShardgateError, typer.TyperException, OSError) as error:
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
