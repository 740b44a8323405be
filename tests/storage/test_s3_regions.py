"""Buckets in another region than that of the settings."""

import json
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import aclosing, closing
from typing import Any, Final
from urllib.parse import urlsplit

import pytest
import trustme
from pydantic import SecretStr

from shardgate.errors import StorageUnusableError
from shardgate.model import ByteRange, ObjectRef
from shardgate.settings import StoreSettings
from shardgate.storage.contract import ABSENT, CONFLICT
from shardgate.storage.refusals import Refusal, other_region
from shardgate.storage.s3 import S3Store
from shardgate.storage.s3_client import S3Client
from shardgate.storage.s3_signing import S3Signer
from shardgate.storage.s3_write import S3WriteOptions
from tests.support.seaweedfs import REGION, SeaweedFS
from tests.support.storage.amazon import HOSTS, Amazon
from tests.support.storage.faulty import LONGEST_S
from tests.support.storage.reading import found, stat_of

MIB: Final = 1024**2
BUCKET: Final = "regional"
RIGHT: Final = f"{BUCKET}.s3.{REGION}.amazonaws.com"
WRONG: Final = f"{BUCKET}.s3.eu-west-1.amazonaws.com"
ANY: Final = f"{BUCKET}.s3.amazonaws.com"
"""Hosts of the bucket's region, of that of the settings, and of all regions."""
REF: Final = ObjectRef(f"s3://{BUCKET}", "a/key of ours")
_POLICY: Final = {
    "Effect": "Allow",
    "Principal": "*",
    "Action": ["s3:GetObject", "s3:ListBucket"],
    "Resource": [f"arn:aws:s3:::{BUCKET}", f"arn:aws:s3:::{BUCKET}/*"],
}
type Attempt = Callable[[S3Store], Awaitable[Any]]


@pytest.fixture(scope="module")
def bucket(seaweedfs: SeaweedFS) -> Generator[SeaweedFS]:
    """Make a bucket that all may read."""
    port = urlsplit(seaweedfs.endpoint_url).port
    with closing(SeaweedFS(port or 0, BUCKET)) as server:
        policy = json.dumps({"Version": "2012-10-17", "Statement": [_POLICY]})
        server.client.create_bucket(Bucket=BUCKET)
        server.client.put_bucket_policy(Bucket=BUCKET, Policy=policy)
        yield server


