"""Who may only start runs reads and writes where the operator of the workers allows it; and requests that lead elsewhere: every
hop is checked, by every client that reads what people name.
"""

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pydantic import TypeAdapter, ValidationError

from deployments.register import run_form
from flat_tokens.stores.reading import INPUT_ROOTS, OUTPUT_ROOTS
from flat_tokens.stores.store import Store
from flows.build import build_dataset
from flows.derive import derive_dataset, import_dataset
from flows.export import export_dataset
from flows.groups import tokenize_group
from flows.retokenize import retokenize_dataset
from flows.verify import verify_dataset
from tasks.config import BuildConfig, HubDataset, Source, TokenizerConfig
from tasks.download.fetch import fetch_file
from tasks.download.sources import resolve_source
from tasks.locations import RUN, WITHOUT_SECRETS, Location, Output, check_hop, plain_location, unbound
from tasks.models import FoundFile
from tests.processes import serving
from tests.refusal import refusal
from tests.tasks.download.test_fetch import BODY, Server

READ, WRITE = TypeAdapter(Location).validate_python, TypeAdapter(Output).validate_python


@pytest.fixture
def roots(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Text may be read in one directory and one bucket, datasets may be written in others, and read there."""
    for name in ("text", "tokens", "elsewhere"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv(INPUT_ROOTS, f"{tmp_path}/text, gs://texts/raw ,hf://datasets/HuggingFaceFW")
    monkeypatch.setenv(OUTPUT_ROOTS, f"{tmp_path}/tokens,s3://tokens")
    return tmp_path


def config(roots: Path, **settings: Any) -> BuildConfig:
    given = {"output": f"{roots}/tokens/out", "sources": [{"path": f"{roots}/text"}], "tokenizer": "bytes", **settings}
    return BuildConfig.model_validate(given)


@pytest.mark.parametrize("path", ["text", "text/a/*.jsonl", "tokens/versions/x"])
def test_what_lies_within_the_roots_is_let_through(roots, path):
    config(roots)
    assert READ(f"{roots}/{path}") == f"{roots}/{path}"
    assert READ(f"file://{roots}/{path}") == f"file://{roots}/{path}"
    for url in (
        "gs://texts/raw",
        "gs://texts/raw/a.parquet",
        "gcs://texts/raw/a",
        "s3://tokens/a",
        "hf://datasets/HuggingFaceFW/x",
    ):
        assert READ(url) == url
    assert WRITE("s3a://tokens/out") == "s3a://tokens/out"


@pytest.mark.parametrize(
    "location",
    [
        "/etc/passwd",
        "{roots}/elsewhere",
        "{roots}/text-of-others",  # begins like a root, but is not in it
        "{roots}",
        "gs://texts",
        "gs://texts/rawer/a",
        "gs://others/raw",
        "s3://texts/raw",  # another store
        "https://texts/raw",
        "memory://texts/raw",
        "hf://datasets/allenai/c4",
    ],
)
def test_what_lies_outside_is_refused_with_the_roots_there_are(roots, location):
    with refusal(r"may not be read here: FLAT_TOKENS_INPUT_ROOTS allows .*gs://texts/raw", ValidationError):
        READ(location.format(roots=roots))


def test_what_may_be_read_may_not_be_written_for_that(roots):
    with refusal(r"may not be written here: FLAT_TOKENS_OUTPUT_ROOTS allows .*s3://tokens", ValidationError):
        WRITE(f"{roots}/text/out")


@pytest.mark.parametrize(
    "settings",
    [
        {"sources": [{"hub": {"path": "allenai/c4", "name": "en"}}]},
        {"tokenizer": {"name": "../tokenizer.tiktoken"}},
        {"tokenizer": "openai-community/gpt2"},
    ],
    ids=str,
)
def test_names_on_the_hub_and_files_of_tokenizers_are_places_too(roots, settings):
    with refusal(r"may not be (read|written) here", ValidationError):
        config(roots, **settings)


@pytest.mark.parametrize(
    ("root", "name", "is_let_through"),
    [
        ("hf://openai-community", "openai-community/gpt2", True),
        ("hf://openai-community/gpt2", "openai-community/gpt2", True),
        ("hf://", "openai-community/gpt2", True),
        ("/data", "cl100k_base", True),
        ("/data", "openai-community/gpt2", False),
        ("hf://openai-community", "openai-community-2/gpt2", False),
        ("hf://openai-community/gpt2", "openai-community/gpt2-xl", False),
        ("hf://openai-community/gpt2", "openai-community/../evil/gpt2", False),
        ("hf://openai-community/gpt2", "openai-community/gpt2@main", True),  # the hub has no repository of that name
        ("hf://datasets/openai-community", "openai-community/gpt2", False),
        ("https://huggingface.co", "openai-community/gpt2", False),
        ("openai-community", "openai-community/gpt2", False),
    ],
)
def test_a_tokenizer_from_the_hub_lies_below_a_root(monkeypatch, root, name, is_let_through):
    monkeypatch.setenv(INPUT_ROOTS, root)
    if is_let_through:
        assert TokenizerConfig(name=name).name == name
    else:
        with refusal(r"may not be read here: FLAT_TOKENS_INPUT_ROOTS allows|goes up", ValidationError):
            TokenizerConfig(name=name)


def runs_with(location: str, inside: str) -> list[tuple[Any, dict[str, Any]]]:
    """Runs of all deployments, each with a location at one of its places; what else is named is *inside*."""
    config = {"output": inside, "sources": [{"path": inside}], "tokenizer": {"name": "bytes"}}
    merge = {"operation": {"operation": "merge"}, "inputs": [inside], "output": inside}
    return [
        (build_dataset, {"config": {**config, "output": location}}),
        (build_dataset, {"config": {**config, "scratch": location}}),
        (build_dataset, {"config": {**config, "sources": [{"path": location}]}}),
        (build_dataset, {"config": {**config, "tokenizer": {"name": location}}}),
        (verify_dataset, {"dataset": location}),
        (export_dataset, {"dataset": location, "output": inside, "format": "megatron"}),
        (export_dataset, {"dataset": inside, "output": location, "format": "megatron"}),
        (retokenize_dataset, {"dataset": location, "tokenizers": ["gpt2"]}),
        (derive_dataset, {"request": {**merge, "inputs": [inside, location]}}),
        (derive_dataset, {"request": {**merge, "scratch": location}}),
        (derive_dataset, {"request": {**merge, "operation": {"operation": "subset", "id_list": location}}}),
        (import_dataset, {"request": {"path": location, "output": inside}}),
        (tokenize_group, {"output": location, "group": "0"}),
    ]


def test_every_deployment_is_bound(roots):
    """Prefect checks a run's parameters by these before the flow begins."""
    for flow, parameters in runs_with("/srv/a.json", f"{roots}/tokens/a"):
        with pytest.raises(Exception, match=r"may not be (read|written) here"):
            flow.validate_parameters(parameters)


@pytest.fixture
def no_roots(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (INPUT_ROOTS, OUTPUT_ROOTS):
        monkeypatch.delenv(variable, raising=False)


def test_without_roots_there_is_no_bound(no_roots, monkeypatch):
    assert READ("/etc/passwd") == WRITE("/etc/passwd") == "/etc/passwd"
    monkeypatch.setenv(INPUT_ROOTS, "/data")
    assert WRITE("/srv/out") == "/srv/out"  # each of them bounds its own


@pytest.mark.parametrize(
    "location",
    [
        "http://HOST/x?:/../../../data.example/corpus/y",
        "http://169.254.169.254:80/../data.example/corpus/y",
        "https://data.example/corpus/%2e%2e/secret",
        "https://data.example/corpus/%252e%252e/secret",
        "https://data.example/corpus/..%2fsecret",
        "https://data.example/corpus/..;/secret",
        "https://data.example/corpus/..\\secret",
        "https://data.example/corpus%2fx",
        "https://data.example/corpus?path=x/../y&url=z",
        "https://data.example:8443/corpus/y",
        "http://data.example/corpus/y",
        "https://data.example./corpus/y",
        "https://evil.example\\.data.example/corpus",
        "https://evil.example\t/corpus",
        " https://data.example/corpus/y",
        "https://data.example//corpus/y",
        "https://data.example:0/corpus/y",
        "https://ｄata.example/corpus/y",
        "s3://good/out/../in",
        "s3://good//out/x",
        "hf://datasets/other:x/../org/y",
        "hf://datasets/org-else/y",
        "file://local:///good/x",
        "file://local://{roots}/text",
        "file:{roots}/text",
        "file:/etc/passwd",
        "{roots}/text/k:/../../elsewhere",
    ],
)
def test_what_can_be_read_in_two_ways_is_within_no_root(roots, monkeypatch, location):
    allowed = f"{roots}/text,https://data.example/corpus,s3://good/out,hf://datasets/org"
    monkeypatch.setenv(INPUT_ROOTS, allowed)
    monkeypatch.setenv(OUTPUT_ROOTS, allowed)
    monkeypatch.chdir(roots / "text")
    for check in (READ, WRITE):
        with pytest.raises(ValidationError):
            check(location.format(roots=roots))


def test_spellings_of_one_place_are_one_place(roots, monkeypatch):
    monkeypatch.setenv(INPUT_ROOTS, "https://data.example:443/corpus/,hf://datasets/org/name,s3://good/a b")
    for location in (
        "https://DATA.example/corpus/x y/a.jsonl?download=true",
        "https://data.example/%63orpus/x%20y",
        "hf://datasets/org/name@refs%2Fconvert%2Fparquet/a.parquet",
        "hf://datasets/org/name@refs/pr/1/a.parquet",
        "s3://good/a b/c#1?.jsonl",
    ):
        assert READ(location) == location


@pytest.mark.parametrize("path", ["other:x/../org/y", "org/y/../../z", "https://u:SECRET@h/x", "org/x?token=SECRET", "../org/y"])
def test_a_dataset_of_the_hub_is_a_name_and_no_path(path):
    with pytest.raises(ValidationError) as refused:
        HubDataset(path=path)
    assert "SECRET" not in str(refused.value)
    with pytest.raises(ValidationError):
        HubDataset(path="org/y", revision="../../z")


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest",
        "http://2852039166/",
        "http://0xA9FEA9FE/",
        "http://0251.0376.0251.0376/",
        "http://169.254.43518/",
        "http://[::ffff:169.254.169.254]/",
        "http://[fe80::1]/",
        "http://[fe80::5efe:808:808]/",
        "http://[2002:a9fe:a9fe::1]/",
        "http://[2001:0:a9fe:a9fe::1]/",
        "http://[2001:0:808:808::5601:5601]/",
        "http://[64:ff9b:1::a9fe:a9fe]/",
        "http://[64:ff9b:1:a9fe:a9:fe00::]/",
        "http://[::ffff:0:a9fe:a9fe]/",
        "http://[2001:db8::5efe:a9fe:a9fe]/",
        "http://[fd00:ec2::254]/",
        "http://[FD20:CE::254]/",
        "http://100.100.100.200/",
        "http://[::ffff:100.100.100.200]/",
        "http://0x646464c8/",
        "http://192.0.0.192/",
        "http://168.63.129.16/",
        "http://[64:ff9b::a83f:8110]/",
        "http://[2002:c000:c0::]/",
    ],
)
def test_addresses_of_credentials_are_not_asked_however_they_are_written(no_roots, url):
    with refusal(r"an address at which cloud machines get their credentials\. No root names it", ValidationError):
        READ(url)


