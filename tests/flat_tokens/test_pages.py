"""Page headers of Parquet files, compared with the values that the library decodes."""

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flat_tokens.pages import Page, batch_lengths, common_lengths, pages_of
from tests.refusal import refusal


def header(*fields: bytes) -> bytes:
    """A page header of thrift's compact protocol, from the bytes of its fields."""
    return b"".join(fields) + b"\0"


# Field 1 is the kind, 2 the size, 3 the stored size, 5 and 7 the headers of data and dictionary pages; integers are doubled.
DICTIONARY_OF_3_ENTRIES_IN_100_BYTES = header(b"\x15\x04", b"\x15\xc8\x01", b"\x15\x14", b"\x4c\x15\x06\x15\x00\x00") + bytes(10)
DATA_OF_4_PLACES_IN_IT = header(b"\x15\x00", b"\x15\x0c", b"\x15\x0c", b"\x2c\x15\x08\x15\x10\x15\x06\x15\x06\x00") + bytes(6)
DATA_OF_2_PLAIN_VALUES = header(b"\x15\x00", b"\x15\x28", b"\x15\x0a", b"\x2c\x15\x04\x15\x00\x15\x06\x15\x06\x00") + bytes(5)


def test_headers_by_the_letter_of_the_format():
    data = b"PAR1" + DICTIONARY_OF_3_ENTRIES_IN_100_BYTES + DATA_OF_4_PLACES_IN_IT + DATA_OF_2_PLAIN_VALUES
    assert list(pages_of(io.BytesIO(data), 4, 6)) == [
        Page(0, 0, 100, for_each_row=False),
        Page(4, 133, 100, for_each_row=True),
        Page(2, 20, 20, for_each_row=False),
    ]


TEXTS = [None if i % 11 == 5 else f"text number {i} " * (i % 9) for i in range(3000)]


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize(
    "options",
    [
        {"use_dictionary": True, "dictionary_pagesize_limit": 5000},
        {"use_dictionary": False, "compression": "none"},
        {"use_dictionary": False, "column_encoding": "DELTA_LENGTH_BYTE_ARRAY"},
        {"use_dictionary": False, "column_encoding": "DELTA_BYTE_ARRAY", "compression": "zstd"},
        {"use_dictionary": False, "write_statistics": False, "write_page_checksum": True},
    ],
)
def test_pages_have_all_rows_and_at_most_what_they_say(tmp_path, version, options):
    path = tmp_path / "a.parquet"
    table = pa.table({"text": pa.array(TEXTS, pa.string())})
    settings = {"row_group_size": 1000, "data_page_size": 4000, "write_batch_size": 50}
    pq.write_table(table, path, data_page_version=version, **settings, **options)
    lengths = [len(text or "") for text in TEXTS]
    with pq.ParquetFile(path) as parquet, path.open("rb") as file:
        for group in range(3):
            chunk = parquet.metadata.row_group(group).column(0)
            start = chunk.dictionary_page_offset or chunk.data_page_offset
            pages = list(pages_of(file, start, 1000))
            assert sum(page.rows for page in pages) == 1000
            at = group * 1000
            for page in pages:
                of_page = lengths[at : at + page.rows]
                at += page.rows
                if page.for_each_row:
                    assert max(of_page) <= page.most_bytes
                elif page.rows:
                    assert sum(of_page) <= page.most_bytes


def test_more_rows_than_there_are_and_other_kinds_of_pages_are_refused():
    with refusal("have 4 rows or more, not 3"):
        list(pages_of(io.BytesIO(DATA_OF_4_PLACES_IN_IT), 0, 3))
    with refusal("damaged"):
        list(pages_of(io.BytesIO(DATA_OF_4_PLACES_IN_IT), 0, 5))
    with refusal("of kind 5"):
        list(pages_of(io.BytesIO(header(b"\x15\x0a", b"\x15\x0c", b"\x15\x0c")), 0, 1))


def test_long_statistics_are_passed_over():
    """A header may be longer than what is read at first."""
    long = b"x" * 100_000
    statistics = b"\x5c\x18" + b"\xa0\x8d\x06" + long + b"\0"
    data = header(b"\x15\x00", b"\x15\x28", b"\x15\x0a", b"\x2c\x15\x04\x15\x00\x15\x06\x15\x06" + statistics + b"\0") + bytes(5)
    assert list(pages_of(io.BytesIO(data), 0, 2)) == [Page(2, 20, 20, for_each_row=False)]


@pytest.mark.parametrize(
    "value",
    [
        b"\x19\xf7" + b"\xff" * 9 + b"\x01",  # a list of 2**63 doubles
        b"\x19" * 5000,  # lists of lists
        b"\x1a\xf3" + b"\xff" * 4 + b"\x01" + bytes(100),  # a set
        b"\x1b\x01\x33" + bytes(100),  # a map
        b"\x1c" * 5000,  # structs of structs
    ],
)
@pytest.mark.timeout(20)
def test_values_that_no_header_has_are_an_error_at_once(value):
    with refusal("damaged"):
        list(pages_of(io.BytesIO(header(b"\x15\x00", b"\x15\x28", b"\x15\x0a", value)), 0, 1))


def test_pages_that_say_they_are_larger_than_allowed_are_refused():
    """Whether before or after they are unpacked, and of whatever encoding."""
    two_billions = b"\x15\xfe\xff\xff\xff\x0f"
    places = b"\x2c\x15\x08\x15\x10\x15\x06\x15\x06\x00"
    for sizes in ((two_billions, b"\x15\x0a"), (b"\x15\x0a", two_billions)):
        with refusal(r"has 2,147,483,647 bytes when it is unpacked; 1,000 are allowed.*, or more"):
            list(pages_of(io.BytesIO(header(b"\x15\x00", *sizes, places)), 0, 4, 1000, ", or more"))
    with refusal("damaged"):  # no size has more than 31 bits
        list(pages_of(io.BytesIO(header(b"\x15\x00", b"\x15\x0a", b"\x15\x80\x80\x80\x80\x20", places)), 0, 4))


@pytest.mark.parametrize(
    ("pages", "lengths"),
    [
        ([], []),
        ([Page(0, 0, 9, False)], []),
        ([Page(10, 40, 40, False)] * 5, [20, 20, 10]),  # two pages come to about 100 bytes, the third goes over
        ([Page(10, 400, 400, False)], [3, 3, 3, 1]),  # a large page in parts
        ([Page(10, 10, 300, True)], [3, 3, 3, 1]),  # each row may have 300 of the 1000 bytes
        ([Page(3, 1, 5000, True)], [1, 1, 1]),  # each row may have more than all
        ([Page(10, 40, 40, False), Page(10, 10, 300, True)], [13, 3, 3, 1]),
        ([Page(100, 0, 0, True)], [50, 50]),  # never more than 50 rows
    ],
)
def test_batches_by_pages(pages, lengths):
    assert list(batch_lengths(pages, about_bytes=100, most_bytes=1000, most_rows=50)) == lengths


@given(st.lists(st.sets(st.integers(1, 50), max_size=10), min_size=1, max_size=3))
def test_common_lengths_end_wherever_one_of_the_columns_does(cuts):
    columns = [np.diff([0, *sorted(ends), 51]).tolist() for ends in cuts]
    common = list(common_lengths([iter(lengths) for lengths in columns]))
    assert np.cumsum(common).tolist() == sorted({51}.union(*cuts))
