"""Columns by the names of directories."""

import pytest

from flat_tokens.text.partitions import partitions_of


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("part.parquet", {}),
        ("lang=en/part.parquet", {"lang": "en"}),
        ("a/lang=en/b/year=2024/k=v.parquet", {"lang": "en", "year": "2024"}),
        ("lang=__HIVE_DEFAULT_PARTITION__/x", {"lang": None}),
        ("lang=/x", {"lang": ""}),
        ("=en/x", {}),
        ("a%20b=c%2Fd%C3%A9=1%/x", {"a b": "c/dé=1%"}),
        ("k=%FF/x", {"k": "\ufffd"}),
        ("k=1/k=2/x", {"k": "2"}),
    ],
)
def test_columns_are_the_directories_with_an_equals_sign(name, columns):
    assert partitions_of(name) == columns
