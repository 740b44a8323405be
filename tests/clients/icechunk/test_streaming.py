"""The program of a camera in the documents, while the service is killed."""

import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import icechunk
import zarr

from tests.support.documents import program
from tests.support.gateways import of_dataset, start_gateway
from tests.support.processes import environ, free_ports, wait_until

EXPOSE: Final = "    return numpy.full("
"""What the camera of the program does."""
NO_FILM: Final = "    from pathlib import Path\n    assert not Path('stop').exists(), 'no film'\n"
WRITTEN: Final = 5


def test_slices_survive_the_death_of_the_service_and_an_error_of_the_camera(
    tmp_path: Path,
) -> None:
    """No slice that was answered is lost if the service is killed and starts again, and then the
    camera fails: the commit has all of them.
    """
    repository = icechunk.Repository.create(icechunk.local_filesystem_storage(str(tmp_path)))
    port = str(free_ports(1)[0])
    configuration = of_dataset(str(tmp_path)) | {"SHARDGATE_SERVER__PORT": port}
    text = program("docs/streaming.md", "# camera.py").replace(EXPOSE, NO_FILM + EXPOSE)
    text = text.replace("http://127.0.0.1:8000", f"http://127.0.0.1:{port}")
    (tmp_path / "camera.py").write_text(text.replace("/lab", "/data"))

    def fragments() -> int:
        return len(list(tmp_path.glob("sessions/*/fragments/*")))

    with closing(start_gateway(configuration)) as doomed:
        camera = subprocess.Popen(
            [sys.executable, "camera.py", "1", "3600"],
            env=environ(PYTHONWARNINGS="ignore"),
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            wait_until(lambda: fragments() > WRITTEN)
            doomed.kill()
            known = fragments()
            with closing(start_gateway(configuration)):
                wait_until(lambda: fragments() > known + WRITTEN)
                (tmp_path / "stop").touch()
                _, error = camera.communicate()
        finally:
            camera.kill()

    assert "no film" in error
    newest = next(iter(repository.ancestry(branch="main")))
    count = int(newest.message.removesuffix(" slices"))
    assert count > 2 * WRITTEN
    film: Any = zarr.open_array(repository.readonly_session("main").store, path="film", mode="r")
    for number, written in enumerate(film[:count]):
        assert {written.min(), written.max()} == {number % 250 + 1}
