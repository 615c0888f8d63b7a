"""What a disk may hold after the power was lost: the operations that `inject.Watch` recorded, replayed up to any of them.

A file's bytes are on the disk when the file was synced, and a name is there, or gone, when its directory was. All else may or may
not have reached the disk, so that one moment has several outcomes; `Disk.state` gives three of them: nothing that was not
synced (``dropped``), all names but no bytes that were not synced (``names``, as file systems that keep a journal of names alone
leave it), and each of both at random (``random``). Renaming is one step: a directory is never at two
places.
"""

import os
import random
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tests.faults.support import entries

OUTCOMES = ("dropped", "names", "random")
Tree = dict[str, bytes | str | None]
"""Names below the root: a file's bytes, a symbolic link's target, None for a directory."""


class Node:
    """A file, directory or symbolic link, as programs see it and as the disk has it."""

    def __init__(self, kind: Literal["file", "directory", "link"], target: str = "") -> None:
        self.kind, self.target = kind, target
        self.data, self.synced = bytearray(), b""
        self.names: dict[str, Node] = {}
        self.synced_names: dict[str, Node] = {}

    def sync(self) -> None:
        self.synced, self.synced_names = bytes(self.data), dict(self.names)


class State(NamedTuple):
    """A tree that a loss of power may leave. ``digest`` is equal for equal trees."""

    outcome: str
    tree: Tree
    digest: int


class Disk:
    """A directory whose content was on the disk when the recording began."""

    def __init__(self, root: Path) -> None:
        self._nodes: dict[int, Node] = {}
        self._root = self._load(root)

    def _load(self, path: Path) -> Node:
        status = path.lstat()
        if path.is_symlink():
            node = Node("link", os.readlink(path))
        elif path.is_dir():
            node = Node("directory")
            node.names = {child.name: self._load(child) for child in path.iterdir()}
        else:
            node = self._nodes.get(status.st_ino) or Node("file")
            node.data = bytearray(path.read_bytes())
        node.sync()
        self._nodes[status.st_ino] = node
        return node

    def apply(self, operation: tuple[Any, ...]) -> None:
        match operation:
            case ("create", parent, name, number):
                self._nodes[number] = self._nodes[parent].names[name] = Node("file")
            case ("mkdir", parent, name, number):
                self._nodes[number] = self._nodes[parent].names[name] = Node("directory")
            case ("symlink", parent, name, target):
                self._nodes[parent].names[name] = Node("link", target)
            case ("link", parent, name, number):
                self._nodes[parent].names[name] = self._nodes[number]
            case ("write", number, at, data):
                node = self._nodes[number]
                node.data.extend(bytes(max(at - len(node.data), 0)))
                node.data[at : at + len(data)] = data
            case ("truncate", number, size):
                node = self._nodes[number]
                node.data.extend(bytes(max(size - len(node.data), 0)))
                del node.data[size:]
            case ("rename", parent, name, new_parent, new_name):
                self._nodes[new_parent].names[new_name] = self._nodes[parent].names.pop(name)
            case ("unlink", parent, name):
                del self._nodes[parent].names[name]
            case ("sync", number):
                self._nodes[number].sync()
            case _:
                raise NotImplementedError(operation)

    def state(self, outcome: str, seed: int) -> State:
        tree = self._tree(outcome, random.Random(seed))
        return State(outcome, tree, hash(frozenset(tree.items())))

    def _tree(self, outcome: str, chance: random.Random) -> Tree:
        tree = {}
        places = {}

        def put(node: Node, path: str, is_live: bool) -> None:
            if node.kind == "link":
                tree[path] = node.target
            elif node.kind == "file":
                live = outcome == "random" and chance.random() < 0.5
                tree[path] = bytes(node.data) if live else node.synced
            else:
                # A directory that was moved, where only the new place, or only the old one, was synced, is at one of them.
                if id(node) in places:
                    other, other_is_live = places[id(node)]
                    if other_is_live or not is_live:
                        return
                    for name in [name for name in tree if name == other or name.startswith(f"{other}/")]:
                        del tree[name]
                places[id(node)] = path, is_live
                tree[path] = None
                now = {"dropped": node.synced_names, "names": node.names}.get(outcome)
                if now is None:
                    now = {
                        name: kept[name]
                        for name in sorted({*node.names, *node.synced_names})
                        if name in (kept := node.names if chance.random() < 0.5 else node.synced_names)
                    }
                for name, child in sorted(now.items()):
                    put(child, f"{path}/{name}" if path else name, node.names.get(name) is child)

        put(self._root, "", True)
        del tree[""]
        return tree


def write_tree(tree: Tree, root: Path) -> None:
    """Make a state real, in a new directory."""
    root.mkdir()
    for name, content in sorted(tree.items()):
        path = root / name
        if content is None:
            path.mkdir()
        elif isinstance(content, str):
            path.symlink_to(content)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(0o600)  # a key is nobody else's
            path.write_bytes(content)


def tree_of(root: Path) -> Tree:
    """What is below a directory."""
    return {
        name: os.readlink(entry.path) if entry.is_symlink() else None if entry.is_dir() else Path(entry.path).read_bytes()
        for name, entry in entries(root)
    }