@pytest.fixture
async def amazon(
    bucket: SeaweedFS, authority: trustme.CA, ca_file: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[Amazon]:
    """Run the hosts of Amazon, which are found in place of the real ones."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(*HOSTS).configure_cert(context)
    monkeypatch.setenv("AWS_CA_BUNDLE", ca_file)
    bucket.put(REF.key, b"data")
    with Amazon(bucket, context).running() as server:
        server.be_resolved(monkeypatch)
        yield server


def settings(region: str | None = "eu-west-1", **more: Any) -> StoreSettings:
    """Return the settings of a store of *region* with the keys of the bucket."""
    keys = {"access_key_id": "testkey", "secret_access_key": SecretStr("testsecret")}
    return StoreSettings(region=region, **(keys | more))


@pytest.fixture
async def store(amazon: Amazon) -> AsyncGenerator[S3Store]:
    """Open a store of another region, which sends bodies of over a MiB in parts."""
    options = S3WriteOptions(LONGEST_S, copied_nbytes=MIB, whole_nbytes=6 * MIB)
    async with aclosing(S3Store(settings(), timeout_s=LONGEST_S, options=options)) as opened:
        yield opened


async def list_all(store: S3Store) -> list[str]:
    """Return the keys below the folder."""
    return [each.ref.key async for each in store.list(ObjectRef(REF.bucket, "a/"))]


async def stream_all(store: S3Store) -> bytes:
    """Read the object as a stream."""
    async with store.stream(REF, ByteRange(0, 4), if_match=None) as pieces:
        return b"".join([piece async for piece in pieces])


async def put_new(store: S3Store) -> object:
    """Write an object that does not exist."""
    return await store.put(REF, [b"new"], expected=ABSENT)


READS: Final[dict[str, Attempt]] = {
    "get": lambda store: found(store, REF),
    "stat": lambda store: stat_of(store, REF),
    "stream": stream_all,
    "list": list_all,
    "check": lambda store: store.check_reachable(REF),
}
WRITES: Final[dict[str, Attempt]] = {
    "put": put_new,
    "delete": lambda store: store.delete(REF, expected=None),
    "verify": lambda store: store.verify_conditional_writes(REF),
}


@pytest.mark.parametrize(
    ("region", "anonymous"),
    [("eu-west-1", False), ("eu-west-1", True), (None, False), ("new", True)],
)
async def test_bucket_in_another_region_is_read(
    amazon: Amazon, region: str | None, *, anonymous: bool
) -> None:
    """A read of a bucket elsewhere gets the object, and later ones go to its region at once."""
    amazon.is_new = region == "new"
    chosen = None if region == "new" else region
    made = StoreSettings(region=chosen, anonymous=True) if anonymous else settings(chosen)
    for read in READS.values():
        amazon.seen.clear()
        async with aclosing(S3Store(made, timeout_s=LONGEST_S)) as store:
            first = await read(store)
            refused = len(amazon.refused)
            again = await read(store)

        assert again == first
        assert refused <= 3  # a HEAD that gives no reason is repeated as a GET
        assert len(amazon.refused) == refused
        assert anonymous or {each.host for each in amazon.seen[-1:]} == {RIGHT}
    assert amazon.looked_up <= {RIGHT, WRONG, ANY}


async def test_region_of_a_bucket_is_shared_by_reads_and_writes(
    amazon: Amazon, store: S3Store
) -> None:
    """After one request that was refused, reads, listings and writes go to the right region."""
    await found(store, REF)
    for attempt in READS | WRITES:
        await (READS | WRITES)[attempt](store)

    assert [each.method for each in amazon.refused] == ["GET"]


@pytest.mark.parametrize("nbytes", [3, 2 * MIB, 7 * MIB], ids=["small", "large", "in parts"])
async def test_write_to_another_region_is_done_once_under_its_condition(
    amazon: Amazon, bucket: SeaweedFS, store: S3Store, nbytes: int
) -> None:
    """The first write to a bucket elsewhere, of any size, is done once, under its condition."""
    body = b"x" * nbytes
    bucket.delete(REF.key)

    etag = await store.put(REF, [body], expected=ABSENT)

    assert (await found(store, REF)).data == body
    assert (await stat_of(store, REF)).etag == etag
    assert all(each.host == RIGHT for each in amazon.seen if each.status == 200)
    assert await store.put(REF, [body], expected=ABSENT) is CONFLICT


@pytest.mark.parametrize("nbytes", [3, 2 * MIB], ids=["small", "large"])
async def test_condition_of_a_redirected_write_holds_where_the_bucket_is(
    amazon: Amazon, bucket: SeaweedFS, store: S3Store, nbytes: int
) -> None:
    """A conditional PUT that is sent to another region is refused there by its condition."""
    outcome = await store.put(REF, [b"x" * nbytes], expected=ABSENT)

    assert outcome is CONFLICT
    assert [each.status for each in amazon.seen if each.method == "PUT"] == [301, 412]
    assert bucket.client.head_object(Bucket=BUCKET, Key=REF.key)["ContentLength"] == 4


async def test_delete_in_another_region_is_sent_there(amazon: Amazon, store: S3Store) -> None:
    """The first request to a bucket elsewhere may be a DELETE, which is done there."""
    assert await store.delete(REF, expected=None) is True

    statuses = [each.status for each in amazon.seen if each.method == "DELETE"]
    assert statuses == [301, 204]
    assert await store.get(REF) is None


async def test_name_that_is_no_region_of_amazon_is_not_followed(
    amazon: Amazon, store: S3Store
) -> None:
    """A redirect to a name that is no region of AWS is an error, and reaches no other host."""
    for named in ("eu-central-9", "aws-global", "example", "us-east-1.evil.example"):
        amazon.named = named
        for attempt in (READS | WRITES).values():
            with pytest.raises(StorageUnusableError, match="301"):
                await attempt(store)

    assert amazon.looked_up == {WRONG}


@pytest.mark.parametrize("by_environment", [False, True])
async def test_configured_endpoint_is_kept_and_its_error_names_the_region(
    amazon: Amazon, monkeypatch: pytest.MonkeyPatch, *, by_environment: bool
) -> None:
    """A wrong region of a configured endpoint is an error with the right one and the settings."""
    url = f"https://{ANY}"
    if by_environment:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    made = settings(endpoint_url=None if by_environment else url)
    async with aclosing(S3Store(made, timeout_s=LONGEST_S)) as store:
        reason = "the bucket is in eu-central-1: set region to that, and endpoint_url, if there"
        for attempt in (READS | WRITES).values():
            with pytest.raises(StorageUnusableError, match=reason):
                await attempt(store)

    assert amazon.looked_up == {ANY}
    assert {each.status for each in amazon.seen} == {400}


async def test_second_redirect_is_an_error(amazon: Amazon, store: S3Store) -> None:
    """A region that redirects to another one too is an error after two requests."""
    amazon.named = "eu-west-1"

    for attempt in READS["get"], put_new, list_all:
        amazon.seen.clear()
        with pytest.raises(StorageUnusableError, match="the bucket is in eu-west-1"):
            await attempt(store)
        assert [each.status for each in amazon.seen] == [301, 301]


@pytest.mark.parametrize(
    ("region", "named", "host"),
    [
        ("cn-north-1", "cn-northwest-1", "data.s3.cn-northwest-1.amazonaws.com.cn"),
        ("us-gov-west-1", "us-gov-east-1", "data.s3.us-gov-east-1.amazonaws.com"),
    ],
)
async def test_host_of_a_region_is_that_of_its_partition(
    region: str, named: str, host: str
) -> None:
    """A bucket in another region of China or GovCloud is asked for at the host of that region."""
    async with aclosing(S3Client(settings(region))) as client:
        ref = ObjectRef("s3://data", "key")
        assert client.learn_region(ref, Refusal("GET", 301, region=named))

        assert (await S3Signer(client).presign("GET", ref)).origin.host == host


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
async def test_endpoint_of_the_environment_gets_buckets_in_the_path(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A server that a variable names is asked for buckets by path: their hosts do not exist."""
    monkeypatch.setenv(name, "http://minio:9000")
    async with aclosing(S3Client(settings())) as client:
        target = await S3Signer(client).presign("GET", ObjectRef("s3://data", "key"))

    assert (target.origin.host, target.path) == ("minio", "/data/key")


@pytest.mark.parametrize(
    ("code", "region"),
    [("IllegalLocationConstraintException", "af-south-1"), ("InvalidRequest", "")],
)
def test_refusal_of_an_endpoint_names_the_region_of_the_bucket(code: str, region: str) -> None:
    """The refusal of a regional endpoint, unlike others with 400, tells the bucket's region."""
    assert other_region(400, code, "", "af-south-1") == region