def test_private_addresses_are_for_runs_of_ones_own(no_roots, monkeypatch):
    """A run that came through Prefect's API reads at one only if a root names it."""
    internal = ["127.0.0.1:8000", "10.1.2.3", "100.64.0.1", "0.0.0.0", "[::1]", "[::]", "[fd12::1]", "[2002:a01:203::]"]
    public = ["8.8.8.8", "[2606:4700::1111]", "data.example"]
    for host in (*internal, *public):
        assert READ(f"http://{host}/a") == f"http://{host}/a"
    monkeypatch.setenv(RUN, "0000")
    for host in public:
        assert READ(f"http://{host}/a") == f"http://{host}/a"
    for host in internal:
        with refusal(f"a private address, .* unless {INPUT_ROOTS} names it", ValidationError):
            READ(f"http://{host}/a")
    monkeypatch.setenv(INPUT_ROOTS, "http://127.0.0.1:8000")
    assert READ("http://127.0.0.1:8000/a") == "http://127.0.0.1:8000/a"


SIGNED = [
    *(
        f"https://example.org/a?{name}=SECRET"
        for name in [
            "auth",
            "pwd",
            "jwt",
            "sas",
            "code",
            "AWSAccessKeyId",
            "token",
            "Expires",
            "%74oken",
            "download=1&x",
            "download=1;sig",
        ]
    ),
    "https://example.org/a;token=SECRET",
    "https://example.org/a#token=SECRET",
    "https://example.org/a?SECRET",
    "https://example.org/a#SECRET",
    "https://example.org/a%3Ftoken=SECRET",
    "s3://bucket/a?sig=SECRET",
    "gs://bucket/a#token=SECRET",
    "memory://a;token=SECRET",
]
WITH_USER = [
    "https://u:SECRET@h/a",
    "HTTPS://u:SECRET@h/a",
    "https:/u:SECRET@h",
    "https:u:SECRET@h",
    "https:///u:SECRET@h",
    " https://SECRET@h/a",
    "https:\\\\u:SECRET@h",
    "file://u:SECRET@h/a",
    "ftp://u:SECRET@h/a",
    "hf://u:SECRET@h/a",
    "u:SECRET@h/a",
    "simplecache::https://u:SECRET@h/a",
]


