"""Measure Shardgate beside its yardsticks and print one table; exit code 1 if a goal is missed."""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

from . import (
    archives,
    blocks,
    calls,
    charts,
    commits,
    comparing,
    costs,
    edges,
    far,
    manifest,
    nginx_cache,
    replicas,
    sizes,
    streaming,
    throughput,
    tls,
    trains,
    views,
    whole,
    writing,
)  # fmt: skip
from .data import write_arrays
from .figures import Figure, describe, show, write_json
from .repositories import write_same
from .servers import BUCKET, nginx_files

_PARTS: Final = "abcdefghijklmnopqrstuvwx"


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
    load = {"rounds": options.rounds, "seconds": options.seconds}
    with nginx_files(home / "nginx", objects) as store:
        parts: dict[str, Callable[[Path], Iterable[Figure]]] = {
            "abc": lambda here: throughput.measure(here, root, store, options.only, **load),
            "d": lambda here: blocks.measure(here, root, store),
            "e": lambda here: costs.measure_memory(here, root, store),
            "f": lambda _: costs.measure_minishard(),
            "g": lambda here: manifest.measure(here, store),
            "h": writing.measure,
            "i": commits.measure,
            "j": lambda here: comparing.measure("j", here, root, store, **load),
            "k": lambda here: comparing.measure("k", here, root, store, **load),
            "l": lambda here: costs.measure_start(here, store),
            "m": lambda here: far.measure(here, root, store),
            "n": lambda here: sizes.measure(here, root, store, **load),
            "o": lambda _: calls.measure(root),
            "q": lambda here: tls.measure(here, root, store, **load),
            "r": lambda here: nginx_cache.measure(here, root, store, **load),
            "s": trains.measure,
            "t": lambda here: archives.measure(here, root, store, **load),
            "u": whole.measure,
            "v": streaming.measure,
            "w": lambda here: edges.measure(here, root, store, rounds=options.rounds),
            "x": replicas.measure,
            "p": lambda here: views.measure(here, root, store, rounds=options.rounds),
        }
        for names, measure in parts.items():
            if set(names) & set(options.only):
                yield from measure(home / names)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.benchmarks", description=__doc__)
    parser.add_argument(
        "--only",
        type=_parts,
        default=_PARTS,
        metavar="a,b,…",
        help="a: chunk cached, b: index cached, c: 304, d: blocks, e: memory, f: minishard index, "
        "g: manifest, h: writing, i: commits, j: metrics and access log, k: tokens, l: start, "
        "m: far store, n: sizes, o: calls, p: views in Chromium, "
        "q: store over TLS, r: cache of nginx, s: commits of several clients, "
        "t: archives, u: whole arrays, v: a camera, w: caches near the client, "
        "x: replicas",
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
    if not parts or set(parts) - set(_PARTS):
        raise argparse.ArgumentTypeError(f"the parts are a to {_PARTS[-1]}")
    return parts


if __name__ == "__main__":
    sys.exit(main())
