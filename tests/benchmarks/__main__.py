"""Measure Shardgate beside its yardsticks and print one table; exit code 1 if a goal is missed."""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from . import (
    blocks,
    calls,
    charts,
    commits,
    comparing,
    costs,
    far,
    manifest,
    sizes,
    throughput,
    views,
    writing,
)  # fmt: skip
from .data import write_arrays, write_many_shards
from .figures import Figure, describe, show, write_json
from .repositories import write_same
from .servers import BUCKET, Server, nginx_files


def main() -> int:
    """Run the parts that were asked for."""
    options = _parse()
    if missing := [tool for tool in ("nginx", "wrk") if shutil.which(tool) is None]:
        print(f"not installed: {', '.join(missing)}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="shardgate-bench-") as folder:
        figures = list(_measure(Path(folder), options))
    machine = describe()
    show(figures, machine)
    if options.charts:
        charts.draw(options.charts, figures)
    if options.json:
        write_json(options.json, figures, machine)
    return 0 if all(figure.is_met for figure in figures) else 1


def _measure(home: Path, options: argparse.Namespace) -> Iterator[Figure]:
    objects = home / "store"
    root = objects / BUCKET / "em.zarr"
    write_arrays(root)
    write_same(root)
    with nginx_files(home / "nginx", objects) as store:
        yield from _compare(home, root, store, options)
        if "d" in options.only:
            yield from blocks.measure(home / "d", root, store)
        if "e" in options.only:
            write_many_shards(root / "many")
            yield from costs.measure_memory(home / "e", store)
        if "f" in options.only:
            yield from costs.measure_minishard()
        if "g" in options.only:
            yield from manifest.measure(home / "g", store)
        if "l" in options.only:
            yield from costs.measure_start(home / "l", store)
        yield from _show_ways(home, root, store, options)
    if "h" in options.only:
        yield from writing.measure(home / "h")
    if "i" in options.only:
        yield from commits.measure(home / "i")


def _compare(
    home: Path, root: Path, store: Server, options: argparse.Namespace
) -> Iterator[Figure]:
    """Run the parts in which contestants take turns."""
    load = {"rounds": options.rounds, "seconds": options.seconds}
    if compared := "".join(part for part in "abc" if part in options.only):
        yield from throughput.measure(home / "abc", root, store, compared, **load)
    for part in "jk":
        if part in options.only:
            yield from comparing.measure(part, home / part, root, store, **load)
    if "n" in options.only:
        yield from sizes.measure(home / "n", root, store, **load)


def _show_ways(
    home: Path, root: Path, store: Server, options: argparse.Namespace
) -> Iterator[Figure]:
    """Run the parts about the way of a request: waits, calls, and views."""
    if "m" in options.only:
        yield from far.measure(home / "m", root, store)
    if "o" in options.only:
        yield from calls.measure(root)
    if "p" in options.only:
        yield from views.measure(home / "p", root, store, rounds=options.rounds)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.benchmarks", description=__doc__)
    parser.add_argument(
        "--only",
        type=_parts,
        default="abcdefghijklmnop",
        metavar="a,b,…",
        help="a: chunk cached, b: index cached, c: 304, d: blocks, e: memory, f: minishard index, "
        "g: manifest, h: writing, i: commits, j: metrics and access log, k: tokens, l: start, "
        "m: far store, n: sizes, o: calls, p: views in Chromium",
    )
    parser.add_argument("--rounds", type=int, default=11, help="default: %(default)s")
    parser.add_argument(
        "--seconds", type=int, default=1, help="of each contestant in each round; default: 1"
    )
    parser.add_argument("--charts", type=Path, metavar="FOLDER", help="draw charts there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    return parser.parse_args()


def _parts(text: str) -> str:
    parts = text.replace(",", "")
    if not parts or set(parts) - set("abcdefghijklmnop"):
        raise argparse.ArgumentTypeError("the parts are a to p")
    return parts


if __name__ == "__main__":
    sys.exit(main())
