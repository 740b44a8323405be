"""Where the figures come from: the machine by name, processes by what they use."""

import os
import platform
import subprocess
from pathlib import Path
from typing import Final

_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


def describe() -> dict[str, str]:
    """Name what a reader must know to compare figures."""
    return {
        "cpu": _cpu_model(),
        "cores": f"{len(os.sched_getaffinity(0))} cores",
        "python": f"Python {platform.python_version()}",
        "kernel": f"Linux {platform.release()}",
        "nginx": _version("nginx", "-v").removeprefix("nginx version: "),
        "wrk": _version("wrk", "-v"),
    }


def cpu_seconds(pid: int) -> float:
    """Tell the processor time that *pid* and its descendants have used."""
    return sum(_cpu_ticks(each) for each in _family(pid)) / _TICKS_PER_S


def resident_bytes(pid: int) -> int:
    """Tell how much memory of *pid* and its descendants is resident."""
    return sum(_resident_kib(each) for each in _family(pid)) * 1024


def _family(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(each for child in children for each in _family(int(child)))]


def _cpu_ticks(pid: int) -> int:
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(after_name[11]) + int(after_name[12])


def _resident_kib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    return 0


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(*command: str) -> str:
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return (answer.stdout + answer.stderr).splitlines()[0].split(" Copyright")[0].strip()