@pytest.mark.parametrize(
    "location", [*SIGNED, *WITH_USER, "https://u%3ASECRET%40h/a", "https://u:SE/CRET@h", "https://h:SECRET/a"]
)
def test_a_secret_is_refused_and_not_repeated(location):
    with pytest.raises(ValueError, match=r"credentials|not followed by a server") as refused:
        plain_location(location)
    assert "CRET" not in str(refused.value)


@pytest.mark.parametrize(
    "location",
    ["https://example.org/a/part%231.jsonl", "https://example.org/a%3F.jsonl?raw=true", "https://example.org/a%253Fb%3B"],
)
def test_an_encoded_question_mark_or_hash_belongs_to_the_path(location):
    assert plain_location(location) == location
    assert re.match(WITHOUT_SECRETS, location)


@functools.cache
def form(flow: Any) -> Any:
    """The check of the parameters of a flow's runs."""
    schema = run_form(flow)
    return jsonschema.validators.validator_for(schema)(schema)


@pytest.mark.parametrize("location", [*SIGNED, *WITH_USER])
def test_the_form_of_a_run_refuses_secrets_before_the_run_is_stored(location):
    """As Prefect's server checks parameters; the models would refuse them, but only on the worker."""
    for flow, parameters in runs_with("/data/in", "/data/out"):
        form(flow).validate(parameters)
    hub = {"output": "/data/out", "sources": [{"hub": {"path": location}}], "tokenizer": "bytes"}
    retokenize = {"dataset": "/data/out", "tokenizers": ["bytes"]}
    more = [
        (build_dataset, {"config": hub}),
        *((retokenize_dataset, retokenize | one) for one in ({"tokenizers": [location]}, {"output": location})),
    ]
    for flow, parameters in [*runs_with(location, "/data/out"), *more]:
        with pytest.raises(jsonschema.ValidationError):
            form(flow).validate(parameters)


