"""The page on the configuration names every key, with the default that the program has."""

import re
from pathlib import Path

import pytest

from tasks.config import BuildConfig, DocumentPolicy, GroupPolicy, Source

PAGE = (Path(__file__).parents[2] / "docs/configuration.md").read_text("utf-8")


def keys_under(heading: str) -> dict[str, str]:
    """Keys of the tables below a heading, with what stands as their default."""
    below = re.split(r"^## ", PAGE, flags=re.M)
    (section,) = (part for part in below if part.startswith(heading))
    return dict(re.findall(r"^\| `([a-z_.]+)` \| (.*?) \|", section, flags=re.M))


@pytest.mark.parametrize(
    ("heading", "model", "apart"),
    [
        ("# Configuration", BuildConfig, {"documents", "split"}),
        ("A source", Source, set()),
        ("Many workers", GroupPolicy, set()),
    ],
)
def test_every_key_is_there_and_no_other(heading, model, apart):
    told = {key for key in keys_under(heading) if "." not in key}
    assert told == set(model.model_fields) - apart


def test_defaults_are_those_of_the_program():
    build, groups, documents = keys_under("# Configuration"), keys_under("Many workers"), DocumentPolicy()
    for name, field in GroupPolicy.model_fields.items():
        assert groups[name] == str(field.default).lower()
    for name in ("name", "layout", "runner", "verify_level"):
        assert build[name] == f"`{BuildConfig.model_fields[name].default}`"
    for name in ("validation_fraction", "split_seed"):
        assert build[name] == str(BuildConfig.model_fields[name].default)
    assert build["slice_bytes"] == "128 MB"
    assert BuildConfig.model_fields["slice_bytes"].default == 128_000_000
    assert (build["documents.on_bad"], build["documents.empty"]) == (f"`{documents.on_bad}`", f"`{documents.empty}`")
    assert build["documents.max_bytes"] == f"{documents.max_bytes >> 20} MiB"
