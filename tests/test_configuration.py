"""The configuration: precedence, invalid values, and the text of errors."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from shardgate.configuration import RootOptions, load, load_settings
from shardgate.errors import ConfigurationError
from shardgate.settings import Settings

MIB = 1024**2


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Return the path of a file that does not exist yet."""
    return tmp_path / "shardgate.toml"


def complaint(
    path: Path | None, environ: dict[str, str], options: dict[str, dict[str, object]] | None = None
) -> str:
    """Load an invalid configuration, and return the error's text."""
    with pytest.raises(ConfigurationError) as caught:
        load(path, environ, options)
    assert caught.value.__cause__ is None or not isinstance(caught.value.__cause__, ValidationError)
    return str(caught.value)


ERA5 = "[datasets.era5]\nurl = 's3://lab'\nvirtual_chunk_prefixes"
EM_URL = "SHARDGATE_DATASETS__EM__URL"
UNKNOWN_STORE = "SHARDGATE_DATASETS__OK__STORE"
PREFIXES = "datasets.era5.virtual_chunk_prefixes"


def test_defaults_apply_without_configuration() -> None:
    """The documented defaults apply without file and environment."""
    settings = load(None, {})

    assert settings == Settings(tokens=settings.tokens)
    assert (settings.server.host, settings.server.port) == ("127.0.0.1", 8000)
    assert settings.cache.index_bytes == 256 * MIB


def test_the_documented_file_is_understood(config: Path) -> None:
    """The example of the documentation is loaded with its values."""
    config.write_text(
        """
        [server]
        host = "0.0.0.0"
        cors_origins = ["https://viewer.example"]
        [cache]
        index_bytes = "64MiB"
        chunk_bytes = "0"
        [stores.lab]
        endpoint_url = "http://127.0.0.1:8333"
        access_key_id = "me"
        secret_access_key = "hunter2"
        [datasets.em]
        url = "s3://bucket/em.zarr/"
        store = "lab"
        """
    )

    settings = load(config, {})

    assert settings.server.cors_origins == ("https://viewer.example",)
    assert settings.cache.index_bytes == 64 * MIB
    assert settings.cache.chunk_bytes == 0
    assert settings.datasets["em"].url == "s3://bucket/em.zarr"
    secret = settings.stores["lab"].secret_access_key
    assert secret is not None
    assert secret.get_secret_value() == "hunter2"


def test_precedence_of_configuration(config: Path) -> None:
    """The environment overrides single values of the file, and the command line those of both."""
    config.write_text('[server]\nport = 1\nhost = "a"\nworkers = 3\n')
    environ = {"SHARDGATE_SERVER__PORT": "2", "SHARDGATE_SERVER__HOST": "b"}

    server = load(config, environ, {"server": {"port": 3}}).server

    assert (server.workers, server.host, server.port) == (3, "b", 3)


def test_everything_can_come_from_the_environment() -> None:
    """Datasets, stores and lists can be set by environment variables without a file."""
    settings = load(
        None,
        {
            "SHARDGATE_DATASETS__EM__URL": "s3://bucket",
            "SHARDGATE_DATASETS__MY__VOLUME__URL": "memory://x",
            "SHARDGATE_STORES__LAB__ANONYMOUS": "true",
            "SHARDGATE_SERVER__CORS_ORIGINS": '["https://a", "https://b"]',
            "SHARDGATE_DATASETS__EM__VIRTUAL_CHUNK_PREFIXES": '["/data/grib", "https://a.b/"]',
            "SHARDGATE_CACHE__TTL_S": "0.5",
            "HOME": "/",
        },
    )

    assert list(settings.datasets) == ["em", "my__volume"]
    prefixes = settings.datasets["em"].virtual_chunk_prefixes
    assert [prefix.url for prefix in prefixes] == ["file:///data/grib", "https://a.b"]
    assert settings.stores["lab"].anonymous
    assert settings.server.cors_origins == ("https://a", "https://b")
    assert settings.cache.ttl_s == 0.5


@pytest.mark.parametrize("text", ["/arrays/v1", "/arrays/v1/"])
def test_final_slash_of_the_root_path_is_left_out(text: str) -> None:
    """The path of the service has no final slash, which its setting may have."""
    assert load(None, {"SHARDGATE_SERVER__ROOT_PATH": text}).server.root_path == "/arrays/v1"
    assert load(None, {"SHARDGATE_SERVER__ROOT_PATH": "/"}).server.root_path == ""


