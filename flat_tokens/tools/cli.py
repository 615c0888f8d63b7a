"""The command line: ``flat-tokens COMMAND``, such as ``inspect``, ``stats`` or ``verify``. Commands of both programs share the
parser, the types of arguments, and the options of all formats as flags.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import posixpath
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from flat_tokens import __version__
from flat_tokens.extras import extra
from flat_tokens.options import did_you_mean, nearest
from flat_tokens.reader import no_dataset
from flat_tokens.stores.local import kind_of
from flat_tokens.stores.store import Store
from flat_tokens.tools import terminal
from flat_tokens.vocabulary import Vocabulary, nearest_file

if TYPE_CHECKING:
    from flat_tokens.tools.corpus import Corpus

FAMILIES = {
    "flat_tokens.tools.inspect": ("inspect",),
    "flat_tokens.tools.stats": ("stats",),
    "flat_tokens.tools.verify": ("verify",),
    "flat_tokens.tools.trace": ("trace", "seen"),
    "flat_tokens.tools.record": ("record",),
    "flat_tokens.tools.documents": ("documents",),
    "flat_tokens.tools.diff": ("diff",),
    "flat_tokens.tools.compare": ("compare",),
    "flat_tokens.tools.export": ("export", "import"),
    "flat_tokens.tools.cli": ("completion",),
}
"""Modules, and the commands that each adds by ``add_commands``. The function of a command returns its exit status."""

STATUS = """\
exit status:
  0  all is well: shown, found, right, the same
  1  it is not: nothing found, something damaged, a difference
  2  it is unknown: bad arguments, nothing there, a package missing

Errors are one line on standard error; FLAT_TOKENS_DEBUG=1 shows where one comes from.
"""
SAME, DIFFERENT, TROUBLE = 0, 1, 2
"""Exit statuses, as of grep and diff: found or the same; not found or different; an error."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        options = parser(*words[:1]).parse_args(words)
    except SystemExit as ended:
        return int(ended.code or 0)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal without a character is not a reason to fail
    try:
        status = int(options.run(options))
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader has closed the pipe. Nothing may fail again when the interpreter flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # drivers of stores raise errors of their own
        if os.environ.get("FLAT_TOKENS_DEBUG"):
            raise
        name, message = type(error).__name__, terminal.one_line(error)
        # The messages of these say enough without the type's name.
        says_all = isinstance(error, OSError | ValueError | LookupError | MemoryError | ImportError)
        if message != name and (not says_all or isinstance(error, KeyError)):
            message = f"{name}: {message}"
        print(f"flat-tokens {options.command}: {message}", file=sys.stderr)
        return TROUBLE


def parser(command: str = "-") -> Parser:
    """The parser of a command of ``flat-tokens``, or of all."""
    about = "Look inside tokenized datasets, of flat-tokens and of its neighbours' formats, and turn one into another."
    return program("flat-tokens", about, STATUS, FAMILIES, command)


ANY_DATASET = "a dataset, a build's output, one split, a token shard, or files of another format; a local path or a URL"

WRITING_ONLY = (
    *("tokens_per_file", "tokens_per_shard", "tokens_per_row_group", "tokens_per_batch", "size_limit", "drop_last"),
    *("compression", "name", "tokenizer", "closing", "generation", "vocabulary_size", "inner_end_of_text"),
)
"""Options of formats that have no effect on reading."""
READING_ONLY = ("sequence", "ignore_offsets", "max_index_bytes", "bytes_type", "labels")
"""Options of formats that have no effect on writing."""

FORMAT_OPTION = "format_option_"


class Parser(argparse.ArgumentParser):
    """The parser of a program or of a command. A mistake is one line, with the nearest name, and status 2."""

    def error(self, message: str) -> NoReturn:
        end = "" if message.endswith(("?", ".")) else "."
        self.exit(TROUBLE, terminal.line(f"{self.prog}: {message}{end} {self.prog} --help shows all") + "\n")

    def parse_known_args(self, *given: Any) -> Any:  # type: ignore[override]
        options, others = super().parse_known_args(*given)
        for other in others:
            near = nearest(other.partition("=")[0], self._option_string_actions) if other.startswith("-") else None
            self.error(f"there is no argument {other!r}." + (f" Did you mean {near!r}?" if near else ""))
        return options, others

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, f"there is no {value!r}. {did_you_mean(str(value), map(str, action.choices))}")


