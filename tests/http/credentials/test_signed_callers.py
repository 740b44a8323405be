"""Callers whom an issuer vouches for, and whom they let in, at the service."""

from collections.abc import Generator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from app.settings import DatasetSettings, Settings
from tests.http.credentials.issuing import JWKS, Issuer, issuing, make_key
from tests.serving import serving
from tests.storage.faulty import Fault

TEXT = b"what the lab may read"


class Lab(NamedTuple):
    """A service, and the issuer that it trusts."""

    issuer: Issuer
    url: str

    def read(self, token: str | None, path: str = "/em/text.txt") -> httpx.Response:
        """Ask with *token*, or without one."""
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        return httpx.get(f"{self.url}{path}", headers=headers)

    def mint(self, token: str | None, dataset: str = "em") -> httpx.Response:
        """Ask for a token with *token*, or without one."""
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        return httpx.post(f"{self.url}/api/tokens", json={"dataset": dataset}, headers=headers)


def serve_lab(folder: Path, issuer: Issuer) -> Settings:
    """Serve what the lab may read, and what only its head may."""
    for name in "em", "secret":
        (folder / name).mkdir()
        (folder / name / "text.txt").write_bytes(TEXT)
    return Settings(
        issuers={"sso": issuer.settings},
        datasets={
            "em": DatasetSettings(url=str(folder / "em"), read=("sso:lab",)),
            "secret": DatasetSettings(url=str(folder / "secret"), read=("sso:head",)),
        },
    )


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Generator[Lab]:
    """Run both."""
    with issuing() as issuer:
        settings = serve_lab(tmp_path_factory.mktemp("lab"), issuer)
        with serving(settings) as url:
            yield Lab(issuer, url)


@pytest.fixture(scope="module")
def ada(lab: Lab) -> str:
    """Give the token of somebody in the lab."""
    return lab.issuer.sign({"groups": ["lab"]})


def test_who_is_in_the_group_may_read(lab: Lab, ada: str) -> None:
    """The rule names the issuer and the group."""
    assert lab.read(ada).content == TEXT


def test_what_others_may_read_is_not_there(lab: Lab, ada: str) -> None:
    """As what does not exist at all."""
    assert lab.read(ada, "/secret/text.txt").status_code == 404
    assert lab.mint(ada, "secret").status_code == 404


@pytest.mark.parametrize("group", ["sso:lab", "~em", "ab", "LAB", "public"])
def test_another_group_may_not(lab: Lab, group: str) -> None:
    """However it is called."""
    assert lab.read(lab.issuer.sign({"groups": [group]})).status_code == 404


def test_a_token_that_is_wrong_is_refused(lab: Lab) -> None:
    """Its caller may get another."""
    answer = lab.read(lab.issuer.sign({"groups": ["lab"], "exp": 1}))

    assert answer.status_code == 401
    assert "expired" in answer.json()["detail"]


def test_a_minted_token_reads_by_its_path(lab: Lab, ada: str) -> None:
    """And as a bearer token; nothing else can be done with it."""
    minted = lab.mint(ada).json()

    assert lab.read(None, minted["paths"]["em"] + "text.txt").content == TEXT
    assert lab.read(minted["token"]).content == TEXT
    assert lab.read(minted["token"], "/secret/text.txt").status_code == 404
    assert lab.mint(minted["token"]).status_code == 403


def test_who_shows_nothing_mints_nothing(lab: Lab) -> None:
    """Nor learns whether there is such a dataset."""
    assert [lab.mint(None, name).status_code for name in ("em", "none")] == [401, 401]


def test_when_the_issuer_is_away_all_come_back_later(tmp_path: Path) -> None:
    """None is refused: readers would take that for an answer."""
    with issuing() as issuer, serving(serve_lab(tmp_path, issuer)) as url:
        issuer.server.fail(Fault.ERROR, path=JWKS)
        token = issuer.sign({"groups": ["lab"]})
        answers = [Lab(issuer, url).read(token), Lab(issuer, url).mint(token)]

    assert [answer.status_code for answer in answers] == [503, 503]
    assert all("Retry-After" in answer.headers for answer in answers)
    assert all(issuer.url not in answer.text for answer in answers)


def test_a_key_that_is_changed_is_noticed(tmp_path: Path) -> None:
    """The keys are read when the first token comes, and not before."""
    with issuing() as issuer, serving(serve_lab(tmp_path, issuer)) as url:
        issuer.publish(make_key("second"))
        token = issuer.sign({"groups": ["lab"]}, key=make_key("second"))

        assert Lab(issuer, url).read(token).content == TEXT
