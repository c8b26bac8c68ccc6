"""What VMs are and do, as `pvisor vm` shows it: `vm ls`, and the commands that start some."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from cli.common import Settings, age, human_bytes, output_options, table

if TYPE_CHECKING:
    from vmm.record import VmRecord
    from vmm.survey import VmStatus
    from vmm.vms import Vms


def describe(status: VmStatus) -> dict[str, Any]:
    """What `ls --json` and the commands that make VMs show of one."""
    record = status.record
    return {
        "name": record.name,
        "state": status.state,
        "detail": status.detail,
        "image": record.image,
        "image_name": record.image_name or None,
        "memory_bytes": record.memory_bytes,
        "cpus": record.cpus,
        "disk_bytes": record.disk_bytes,
        "network": record.network,
        "created_at": record.created_ns // 1_000_000_000,
        "snapshot": record.snapshot or None,
        "snapshot_name": record.snapshot_name or None,
        "pid": status.pid,
        "private_bytes": status.private_bytes,
    }


def show(settings: Settings, vms: Vms, name: str) -> None:
    """One VM that was just started: its name."""
    if not settings.json_output:
        settings.emit(None, name)
        return
    from vmm.survey import status

    settings.emit(describe(status(vms, name)), name)


def show_all(settings: Settings, vms: Vms, records: Sequence[VmRecord]) -> None:
    """Some that were, each by its name on a line."""
    names = "\n".join(record.name for record in records)
    if not settings.json_output:
        settings.emit(None, names)
        return
    from vmm.survey import look

    settings.emit([describe(status) for status in look(vms, records)], names)


@click.command("ls", short_help="List VMs, and what they do.")
@output_options
def list_vms(settings: Settings) -> None:
    """List VMs: running, parked, damaged, or ended and why.

    PRIVATE is the memory that only this VM has: a parked one has none.

    \b
    Example:
      pvisor vm ls
    """
    from vmm.survey import survey
    from vmm.vms import Vms

    vms = Vms(settings.config)
    found = survey(vms)

    def text() -> str:
        now = time.time()
        rows = [
            [
                status.name,
                status.state,
                status.record.image_name or status.record.image[:12] or "-",
                age(now - status.record.created_ns / 1e9) if status.record.created_ns else "-",
                human_bytes(status.record.memory_bytes) if status.record.memory_bytes else "-",
                human_bytes(status.private_bytes) if status.pid is not None else "-",
                status.record.snapshot_name or status.record.snapshot[:12] or "-",
                status.detail,
            ]
            for status in found
        ]
        return table(["VM", "STATE", "IMAGE", "AGE", "MEMORY", "PRIVATE", "SNAPSHOT", ""], rows)

    settings.emit([describe(status) for status in found], text)
