"""The user's directories that have an image mounted on them, and the end of all mounts when the daemon ends.

A daemon that died leaves mounts whose uncached pages can not be read any more. `detach_all` takes them away, `restore`
brings the user's directories that it found mounted back once a daemon runs again.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fuse import linux, rundir
from fuse.errors import MountError
from fuse.imagemount import drop_leases, mount_image
from fuse.mountinfo import MountPoint, mount_at, mount_points
from imaged.config import Config
from imaged.errors import NotFoundError, PvisorError
from imaged.flock import try_lock

if TYPE_CHECKING:
    from fuse.node import Node, OpenImage

log = logging.getLogger(__name__)
_TABLE_VERSION = 1
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class UserMount:
    """A directory on which the user mounted an image. `device` tells this mount from others that are made there.

    `detached`: `detach_all` took it away, and it is to come back.
    """

    directory: str
    image: str
    name: str
    device: int
    detached: bool = False


class Released(NamedTuple):
    """The images that were unmounted, by id. Where something is in use: the user's directories, and in words the rest,
    and by whom.
    """

    images: list[str]
    directories: list[UserMount]
    busy: list[str]


def mount_user(config: Config, image: OpenImage, directory: Path) -> None:
    """Mount an image on a directory of the user's. MountError; NotFoundError when there is no such directory."""
    directory = _directory(directory)
    source = mount_image(config, image)
    with rundir.mounting(config):
        table = _read_table(config)
        held = table.get(str(directory))
        if held is not None and _is_mounted(held):
            if held.image == image.id:
                return
            hint = f"`pvisor umount {directory}` first"
            raise MountError(f"mount on {directory}: image {held.name} is mounted there", errno.EBUSY, hint=hint)
        entry = UserMount(str(directory), image.id, image.name, source.stat().st_dev)
        linux.mount(source, directory, flags=linux.MS_BIND)
        try:
            _write_table(config, {**table, entry.directory: entry})
        except BaseException:
            linux.umount(directory, linux.MNT_DETACH)
            raise


def umount_user(config: Config, directory: Path) -> None:
    """Undo `mount_user`. NotFoundError when nothing was mounted there by it; MountError when it is in use or hidden."""
    directory = directory.resolve()
    if not config.run.is_dir():
        raise _not_mounted(directory)
    with rundir.mounting(config):
        table = _read_table(config)
        entry = table.pop(str(directory), None)
        if entry is None:
            raise _not_mounted(directory)
        if _is_mounted(entry):
            _umount_idle(directory)
        _write_table(config, table)


def user_mounts(config: Config) -> list[UserMount]:
    """The user's directories, whether or not they are mounted just now."""
    return list(_read_table(config).values())


def release_all(config: Config) -> Released:
    """Unmount every image, or none when one is in use. The leases of this process end here.

    A directory of the user's counts as a use. Only a use that begins in this very moment can leave some unmounted; then
    `images` has them, for `mount_again`.
    """
    drop_leases()
    released: list[str] = []
    directories: list[UserMount] = []
    busy: list[str] = []
    with rundir.mounting(config), contextlib.ExitStack() as leases:
        for entry in user_mounts(config):
            try:
                if _is_mounted(entry):
                    directories.append(entry)
            except MountError as error:
                busy.append(error.message)
        targets = [mount.path for mount in mount_points() if mount.path.parent == config.images]
        found = (_in_use(config, target, leases) for target in dict.fromkeys(targets))
        busy += [reason for reason in found if reason is not None]
        if not directories and not busy:
            try:
                for target in targets:
                    linux.umount(target)
                    released.append(target.name)
            except MountError as error:
                busy.append(error.message)
    return Released(released, directories, busy)


def release_unnamed(config: Config, named: Collection[str]) -> list[str]:
    """Unmount the images that are mounted for nobody in particular, but for those in `named`; which these are."""
    released: list[str] = []
    if not config.run.is_dir():
        return released
    with rundir.mounting(config), contextlib.ExitStack() as leases:
        kept = {*named, *(entry.image for entry in user_mounts(config))}
        targets = [mount.path for mount in mount_points() if mount.path.parent == config.images]
        for target in dict.fromkeys(targets):
            if target.name not in kept and _in_use(config, target, leases) is None:
                with contextlib.suppress(MountError):
                    linux.umount(target)
                    released.append(target.name)
    return released


