"""Archives of texts: the rows of their members, and archives that are damaged or hostile."""

import gzip
import json
import tarfile
from functools import partial
from typing import Any

import pytest

from flat_tokens.text.formats import detect_format
from flat_tokens.text.tar import BLOCK, TAR
from tests.flat_tokens.text.test_source_formats import LFS_POINTER
from tests.refusal import refusal
from tests.sources import documents_of
from tests.sources import tar_bytes as tar

read = partial(documents_of, TAR)


def lines(*rows: Any) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


WEBDATASET = [
    ("./000.jpg", b"\xff\xd8"),
    ("./000.txt", "héllo".encode()),
    ("./000.json", b'{"url": "u0", "n": 1, "text": "not this"}'),
    ("./001.json", b'{"text": "of JSON", "key": "own", "doc": {"n": 7}}'),
    ("./001.cls", b"5"),
    ("./dir/002.txt", b"two"),
    ("./dir/002.txt", b"again"),
]


def test_neighbours_of_one_name_are_a_row(tmp_path):
    for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT):
        found = read(tmp_path / "x.tar", tar(WEBDATASET, form), ("url", "n", "doc.n"), "key")
        assert found == [
            (0, "héllo", "000", "u0", 1, None),
            (1, "of JSON", "own", None, None, 7),
            (2, "two", "dir/002", None, None, None),
            (3, "again", "dir/002", None, None, None),
        ]
    first, _ = read(tmp_path / "x.tar", tar(WEBDATASET[5:]), (), "__key__", text="txt")
    assert first == (0, "two", "dir/002")


def test_lines_of_members_are_rows(tmp_path):
    members = [
        ("a.jsonl", b"\xef\xbb\xbf" + lines({"text": "1", "id": "x"}, {"text": "2", "id": "y"})),
        ("b.txt", b"\xef\xbb\xbfthree"),
        ("c.JSONL", lines({"text": "4", "id": "z"}).rstrip() + b"\n\n" + b'{"text": "6"}'),
        ("e.txt", b""),
    ]
    for size in (1, 1 << 20):
        found = read(tmp_path / "x.tar", tar(members), ("id",), range_bytes=size)
        assert [one[:2] + one[3:] for one in found] == [
            (0, "1", "x"),
            (1, "2", "y"),
            (2, "three", None),
            (3, "4", "z"),
            (5, "6", None),
            (6, "", None),
        ]


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
@pytest.mark.parametrize("size", [1, 1024, 1025, 3000])
def test_ranges_have_the_members_of_the_archive(tmp_path, form, size):
    """With long names, in both ways in which archives have them."""
    texts = [("a", "x" * 512), ("é" * 120, "é" * 300), ("b" * 99, ""), ("c", "x" * 513), ("d" * 200, "last")]
    data = tar(((f"{name}.txt", text.encode()) for name, text in texts), form)
    found = read(tmp_path / "x.tar", data, (), "key", range_bytes=size)
    assert found == [(number, text, name) for number, (name, text) in enumerate(texts)]


def test_links_devices_and_names_that_lead_out_open_nothing(tmp_path):
    (tmp_path / "secret.txt").write_text("secret")
    data = b"".join(
        tar([(f"{number}.txt", b"")], type=kind, linkname=str(tmp_path / "secret.txt"))[:BLOCK]
        for number, kind in enumerate((tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE))
    )
    data += tar([("../../etc/passwd.txt", b"a"), ("/etc/x.txt", b"b"), (".hidden.txt", b"c"), ("d/._x.txt", b"d"), ("y/", b"")])
    assert [one[1:3] for one in read(tmp_path / "x.tar", data, (), "key")] == [("a", "../../etc/passwd"), ("b", "/etc/x")]


def test_archives_behind_each_other_are_one(tmp_path):
    one = tar([("a.txt", b"1")])
    assert [row[1] for row in read(tmp_path / "x.tar", one + tar([("b.txt", b"2")]))] == ["1", "2"]
    assert [row[1] for row in read(tmp_path / "x.tar", one[: 2 * BLOCK])] == ["1"]  # without an end


def test_bad_members_are_bad_documents(tmp_path):
    members = [("a.json", b"{"), ("b.json", b"[1]"), ("c.txt", b"x" * 51), ("d.txt", b"\xff"), ("e.json", b'{"n": 1}')]
    found = read(tmp_path / "x.tar", tar([*members, ("f.txt", b"x" * 50)]), max_bytes=50)
    assert [(one[0], one[1]) for one in found[:3]] == [(0, "malformed"), (1, "wrong_type"), (2, "too_long")]
    assert "'a.json' is not JSON" in found[0][2]
    assert found[3][1] == "\ufffd"
    assert (found[4][1], found[4][2]) == ("null", "the line has no key 'text'")
    assert found[5][1] == "x" * 50


ONE = tar([("a.txt", b"text" * 200), ("b.txt", b"text")])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (ONE[: 2 * BLOCK], r"header at byte 0: 'a.txt' has 800 bytes, and the archive ends after 512 of them"),
        (ONE[: 2 * BLOCK + 400], r"header at byte 0: the archive ends within the block of 'a.txt', so it is cut off"),
        (ONE[: 3 * BLOCK] + b"x" + ONE[3 * BLOCK + 1 :], r"header at byte 1,536: it is damaged \(bad checksum\)"),
        (tar([("a.txt.gz", b"x")]), r"has the member 'a.txt.gz', which is not read in an archive. Unpack it first: tar -xf"),
        (tar([("a.txt", gzip.compress(b"x"))]), "the member a.txt is packed as .gz, which is not read in an archive"),
        (tar([("d/a.txt", LFS_POINTER)]), "the member d/a.txt is a pointer of Git LFS, not the file itself. Fetch the file"),
        (tar([("a.jpg", b"x")]), r"has no member that ends in .txt, .text, .json, .jsonl, .ndjson"),
        (tar([("a.txt", b"x")], type=tarfile.GNUTYPE_SPARSE), "it is a sparse file"),
        (tar([("a.txt", b"x")], pax_headers={"GNU.sparse.major": "1"}), "it is a sparse file"),
        (tar([("a.txt", b"x")], pax_headers={"comment": "x" * (2 << 20)}), "it is an extended header of 2,097,1.* 1,048,576 are"),
        (tar([("a.txt", b"x")], pax_headers={"size": "99999999"}), "'a.txt' has 99,999,999 bytes"),
        (tar([("a.json", b'{"n": 1}')]), r"no column 'text'; it has 'n', 'key'. Set source.text_column"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_place(tmp_path, data, words):
    with refusal(rf"x\.tar.*{words}"):
        read(tmp_path / "x.tar", data)


def test_the_content_or_the_name_says_what_it_is():
    old = bytearray(tar([("a.txt", b"x")], tarfile.USTAR_FORMAT))
    assert detect_format(bytes(old), "x") == "tar"
    old[257:265] = bytes(8)  # the magic of later forms
    old[148:156] = b"%06o\0 " % (256 + sum(old[:148]) + sum(old[156:BLOCK]))
    assert [detect_format(bytes(old), name) for name in ("x.tar", "x.tar.gz", "x.tgz")] == ["tar"] * 3
    with refusal(r"x\.tar is not an archive: it begins with b'text'"):
        detect_format(b"text", "x.tar")
    with refusal("is compressed twice"):
        detect_format(gzip.compress(bytes(old)), "x.tar.gz")
