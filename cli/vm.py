"""`pvisor vm`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from cli.arguments import OPTIONS_FIRST, memory_size, own_command
from cli.common import Settings, command_options, output_options, warn
from cli.progress import progress
from cli.signals import ending_in_order
from cli.vmexec import NameFirst, console, execute, follow, kill, ps, workload_options
from cli.vmlist import list_vms, show, show_all
from vmm.workload import WorkloadOptions

if TYPE_CHECKING:
    from fuse.node import OpenImage
    from vmm.record import VmRecord


@click.group(short_help="Run, park, resume and fork virtual machines.")
def vm() -> None:
    """Virtual machines over images: run, parked as snapshots, resumed and forked from them.

    \b
    Examples:
      pvisor vm run --name build debian:12
      pvisor vm exec build -- sh -c 'echo work > /root/file'
      pvisor vm park build
      pvisor vm fork build -n 4
      pvisor vm run debian:12 -- cat /etc/os-release
    """


def network_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """--net of the commands that start a VM which has an interface already, or has none."""
    option = click.option(
        "--net",
        "network",
        type=click.Choice(["none", "user"]),
        help="user: outgoing connections through this host. As it was when not given; none for a pulled snapshot.",
    )
    return option(function)


def _warn_of_network(records: Sequence[VmRecord], asked: str | None) -> None:
    for record in records:
        if record.network == "restricted" and asked is None:
            warn(
                f"VM {record.name}: its snapshot was made with a network, which leads nowhere here; "
                "--net user gives it this host's"
            )


@vm.command(cls=NameFirst, context_settings=OPTIONS_FIRST, short_help="Boot a VM, and run a command in it.")
@click.option("--name", "vm_name", metavar="VM", help="What to call it; the next free name when not given.")
@click.option(
    "--memory", "memory_bytes", default="512M", show_default=True, callback=memory_size, metavar="SIZE", help="Its RAM."
)
@click.option("--cpus", type=click.IntRange(1, 64), default=1, show_default=True, metavar="N", help="Its processors.")
@click.option(
    "--disk", "disk_bytes", callback=memory_size, metavar="SIZE", help="Keep its writes on a disk, not in its RAM."
)
@click.option(
    "--net",
    "network",
    type=click.Choice(["none", "user"]),
    default="none",
    show_default=True,
    help="user: outgoing connections through this host.",
)
@click.option("--keep", is_flag=True, help="Leave the VM running when CMD has ended.")
@workload_options
@click.argument("name", metavar="NAME")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- CMD ARG...]", callback=own_command)
@command_options
def run(
    settings: Settings,
    name: str,
    command: tuple[str, ...],
    vm_name: str | None,
    memory_bytes: int,
    cpus: int,
    disk_bytes: int | None,
    network: str,
    keep: bool,
    options: WorkloadOptions,
    stdin: int | None,
    timeout_s: float | None,
) -> int:
    """Boot a VM from an image. Without CMD it is left running, and its name is printed.

    With CMD that runs in the VM, which is removed when it has ended. Stdout and exit code are then CMD's own: --json
    changes nothing there.

    \b
    Examples:
      pvisor vm run --name build --memory 1G --disk 8G debian:12
      pvisor vm run debian:12 -- uname -a
      pvisor vm run -it debian:12 -- bash
    """
    from vmm.boot import Shape, boot, temporary
    from vmm.vms import Vms
    from vmm.workload import check, resolve

    if not command and (options != WorkloadOptions() or stdin is not None or timeout_s is not None or keep):
        raise click.UsageError("-e, -w, -u, -i, -t, --timeout and --keep are for a CMD: give one after --")
    check(command, options)
    vms = Vms(settings.config)
    shape = Shape(memory_bytes=memory_bytes, cpus=cpus, disk_bytes=disk_bytes or 0, network=network)
    image, opener = _image(settings, name)
    with ending_in_order(), ExitStack() as stack:
        with progress(settings) as told:
            if not command or keep:
                record = boot(vms, image, opener, shape, name=vm_name, progress=told)
            else:
                made = temporary(vms, image, opener, shape, name=vm_name, progress=told)
                record = stack.enter_context(made)
        if not command:
            show(settings, vms, record.name)
            return 0
        workload = resolve(record.image_config, command, options, entrypoint=True)
        return follow(vms, record.name, workload, stdin, timeout_s, tty=options.tty)


def _image(settings: Settings, name: str) -> tuple[str, Callable[[], OpenImage]]:
    """The image's name, and what opens it; one of another source is pulled first."""
    from fuse import node
    from imaged.names import ImageName, SourceName

    if SourceName.is_source(name):
        from cli.convert import pull_image

        name = pull_image(settings, name, lazy=True).name
    ImageName.parse(name)  # a bad name is wrong usage; the daemon could only say that it failed
    config = settings.config
    return name, lambda: node.open_image(config, name, server=config.server, start=True)


