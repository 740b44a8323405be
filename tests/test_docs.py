"""The README and `docs/` match the program."""

import json
import re
import struct
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from pydantic import ByteSize
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefinedType
from typer.main import get_command

from shardgate.cli import app
from shardgate.configuration import load
from shardgate.model import ObjectRef
from shardgate.server.problems import STATUS
from shardgate.settings import TABLES, Settings
from shardgate.storage.memory import MemoryStore
from tests.support.documents import DOCUMENTS, PAGES, ROOT, blocks
from tests.support.resolving import reading
from tests.support.serving import client_of


def spelled_default(field: FieldInfo) -> str:
    """Return the default of *field* as the configuration file spells it."""
    match field.get_default():
        case _ if field.is_required():
            return "required"
        case None | PydanticUndefinedType():
            return ""
        case ByteSize() as size:
            unit, name = (1024**2, "MiB") if size >= 1024**2 else (1024, "KiB")
            assert size % unit == 0
            return f'`"{size // unit}{name}"`'
        case tuple() as values:
            return f"`{json.dumps(values)}`"
        case value:
            return f"`{json.dumps(value)}`"


def settings_rows() -> list[str]:
    """Return the rows of the table of settings."""
    names = {each: f"{each}.NAME" for each in ("stores", "callers", "issuers", "datasets")}
    return [
        f"| `{names.get(section, section)}.{name}` | {spelled_default(field)} "
        f"| {field.description} |"
        for section, table in TABLES.items()
        for name, field in table.model_fields.items()
    ]


def test_settings_table_matches_the_settings() -> None:
    """The table of settings has exactly the settings, with their defaults and descriptions."""
    rows = [
        line for line in DOCUMENTS.splitlines() if re.match(r"\| `(\w+|\w+\.NAME)\.\w+` \|", line)
    ]

    assert sorted(rows) == sorted(settings_rows())


def test_named_settings_exist() -> None:
    """Each setting that the documents name by its section exists."""
    pattern = rf"`({'|'.join(TABLES)})\.(?:NAME\.)?(?!conf`)([a-z]\w*)`"

    named = set(re.findall(pattern, DOCUMENTS))

    assert named
    assert {name for name in named if name[1] not in TABLES[name[0]].model_fields} == set()


async def test_the_service_is_mounted_as_described() -> None:
    """The example of another application serves the datasets below its path."""
    (example,) = [block for block in blocks("python") if "app.mount(" in block]
    names: dict[str, Any] = {}
    exec(example, names)  # noqa: S102 - our own text

    app = names["app"]
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        listed = (await client.get("/arrays/api/datasets")).json()
    assert [each["path"] for each in listed["datasets"]] == ["/arrays/em/"]


@pytest.mark.parametrize("example", blocks("toml"))
def test_example_file_is_loaded(example: str, tmp_path: Path) -> None:
    """Each example of a configuration file is loaded, with datasets."""
    path = tmp_path / "shardgate.toml"
    path.write_text(example)

    settings = load(path, {})

    assert isinstance(settings, Settings)
    assert settings.datasets


def commands() -> dict[str, Any]:
    """Return the commands by name."""
    return dict(getattr(get_command(app), "commands", {}))


def test_documented_commands_match_the_program() -> None:
    """The table of commands is the program's, and each option is documented."""
    named = set(re.findall(r"^\| `shardgate (\w+)", DOCUMENTS, re.MULTILINE))
    options = {
        option
        for command in commands().values()
        for parameter in command.params
        for option in parameter.opts
        if option.startswith("--")
    }

    assert named == set(commands())
    assert {option for option in options if f"`{option}" not in DOCUMENTS} == set()


def test_readme_is_short() -> None:
    """The README has less than 10,000 bytes, and no line above 400."""
    text = (ROOT / "README.md").read_bytes()

    assert len(text) < 10_000
    assert max(map(len, text.splitlines())) <= 400


