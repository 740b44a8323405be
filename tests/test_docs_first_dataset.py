"""The steps of `docs/first-dataset.md`, and the programs of `docs/clients.md` for private data."""

import json
import os
import re
import ssl
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import unquote

import httpx
import pytest
import trustme

from tests.support.auth.provider import CLIENT_ID, CLIENT_SECRET, Provider, providing
from tests.support.clients.precomputed.cases import BY_NAME
from tests.support.clients.precomputed.volumes import write
from tests.support.commands import run, running
from tests.support.documents import ROOT, program
from tests.support.processes import environ
from tests.support.proxies import proxying
from tests.support.records import replaced
from tests.support.seaweedfs import SeaweedFS
from tests.support.viewers.images import put_image

_PAGE: Final = (ROOT / "docs/first-dataset.md").read_text("utf-8")
_CLIENTS: Final = (ROOT / "docs/clients.md").read_text("utf-8")
_LOCAL: Final = "http://127.0.0.1:8000"
_PUBLIC: Final = "https://chunks.example"
_VOLUME: Final = "bits/identity_1_2_3"
_GROUP: Final = "em-readers"
_BROWSER: Final = """#!{python}
import html, re, sys, httpx
with httpx.Client(follow_redirects=True, timeout=60) as client:
    page = client.get(sys.argv[1]).text
    client.get(html.unescape(re.search('href="(http[^"]+)"', page)[1]))
"""
"""A browser whose person is known to the provider, and allows what is asked."""


def step(number: int) -> str:
    """Return the text of a step."""
    return _PAGE.split(f"\n## {number}. ", 1)[1].split("\n## ", 1)[0]


def block(text: str, language: str) -> str:
    """Return the only block of *language* in *text*."""
    (found,) = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    return str(found)


def commands(number: int) -> dict[str, str]:
    """Return the commands of a step with the output that is shown below each."""
    shown = re.findall(r"```console\n(.*?)```", step(number), re.DOTALL)
    parts = "".join(shown).removeprefix("$ ").split("\n$ ")
    return {command: printed.strip() for command, _, printed in (p.partition("\n") for p in parts)}


