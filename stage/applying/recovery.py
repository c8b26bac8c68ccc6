"""The end of an apply, reached by the apply itself or by whoever comes after a crash: undone, or finished.

Everything here can be cut off anywhere and begun again.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from dataclasses import replace
from pathlib import Path

from fuse import linux
from imaged.errors import FormatError
from stage.applying.history import UNKNOWN, Entry, Identity
from stage.applying.ledger import Journal, Ledger
from stage.applying.steps import Kept, Steps, below
from stage.applying.workspace import held, is_same
from stage.edits.names import quoted
from stage.edits.tree import Node, Tree, absent, split
from stage.errors import StageBusyError, StageError
from stage.hostpath import HostTree, empty, listing

_log = logging.getLogger(__name__)
_REDIRECT = "trusted.overlay.redirect"
REMEDIES = {
    errno.ENOSPC: "make space on its file system, or on that of PVISOR_HOME",
    errno.EDQUOT: "make space on its file system, or on that of PVISOR_HOME",
    errno.EROFS: "mount it so that it can be written",
    errno.EPERM: "the file or its directory may be immutable: see lsattr",
    errno.EACCES: "see who may write there",
}
_UNWRITABLE = {errno.EROFS, errno.EPERM, errno.EACCES}


def recover(directory: Path) -> bool:
    """What a crash left of an apply of the stage with this ledger; waits for one that is under way.

    Whether it is left still, where the workspace can not be written: that is logged, and in nobody's way but the next
    apply's. Costs two look-ups when there is nothing. StageError.
    """
    ledger = Ledger(directory)
    found = ledger.journal() if ledger.unfinished() else None
    if found is None:
        return False
    journal = found[0]
    try:
        with held(Path(journal.workspace), journal.base) as tree:
            resume(ledger, tree)
    except OSError as error:
        _log.error("%s", unfinished(journal, error).message)
        return True
    except StageBusyError:
        raise
    except StageError as error:
        raise StageError(
            f"an apply is unfinished: {error.message}",
            hint=f"{error.hint}; or remove {ledger.directory} to leave the workspace as it is",
        ) from error
    return False


def unfinished(journal: Journal, error: OSError) -> StageError:
    """What it means that an apply can not be brought to its end."""
    place = f"{journal.workspace}/{_shown(journal.place_name)}"
    return StageError(
        f"an apply to {journal.workspace} is unfinished: {what_failed(error)}; what it has replaced, if anything, is in"
        f" {place}",
        hint=REMEDIES.get(error.errno or 0, "see what the kernel's log says of the disk") + ", then apply again",
    )


def what_failed(error: OSError) -> str:
    """The file, where it is known, and the reason."""
    name = error.filename
    where = f"{_shown(os.fsencode(name))}: " if isinstance(name, bytes | str) else ""
    return f"{where}{error.strerror}"


def recover_workspace(stages: Path, tree: HostTree, *, mine: Path) -> None:
    """What any stage has left unfinished in this workspace, held for the stage with the ledger `mine`.

    A damaged journal of another stage is that stage's, and does not say which workspace it is about.
    """
    here = os.fstat(tree.fd)
    for directory in sorted(stages.glob("*/apply")) if stages.is_dir() else ():
        ledger = Ledger(directory)
        try:
            found = ledger.journal() if ledger.unfinished() else None
        except FormatError as error:
            if directory == mine:
                raise
            _log.warning("stage %s has an apply that nobody can finish: %s", directory.parent.name, error.message)
            continue
        if found is not None and is_same(found[0].base, here):
            try:
                resume(ledger, tree)
            except OSError as error:
                raise unfinished(found[0], error) from error


def resume(ledger: Ledger, tree: HostTree) -> bool:
    """Brings the apply to its end, in the workspace that the caller holds; whether it is applied."""
    found = ledger.journal()
    if found is None:
        return False
    journal, committed = found
    place = _open_place(journal, tree)
    left: dict[int, Identity] = {}
    if place is not None:
        try:
            kept = () if committed else _undo(journal, tree, place)
            if committed:
                left = _remove_shared(journal, place)
            needed = any(item.number is not None for item in kept)
            if not needed:
                empty(place)
        finally:
            os.close(place)
        if kept:
            _tell(journal, kept)
        if not needed:
            os.rmdir(journal.place_name, dir_fd=tree.fd)
    elif not committed and journal.steps:
        _log.error(
            "an apply to %s can not be undone, since somebody has removed %s: compare the directory by hand",
            journal.workspace,
            _shown(journal.place_name),
        )
    if committed:
        _finish(ledger, journal, tree, left)
    else:
        _forget(ledger, journal, tree)
    ledger.close()
    return committed


def _open_place(journal: Journal, tree: HostTree) -> int | None:
    """The private directory, if it is there and is that one."""
    try:
        fd = linux.open_beneath(tree.fd, journal.place_name, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        if absent(error):
            return None
        raise
    if os.fstat(fd).st_ino == journal.place or (journal.place is None and not listing(fd)):
        return fd
    os.close(fd)
    return None


def _undo(journal: Journal, tree: HostTree, place: int) -> tuple[Kept, ...]:
    """Every step that was done, last first. Returns what could not be put back without losing what others wrote."""
    made = set(journal.made)

    def untouched(directory: int, name: bytes) -> bool:
        return all(found.st_ino in made and found.st_ctime_ns <= journal.made_ns for found in below(directory, name))

    steps = Steps(tree=tree, place=place, untouched=untouched)
    for step in reversed(journal.steps):
        steps.undo(step)
    linux.sync_file_system(place)
    return tuple(steps.kept)


def _tell(journal: Journal, kept: tuple[Kept, ...]) -> None:
    _log.error(
        "an apply to %s was undone, but for names that others have written meanwhile: %s",
        journal.workspace,
        ", ".join(
            _shown(item.path)
            + (f" (what was there before is {_shown(journal.place_name)}/{item.number})" if item.number else "")
            for item in kept
        ),
    )


def _shown(path: bytes) -> str:
    return quoted(path).decode()


def _remove_shared(journal: Journal, place: int) -> dict[int, Identity]:
    """Removes the old names of files that have others, too, by inode: with a name goes the ctime of the others."""
    shared = {identity.inode: identity for _, identity in journal.shared}
    left: dict[int, Identity] = {}
    with HostTree(os.dup(place)) as inside:
        pending = [b"."] if shared else []
        while pending:
            path = pending.pop()
            for name in inside.names(path):
                at = name if path == b"." else path + b"/" + name
                found = inside.stat(at)
                if found is not None and stat.S_ISDIR(found.st_mode):
                    pending.append(at)
                elif found is not None and found.st_ino in shared:
                    after = _remove(inside, at)
                    old = shared[found.st_ino]
                    if after.st_nlink and (after.st_size, after.st_mtime_ns) == (old.size_bytes, old.mtime_ns):
                        left[found.st_ino] = replace(old, ctime_ns=after.st_ctime_ns)
    return left


def _remove(tree: HostTree, path: bytes) -> os.stat_result:
    """Removes one name of a file; the file as it is then."""
    fd = tree.open_node(path)
    try:
        directory, name = tree.parent(path)
        os.unlink(name, dir_fd=directory)
        return os.fstat(fd)
    finally:
        os.close(fd)


def _finish(ledger: Ledger, journal: Journal, tree: HostTree, left: dict[int, Identity]) -> None:
    """Times, the stage's own view, and what the stage and the host have for each name from here on."""
    for path, mtime_ns in journal.times:
        _set_time(tree, path, mtime_ns)
    upper = ledger.directory.parent / "workspace-upper"
    if journal.redirected and upper.is_dir():
        with Tree(upper) as writes:
            for path in journal.redirected:
                _redirect(writes, path)
    applied = ledger.applied()
    applied.move(journal.moved)
    applied.files |= left
    missing = {identity.inode: identity for _, identity in journal.shared if identity.inode not in left}
    with Tree(Path(f"/proc/self/fd/{tree.fd}")) as host:
        for record in journal.records:
            found: Identity | None = None
            if record.host is not None:  # what others have written there since is theirs: the next apply meets it
                node = host.node(record.path)
                found = UNKNOWN
                if node is not None and _is_as(record.host, node):
                    found = Identity.of(node)
                    applied.keep(node)
            applied.entries[record.path] = Entry(stage=record.stage, host=found)
        for path in journal.touched:
            node = host.node(path)
            if node is not None:
                applied.touch(path, node)
        for path in [path for path, entry in applied.entries.items() if entry.host and entry.host.inode in missing]:
            node = host.node(path)  # its old names went with a crash in between: by those that are known
            if node is not None and node.inode in missing and _is_as(missing[node.inode], node):
                applied.touch(path, node)
    ledger.save(applied)