def test_variables_match_names_of_the_file_in_any_case(config: Path) -> None:
    """A variable in capitals sets the table whose name the file spells otherwise."""
    config.write_text('[datasets.EmVolume]\nurl = "s3://old"\n')

    settings = load(config, {"SHARDGATE_DATASETS__EMVOLUME__URL": "s3://new"})

    assert {name: dataset.url for name, dataset in settings.datasets.items()} == {
        "EmVolume": "s3://new"
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[servr]\nport = 1", "servr: is no setting; did you mean server?"),
        ("[server]\nprot = 1", "server.prot: is no setting; did you mean port?"),
        ("[datasets.em]\nurl='s3://b'\nurll='x'", "datasets.em.urll: is no setting; did you mean"),
        ("[datasets.em]\nview='raw'", "datasets.em.url: is missing"),
        ("[server]\nhosts=['https://x']", "server.hosts.0: is no host name such as"),
        ("[server]\nhosts=['*', 'a.b:80']", "server.hosts.1: is no host name such as"),
        ("[datasets.api]\nurl='s3://b'", "datasets.api: is not a name for a dataset"),
        ("[datasets.'a b']\nurl='s3://b'", "datasets.a b: is not a name for a dataset"),
        ("[datasets.em]\nurl='ftp://b'", "datasets.em.url: begins with none of file://"),
        ("[datasets.em]\nurl='s3://'", "datasets.em.url: names no bucket or host"),
        ("[datasets.em]\nurl='file://folder'", "datasets.em.url: is relative"),
        ("[datasets.em]\nurl='http://h/a?b=c'", "datasets.em.url: has a query"),
        ("[datasets.em]\nurl='http://h'\nredirects=['cdn']", "datasets.em.redirects.0: is not the"),
        ("[datasets.em]\nurl='s3://b'\nredirects=['http://h']", "datasets.em: redirects goes with"),
        ("[datasets.em]\nurl='s3://b'\nstore='lab'", "datasets.em.store: names no [stores] table"),
        (
            "[datasets.em]\nurl='s3://b'\nformat='hdf5'",
            "datasets.em.format: Input should be 'auto'",
        ),
        *[
            (
                f"[datasets.em]\nurl='s3://b'\ncache_control='{value}'",
                "datasets.em.cache_control: is",
            )
            for value in (
                *("a\tb", "", "private; max-age=60", "max-age=1d", "s-maxage", "max-age=60,"),
                *('no-cache="a, s-maxage=60"', "stale-while-revalidate=-1", "max-age = 60"),
            )
        ],
        (
            "[datasets.em]\nurl='https://h/a'\nwritable=true",
            "datasets.em: writable goes with one of file://, s3://, gs://, az://, memory:// only",
        ),
        *[
            (f"[server]\nroot_path = '{path}'", "server.root_path: is no path such as /arrays")
            for path in ("arrays", "//", "/a//b", "/..", "/a/./b", "/a b", "/a?b", "/a\\b", "/%61")
        ],
        ("[server]\nroot_path = '/_shard'", "server.root_path: is no path such as /arrays"),
        ("[server]\nroot_path = '/api/v1'", "server.root_path: begins with /api, a path of the"),
        (
            "[server]\nroot_path='/em/x'\n[datasets.em]\nurl='s3://b'",
            "server.root_path: begins with the name of the dataset em",
        ),
        ("[server]\nport = 65536", "server.port: Input should be less than or equal to 65535"),
        ("[cache]\nindex_bytes = 'lots'", "cache.index_bytes: is not a size such as 256MiB"),
        ("[cache]\nttl_s = inf", "cache.ttl_s: Input should be a finite number"),
        ("[stores.s]\naccess_key_id = 'a'", "stores.s: access_key_id and secret_access_key go"),
        (
            "[stores.s]\nanonymous=true\naccess_key_id='a'\nsecret_access_key='hunter2'",
            "stores.s: anonymous and access_key_id exclude each other",
        ),
        (
            "[stores.s]\nanonymous=true\nrequester_pays=true",
            "stores.s: anonymous and requester",
        ),
        (
            "[stores.s]\nbearer_token='hunter2'\nbearer_token_file='a'",
            "stores.s: bearer_token and bearer_token_file exclude each other",
        ),
        ("[datasets.em]\nurl=''", "datasets.em.url: is empty"),
        ("[stores.s]\nendpoint_url = 'lab:80'", "stores.s.endpoint_url: is not the http(s)://"),
        ("server = 1", "server: Input should be a valid dictionary"),
        (f"{ERA5} = ['ftp://a/']", f"{PREFIXES}.0.url: begins with none of"),
        (f"{ERA5} = ['s3://']", f"{PREFIXES}.0.url: names no bucket or host"),
        (f"{ERA5} = ['https://me:hunter2@a/']", f"{PREFIXES}.0.url: holds credentials"),
        (f"{ERA5} = [{{url='s3://a/', store='x'}}]", f"{PREFIXES}: names no [stores] table"),
        (f"{ERA5} = [{{url='s3://a/', region='x'}}]", f"{PREFIXES}.0.region: is no setting"),
    ],
)
def test_invalid_setting_of_a_file_is_one_line(config: Path, text: str, said: str) -> None:
    """An invalid setting of a file is an error of one line that begins with its path."""
    config.write_text(text)

    message = complaint(config, {})

    assert message.startswith(said)
    assert "\n" not in message
    assert "hunter2" not in message