class Reader(NamedTuple):
    """Somebody who does what the page says, with real names in place of those shown."""

    folder: Path
    names: dict[str, str]
    variables: dict[str, str]

    def really(self, text: str) -> str:
        """Return *text* with the real names."""
        for shown, real in self.names.items():
            text = text.replace(shown, real)
        return text

    def run(self, command: str) -> str:
        """Run a command in a shell, and return its output."""
        done = subprocess.run(
            ["/bin/bash", "-c", self.really(command)],
            cwd=self.folder,
            env=environ(**self.variables),
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout.strip()

    def exports(self, text: str) -> dict[str, str]:
        """Return the variables that the block of *text* in a shell sets."""
        names = re.findall(r"^export (\w+)=", text, re.MULTILINE)
        told = json.dumps({name: f"${name}" for name in names}).replace('"', '\\"')
        return dict(json.loads(self.run(f'{text}\necho "{told}"')))


def told(text: str) -> str:
    """Return *text* with each run of spaces as one."""
    return " ".join(text.split())


@pytest.fixture(scope="module")
def bucket(seaweedfs: SeaweedFS, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Store an OME-Zarr image, and a segmentation, in a bucket; return its URL."""
    folder = tmp_path_factory.mktemp("bucket")
    put_image(folder / "em.zarr")
    write(BY_NAME[_VOLUME], folder / "cells", tmp_path_factory.mktemp("twins"))
    seaweedfs.upload_folder(folder, "first")
    return f"s3://{seaweedfs.bucket}/first"


@pytest.fixture(scope="module")
def reader(
    bucket: str, seaweedfs: SeaweedFS, ca_file: str, tmp_path_factory: pytest.TempPathFactory
) -> Reader:
    """Do steps 1 and 2: return a user with a browser and the credentials of the bucket."""
    folder = tmp_path_factory.mktemp("reader")
    browser = folder / "browser"
    browser.write_text(_BROWSER.format(python=sys.executable))
    browser.chmod(0o755)
    variables = seaweedfs.environ | {
        "BROWSER": f"{browser} %s",
        "CURL_CA_BUNDLE": ca_file,
        "HOME": str(folder),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "REQUESTS_CA_BUNDLE": ca_file,
        "SSL_CERT_FILE": ca_file,
        "XDG_CONFIG_HOME": str(folder),
    }
    names = {
        "s3://bucket": bucket,
        "http://127.0.0.1:8333": seaweedfs.endpoint_url,
        "shardgate-login": CLIENT_ID,
        "'the secret of the client'": f"'{CLIENT_SECRET}'",
    }
    user = Reader(folder, names, variables)
    variables |= user.exports(block(step(2), "sh"))
    return user


@pytest.fixture(scope="module")
def provider() -> Generator[Provider]:
    """Run a provider at which somebody of the group is signed in, without codes for devices."""
    with providing() as provider:
        provider.device = None
        provider.claims = {"groups": [_GROUP]}
        yield provider


@pytest.fixture(scope="module")
def private(
    reader: Reader,
    provider: Provider,
    authority: trustme.CA,
    tmp_path_factory: pytest.TempPathFactory,
) -> Generator[Reader]:
    """Do steps 4 and 5, with the segmentation as another dataset, and return the user."""
    reader.names["https://login.example/realms/lab"] = provider.url
    (reader.folder / "shardgate.toml").write_text(reader.really(block(step(4), "toml")))
    more = {
        "SHARDGATE_DATASETS__CELLS__URL": f"{reader.names['s3://bucket']}/cells",
        "SHARDGATE_DATASETS__CELLS__READ": f'["lab:{_GROUP}"]',
    }
    variables = reader.variables | reader.exports(block(step(4), "sh")) | more
    folder = tmp_path_factory.mktemp("nginx")
    file = folder / "tls.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(file))
    given = re.compile(r"^ *(listen|server_name|ssl_\w+) .*\n", re.MULTILINE)
    server = given.sub("", block(step(5), "nginx"))
    inside = server.strip().removeprefix("server {").removesuffix("}")
    config = str(reader.folder / "shardgate.toml")
    with running("serve", config, "--port", "0", lines=1, **variables) as (_, (line,)):
        url = line.split()[0].removesuffix("/em/").removesuffix("/cells/")
        with proxying(folder, url, inside, certificate=file) as public:
            names = {**reader.names, _LOCAL: url, _PUBLIC: public, "chunks.example": public[8:]}
            yield replaced(reader, names=names)


@pytest.fixture
def browser(ca_file: str) -> Generator[httpx.Client]:
    """Open a browser that has no cookies."""
    trusting = ssl.create_default_context(cafile=ca_file)
    headers = {"Accept": "text/html"}
    with httpx.Client(follow_redirects=True, verify=trusting, headers=headers) as client:
        yield client


def test_inspect_shows_the_levels_of_the_image(reader: Reader) -> None:
    """`inspect` of the bucket prints the lines that the page shows."""
    ((command, shown),) = commands(2).items()
    _, *arguments = reader.really(command).split()

    done = run(*arguments, **reader.variables)

    assert done.returncode == 0, done.stderr
    assert {told(line) for line in shown.splitlines()} <= set(map(told, done.stdout.splitlines()))


def test_image_is_served_with_a_picture(reader: Reader) -> None:
    """The service prints its URL, and the commands of step 3 the statuses that are shown."""
    (serve, line), *curls = commands(3).items()
    _, _, root = serve.split()
    command = ("serve", reader.really(root), "--port", "0")
    with running(*command, lines=1, **reader.variables) as (_, (first,)):
        url = first.split()[0].removesuffix("/em/")
        names = {_LOCAL: url, **reader.names}
        user = replaced(reader, names=names)
        page = httpx.get(f"{url}/em/", headers={"Accept": "text/html"}).text
        printed = [user.run(command) for command, _ in curls]

    assert told(first) == told(user.really(line))
    assert printed == [shown for _, shown in curls]
    assert (reader.folder / "preview.png").read_bytes().startswith(b"\x89PNG")
    assert "Open in Neuroglancer" in page


@pytest.mark.parametrize("number", [4, 5])
def test_private_image_is_refused(private: Reader, number: int) -> None:
    """The commands of steps 4 and 5 print what the page shows, which is 401 for the image."""
    shown = {each: text for each, text in commands(number).items() if each.startswith("curl")}

    printed = {command: private.run(command) for command in shown}

    assert "401" in shown.values()
    assert printed == {command: private.really(text) for command, text in shown.items()}


def test_person_who_signs_in_gets_the_link(private: Reader, browser: httpx.Client) -> None:
    """The list is empty before the sign-in; after it, it has the dataset, whose page has the link.

    The link leads to the public page of Neuroglancer, with the source of step 6 and no token.
    """
    site = private.names[_PUBLIC]
    before = browser.get(f"{site}/").text
    after = browser.get(f"{site}/login").text
    page = browser.get(f"{site}/em/").text
    (path,) = re.findall(r'href="([^"]+)">Open in Neuroglancer', page)
    address = httpx.URL(f"{site}/em/").join(path.replace("&amp;", "&"))
    link = browser.get(address, follow_redirects=False)
    viewer, source = re.findall(r"leads to `(https:[^`]+)`. Its source is `([^`]+)`", _PAGE)[0]

    assert "Sign in" in before
    assert '/em/"' not in before
    assert '/em/"' in after
    assert link.headers["location"].startswith(f"{viewer}#!")
    assert private.really(source) in unquote(link.headers["location"])
    assert "~" not in link.headers["location"]


def test_person_of_another_group_may_read_nothing(
    private: Reader, provider: Provider, browser: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody outside of the group reads the sentence of step 6, and is not signed in."""
    monkeypatch.setitem(provider.claims, "groups", ["others"])
    (said,) = re.findall(r"reads \"… ([^\"]+)\"", step(6))

    answer = browser.get(f"{private.names[_PUBLIC]}/login")

    assert answer.status_code == 403
    assert said.rstrip(".") in answer.text


def test_command_that_signs_in_reads_the_image(private: Reader) -> None:
    """The command of step 6 signs in, and reads a key."""
    ((command, shown),) = commands(6).items()

    assert private.run(command) == shown
    assert json.loads((private.folder / "answer").read_text())["node_type"] == "group"


def test_cloud_volume_reads_with_the_token(private: Reader) -> None:
    """The commands and the program for cloud-volume read a private segmentation."""
    chapter = _CLIENTS.split("### cloud-volume\n", 1)[1].split("\n### ", 1)[0]
    private.run(block(chapter, "sh"))
    text = private.really(program("docs/clients.md", "CloudVolume("))
    (private.folder / "volume.py").write_text(f"{text}print(volume[:].tobytes().hex())")
    stored = BY_NAME[_VOLUME].scales[0].values

    read = private.run("python volume.py").splitlines()[-1]

    assert bytes.fromhex(read) == stored.tobytes()


def test_obstore_lists_a_private_group(private: Reader) -> None:
    """The program for obstore lists the levels of the private image."""
    text = private.really(program("docs/clients.md", "skip_signature"))
    (private.folder / "group.py").write_text(text)

    assert private.run("python group.py") == "['0', '1']"
