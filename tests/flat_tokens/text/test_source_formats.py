"""What a file is, by its first bytes: compressions that are read, and content that is not the file's own, refused by name."""

import bz2
import gzip
import io
import lzma
import sys
import zipfile

import numpy as np
import pytest
import zstandard

from flat_tokens.text.formats import COMPRESSIONS, FOREIGN, compression_of, detect_format, named_format, unpacked
from tests.refusal import refusal

TEXT = b"a line of text\n" * 200
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 12345\n"


def skippable(size: int, number: int = 0) -> bytes:
    """A frame of zstd that holds nothing of the text, as pzstd and seekable files have them."""
    return bytes([0x50 + number]) + b"\x2a\x4d\x18" + size.to_bytes(4, "little") + bytes(size)


def with_window(log: int) -> bytes:
    """A frame as ``zstd --long`` writes it, whose header does not say how long the text is."""
    settings = zstandard.ZstdCompressionParameters.from_level(3, window_log=log, enable_ldm=True)
    packing = zstandard.ZstdCompressor(compression_params=settings).compressobj()
    return packing.compress(TEXT) + packing.flush()


def zip_of(data: bytes) -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as archive:
        archive.writestr("a.txt", data)
    return sink.getvalue()


FRAME = zstandard.compress(TEXT)


@pytest.mark.parametrize(
    ("data", "times"),
    [
        (skippable(0, 15) + skippable(5000, 3) + FRAME + skippable(4) + FRAME, 2),
        (FRAME + skippable(10_000_000) + FRAME + skippable(8), 2),
        (zstandard.compress(b"") + skippable(1), 0),
    ],
)
def test_frames_of_zstd_without_text_are_passed_over(data, times):
    assert compression_of(data[:4096], "a.txt.zst") == ".zst"
    assert b"".join(unpacked(io.BytesIO(data), ".zst", "a.zst")) == TEXT * times


@pytest.mark.parametrize("data", [skippable(4)[:6], FRAME + skippable(40)[:20], skippable(4) + FRAME[:5]])
def test_a_file_that_ends_within_a_frame_is_damaged(data):
    with refusal(r"^a.zst is damaged at byte \d+ or before: the file ends within a compressed frame"):
        list(unpacked(io.BytesIO(data), ".zst", "a.zst"))


@pytest.mark.parametrize("log", [27, 28, 31])
def test_long_windows_are_unpacked_or_refused_with_the_remedy(log):
    data = FRAME + with_window(log) + FRAME
    assert b"".join(unpacked(io.BytesIO(data), ".zst", "a.zst")) == TEXT * 3
    if log > 27:
        refused = rf"^d/a.zst is compressed with a window of {1 << log:,} bytes, .* first: zstd -d --long={log} a.zst$"
        with refusal(refused):
            list(unpacked(io.BytesIO(data), ".zst", "d/a.zst", max_window=1 << log - 1))


def test_a_dictionary_that_is_not_there_is_no_damage():
    dictionary = zstandard.train_dictionary(1000, [b"sample %d of a text" % i * 20 for i in range(200)])
    data = zstandard.ZstdCompressor(dict_data=dictionary).compress(TEXT)
    with refusal(r"^a.zst is compressed with a dictionary \(id \d+\). Unpack it first: zstd -d -D"):
        list(unpacked(io.BytesIO(data), ".zst", "a.zst"))


def test_a_file_of_lz4_that_begins_as_one_of_zstd_is_refused():
    with refusal(r"^a.lz4 is packed as .lz4, which is not read here. Unpack it first: lz4 -d a.lz4"):
        list(unpacked(io.BytesIO(skippable(4) + b"\x04\x22\x4d\x18rest"), ".zst", "a.lz4"))


@pytest.mark.parametrize("ending", [*COMPRESSIONS, ".gzip", ".zstd", ".bzip2", *FOREIGN])
@pytest.mark.parametrize("head", [b"\0\1\2\3" * 9, b"\n\n" + FRAME, b"caf\xe9"])
def test_a_file_named_as_packed_is_not_taken_for_text(ending, head):
    remedy = f"Unpack it first: {FOREIGN[ending][1]}" if ending in FOREIGN else "Fetch it again, or rename it"
    for name in (f"a.txt{ending}", f"A{ending.upper()}"):
        with refusal(rf"^{name} begins with b.*, as no \{ending} file does that is read here\. {remedy}"):
            compression_of(head, name)
    assert named_format(f"a.jsonl{ending}") == "jsonl"


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt.ZST", "corpus.br", "a.parquet.xz"])
def test_a_file_that_kept_the_name_of_its_compression_is_read(name):
    """Servers unpack files that they send."""
    for head in (
        b'{"text": "a"}\n',
        "é\t\r\n".encode() * 800,
        ("x" * 4095 + "é").encode()[:4096],
        b"PAR1\0",
    ):
        assert compression_of(head, name) is None


