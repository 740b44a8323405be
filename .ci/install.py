"""Install packages with this Python, as pip is told by the arguments.

pip prints in one line what it has loaded; uv, if it is on PATH, prints its own progress.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable

WHEEL = re.compile(
    r" *(?:Downloading|Using cached|Processing) (\S+\.whl)(?: \(([0-9.]+) (k|M)B\))?$"
)


def main() -> int:
    """Install, and return the exit code of the installer."""
    if uv := shutil.which("uv"):
        return subprocess.call([uv, "pip", "install", "--python", sys.executable, *sys.argv[1:]])
    command = [sys.executable, "-m", "pip", "install", "--progress-bar", "off", *sys.argv[1:]]
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as pip:
            follow(pip.stdout or ())
        errors.seek(0)
        sys.stderr.writelines(line for line in errors if not line.startswith("WARNING"))
    return pip.returncode


def follow(lines: Iterable[str]) -> None:
    """Print what pip says of its progress."""
    count = 0
    megabytes = 0.0
    for line in lines:
        if wheel := WHEEL.match(line):
            file, size, unit = wheel.groups()
            count += 1
            megabytes += float(size or 0) / (1 if unit == "M" else 1000)
            name = file.rpartition("/")[2].partition("-")[0]
            say(f"{count} packages, {megabytes:.0f} MB: {name}", is_step=count % 20 == 0)
        elif line.startswith("Installing collected packages"):
            say(f"installing {line.count(',') + 1} packages", is_step=True)
    if sys.stdout.isatty():
        print("\r" + " " * 78, end="\r", flush=True)


def say(text: str, *, is_step: bool) -> None:
    """Rewrite the line of a terminal; print every twentieth one elsewhere."""
    if sys.stdout.isatty():
        print(f"\r  {text:<76.76}", end="", flush=True)
    elif is_step:
        print(f"  {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