@pytest.mark.parametrize("value", [f"{'[' * 100_000}{']' * 100_000}", "9" * 5_000])
def test_value_that_cannot_be_parsed_is_an_error_of_the_file(config: Path, value: str) -> None:
    """A value that nests too deep, or has too many digits, is an error that names the file."""
    config.write_text(f"server = {value}\n")

    assert complaint(config, {}).startswith(f"{config}: ")


@pytest.mark.parametrize("value", [f"{'[' * 100_000}{']' * 100_000}", f"[{'9' * 5_000}]"])
def test_value_of_the_environment_that_cannot_be_parsed_is_no_list(value: str) -> None:
    """A list of the environment that nests too deep, or has too long a number, is an error."""
    assert "is not a list such as" in complaint(None, {"SHARDGATE_SERVER__TRUSTED_PROXIES": value})


def test_all_wrong_settings_are_reported_at_once(config: Path) -> None:
    """Each wrong setting of a file and of the environment has a line with its own path."""
    config.write_text(
        """
        [server]
        prot = 1
        workers = 0
        [stores.lab]
        access_key_id = "me"
        [datasets.em]
        url = "s3://b"
        redirect = ["https://a"]
        store = "lap"
        [datasets.x]
        urll = "s3://b"
        [datasets.y]
        url = "s3://b"
        store = "lap"
        read = ["bob"]
        virtual_chunk_prefixes = [{ url = "s3://c", redirects = ["https://a"] }, "ftp://d"]
        """
    )
    environ = {"SHARDGATE_PORT": "1", "SHARDGATE_CACHE__TTL_S": "0"}

    with pytest.raises(ConfigurationError) as caught:
        load(config, environ)

    told = dict(line.split(": ", 1) for line in caught.value.args)
    assert sorted(told) == [
        *("SHARDGATE_CACHE__TTL_S", "SHARDGATE_PORT", "datasets.em.redirect", "datasets.em.store"),
        *("datasets.x.urll", "datasets.y.read", "datasets.y.store"),
        "datasets.y.virtual_chunk_prefixes.0.redirects",
        "datasets.y.virtual_chunk_prefixes.1.url",
        *("server.prot", "server.workers", "stores.lab"),
    ]
    assert told["datasets.em.redirect"] == "is no setting; did you mean redirects?"
    assert told["datasets.y.virtual_chunk_prefixes.0.redirects"] == "is no setting"


