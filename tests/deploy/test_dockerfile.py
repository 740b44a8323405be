"""What holds of the Dockerfile without building it."""

import re

import pytest

from tests.deploy.dockerfile import Stage, image, stages

NOT_ROOT = re.compile(r"[1-9]\d*:[1-9]\d*")


def test_the_image_takes_nothing_from_the_build_but_its_environment() -> None:
    """Neither sources nor tools of the build come along."""
    assert image().base != "build"
    assert image().values("COPY") == ["--from=build /venv /venv"]


@pytest.mark.parametrize("stage", stages()[1:], ids=lambda stage: stage.name or "image")
def test_what_runs_is_not_root(stage: Stage) -> None:
    """The user is a number, so that Kubernetes can tell that it is not root."""
    assert NOT_ROOT.fullmatch(stage.values("USER")[-1])


def test_signals_reach_the_service() -> None:
    """No shell is before it, which would keep SIGTERM to itself."""
    assert image().command("ENTRYPOINT") == ["shardgate"]
    assert image().command("CMD") == ["serve"]


def test_health_is_asked_without_a_shell() -> None:
    """The image needs no shell, and no other program than Python."""
    assert image().command("HEALTHCHECK")[0] == "python"