@pytest.mark.parametrize("pattern", ["text", "text/*.jsonl", "text/*/*.jsonl", "text/**/*.jsonl", "text/link.jsonl"])
def test_links_below_a_root_lead_nowhere_else(roots, pattern):
    (roots / "elsewhere/a.jsonl").write_text("secret")
    if pattern == "text/*/*.jsonl":
        (roots / "text/folder").symlink_to(roots / "elsewhere")
    else:
        (roots / "text/link.jsonl").symlink_to(roots / "elsewhere/a.jsonl")
    with refusal("may not be read here"):
        resolve_source(Source(path=f"{roots}/{pattern}"), 0)


@pytest.mark.parametrize(
    "uri",
    ["/etc/passwd", "file:///etc/passwd", "https://h/a", "hf://datasets/else/x@main/a", f"datasets://else/x@{'0' * 40}?split=a"],
)
def test_a_file_that_a_group_names_is_looked_for_within_the_roots(roots, uri):
    with refusal("may not be read here"):
        fetch_file(FoundFile(source=0, name="a", uri=uri, size=None), (Source(path=f"{roots}/text"),), roots / "scratch")


def test_a_worker_without_roots_says_which_are_missing(roots, monkeypatch):
    assert unbound() is None
    monkeypatch.setenv(INPUT_ROOTS, "")
    assert str(unbound()).startswith("FLAT_TOKENS_INPUT_ROOTS not set")
    monkeypatch.delenv(OUTPUT_ROOTS)
    assert str(unbound()).startswith("FLAT_TOKENS_INPUT_ROOTS and FLAT_TOKENS_OUTPUT_ROOTS not set")


@pytest.fixture
def servers() -> Iterator[tuple[Server, Server]]:
    with serving(one := Server()), serving(other := Server()):
        yield one, other


CLIENTS = pytest.mark.parametrize(
    "client",
    [
        lambda url, _: resolve_source(Source(path=url), 0),
        lambda url, scratch: fetch_file(FoundFile(source=0, name="a.jsonl", uri=url, size=None), (Source(path="x"),), scratch),
        lambda url, _: Store.at(url).read(""),
    ],
    ids=["look", "fetch", "read"],
)