def program(name: str, about: str, status: str, families: Mapping[str, Sequence[str]], command: str = "-") -> Parser:
    """The parser of a program's command, or of all. *families*: modules, and the commands that each adds. The modules of other
    commands are not imported: that would take longer than many commands do.
    """
    top = Parser(prog=name, description=about, epilog=status, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--version", action="version", version=f"flat-tokens {__version__}")
    top.set_defaults(parser=partial(program, name, about, status, families))
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    known = {one for names in families.values() for one in names}
    for module, names in families.items():
        if command not in known and not command.startswith("-"):
            for one in names:
                commands.add_parser(one)
        elif command in names or command not in known:
            importlib.import_module(module).add_commands(commands)
    for added in commands.choices.values():
        added.epilog = f"{added.epilog}\n{status}"
    return top


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], Any], about: str, examples: str, listed: str = "", **kinds: Any
) -> Parser:
    """Add a command with the options that all have, and the arguments *listed*, as `add_listed` takes them. Its help has a
    description, examples and the exit statuses.
    """
    command: Parser = commands.add_parser(
        name,
        help=about,
        description=f"{about[0].upper()}{about[1:]}.",
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=run)
    add_listed(command, f"--quiet --color --json\n{listed}", **kinds)
    return command


def existing_place(text: str) -> str:
    """A URL, or a path at which something is."""
    try:
        if "://" in text or kind_of(text) is not None:
            return text
        near = nearest_file(Path(text))
    except OSError as error:
        raise argparse.ArgumentTypeError(terminal.one_line(error)) from error
    is_file = near or Path(text).suffix
    raise argparse.ArgumentTypeError(f"there is nothing at {text}.{near}" if is_file else str(no_dataset(Store.at(text))))


def existing_prefix(text: str) -> str:
    """A URL, or a path at which something is, or with which the names of files begin."""
    above, name = os.path.split(text)
    with contextlib.suppress(OSError):
        if name and any(one.startswith(name) for one in os.listdir(above or ".")):
            return text
    return existing_place(text)


def write_file(path: str, text: str) -> str:
    """Write a file at a path or URL. Returns a sentence that says so. ValueError for a device or a pipe."""
    if kind_of(path) == "special":
        raise ValueError(f"{path}: is a device or a pipe. Name a file")
    directory, name = posixpath.split(path)
    Store.at(directory or ".").put(name, text.encode())
    return f"wrote {path}"


def option(text: str) -> tuple[str, Any]:
    """A format's option: its value is JSON if it is JSON, else text."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def source_place(text: str) -> tuple[str, str]:
    """The name of a source, and the place of its dataset."""
    name, _, path = text.partition("=")
    if not name or not path:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PATH")
    return name, path


def whole(text: str) -> int:
    """A whole number, whose digits may be grouped: ``1_000`` or ``1,000``."""
    try:
        return int(text.replace("_", "").replace(",", ""))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def at_least(least: int) -> Callable[[str], int]:
    """The argument type of whole numbers from *least* up."""

    def parse(text: str) -> int:
        if (value := whole(text)) < least:
            raise argparse.ArgumentTypeError(f"{value} is below {least}")
        return value

    return parse


TYPES: dict[str, Callable[[str], Any]] = {"N": at_least(0), "KEY=VALUE": option, "NAME=PATH": source_place}
"""Types of values, by the words that stand for them in help. Other values are texts."""

SHARED = """
--option KEY=VALUE...  an option of the format, such as end_of_text=50256 to find the documents again in streams of tokens
--tokenizer NAME_OR_FILE  decode with this one instead of the one in the manifest: a tiktoken encoding, bytes, a .tiktoken file,
 a tokenizer.json, tekken.json or .model file, its directory, or a repository of the hub