@pytest.mark.parametrize(
    ("name", "suggested"),
    [("a/b", "a-b"), ("my data", "my-data"), ("api", "api-data"), ("é", "data"), (".a", "a")],
)
def test_invalid_name_of_a_dataset_is_answered_with_a_valid_one(name: str, suggested: str) -> None:
    """The error for an invalid name of a dataset suggests a valid one that is alike."""
    told = complaint(None, {}, {"datasets": {name: {"url": "s3://b"}}})

    assert told == f"datasets.{name}: is not a name for a dataset; try {suggested}"


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("SHARDGATE_SERVER__PORT", "many", "SHARDGATE_SERVER__PORT: Input should be a valid int"),
        ("SHARDGATE_SERVR__PORT", "1", "SHARDGATE_SERVR__PORT: is no setting; did you mean server"),
        ("SHARDGATE_SERVER__PROT", "1", "SHARDGATE_SERVER__PROT: is no setting; did you mean port"),
        ("SHARDGATE_SERVER_PORT", "1", "SHARDGATE_SERVER_PORT: is no setting; write"),
        ("SHARDGATE_PORT", "8080", "SHARDGATE_PORT: is no setting; write"),
        ("SHARDGATE_SERVER__CORS_ORIGINS", "*", "SHARDGATE_SERVER__CORS_ORIGINS: is not a list"),
        ("SHARDGATE_DATASETS__EM__URLL", "s3://b", "SHARDGATE_DATASETS__EM__URLL: is no setting"),
        ("SHARDGATE_DATASETS__EM", "s3://b", "SHARDGATE_DATASETS__EM: Input should be a valid"),
        (EM_URL, "s3://[b", f"{EM_URL}: Invalid IPv6 URL"),
        (EM_URL, "http://host/\udcff", f"{EM_URL}: is not UTF-8"),
        ("SHARDGATE_DATASETS__EM__STORE", "lab", "datasets.em.url: is missing"),
        (UNKNOWN_STORE, "lab", f"{UNKNOWN_STORE}: names no [stores]"),
        ("SHARDGATE_SERVER__ROOT_PATH", "x", "SHARDGATE_SERVER__ROOT_PATH: is no path such as"),
        ("SHARDGATE_SERVER__ROOT_PATH", "/ok", "SHARDGATE_SERVER__ROOT_PATH: begins with the name"),
        ("SHARDGATE___", "1", "SHARDGATE___: "),
    ],
)
def test_invalid_variable_is_one_line(variable: str, value: str, said: str) -> None:
    """An invalid variable is an error of one line that begins with its name."""
    message = complaint(None, {variable: value, "SHARDGATE_DATASETS__OK__URL": "s3://b"})

    assert message.startswith(said)
    assert "\n" not in message


def test_variables_below_an_invalid_table_are_errors(config: Path) -> None:
    """Variables below a setting of the file that should be a table are errors."""
    config.write_text("server = 1\ndatasets = 2\n")

    message = complaint(
        config, {"SHARDGATE_SERVER__PORT": "1", "SHARDGATE_DATASETS__EM__URL": "s3://b"}
    )

    assert message == (
        "SHARDGATE_SERVER__PORT: Input should be a valid dictionary or instance of ServerSettings; "
        "SHARDGATE_DATASETS__EM__URL: Input should be a valid dictionary"
    )


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("SHARDGATE_SERVICE_HOST", "10.0.0.7"),
        ("SHARDGATE_SERVICE_PORT", "8000"),
        ("SHARDGATE_SERVICE_PORT_HTTP", "8000"),
        ("SHARDGATE_PORT", "tcp://10.0.0.7:8000"),
        ("SHARDGATE_PORT_8000_TCP", "tcp://10.0.0.7:8000"),
        ("SHARDGATE_PORT_8000_TCP_ADDR", "10.0.0.7"),
        ("SHARDGATE_WEB_SERVICE_HOST", "10.0.0.7"),
    ],
)
def test_kubernetes_service_links_are_ignored(variable: str, value: str) -> None:
    """Variables that Kubernetes sets for a Service called ``shardgate`` are ignored."""
    assert load(None, {variable: value}) == Settings()


def test_errors_contain_no_secret(config: Path) -> None:
    """An error about a setting contains no value of a secret."""
    config.write_text('[stores.lab]\nsecret_access_key = ["hunter2"]\n')
    environ = {
        "SHARDGATE_STORES__LAB__SECRET_ACCES_KEY": "hunter2",
        "SHARDGATE_STORES__LAB": "hunter2",
        "SHARDGATE_SECRET": "hunter2",
        "SHARDGATE_DATASETS__EM__URL": "https://me:hunter2@host/em.zarr",
    }

    messages = [complaint(config, {})]
    messages += [complaint(None, {variable: value}) for variable, value in environ.items()]

    assert "hunter2" not in " ".join(messages)


