"""The Helm chart, rendered by Helm itself."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from tests.deploy.dockerfile import ROOT

CHART: Final = ROOT / "deploy/helm/shardgate"
EVERYTHING: Final = Path(__file__).parent / "everything.yaml"
KUBERNETES: Final = ("1.30", "1.37")
GATEWAY: Final = ("Deployment", "demo-shardgate")
BALANCER: Final = ("Deployment", "demo-shardgate-balancer")


class Chart(NamedTuple):
    """Renders with the program *helm*."""

    helm: str

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run Helm to its end."""
        return subprocess.run(
            [self.helm, *arguments], capture_output=True, text=True, check=False, timeout=60
        )

    def render(self, *files: Path, **values: Any) -> "Rendered":
        """Render the release ``demo`` with the values in *files*, and *values* over them."""
        options = [f"--values={file}" for file in files]
        options += [f"--set-json={name}={json.dumps(value)}" for name, value in values.items()]
        done = self.run("template", "demo", str(CHART), "--namespace=lab", *options)
        if done.returncode:
            raise ValueError(done.stderr)
        made = filter(None, yaml.safe_load_all(done.stdout))
        return Rendered({(each["kind"], each["metadata"]["name"]): each for each in made})


class Rendered(NamedTuple):
    """Resources by kind and name."""

    resources: Mapping[tuple[str, str], Mapping[str, Any]]

    def pods(self) -> dict[str, Mapping[str, Any]]:
        """Give the specification of each pod, by the name of what makes it."""
        found = {}
        for (kind, name), resource in self.resources.items():
            if kind == "Deployment":
                found[name] = resource["spec"]["template"]["spec"]
            elif kind == "Pod":
                found[name] = resource["spec"]
        return found
