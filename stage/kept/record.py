"""stage.json: what a stage was made from, and what its workspace was then."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from imaged.publish import published
from stage.errors import StageSetupError

# What the kernel stamps files with; the time module has no name for it.
_CLOCK_REALTIME_COARSE = 5
_TICKS = 25
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The workspace just before the stage first mounted it: what changed later has a ctime above `time_ns`.

    `device` and `inode` tell the directory from another one that took its place. `boot` and `booted_ns` are what
    `stage.applying.moment` has to say of the clock; 0 in what is older than these fields.
    """

    time_ns: int
    device: int
    inode: int
    boot: int = 0
    booted_ns: int = 0

    @classmethod
    def unpack(cls, fields: Mapping[str, Any]) -> Base:
        """Raises what wrong JSON does: KeyError, TypeError, ValueError."""
        return cls(
            time_ns=int(fields["time_ns"]),
            device=int(fields["device"]),
            inode=int(fields["inode"]),
            boot=int(fields.get("boot", 0)),
            booted_ns=int(fields.get("booted_ns", 0)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageInfo:
    """The image's id and the name it was asked by, and the workspace the stage was made for.

    `base` is None without a workspace, before its first mount, and in stages that are older than this field.
    """

    name: str
    image: str
    image_name: str = ""
    workspace: str | None = None
    created_at: int = 0
    base: Base | None = None


def new(name: str, image: str, image_name: str, workspace: Path | None) -> StageInfo:
    """Of a stage that is made at this moment."""
    where = str(workspace.absolute()) if workspace is not None else None
    return StageInfo(name=name, image=image, image_name=image_name, workspace=where, created_at=int(time.time()))


def based(info: StageInfo) -> StageInfo:
    """With the workspace as it is at this moment for base; the same when there is no such directory."""
    if info.workspace is None:
        return info
    try:
        found = Path(info.workspace).stat()
    except OSError:  # the launcher says so
        return info
    base = Base(time_ns=moment_ns(), device=found.st_dev, inode=found.st_ino, boot=boot(), booted_ns=booted_ns())
    return replace(info, base=base)


def boot() -> int:
    """A number that no other boot has, small enough for any reader of JSON."""
    return int(_BOOT_ID.read_text().replace("-", "")[:12], 16)


def booted_ns() -> int:
    """When this host was booted, by the clock as it is set: it moves when, and only when, somebody sets the clock."""
    first, up_ns, second = time.time_ns(), time.clock_gettime_ns(time.CLOCK_BOOTTIME), time.time_ns()
    return (first + second) // 2 - up_ns


def moment_ns() -> int:
    """The time of this call, told by the times of files: an earlier change never has a later ctime, a change that
    follows the return always has.

    File times come from a clock that stands still for some milliseconds at a time; this returns when it is past.
    """
    now_ns = time.clock_gettime_ns(time.CLOCK_REALTIME)
    tick_s = time.clock_getres(_CLOCK_REALTIME_COARSE)
    for _ in range(_TICKS):  # not for ever when someone sets the clock back
        if time.clock_gettime_ns(_CLOCK_REALTIME_COARSE) > now_ns:
            break
        time.sleep(tick_s / 4)
    return now_ns


def save(directory: Path, info: StageInfo) -> None:
    """Durable when it returns. OSError."""
    with published(directory / "stage.json") as stream:
        os.fchmod(stream.fileno(), 0o600)
        stream.write(json.dumps(asdict(info), indent=1).encode() + b"\n")


def load(directory: Path) -> StageInfo:
    """Raises StageSetupError when stage.json does not say what the stage is."""
    try:
        fields: dict[str, Any] = json.loads((directory / "stage.json").read_bytes())
        base = fields.get("base")
        return StageInfo(
            name=fields["name"],
            image=fields["image"],
            image_name=fields["image_name"],
            workspace=fields["workspace"],
            created_at=fields["created_at"],
            base=Base.unpack(base) if base is not None else None,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StageSetupError(
            f"stage {directory.name!r}: stage.json does not say what the stage is ({error})",
            hint=f"save what you need from upper and workspace-upper in {directory}, then"
            f" `pvisor stage drop {directory.name}`",
        ) from error
