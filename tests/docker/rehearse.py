"""Run a Dockerfile's steps without a container engine: each stage in a copy of a bare root, as ``docker build`` would.

``rehearse.py --base BASE --scratch DIR [--bind DIR ...] [--env NAME ...]``, as root on Linux. BASE is a root directory in the
place of the pinned image, with ``python`` on its PATH; one of Debian's own is made by

    debootstrap --variant=minbase --include=python3.11,python3.11-venv,python3-pip,ca-certificates bookworm BASE
    ln -s python3.11 BASE/usr/bin/python

--bind and --env give RUN steps what this machine's pip needs to reach its package index. The last stage is left at DIR/image, and
``--then COMMAND ...`` runs a command in it as the image would: its user, environment and working directory, its root read-only
but for the volumes and /tmp.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # a checkout is not installed

from tests.docker.dockerfile import Stage, read_stages

ROOT = Path(__file__).parents[2]


@dataclass
class Image:
    """A stage as far as it has come."""

    root: Path
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"})
    directory: str = "/"
    user: str = "0:0"
    volumes: tuple[str, ...] = ()

    def within(self, path: str) -> Path:
        """Where a path of the image is on this machine; relative ones are below its working directory."""
        return self.root / os.path.normpath(os.path.join(self.directory, path)).lstrip("/")


def ignored(context: Path) -> list[tuple[bool, re.Pattern[str]]]:
    """The rules of .dockerignore: whether each excludes, and what."""
    rules = []
    for line in (context / ".dockerignore").read_text("utf-8").splitlines():
        if line and not line.startswith("#"):
            pattern = re.escape(line.lstrip("!")).replace(r"\*\*/", "(?:.*/)?").replace(r"\*", "[^/]*")
            rules.append((not line.startswith("!"), re.compile(f"(?:{pattern})(?:/.*)?")))
    return rules


def context_files(context: Path) -> list[str]:
    """The files that a build sees. The last rule that fits a path decides."""
    rules = ignored(context)
    tops = [path for path in context.iterdir() if path.name not in (".git", ".venv")]
    found = [path for top in tops for path in (top.rglob("*") if top.is_dir() else [top])]
    names = sorted(path.relative_to(context).as_posix() for path in found if path.is_file())
    return [name for name in names if [excludes for excludes, rule in rules if rule.fullmatch(name)][-1:] != [True]]


def copy(words: list[str], image: Image, stages: dict[str, Image], context: Path) -> None:
    """COPY, in the forms that the Dockerfile uses: files to a directory, a directory to another, from an earlier stage."""
    source_root = None
    if words[0].startswith("--from="):
        source_root, words = stages[words[0].removeprefix("--from=")].root, words[1:]
    *sources, target = words
    seen = context_files(context)
    for source in sources:
        if source_root is not None:
            shutil.copytree(source_root / source.lstrip("/"), image.within(target), symlinks=True, dirs_exist_ok=True)
        elif source in seen:
            place = image.within(target) / Path(source).name if target.endswith("/") else image.within(target)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(context / source, place)
        else:
            below = [name for name in seen if name.startswith(f"{source}/")]
            if not below:
                raise FileNotFoundError(f"COPY {source}: nothing of that name is in the build's context")
            for name in below:
                place = image.within(target) / Path(name).relative_to(source)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(context / name, place)


def run(image: Image, command: list[str], binds: list[str], passed: dict[str, str], *, frozen: bool = False) -> int:
    """Run a command in an image's root, in mount and process namespaces of its own; frozen: as in a read-only container."""
    root = image.root
    mounts = [f'mount --bind "{root}" "{root}"', f'mount -t proc proc "{root}/proc"', f'mount --rbind /dev "{root}/dev"']
    for bind in [*binds, "/etc/resolv.conf"]:
        make = "mkdir -p" if Path(bind).is_dir() else "touch"
        mounts += [f'{make} "{root}{bind}"', f'mount --bind "{bind}" "{root}{bind}"']
    if frozen:
        mounts += [f'mount --bind "{root}{volume}" "{root}{volume}"' for volume in image.volumes]
        mounts += [f'mount -o remount,bind,ro "{root}"', f'mount -t tmpfs -o mode=1777 tmp "{root}/tmp"']
    inside = ["chroot", f"--userspec={image.user}", "--groups=", str(root), "/usr/bin/env", "-i", "-C", image.directory]
    settings = [f"{name}={value}" for name, value in {**passed, **image.environment}.items()]
    script = " && ".join([*mounts, 'exec "$@"'])
    outside = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-euc", script, "rehearse"]
    return subprocess.run([*outside, *inside, *settings, *command], check=False).returncode


def make(stage: Stage, stages: dict[str, Image], options: argparse.Namespace) -> Image:
    """Carry out a stage's instructions."""
    image = Image(options.scratch / (stage.name or "image"))
    shutil.rmtree(image.root, ignore_errors=True)
    image.root.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cp", "-a", str(options.base), str(image.root)], check=True)
    passed = {name: os.environ[name] for name in options.env}
    for instruction in stage.instructions:
        print(f"{instruction.name} {instruction.value}", flush=True)
        match instruction.name:
            case "WORKDIR":
                image.directory = instruction.value
                image.within(".").mkdir(parents=True, exist_ok=True)
            case "ENV":
                image.environment |= dict(word.split("=", 1) for word in instruction.words)
            case "USER":
                image.user = instruction.value
            case "VOLUME":
                image.volumes = tuple(instruction.words)
            case "COPY":
                copy(instruction.words, image, stages, ROOT)
            case "RUN":
                if status := run(image, ["/bin/sh", "-c", instruction.value], options.bind, passed):
                    raise SystemExit(f"RUN ended with status {status}: {instruction.value}")
            case "LABEL" | "EXPOSE" | "STOPSIGNAL" | "HEALTHCHECK" | "CMD":
                pass  # they say how an engine starts, stops and watches a container
            case _:
                raise SystemExit(f"{instruction.name} cannot be rehearsed. Add it to {Path(__file__).name}.")
    return image


def main() -> int:
    """Rehearse docker/Dockerfile; the status of --then, or 0."""
    parser = argparse.ArgumentParser(description=str(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="a root directory in the place of the pinned image")
    parser.add_argument("--scratch", type=Path, required=True, help="where the stages are made: some GB")
    parser.add_argument("--bind", action="append", default=[], help="a file or directory of this machine that RUN steps see")
    parser.add_argument("--env", action="append", default=[], help="a variable of this environment that RUN steps see")
    parser.add_argument("--then", nargs=argparse.REMAINDER, help="a command to run in the image")
    options = parser.parse_args()
    stages: dict[str, Image] = {}
    image = None
    for stage in read_stages():
        image = stages[stage.name] = make(stage, stages, options)
    assert image is not None
    print(f"image at {image.root}", flush=True)
    return run(image, options.then, [], {}, frozen=True) if options.then else 0


if __name__ == "__main__":
    sys.exit(main())
