"""Which files that were deleted and added are one file that was renamed."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from stage.edits.layer import origin
from stage.edits.tree import Node, Tree, split, vanished

# Larger files are not read to find out whether they are the same.
_READ_LIMIT_BYTES = 256 << 20


def renamed(
    deleted: Mapping[bytes, Node], added: Mapping[bytes, Node], *, upper: Tree, lower: Tree
) -> dict[bytes, bytes]:
    """The deleted path of each added one that is the same file: copied from it by overlayfs, or of the same bytes.

    The first holds when the file was changed as well. Directories, and files that are empty or very large, are not told
    by their content.
    """
    old = {path: node for path, node in deleted.items() if not node.is_directory}
    new = {path: node for path, node in added.items() if not node.is_directory}
    found: dict[bytes, bytes] = {}
    if old and new:
        _match(found, _by_origin(old, new, upper, lower))
        taken = set(found.values())
        old = {path: node for path, node in old.items() if path not in taken and _has_bytes(node)}
        new = {path: node for path, node in new.items() if path not in found and _has_bytes(node)}
        _match(found, _by_content(old, new))
    return found


Candidates = Iterator[tuple[Sequence[bytes], Sequence[bytes]]]


def _match(found: dict[bytes, bytes], candidates: Candidates) -> None:
    """Pairs the deleted and added paths of each group: those with the same last name first, then in order."""
    for olds, news in candidates:
        names = {split(path)[1]: path for path in sorted(olds, reverse=True)}
        rest = []
        for path in sorted(news):
            same = names.pop(split(path)[1], None)
            if same is None:
                rest.append(path)
            else:
                found[path] = same
        taken = {found[path] for path in news if path in found}
        found.update(zip(rest, [path for path in sorted(olds) if path not in taken], strict=False))


def _by_origin(old: Mapping[bytes, Node], new: Mapping[bytes, Node], upper: Tree, lower: Tree) -> Candidates:
    names: dict[tuple[int, int], list[bytes]] = defaultdict(list)
    for path, node in old.items():
        names[node.device, node.inode].append(path)
    copies: dict[tuple[int, int], list[bytes]] = defaultdict(list)
    for path, node in new.items():
        if node.tree is lower:
            copies[node.device, node.inode].append(path)
        elif node.tree is upper:
            below = origin(upper, lower, node.location)
            if below is not None:
                copies[below.st_dev, below.st_ino].append(path)
    for key in names.keys() & copies.keys():
        kind = old[names[key][0]].type
        yield names[key], [path for path in copies[key] if new[path].type == kind]


def _by_content(old: Mapping[bytes, Node], new: Mapping[bytes, Node]) -> Candidates:
    sizes = {node.size_bytes for node in old.values()} & {node.size_bytes for node in new.values()}
    groups: dict[bytes, tuple[list[bytes], list[bytes]]] = defaultdict(lambda: ([], []))
    for side, nodes in enumerate((old, new)):
        for path, node in nodes.items():
            if node.size_bytes in sizes:
                digest = _digest(node)
                if digest is not None:
                    groups[digest][side].append(path)
    yield from groups.values()


def _has_bytes(node: Node) -> bool:
    return node.type == "file" and 0 < node.size_bytes <= _READ_LIMIT_BYTES


def _digest(node: Node) -> bytes | None:
    """None for a file that has vanished meanwhile."""
    try:
        with node.reading() as fd, open(fd, "rb", buffering=0, closefd=False) as file:
            return hashlib.file_digest(file, "blake2b").digest()
    except OSError as error:
        if vanished(error):
            return None
        raise