@vm.command(short_help="Write a VM into the store, and end it.")
@click.option(
    "--as",
    "snapshot",
    metavar="SNAP",
    help="What to call the snapshot; as the VM when not given, or VM-1, VM-2 where another has that name.",
)
@click.argument("name", metavar="VM")
@output_options
def park(settings: Settings, name: str, snapshot: str | None) -> None:
    """Write a VM into the store and end it: it then holds no process and no memory, and goes on with `vm resume`.

    Of a VM that came from a snapshot only what it has changed since is read and stored. When it can not be parked, it
    runs on.

    \b
    Examples:
      pvisor vm park build
      pvisor vm park build --as with-tools
    """
    from vmm.parking import park as park_vm
    from vmm.vms import Vms

    with ending_in_order(), progress(settings) as told:
        parked = park_vm(Vms(settings.config), name, snapshot=snapshot, progress=told)
    document = {
        "name": parked.vm,
        "state": "parked",
        "snapshot": parked.snapshot,
        "snapshot_name": parked.name,
        "dirty_bytes": parked.dirty_bytes,
        "memory_bytes": parked.memory_bytes,
        "stopped_s": round(parked.stopped_s, 6),
    }
    settings.emit(document, parked.name)


@vm.command(short_help="Let a parked VM, or a snapshot, go on.")
@click.option("--name", "vm_name", metavar="VM", help="Make a new VM of this name.")
@network_option
@click.argument("name", metavar="SNAP|VM")
@command_options
def resume(settings: Settings, name: str, vm_name: str | None, network: str | None) -> None:
    """Let a parked VM go on where it was; or a new VM from a snapshot, which is called as the snapshot is.

    A snapshot that is not here is pulled lazily from the server first.

    The guest gets the time of now and new random numbers. Its memory comes when it is touched.

    \b
    Examples:
      pvisor vm resume build
      pvisor vm resume with-tools --name build2
    """
    from vmm.restore import resume as resume_vm
    from vmm.vms import Vms

    vms = Vms(settings.config)
    with ending_in_order(), progress(settings) as told:
        record = resume_vm(vms, name, name=vm_name, network=network, server=vms.config.server, progress=told)
    _warn_of_network([record], network)
    show_all(settings, vms, [record])


@vm.command(short_help="Make new VMs of a VM or a snapshot.")
@click.option("-n", "count", type=click.IntRange(min=1), default=1, show_default=True, metavar="N", help="How many.")
@network_option
@click.argument("name", metavar="SNAP|VM")
@command_options
def fork(settings: Settings, name: str, count: int, network: str | None) -> None:
    """Make new VMs that go on from what a VM is now, or from a snapshot; a running VM goes on itself.

    They are called NAME-1, NAME-2 and so on, the next that neither VMs nor snapshots have. Each gets a name, a machine
    id, an address and random numbers of its own. All are made, or none.

    \b
    Example:
      pvisor vm fork build -n 4
    """
    from vmm.restore import fork as fork_vm
    from vmm.vms import Vms

    vms = Vms(settings.config)
    with ending_in_order(), progress(settings) as told:
        records = fork_vm(vms, name, count, network=network, server=vms.config.server, progress=told)
    _warn_of_network(records, network)
    show_all(settings, vms, records)


@vm.command("rm", short_help="End and remove VMs.")
@click.option("--keep-snapshot", is_flag=True, help="Keep what a parked VM is parked as.")
@click.argument("names", nargs=-1, required=True, metavar="VM...")
@output_options
def remove(settings: Settings, names: tuple[str, ...], keep_snapshot: bool) -> None:
    """End VMs and remove what they wrote.

    With a parked VM goes the snapshot that it is parked as, unless --as gave that another name. Of a VM that runs or
    has ended its last park stays, and so do VMs that were forked from any.

    \b
    Example:
      pvisor vm rm build build-1
    """
    from imaged.errors import PvisorError
    from vmm.errors import VmError
    from vmm.removal import remove as remove_vm
    from vmm.vms import Vms

    vms, removed = Vms(settings.config), []
    failures: dict[str, PvisorError] = {}
    try:
        for name in dict.fromkeys(names):
            try:
                removed.append(remove_vm(vms, name, keep_snapshot=keep_snapshot))
            except PvisorError as error:
                failures[name] = error
    finally:
        if removed:
            found = [asdict(one) for one in removed]
            settings.emit({"removed": found}, "\n".join(one.name for one in removed))
        for one in removed:
            if one.kept is not None and not keep_snapshot:
                print(_what_stays(one.name, one.kept), file=sys.stderr)
    if len(failures) == 1:
        raise next(iter(failures.values()))
    if failures:
        causes = "; ".join(f"{name}: {failure.message}" for name, failure in failures.items())
        hint = "the others are" if removed else "`pvisor vm ls` lists them"
        raise VmError(f"{len(failures)} VMs were not removed: {causes}", hint=hint)


def _what_stays(name: str, snapshot: str) -> str:
    again = f"pvisor vm resume {snapshot}" + ("" if snapshot == name else f" --name {name}")
    return (
        f"pvisor: snapshot {snapshot}, the last park of VM {name}, stays: `{again}` goes on from it, "
        f"`pvisor snapshot rm {snapshot}` removes it"
    )


for _command in (list_vms, execute, ps, kill, console):
    vm.add_command(_command)