def _in_use(config: Config, target: Path, leases: contextlib.ExitStack) -> str | None:
    """What keeps an image mounted; when nothing does, `leases` gets its lease, so that nobody begins to use it."""
    from imaged.chunkstore.storelock import holders

    lease = os.open(rundir.lease_path(config, target.name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    leases.callback(os.close, lease)
    if not try_lock(lease):
        pids = ", ".join(map(str, holders(os.fstat(lease)))) or "unknown"
        return f"image {target.name[:12]}: process {pids}"
    try:
        # The first such call unmounts nothing: it says whether it could. To look at the mount takes its mark away.
        _touch(target)
        linux.umount(target, linux.MNT_EXPIRE)
    except MountError as error:
        if error.errno != errno.EAGAIN:
            return f"image {target.name[:12]}: {os.strerror(error.errno)}"
    finally:
        _touch(target)
    return None


def _touch(target: Path) -> None:
    os.close(os.open(target, os.O_PATH | os.O_CLOEXEC))


def mount_again(config: Config, node: Node, images: Iterable[str]) -> None:
    """Mount images that `release_all` unmounted, for nobody in particular."""
    for image in images:
        try:
            mount_image(config, node.open_image(image))
        except (PvisorError, OSError) as error:
            log.warning("mount image %s again: %s", image[:12], error)
    drop_leases()


def forget_all(config: Config, images: Iterable[str]) -> None:
    """Once the daemon has ended: the directories these images were on, and the user's that wait to be mounted again.

    Not earlier: to remove a directory takes the mount away that another mount namespace has on it.
    """
    with rundir.mounting(config):
        _write_table(config, {})
        for image in images:
            with contextlib.suppress(OSError):
                (config.images / image).rmdir()


def detach_all(config: Config) -> None:
    """Take away the daemon's mount and all that stands on it, in use or not.

    For what a dead daemon left, so nothing here may read a file on these mounts. The table then has the directories
    that were mounted, for `restore`, and those that are hidden under another mount: their time comes later.
    """
    if not config.run.is_dir():
        return
    with rundir.mounting(config):
        table = {}
        for entry in _read_table(config).values():
            try:
                if _is_mounted(entry):
                    _detach(Path(entry.directory))
                    table[entry.directory] = replace(entry, detached=True)
                elif entry.detached:
                    table[entry.directory] = entry
            except MountError as error:
                log.warning("%s", error.message)
                table[entry.directory] = entry
        _write_table(config, table)
        for mount in reversed(mount_points()):
            if mount.path == config.blocks or mount.path.parent == config.images:
                with contextlib.suppress(MountError):
                    _detach(mount.path)


def _detach(path: Path) -> None:
    log.info("unmounting %s", path)
    linux.umount(path, linux.MNT_DETACH | linux.UMOUNT_NOFOLLOW)


def restore(config: Config, node: Node, entries: Iterable[UserMount]) -> list[str]:
    """Mount the user's directories again; what could not be, in words. Entries in the table stay, for the next time."""
    failures = []
    for entry in entries:
        try:
            mount_user(config, node.open_image(entry.image), Path(entry.directory))
        except (PvisorError, OSError) as error:
            log.warning("mount %s on %s again: %s", entry.name, entry.directory, error)
            failures.append(f"{entry.directory}: {error}")
    return failures


def _is_mounted(entry: UserMount) -> bool:
    """Whether the mount we made is still there. MountError when another one hides it: unmounting would hit that one."""
    if not any(_is_ours(mount, entry) for mount in mount_points()):
        return False
    top = mount_at(Path(entry.directory))
    if top is not None and _is_ours(top, entry):
        return True
    above = f"{top.fstype} on {top.path}" if top is not None else "another mount"
    hint = "unmount that first"
    raise MountError(f"image {entry.name} on {entry.directory} is hidden by {above}", errno.EBUSY, hint=hint)


def _is_ours(mount: MountPoint, entry: UserMount) -> bool:
    return str(mount.path) == entry.directory and mount.device == entry.device


def _umount_idle(directory: Path) -> None:
    try:
        linux.umount(directory)
    except MountError as error:
        if error.errno != errno.EBUSY:
            raise
        hint = f"end the processes that use it; `fuser -vm {directory}` lists them"
        raise MountError(f"unmount {directory}", errno.EBUSY, hint=hint) from error


def _directory(path: Path) -> Path:
    try:
        resolved = path.resolve(strict=True)
    except OSError as error:
        raise NotFoundError(f"mount on {path}: {error.strerror}", hint="make the directory first") from error
    if not resolved.is_dir():
        raise NotFoundError(f"mount on {path}: not a directory", hint="give a directory")
    return resolved


def _not_mounted(directory: Path) -> NotFoundError:
    return NotFoundError(f"no image is mounted on {directory}", hint="`pvisor mount NAME DIR` mounts one")


def _read_table(config: Config) -> dict[str, UserMount]:
    """By directory. What an earlier boot or a torn write left counts as no table."""
    try:
        document: Any = json.loads(rundir.table_path(config).read_bytes())
        if document["version"] != _TABLE_VERSION or document["boot_id"] != _BOOT_ID.read_text().strip():
            return {}
        return {row["directory"]: UserMount(**row) for row in document["mounts"]}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError) as error:
        log.warning("mount table %s: %s", rundir.table_path(config), error)
        return {}


def _write_table(config: Config, table: dict[str, UserMount]) -> None:
    """Replace it atomically; the caller holds `rundir.mounting`."""
    path = rundir.table_path(config)
    if not table and not path.exists():
        return
    rows = [asdict(entry) for entry in table.values()]
    temporary = path.with_name(path.name + ".tmp")
    boot_id = _BOOT_ID.read_text().strip()
    temporary.write_text(json.dumps({"version": _TABLE_VERSION, "boot_id": boot_id, "mounts": rows}, indent=1))
    temporary.replace(path)