@CLIENTS
@pytest.mark.parametrize("leads", ["{other}/data/a.jsonl", "/secret/a.jsonl", "/to/x/../../secret/a", "/data/%2e%2e/secret/a"])
def test_a_redirect_out_of_the_roots_is_refused_before_it_is_followed(servers, tmp_path, monkeypatch, client, leads):
    one, other = servers
    monkeypatch.setenv(INPUT_ROOTS, f"{one.home}/data,x,{tmp_path}")
    monkeypatch.chdir(tmp_path)
    one.leads = leads.format(other=other.home)
    with refusal(r"which may not be read here: FLAT_TOKENS_INPUT_ROOTS allows", (ValueError, OSError)):
        client(f"{one.home}/data/to/a.jsonl", tmp_path)
    assert other.paths == []
    assert not any("secret" in path for path in one.paths)


@CLIENTS
@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("leads", ["{other}/data/a.jsonl", "/data/a.jsonl", "{one}/data/b.jsonl", "/again/to/a.jsonl"])
def test_a_redirect_within_the_roots_is_followed(servers, tmp_path, monkeypatch, client, leads, bound):
    """Also where that leads on."""
    one, other = servers
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(INPUT_ROOTS, f"{one.home}/,{other.home}/data/,x" if bound else "")
    one.leads, one.to = leads.format(one=one.home, other=other.home), "/to/" if leads != "/again/to/a.jsonl" else "/first/to/"
    client(f"{one.home}/first/to/a.jsonl", tmp_path)
    assert [*one.paths, *other.paths][-1] == re.sub("{.*}", "", leads)


@CLIENTS
def test_a_redirect_to_an_address_of_credentials_is_refused(servers, tmp_path, client):
    servers[0].leads = "http://[2002:a9fe:a9fe::1]/latest"
    with refusal("an address at which cloud machines get", (ValueError, OSError)):
        client(f"{servers[0].home}/to/a.jsonl", tmp_path)


@CLIENTS
def test_a_name_of_a_link_local_address_is_refused_when_it_is_connected_to(servers, tmp_path, monkeypatch, client):
    """What the name led to is looked at, not what it may lead to the next time."""
    import tasks.locations

    numbers = tasks.locations._numbers
    monkeypatch.setattr(tasks.locations, "_numbers", lambda host: numbers("169.254.0.1" if host == "127.0.0.1" else host))
    url = servers[0].home.replace("127.0.0.1", "localhost")
    with refusal(r"localhost \(127.0.0.1\), an address at which cloud", (ValueError, OSError)):
        client(f"{url}/data/a.jsonl", tmp_path)
    assert servers[0].paths == []


def test_headers_of_ours_stay_with_the_first_server(servers):
    one, other = servers
    one.leads = f"{other.home}/data/a.jsonl"
    import fsspec

    fs = fsspec.filesystem(
        "http", client_kwargs={"headers": {"X-Key": "ours", "Authorization": "ours"}}, skip_instance_cache=True
    )
    assert fs.cat(f"{one.home}/to/a.jsonl") == BODY
    assert one.headers[0]["X-Key"] == one.headers[0]["Authorization"] == "ours"
    assert not {"X-Key", "Authorization"} & set(other.headers[0])


def test_what_begins_at_the_hub_may_lead_to_public_servers_by_https(monkeypatch):
    monkeypatch.setenv(INPUT_ROOTS, "https://huggingface.co/datasets/org")
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    hub = "https://huggingface.co/datasets/org/name/resolve/main/a.parquet"
    for url in ("https://cdn-lfs.hf.co/repos/a?Signature=x", "https://huggingface.co/api/resolve-cache/a", hub):
        check_hop(hub, url)
    check_hop(hub, "https://cdn-lfs.hf.co/a", "93.184.215.14")
    for url, address in (
        ("http://cdn-lfs.hf.co/a", ""),
        ("https://127.0.0.1/a", ""),
        ("https://2130706433/a", ""),
        ("https://10.0.0.1/a", ""),
        ("https://cdn-lfs.hf.co/a", "10.0.0.1"),
        ("https://cdn-lfs.hf.co/a", "169.254.169.254"),
        ("file:///etc/passwd", ""),
    ):
        with refusal("may not be read here"):
            check_hop(hub, url, address)
    with refusal("may not be read here"):
        check_hop("https://huggingface.co.example/a", "https://cdn-lfs.hf.co/a")


def test_a_root_may_name_a_link_local_address(monkeypatch):
    monkeypatch.setenv(INPUT_ROOTS, "http://169.254.7.7:8080/data")
    assert Source(path="http://169.254.7.7:8080/data/a.jsonl").path
    with refusal("may not be read here"):
        Source(path="http://169.254.7.7/data/a.jsonl")
