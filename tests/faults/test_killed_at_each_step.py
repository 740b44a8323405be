"""A gateway is killed at each request of a rewrite, before it is done and after."""

import json
from collections.abc import Generator
from typing import Final, NamedTuple

import httpx
import pytest

from tests.faults.sites import DEADLINE_S, Site, opened
from tests.gateways import Start
from tests.labs import LARGE, SMALL, Shape, value
from tests.seaweedfs import SeaweedFS
from tests.storage.proxy import Mishap

MOMENTS: Final = (
    pytest.param(Mishap.ANSWER_LOST, id="after"),
    pytest.param(Mishap.REQUEST_LOST, id="before", marks=pytest.mark.soak),
)
"""Before a request the store is as it was after the one before that."""


class Rewrite(NamedTuple):
    """What is being done when the gateway is killed."""

    shape: Shape
    chunks: range
    """Which there are before."""
    chunk: int
    """Which is put, or taken away."""
    is_delete: bool
    steps: int
    """So many requests it takes at least."""


SMALL_REWRITES: Final = {
    "first": Rewrite(SMALL, range(0), 1, is_delete=False, steps=2),
    "put": Rewrite(SMALL, range(3), 1, is_delete=False, steps=3),
    "last": Rewrite(SMALL, range(1), 0, is_delete=True, steps=2),
}
COPY: Final = Rewrite(LARGE, range(24), 11, is_delete=False, steps=10)

moments = pytest.mark.parametrize("moment", MOMENTS)


@pytest.fixture(scope="module")
def site(
    seaweedfs: SeaweedFS, tmp_path_factory: pytest.TempPathFactory, start: Start
) -> Generator[Site]:
    """Start what lives on."""
    with opened(seaweedfs, tmp_path_factory.mktemp("killed"), start) as made:
        yield made


@moments
@pytest.mark.parametrize("rewrite", SMALL_REWRITES.values(), ids=list(SMALL_REWRITES))
def test_a_small_rewrite_is_done_or_not(site: Site, rewrite: Rewrite, moment: Mishap) -> None:
    """Whenever the gateway ends, the shard is the old one or the new, and nothing is left."""
    names = rewritten(site, rewrite, moment)

    assert len(names) > rewrite.steps
    assert [site.lab.left(name) for name in names] == [[]] * len(names)


@pytest.mark.soak
@moments
def test_a_large_rewrite_is_done_or_not(site: Site, moment: Mishap) -> None:
    """The same of shards that the server copies; at most one upload, or its object, is left."""
    names = rewritten(site, COPY, moment)

    assert len(names) > COPY.steps
    assert max(len(site.lab.left(name)) for name in names) == 1
    assert site.lab.left(names[-1]) == []


@moments
def test_a_document_is_written_or_not(site: Site, moment: Mishap) -> None:
    """Metadata are the old ones or the new, and can be read with the chunks they are of."""
    nth, is_killed = 0, True
    while is_killed:
        old = {0: value(SMALL, 1, 0)}
        name = site.lab.new_array(SMALL, old)

        is_killed = killed(site, nth, moment, f"{name}/zarr.json", document(site, name, new=True))

        attributes = dict(site.lab.open(name).attrs)
        assert attributes == {"new": True} or (is_killed and attributes == {})
        assert site.lab.read(name)[f"{name}/c/0"] == old[0]
        more = site.put(site.healthy, f"{name}/zarr.json", document(site, name, more=1))
        assert more.is_success
        assert dict(site.lab.open(name).attrs) == {"more": 1}
        nth += 1
    assert nth > 1


def document(site: Site, name: str, **attributes: object) -> bytes:
    """Give the metadata of an array, as clients see them, other attributes."""
    seen = json.loads(site.get(site.healthy, f"{name}/zarr.json") or b"")
    return json.dumps(seen | {"attributes": attributes}).encode()


def killed(site: Site, nth: int, moment: Mishap, key: str, data: bytes | None) -> bool:
    """Kill a gateway at the request *nth* that a write takes; tell whether it got there."""
    with site.behind_proxy() as doomed:
        site.proxy.between = doomed.kill
        site.proxy.spoil([nth], moment)
        try:
            assert site.put(doomed, key, data).is_success
        except httpx.TransportError:
            assert doomed.wait(DEADLINE_S)
            return True
        return False


def rewritten(site: Site, rewrite: Rewrite, moment: Mishap) -> list[str]:
    """Rewrite a shard for each request that this takes, kill at that, and name the arrays."""
    old = {at: value(rewrite.shape, 1, at) for at in rewrite.chunks}
    new = None if rewrite.is_delete else value(rewrite.shape, 2, 0)
    names: list[str] = []
    is_killed = True
    while is_killed:
        name = site.lab.new_array(rewrite.shape, old)
        key = f"{name}/c/{rewrite.chunk}"
        is_killed = killed(site, len(names), moment, key, new)

        expected = {f"{name}/c/{at}": old.get(at) for at in range(rewrite.shape.chunks)}
        found = site.lab.read(name)
        assert found[key] == new or (is_killed and found[key] == expected[key])
        assert found == expected | {key: found[key]}
        _demand_that_all_goes_on(site, rewrite, found, key)
        names.append(name)
    return names


def _demand_that_all_goes_on(
    site: Site, rewrite: Rewrite, found: dict[str, bytes | None], key: str
) -> None:
    """Read through the gateway that lives what is there, and write with it."""
    assert {each: site.get(site.healthy, each) for each in found} == found
    more = value(rewrite.shape, 3, 0)
    assert site.put(site.healthy, key, more).is_success
    name = key.partition("/")[0]
    assert site.lab.read(name) == found | {key: more}