def _forget(ledger: Ledger, journal: Journal, tree: HostTree) -> None:
    """What went and came back is what it was, though the kernel has given it another ctime."""
    for path, mtime_ns in journal.parents:
        _set_time(tree, path, mtime_ns)
    applied = ledger.applied()
    with Tree(Path(f"/proc/self/fd/{tree.fd}")) as host:
        for path, old in [
            *((path, None) for path, _ in journal.parents),
            *((step.path, step.old) for step in journal.steps if step.old is not None),
            *journal.shared,
        ]:
            node = host.node(path)
            if node is not None and (old is None or _is_as(old, node)):
                applied.touch(path, node)
    ledger.save(applied)


def _is_as(known: Identity, node: Node) -> bool:
    """But for its ctime, which every step changes."""
    content = (node.size_bytes, node.mtime_ns) == (known.size_bytes, known.mtime_ns)
    return node.inode == known.inode and (content or node.is_directory)


def _set_time(tree: HostTree, path: bytes, mtime_ns: int) -> None:
    """Of a directory that is still there. One that has the time is not written, and nothing depends on it."""
    try:
        fd = tree.open_node(path)
    except OSError as error:
        if absent(error) or error.errno == errno.EXDEV:
            return
        raise
    try:
        found = os.fstat(fd)
        if stat.S_ISDIR(found.st_mode) and found.st_mtime_ns != mtime_ns:
            os.utime(f"/proc/self/fd/{fd}", ns=(found.st_atime_ns, mtime_ns))
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        _log.warning("%s keeps another modification time than it had: %s", _shown(path), error.strerror)
    finally:
        os.close(fd)


def _redirect(writes: Tree, path: bytes) -> None:
    """The stage shows a directory over what lies below it elsewhere, which has moved to the same place here."""
    parent, name = split(path)
    try:
        with writes.directory(parent) as fd:
            link = b"/proc/self/fd/%d/%s" % (fd, name)
            os.getxattr(link, _REDIRECT, follow_symlinks=False)
            os.setxattr(link, _REDIRECT, b"/" + path, follow_symlinks=False)
    except OSError as error:
        if not absent(error) and error.errno != errno.ENODATA:
            raise
