"""Install the wheel of a folder into a new environment, and read a chunk from the demo there."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit
from venv import EnvBuilder

ENV = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def main(folder: Path) -> int:
    """Return 0 if the installed command serves its demo."""
    (wheel,) = folder.glob("*.whl")
    with tempfile.TemporaryDirectory() as home:
        EnvBuilder(with_pip=True).create(Path(home, "venv"))
        python = Path(home, "venv/bin/python")
        print(f"Installing {wheel.name} into a new environment ...", flush=True)
        run([python, "-m", "pip", "install", "--quiet", f"{wheel.resolve()}[demo]"], home)
        run([python, "-m", "pip", "check"], home)
        return serve(python.with_name("shardgate"), home)


def run(command: Sequence[str | Path], home: str) -> None:
    """Run *command* where no checkout is."""
    subprocess.run(command, cwd=home, env=ENV, check=True)


def serve(shardgate: Path, home: str) -> int:
    """Start the demo, and read the chunk that it names, and pages."""
    command = [shardgate, "demo", "--dir", "data", "--port", "0"]
    with subprocess.Popen(command, cwd=home, env=ENV, stdout=subprocess.PIPE, text=True) as demo:
        try:
            words = (word for line in demo.stdout or () for word in line.split())
            url = next((word for word in words if "://" in word and "/c/" in word), None)
            if url is None:
                sys.exit("the demo ended before it named a chunk")
            chunk = urlsplit(url)
            statuses = {path: get(chunk.netloc, path) for path in (chunk.path, "/", "/docs")}
        finally:
            demo.terminate()
    print(*(f"{path}: {status}" for path, status in statuses.items()), sep="\n")
    return 0 if set(statuses.values()) == {200} else 1


def get(netloc: str, path: str) -> int:
    """Return the status of a GET."""
    connection = HTTPConnection(netloc, timeout=60)
    connection.request("GET", path)
    return connection.getresponse().status


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