--pattern REGEX_OR_NAME  with a .tiktoken file, to encode too: the pattern that splits text, or the tiktoken encoding whose it is
--source PATH...  a directory or URL below which source files are looked for, or such a file; may be given several times
--trust-records  read sources and the tokenizer where the dataset's own records say: any path of this machine, URLs, the hub. For
 datasets whose makers you trust
--at NAME=PATH...  with a ledger: the dataset of source NAME is at this path or URL now; may be given several times
--color {auto,always,never}  colours; auto: on a terminal, unless NO_COLOR is set (default: auto)
--quiet  no progress: warnings, errors and the result alone
--json  the result as JSON on standard output
"""


def add_listed(parser: Any, text: str, **kinds: Any) -> None:
    """Add the arguments that *text* lists as help shows them, such as ``--split NAME  count this split alone``, one a line. A
    line that begins with a space continues the one before.

    After a value, ``...`` is for several, ``!`` for one that is needed, ``?`` for one that may be missing. ``{a,b}`` are choices,
    ``(default: WORD)`` is the default. ``name=VALUE`` and ``--flag=name VALUE`` have another name in the result. Lines after
    ``|`` exclude each other, of those after ``|!`` one is needed. Flags alone are those of SHARED. *kinds*: types, or choices,
    by names in the result.
    """
    group = None
    for line in text.strip().replace("\n ", " ").splitlines():
        left, _, about = line.partition("  ")
        if not about:
            add_shared(parser, *left.split())
            continue
        owner = parser
        if left.startswith("|"):
            owner = group = group or parser.add_mutually_exclusive_group(required=left.startswith("|!"))
        flag, _, value = left.lstrip("|! ").partition(" ")
        flag, _, name = flag.partition("=")
        if not (is_flag := flag.startswith("--")):
            flag, name, value = flag.lower(), flag.lower(), name or flag
        name, metavar = name or flag.strip("-").replace("-", "_"), value.rstrip(".!?")
        settings: dict[str, Any] = {"help": about.replace("%", "%%"), **({"dest": name} if is_flag else {})}
        if value:
            kind, default = kinds.get(name, TYPES.get(metavar)), re.search(r"\(default: (\w+)[;)]", about)
            choices = metavar[1:-1].split(",") if metavar.startswith("{") else None if callable(kind) else kind
            settings |= {"metavar": None if metavar.startswith("{") else metavar, "choices": choices}
            settings["type"] = parse = kind if callable(kind) else str
            if default:
                settings["default"] = parse(default[1])
            if value.endswith("?"):
                settings["nargs"] = "?"
            if value.rstrip("!?").endswith("..."):
                settings |= {"action": "append", "default": []} if is_flag else {"nargs": "*" if "nargs" in settings else "+"}
            settings |= {"required": True} if value.endswith("!") else {}
        else:
            settings["action"] = "store_true"
        owner.add_argument(flag, **settings)


def add_shared(parser: Any, *flags: str) -> None:
    """Add arguments of `SHARED`, and ``--format``, in the order given."""
    listed = {line.split()[0]: line for line in SHARED.strip().replace("\n ", " ").splitlines()}
    for flag in flags:
        kinds = {}
        if flag == "--format":
            from flat_tokens.formats import FLAT_TOKENS, FORMATS  # every format's module, which most commands do without

            kinds["format"] = known = (FLAT_TOKENS, *FORMATS)
            listed[flag] = f"{flag} NAME  the format, where the content does not tell: {', '.join(known)}"
        add_listed(parser, listed[flag], **kinds)


def format_list() -> str:
    """The formats and what each is, for the help of a command."""
    from flat_tokens.formats import FORMATS  # see above

    return "formats:\n" + "\n".join(f"  {name:14} {entry.summary}" for name, entry in FORMATS.items())


def add_option_flags(parser: argparse.ArgumentParser, except_for: Collection[str]) -> None:
    """Add a flag for each option of any format, except those that the command does not use: ``--end-of-text`` for
    ``end_of_text``.
    """
    from flat_tokens.formats import FORMATS  # see above

    owners: dict[str, list[str]] = {}
    for name, entry in FORMATS.items():
        for field in fields(entry.options):
            if field.name not in except_for:
                owners.setdefault(field.name, []).append(name)
    group = parser.add_argument_group("options of the formats")
    for option, formats in owners.items():
        kind = FORMATS[formats[0]].options
        about = f"{', '.join(formats)}: {description(kind, option)}".replace("%", "%%")
        flag = f"--{option.replace('_', '-')}"
        group.add_argument(flag, dest=f"{FORMAT_OPTION}{option}", help=about, **typed(kind, option))


def given_options(options: argparse.Namespace) -> dict[str, Any]:
    """The formats' options on the command line."""
    named = {name: value for name, value in vars(options).items() if name.startswith(FORMAT_OPTION) and value is not None}
    return {name.removeprefix(FORMAT_OPTION): value for name, value in named.items()}