def test_unreadable_file_is_named(config: Path) -> None:
    """A file that is missing, a folder, not text or invalid is an error with its path."""
    assert complaint(config, {}) == f"{config}: No such file or directory"
    assert complaint(config.parent, {}) == f"{config.parent}: Is a directory"
    config.write_bytes(b"\xff")
    assert complaint(config, {}) == f"{config}: is not UTF-8"
    config.write_text("[server]\nport = = 1\n")
    message = complaint(config, {})
    assert message.startswith(f"{config}: ")
    assert "line 2" in message


def test_a_plain_path_becomes_a_file_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path becomes a percent-encoded file URL below the current folder."""
    monkeypatch.chdir(tmp_path)

    settings = load(None, {"SHARDGATE_DATASETS__EM__URL": "my data/em.zarr"})

    assert settings.datasets["em"].url == f"{tmp_path.as_uri()}/my%20data/em.zarr"


def test_prefixes_of_virtual_chunks_are_urls_or_tables(config: Path) -> None:
    """A prefix of virtual chunks is a URL, or a table with a URL and a store."""
    config.write_text(
        """
        [stores.open]
        anonymous = true
        [datasets.era5]
        url = "s3://lab/era5"
        virtual_chunk_prefixes = ["s3://lab/", { url = "s3://open-data/era5", store = "open" }]
        """
    )
    prefixes = load(config, {}).datasets["era5"].virtual_chunk_prefixes

    assert [(prefix.url, prefix.store) for prefix in prefixes] == [
        ("s3://lab", None),
        ("s3://open-data/era5", "open"),
    ]


ANA = {"ana": {"token_sha256": ["0" * 64]}}
LAB = {"url": "https://a.example", "audience": "b"}


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ({"datasets": {"em": {"url": "/em", "read": ["bob"]}}}, "names no caller and no issuer"),
        ({"datasets": {"em": {"url": "/em", "read": ["lab:"]}}}, "names no caller and no issuer"),
        (
            {"issuers": {"lab": LAB}, "datasets": {"em": {"url": "/em", "read": ["lab:group="]}}},
            "names no caller and no issuer",
        ),
        ({"server": {"metrics": ["bob"]}}, "server.metrics: 'bob' names no caller"),
        ({"callers": {"public": {}}}, "is not a name for a caller"),
        ({"callers": {"a:b": {}}}, "is not a name for a caller"),
        ({"callers": {"~a": {}}}, "is not a name for a caller"),
        ({"callers": {"ana": {"token_sha256": ["secret"]}}}, "is not a SHA-256 digest"),
        ({"callers": {"ana": {"access_key_id": "a"}}}, "go together"),
        ({"callers": {**ANA, "bob": ANA["ana"]}}, "callers.bob: has the token or key of another"),
        ({"issuers": {"lab": {"url": "http://a.example", "audience": "b"}}}, "is not the https://"),
        ({"issuers": {"lab": LAB, "again": LAB}}, "issuers.again: has the url of another issuer"),
        ({"tokens": {"secret": "short"}}, "at least 32"),
        ({"login": {"issuer": "lab", "client_id": "a"}}, "login.issuer: names no [issuers]"),
        ({"issuers": {"lab": LAB}, "login": {"issuer": "lab"}}, "issuer and client_id go together"),
        ({"login": {"client_secret": "a", "client_secret_file": "b"}}, "exclude each other"),
        ({"login": {"scopes": ["groups"]}}, "scopes includes openid"),
        ({"login": {"scopes": ["openid groups"]}}, "is not a scope"),
        ({"login": {"viewers": ["*"]}}, "is no origin such as"),
        ({"login": {"viewers": ["https://a.example/"]}}, "is no origin such as"),
        ({"login": {"viewers": ["https://A.example"]}}, "is no origin such as"),
        ({"login": {"viewers": ["http://a.example"]}}, "is no origin such as"),
        ({"login": {"client_secret": ""}}, "login.client_secret: is empty"),
        ({"stores": {"lab": {"session_token": ""}}}, "stores.lab.session_token: is empty"),
        ({"login": {"viewers": ["https://a.example:443"]}}, "(without :443)"),
        ({"server": {"cors_origins": ["http://a.example:80"]}}, "(without :443)"),
        ({"login": {"viewers": ["null"]}}, "is no origin such as"),
        (
            {
                "server": {"cors_origins": ["https://b.example"]},
                "login": {"viewers": ["https://a.example", "https://b.example"]},
            },
            "login.viewers: https://a.example is not in server.cors_origins",
        ),
        (
            {"callers": ANA, "datasets": {"em": {"url": "/em", "read": ["ana"], "writable": True}}},
            "write says who may",
        ),
        ({"datasets": {"em": {"url": "/em", "write": ["public"]}}}, "write goes with writable"),
        (
            {
                "stores": {"open": {"forbidden_is_absent": True}},
                "datasets": {"em": {"url": "s3://em", "store": "open", "writable": True}},
            },
            "datasets.em.writable: excludes a store with forbidden_is_absent",
        ),
        (
            {
                "callers": ANA,
                "datasets": {
                    "em": {"url": "/em", "read": ["ana"], "cache_control": "Public, max-age=60"}
                },
            },
            "cache_control says private or no-store and no s-maxage",
        ),
        (
            {
                "callers": ANA,
                "datasets": {
                    "em": {"url": "/em", "read": ["ana"], "cache_control": "private, s-maxage=60"}
                },
            },
            "cache_control says private or no-store and no s-maxage",
        ),
    ],
)
def test_inconsistent_access_rules_are_refused(
    document: dict[str, dict[str, object]], told: str
) -> None:
    """An inconsistent rule of access is an error that names the setting."""
    assert told in complaint(None, {}, document)


def test_root_that_is_named_like_a_reference_set_is_one() -> None:
    """A root on the command line has the format kerchunk if it ends in .json, .parq or alike."""
    roots = {"json": "s3://x/a.json", "parquet": "/y/A.PARQ/", "zstd": "/y/a.json.zst"}
    others = {"zarr": "/y/a.zarr", "bucket": "s3://x"}
    settings = load(None, {}, RootOptions().tables(roots | others))

    formats = {name: each.format for name, each in settings.datasets.items()}
    assert formats == dict.fromkeys(roots, "kerchunk") | dict.fromkeys(others, "auto")


@pytest.mark.parametrize("root", ["/y/A.ZARR.ZIP", "/y/A.ozx", "s3://x/A.zarr/", "/y/A.Icechunk"])
def test_name_of_a_root_is_without_the_end_of_its_format(root: str) -> None:
    """A dataset of the command line is called as its root, without ends that name the format."""
    settings = load_settings([root], {}, RootOptions())

    assert list(settings.datasets) == ["A"]


@pytest.mark.parametrize("root", ["em=~nobody-of-this-name/em", "~nobody-of-this-name/em"])
def test_home_of_an_unknown_user_is_a_path_like_others(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tilde before an unknown name stays in the path, which then does not exist."""
    monkeypatch.chdir(tmp_path)
    settings = load_settings([root], {}, RootOptions())

    assert settings.datasets["em"].url == f"{tmp_path.as_uri()}/~nobody-of-this-name/em"


def test_root_too_long_for_a_file_name_has_that_name() -> None:
    """A root longer than names of files can be is one that does not exist."""
    settings = load_settings(["a" * 300], {}, RootOptions())

    assert list(settings.datasets) == ["a" * 300]


def test_options_reach_every_root_and_prefix() -> None:
    """`--anonymous` applies to every bucket and allowed prefix, and not to folders."""
    options = RootOptions(("s3://b/p", "/v"), anonymous=True)
    settings = load(None, {}, options.tables({"bucket": "s3://x", "folder": "/y"}))

    assert settings.stores["anonymous"].anonymous
    assert {name: each.store for name, each in settings.datasets.items()} == {
        "bucket": "anonymous",
        "folder": None,
    }
    for dataset in settings.datasets.values():
        prefixes = [(prefix.url, prefix.store) for prefix in dataset.virtual_chunk_prefixes]
        assert prefixes == [("s3://b/p", "anonymous"), ("file:///v", None)]
