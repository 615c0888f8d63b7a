"""Tar archives of texts and JSON, as WebDataset has them. Neighbours with the same name but for its ending are one row: the text
of a ``.txt`` member, next to the fields of a ``.json`` one. Each line of a ``.jsonl`` member is a row. Members of other kinds are
not read.

Names of members are text. Nothing is opened by them, and links and devices are passed over.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from flat_tokens.annotations import JsonObject
from flat_tokens.options import digits
from flat_tokens.text import jsonl, limits
from flat_tokens.text.foreign import packed_as, refuse_foreign
from flat_tokens.text.plain import BOM
from flat_tokens.text.rows import BadRowError, CollectedRows, Range, Rows, SourceFormat, TextFile, check_names, too_long

BLOCK = 512
LARGEST_HEADER = 1 << 20
"""Bytes of an extended header, at most: it has a name and some numbers."""
ROWS_LOOKED_AT = 1000

TEXTS, OBJECTS, LINES = ("txt", "text"), ("json",), ("jsonl", "ndjson")
HEAD_BYTES = 4096
"""Bytes of a member that tell what it is."""
PACKED = ("gz", "zst", "bz2", "xz", "lz4", "zip")
TABLES = ("parquet", "arrow", "feather", "csv", "tsv", "warc")
"""Endings of members that have text and are not read within an archive."""
KEY, TEXT = "key", "text"
OF_WEBDATASET = {"txt": TEXT, "__key__": KEY}
"""The names that WebDataset has for these columns, and ``datasets`` too."""


class Member(NamedTuple):
    """A plain file of an archive: its name without ending and its ending, where its header begins, where its content begins and
    ends, and where the next header begins.
    """

    stem: str
    ending: str
    header: int
    start: int
    stop: int
    following: int


class Neighbours(NamedTuple):
    """Members of one row, or one of lines. ``start``, ``stop``: where the first header begins, and the next one."""

    members: tuple[Member, ...]

    @property
    def start(self) -> int:
        return self.members[0].header

    @property
    def stop(self) -> int:
        return self.members[-1].following

    def of(self, endings: tuple[str, ...]) -> Member | None:
        return next((one for one in self.members if one.ending in endings), None)


def has_header(head: bytes) -> bool:
    """Whether a file begins with the header of a member, or with the end of an archive, however old its form is."""
    try:
        return not head[:BLOCK].strip(b"\0") or bool(tarfile.TarInfo.frombuf(head[:BLOCK], "utf-8", "replace"))
    except tarfile.HeaderError:
        return False


def _members(file: TextFile, opened: BinaryIO, start: int, stop: int) -> Iterator[Member]:
    """The plain files whose headers begin at byte *start* or later, and before *stop*. ValueError, with the place, if a header
    is damaged, and if the archive is cut off. Consecutive archives are one.
    """
    at, begun, name, size = start, start, None, None
    while at < stop:
        opened.seek(at)
        block = opened.read(BLOCK)
        if not block.strip(b"\0"):
            at = begun = at + BLOCK
            continue

        def refused(why: str, at: int = at) -> ValueError:
            return ValueError(f"{file.name}, the header at byte {at:,}: {why}. Write or fetch the archive again.")

        try:
            info = tarfile.TarInfo.frombuf(block, "utf-8", "replace")
        except tarfile.HeaderError as error:
            raise refused(f"it is damaged ({error})") from error
        begin = at + BLOCK
        is_file = info.type in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
        length = info.size if size is None or not is_file else size
        if length < 0 or begin + length > file.size:
            left = file.size - begin
            raise refused(f"{info.name!r} has {length:,} bytes, and the archive ends after {left:,} of them")
        following = begin + -(-length // BLOCK) * BLOCK
        if following > file.size:
            raise refused(f"the archive ends within the block of {info.name!r}, so it is cut off")
        if info.type in (tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE):
            if length > LARGEST_HEADER:
                raise refused(f"it is an extended header of {length:,} bytes; {LARGEST_HEADER:,} are read")
            data = opened.read(length)
            if info.type == tarfile.GNUTYPE_LONGNAME:
                name = data.rstrip(b"\0").decode("utf-8", "replace")
            else:
                fields = _extended(data)
                if any(key.startswith("GNU.sparse.") for key in fields):
                    raise refused("it is a sparse file, which is not read here")
                name = fields.get("path", name)
                if "size" in fields and (size := digits(fields["size"])) is None:
                    raise refused(f"its extended header says a size of {fields['size'][:20]!r}")
        elif info.type == tarfile.GNUTYPE_SPARSE:
            raise refused("it is a sparse file, which is not read here")
        else:
            if is_file:
                stem, ending = _divided(info.name if name is None else name)
                if not stem.rpartition("/")[2].startswith("."):
                    yield Member(stem, ending, begun, begin, begin + length, following)
            # A header that says more of the next one goes with that; one for all is only about times and owners here.
            begun, name, size = following, None, None
        at = following


def _extended(data: bytes) -> dict[str, str]:
    """The fields of an extended header: lines of their length, a space, a name, an equals sign and a value."""
    found, at = dict[str, str](), 0
    while at < len(data):
        said, _, _ = data[at : at + 20].partition(b" ")
        if not (length := digits(said)):
            break
        key, _, value = data[at + len(said) + 1 : at + length - 1].partition(b"=")
        found[key.decode("utf-8", "replace")] = value.decode("utf-8", "replace")
        at += length
    return found


def _divided(name: str) -> tuple[str, str]:
    """The name of a member without its ending, and that in lower case."""
    while name.startswith("./"):
        name = name[2:]
    at = name.rfind(".")
    return (name, "") if at <= name.rfind("/") + 1 else (name[:at], name[at + 1 :].lower())


def _neighbours(file: TextFile, opened: BinaryIO, start: int, stop: int) -> Iterator[Neighbours]:
    """The rows, and members of lines, of an archive from byte *start* to *stop*. ValueError for a member that would be lost."""
    held: list[Member] = []
    for member in _members(file, opened, start, stop):
        inner = _divided(f"x/{member.stem}")[1] if member.ending in PACKED else member.ending
        if member.ending in TABLES or (inner != member.ending and inner in (*TEXTS, *OBJECTS, *LINES, *TABLES)):
            name = f"{member.stem}.{member.ending}"
            raise ValueError(f"{file.name} has the member {name!r}, which is not read in an archive. Unpack it first: tar -xf")
        if member.ending not in (*TEXTS, *OBJECTS, *LINES):
            continue
        is_alone = any(one.ending in LINES for one in (*held, member))
        if held and (is_alone or held[0].stem != member.stem or any(one.ending == member.ending for one in held)):
            yield Neighbours(tuple(held))
            held = []
        held.append(member)
    if held:
        yield Neighbours(tuple(held))


def _check_content(file: TextFile, member: Member, head: bytes) -> None:
    """ValueError for a member that begins as packed bytes do, or as a pointer to a file that was not fetched: neither is text."""
    name = f"{file.name}, the member {member.stem}.{member.ending}"
    refuse_foreign(head, name)
    if (ending := packed_as(head)) is not None:
        raise ValueError(f"{name} is packed as {ending}, which is not read in an archive. Unpack it first: tar -xf")


def _lines(file: TextFile, opened: BinaryIO, member: Member) -> Range:
    """The bytes of a member of lines, without the mark that may be before them."""
    opened.seek(member.start)
    _check_content(file, member, opened.read(min(member.stop - member.start, HEAD_BYTES)))
    opened.seek(member.start)
    start = member.start + len(BOM) if opened.read(len(BOM)) == BOM and member.stop - member.start >= len(BOM) else member.start
    return Range(start, member.stop, None, member.stop - start)


def read(file: TextFile, part: Range) -> Iterator[Rows]:
    collected, end, seen = CollectedRows(file), 0, 0
    with file.open() as opened:
        for row in _neighbours(file, opened, part.start, part.stop):
            lines = row.of(LINES)
            yield from collected.batch(end, seen, is_last=lines is not None)
            if lines is not None:
                before = end
                for rows in jsonl.read(file, _lines(file, opened, lines)):
                    yield rows.behind(before, seen)
                    end = before + rows.end
            else:
                try:
                    value = _value_of(file, opened, row)
                    collected.size += sum(one.stop - one.start for one in row.members)
                    collected.add(end, *jsonl.row_of(value, file))
                except BadRowError as error:
                    collected.faults.append((end, *error.fault))
                end += 1
            seen = row.stop - part.start
    yield from collected.batch(end, seen, is_last=True)


def _value_of(file: TextFile, opened: BinaryIO, members: Neighbours) -> JsonObject:
    """The row of members: the fields of its JSON, its text, and its key."""
    value: JsonObject = {}
    if (member := members.of(OBJECTS)) is not None:
        name = f"{member.stem}.{member.ending}"
        data = _content(file, opened, member, limits.longest_line(file.max_bytes))
        value = jsonl.object_in(data.removeprefix(BOM), repr(name))
    if (member := members.of(TEXTS)) is not None:
        data = _content(file, opened, member, file.max_bytes)
        _check_content(file, member, data[:HEAD_BYTES])
        value[TEXT] = data.removeprefix(BOM).decode("utf-8", "lone-surrogate")
    value.setdefault(KEY, members.members[0].stem)
    for name, other in OF_WEBDATASET.items():
        if name in file.columns and other in value:
            value.setdefault(name, value[other])
    return value


def _content(file: TextFile, opened: BinaryIO, member: Member, most: int) -> bytes:
    size = member.stop - member.start
    if size > most:
        raise BadRowError("too_long", too_long(size, file.max_bytes))
    opened.seek(member.start)
    data = opened.read(size)
    if len(data) < size:
        raise OSError(f"it ends within the member at byte {member.start:,}")
    return data


def _first_keys(file: TextFile, wanted: set[str]) -> dict[str, None] | None:
    """The columns of the first rows, until they have all that are *wanted*; None if there is no row."""
    keys: dict[str, None] | None = None
    with file.open() as opened:
        for number, row in enumerate(_neighbours(file, opened, 0, file.size)):
            keys = {} if keys is None else keys
            if (lines := row.of(LINES)) is not None:
                opened.seek(_lines(file, opened, lines).start)
                head = opened.read(min(limits.LOOK_BYTES, lines.stop - opened.tell()))
                is_whole = opened.tell() >= lines.stop
                keys |= jsonl.keys_of_lines(head if is_whole else head[: head.rfind(b"\n") + 1], wanted)
            else:
                try:
                    value = _value_of(file, opened, row)
                except BadRowError:
                    continue
                keys |= jsonl.keys_of_row(value, wanted)
            if keys.keys() >= wanted or number >= ROWS_LOOKED_AT:
                break
    return keys


def columns(file: TextFile) -> list[str] | None:
    return list(_first_keys(file, set(file.kept_columns)) or ()) or None


def ranges(file: TextFile, range_bytes: int) -> Iterator[Range]:
    keys = _first_keys(file, set(file.columns))
    if keys is None:
        endings = ", ".join(f".{one}" for one in (*TEXTS, *OBJECTS, *LINES))
        raise ValueError(f"{file.name} has no member that ends in {endings}. Leave it out, or name the members so.")
    if keys:
        check_names(file, keys)
    start = end = 0
    with file.open() as opened:
        for row in _neighbours(file, opened, 0, file.size):
            # A range ends before the row with which it would be too large.
            if end > start and row.stop - start > range_bytes:
                yield Range(start, end, None, end - start)
                start = end
            end = row.stop
    yield Range(start, file.size, None, end - start)


def rows_before(file: TextFile, part: Range) -> int:
    count = 0
    with file.open() as opened:
        for row in _neighbours(file, opened, 0, part.start):
            lines = row.of(LINES)
            count += 1 if lines is None else jsonl.lines_within(file, lines.start, lines.stop)
    return count


TAR = SourceFormat((".tar", ".tgz"), ranges, read, rows_before, columns=columns)