def description(kind: type[Any], option: str) -> str:
    """The description of an option, in the docstring of an options class or of its bases."""
    for owner in kind.__mro__:
        said = " ".join((owner.__doc__ or "").split())
        if found := re.search(rf"``{option}``: (.*?)(?= ``\w+``: |$)", said):
            return found[1].replace("``", "").rstrip(".")
    return option.replace("_", " ")


def typed(kind: type[Any], option: str) -> dict[str, Any]:
    """The settings of an option's flag, by its type without None."""
    of = get_type_hints(kind)[option]
    if get_origin(of) not in (Literal, tuple):
        of = next((part for part in get_args(of) if part is not type(None)), of)
    if get_origin(of) is tuple:
        return {"action": "append", "metavar": "TEXT"}
    if get_origin(of) is Literal:
        return {"choices": get_args(of), "type": type(get_args(of)[0])}
    if of is bool:
        is_flag = get_type_hints(kind)[option] is bool
        return {"action": "store_true" if is_flag else argparse.BooleanOptionalAction, "default": None}
    return {"type": whole if of is int else of, "metavar": {int: "N", float: "F"}.get(of, "TEXT")}


def corpus_of(options: argparse.Namespace, path: str | None = None) -> Corpus:
    from flat_tokens.tools.corpus import open_corpus  # see above

    return open_corpus(options.path if path is None else path, options.format, dict(options.option))


def vocabulary_for(corpus: Corpus, options: argparse.Namespace) -> Vocabulary | None:
    from flat_tokens.tools.corpus import vocabulary_of  # see above

    return vocabulary_of(corpus, options.tokenizer, options.pattern, warn, options.trust_records)


def vocabulary_if_any(corpus: Corpus, options: argparse.Namespace) -> tuple[Vocabulary | None, str | None]:
    """The vocabulary, or the reason why that of the dataset cannot be had. One named on the command line must be there."""
    try:
        return vocabulary_for(corpus, options), None
    except (ValueError, ModuleNotFoundError) as error:
        if options.tokenizer is not None:
            raise
        return None, str(error)


def warn(message: str) -> None:
    print(terminal.line(f"flat-tokens: {message}"), file=sys.stderr)


COMPLETION = """
shell={bash,zsh,fish}  the shell that completes command lines
--command=called NAME  the name it is called by, such as that of an alias
"""


def add_commands(commands: Any) -> None:
    """Add ``completion``: the script by which a shell completes a command line, made from the program's own parser."""
    examples = """\
examples:
  eval "$(%(prog)s bash)"          in ~/.bashrc
  eval "$(%(prog)s zsh)"           in ~/.zshrc, after compinit
  %(prog)s fish | source           in ~/.config/fish/config.fish
"""
    about = "print a script that completes commands and options in bash, zsh or fish"
    add_command(commands, "completion", complete, about, examples, COMPLETION)


def complete(options: argparse.Namespace) -> int:
    every = options.parser()
    every.prog = options.called or every.prog
    script = str(extra("shtab", "completion").complete(every, options.shell))
    terminal.show(options, {"script": script}, script.splitlines())
    return SAME