@pytest.mark.parametrize(
    ("pack", "ending"),
    [
        (lambda data: b"\x04\x22\x4d\x18" + data, ".lz4"),
        (lambda data: b"\x02\x21\x4c\x18" + data, ".lz4"),
        (zip_of, ".zip"),
        (lambda data: b"7z\xbc\xaf\x27\x1c\0\4" + data, ".7z"),
        (lambda data: b"Rar!\x1a\x07\x01\0" + data, ".rar"),
        (lambda data: b"\x1f\x9d\x90" + data, ".z"),
        (lambda data: lzma.compress(data, lzma.FORMAT_ALONE), ".lzma"),
        (lambda data: b"LZIP\1" + data, ".lz"),
        (lambda data: b"\x89LZO\0\r\n\x1a\n" + data, ".lzo"),
        (lambda data: b"\xff\x06\0\0sNaPpY" + data, ".sz"),
    ],
)
def test_what_is_not_unpacked_here_is_refused_with_the_remedy(pack, ending):
    """Whatever it is called, and within a packed file, too."""
    head = pack(TEXT)[:4096]
    words = rf"is packed as \{ending}, which is not read here. Unpack it first: {FOREIGN[ending][1]} "
    with refusal(rf"d/a.jsonl {words}a.jsonl"):
        compression_of(head, "d/a.jsonl")
    for wanted in ("auto", "text"):
        with refusal(words):
            detect_format(head, "a.txt.gz", wanted)  # type: ignore[arg-type]


GZIP = gzip.compress(b"some lines of text\n" * 10_000)
DAMAGED_GZIP = {
    "cut off": (GZIP[:-20], "ended before the end-of-stream"),
    "another checksum": (GZIP[:-8] + bytes(4) + GZIP[-4:], "CRC check failed"),
    "a byte that differs": (GZIP[:40] + bytes([GZIP[40] ^ 255]) + GZIP[41:], ""),
}


@pytest.fixture(params=["isal", "zlib"])
def gzip_reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both readers of gzip: the second is there for who has not installed the first."""
    if request.param == "zlib":
        monkeypatch.setitem(sys.modules, "isal", None)


@pytest.mark.usefixtures("gzip_reader")
@pytest.mark.parametrize(("data", "words"), DAMAGED_GZIP.values())
def test_damaged_gzip_is_refused_with_its_place(data, words):
    with refusal(rf"^a.gz is damaged at byte \d+ or before: .*{words}"):
        list(unpacked(io.BytesIO(data), ".gz", "a.gz"))


@pytest.mark.usefixtures("gzip_reader")
def test_an_error_of_the_disk_is_not_one_of_the_gzip_file():
    class Failing(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise OSError(5, "Input/output error")

        def readinto(self, buffer: object) -> int:
            raise OSError(5, "Input/output error")

    with refusal("Input/output error", OSError):
        list(unpacked(Failing(GZIP), ".gz", "a.gz"))


def test_empty_bzip2_is_bzip2():
    assert compression_of(bz2.compress(b""), "a.txt.bz2") == ".bz2"


@pytest.mark.usefixtures("gzip_reader")
@pytest.mark.parametrize(("ending", "pack"), [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)])
@pytest.mark.parametrize("size", [1, 300_000])
def test_streams_behind_the_first_are_read_or_the_file_is_damaged(ending, pack, size):
    """A byte between two streams would hide the second one; zeros may be there, as xz and tar write them. Some are empty."""
    text = np.random.default_rng(0).bytes(size)
    packed = pack(text)

    def read(*parts: bytes) -> bytes:
        return b"".join(unpacked(io.BytesIO(b"".join(parts)), ending, f"a{ending}"))

    assert read(pack(b""), packed, b"\0" * 8, pack(TEXT), packed, b"\0" * 100_000) == text + TEXT + text
    for between in (b"X", b"\0X", b"garbage" * 5000, pack(TEXT)[1:], pack(TEXT)[:-3]):
        with refusal(rf"^a{ending} is damaged at byte"):
            read(packed, between, pack(TEXT))
        with refusal(rf"^a{ending} is damaged at byte"):
            read(packed, between)


@pytest.mark.parametrize("name", ["a.txt", "a.parquet", "a.txt.gz", "a.bin"])
@pytest.mark.parametrize(
    ("pointer", "remedy"),
    [
        (LFS_POINTER, "Git LFS, not the file itself. Fetch the file: git lfs pull"),
        (LFS_POINTER.replace(b"\n", b"\r\n"), "Git LFS, "),
        (LFS_POINTER.replace(b"git-lfs", b"hawser"), "Git LFS, "),
        (b"/annex/objects/SHA256E-s5--0123.txt\n", "git-annex, not the file itself. Fetch the file: git annex get"),
    ],
)
def test_a_pointer_is_not_taken_for_the_file(name, pointer, remedy):
    with refusal(rf"^{name} is a pointer of {remedy}"):
        compression_of(pointer, name)
    for wanted in ("auto", "text"):
        with refusal(rf"^{name} is a pointer of {remedy}"):
            detect_format(pointer, name, wanted)  # type: ignore[arg-type]


def test_a_text_about_pointers_is_a_text():
    assert detect_format(LFS_POINTER + b"is what Git LFS leaves there. " * 40, "a.md") == "text"


@pytest.mark.parametrize("code", ["UTF-16", "UTF-32"])
@pytest.mark.parametrize("order", ["le", "be"])
def test_text_of_another_code_says_how_to_convert_it(code, order):
    head = "\ufefftext".encode(f"{code}-{order}")
    with refusal(rf"^a.txt is {code}, not UTF-8. Convert it first: iconv -f {code} -t UTF-8 a.txt"):
        detect_format(head, "a.txt")