def test_readme_soon_serves_a_bucket() -> None:
    """The first 40 lines of the README have the command that serves one's own bucket."""
    lines = (ROOT / "README.md").read_text("utf-8").splitlines()

    assert "shardgate serve em=s3://bucket/em.zarr" in lines[:40]


def test_documented_routes_match_openapi() -> None:
    """The table of routes has those of OpenAPI, and no other of the control plane."""
    routes = set(re.findall(r"^\| `(?:GET|POST|PUT|DELETE) (/[^`]*)`", DOCUMENTS, re.MULTILINE))
    with client_of(Settings()) as client:
        paths = set(client.get("/openapi.json").json()["paths"])

    assert paths <= routes
    assert {route for route in routes if route.startswith(("/api", "/healthz", "/ready"))} <= paths


def test_statuses_of_errors_are_documented() -> None:
    """Each status that an error can have is explained."""
    explained = {
        status
        for cell in re.findall(r"^\| ((?:\d{3}(?:, )?)+) \|", DOCUMENTS, re.MULTILINE)
        for status in cell.split(", ")
    }

    assert {str(status.value) for status in STATUS.values()} - {"500"} <= explained


def test_targets_of_make_exist() -> None:
    """Each `make` target in the documents exists."""
    makefile = (ROOT / "Makefile").read_text("utf-8")

    for target in re.findall(r"`?\bmake ([a-z]+)\b`", DOCUMENTS):
        assert f"\n{target}:" in makefile, target


def test_version_is_the_same_everywhere() -> None:
    """The changelog, the image and its tags, and the chart have the version of the project."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    places = {
        "CHANGELOG.md": r"^## (\S+)",
        "Dockerfile": r'image\.version="(\S+)"',
        "docker-compose.yml": r"image: shardgate\S*:(\S+)",
        "deploy/helm/shardgate/Chart.yaml": r"^(?:appVersion|version): (\S+)",
        "deploy/helm/shardgate/README.md": r"/shardgate:([\d.]+)",
    }
    for place, pattern in places.items():
        found = re.findall(pattern, (ROOT / place).read_text("utf-8"), re.MULTILINE)
        assert found, place
        assert {*found} == {project["version"]}, place


def test_install_hints_name_extras_of_the_project() -> None:
    """Each hint to install an extra in the documents names one that exists, in a checkout."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = set(re.findall(r"\.\[(\w+)\]'", DOCUMENTS))

    assert extras
    assert extras <= set(project["optional-dependencies"])
    assert "shardgate[" not in DOCUMENTS


def anchor(heading: str) -> str:
    """Return the fragment of *heading*, as GitHub spells it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.name))
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    """Each relative link of a document leads to an existing file and heading."""
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link:
            continue
        name, _, fragment = link.partition("#")
        target = page.parent / name if name else page
        assert target.is_file(), link
        if fragment:  # of a page, not of a picture
            headings = re.findall(r"^#+ (.*)$", target.read_text("utf-8"), re.MULTILINE)
            assert fragment in {anchor(each) for each in headings}, link


async def test_example_format_reads_its_chunks() -> None:
    """The example format of `docs/adding-a-format.md` reads its chunks, and no other keys."""
    page = (ROOT / "docs/adding-a-format.md").read_text("utf-8")
    module = ModuleType("packed")
    sys.modules["packed"] = module  # dataclasses look for it
    exec(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0], module.__dict__)  # noqa: S102
    store = MemoryStore()
    root = ObjectRef("memory://data", "")
    entries = struct.pack("<6Q", 48, 3, 0, 0, 51, 2)
    store.place(root.join("packed.json"), b'{"count": 3}')
    store.place(root.join("shard"), entries + b"abcde")

    data = reading(store, root=root, formats=(module.Packed(),))

    keys = ["0", "1", "2", "3", "00", "x"]
    assert [await data.read(key) for key in keys] == [b"abc", None, b"de", None, None, None]
