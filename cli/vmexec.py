"""What `pvisor vm` does with processes of a guest: `vm exec`, `vm ps`, `vm kill`, and its serial line."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from cli.arguments import OPTIONS_FIRST, failing_with, own_command, process_arguments
from cli.common import Settings, age, output_options, table
from cli.signals import forwarding
from vmm.errors import SETUP_FAILED
from vmm.workload import WorkloadOptions

if TYPE_CHECKING:
    from vmm.vms import Vms
    from vmm.workload import Workload


class NameFirst(click.Command):
    """What follows the name is the command's own, unless it begins with a dash, as no program does: `NAME --json`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with contextlib.suppress(click.UsageError):  # told below
            words = self.make_parser(ctx).parse_args(args=list(args))[0].get("command")
            first = words[0] if isinstance(words, tuple) and words else "--"
            ctx.allow_interspersed_args = first.startswith("-") and first != "--"
        return super().parse_args(ctx, args)


def _seconds(context: click.Context, parameter: click.Parameter, given: float | None) -> float | None:
    from imaged.calls import seconds
    from vmm.errors import VmArgumentError

    try:
        if given == 0:
            raise VmArgumentError("a timeout of 0 is no time", hint="give more, or no --timeout")
        return seconds(given, VmArgumentError)
    except VmArgumentError as error:
        raise click.BadParameter(f"{error.message}: {error.hint}", context, parameter) from error


def workload_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a command that starts a process in a guest; its own failures are exit code 125."""

    @process_arguments
    @click.option(
        "--timeout",
        "timeout_s",
        type=float,
        callback=_seconds,
        metavar="SECONDS",
        help="End the command after this time; the exit code is then 124.",
    )
    @functools.wraps(function)
    def command(
        *arguments: Any,
        env: tuple[str, ...],
        workdir: str | None,
        user: str | None,
        interactive: bool,
        tty: bool,
        **others: Any,
    ) -> Any:
        options = WorkloadOptions(env=env, workdir=workdir, user=user, tty=tty)
        with failing_with(SETUP_FAILED):
            return function(*arguments, options=options, stdin=0 if interactive else None, **others)

    return command


def follow(vms: Vms, name: str, workload: Workload, stdin: int | None, timeout_s: float | None, *, tty: bool) -> int:
    from vmm.control import Control
    from vmm.execution import execute

    with ExitStack() as stack:
        control = stack.enter_context(Control())
        begun = threading.Event()
        stack.enter_context(forwarding(control.signal, begun.is_set))
        terminal = None
        if tty:
            from cli.terminal import guest_terminal

            terminal = stack.enter_context(guest_terminal(control, keys=stdin is not None))
        return execute(
            vms,
            name,
            workload,
            stdin=stdin,
            stdout=_writer(1, name),
            stderr=_writer(2, name),
            timeout_s=timeout_s,
            terminal=terminal,
            control=control,
            on_start=begun.set,
        )


def _writer(fd: int, name: str) -> Callable[[bytes], None]:
    """As `imaged.calls.writer`. VmSetupError when what the command says can not be written."""
    from imaged.calls import writer
    from vmm.errors import VmSetupError

    write = writer(fd)

    def written(data: bytes) -> None:
        try:
            write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            what = "stdout" if fd == 1 else "stderr"
            hint = f"the command goes on in the guest, and what it says is thrown away: `pvisor vm ps {name}` lists it"
            raise VmSetupError(f"{what} could not be written: {error.strerror}", hint=hint) from error

    return written


@click.command("exec", cls=NameFirst, context_settings=OPTIONS_FIRST, short_help="Run a command in a VM.")
@workload_options
@click.argument("name", metavar="VM")
@click.argument(
    "command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- CMD ARG...", callback=own_command
)
@output_options
def execute(
    settings: Settings,
    name: str,
    command: tuple[str, ...],
    options: WorkloadOptions,
    stdin: int | None,
    timeout_s: float | None,
) -> int:
    """Run a command in a running VM. Stdout and exit code are the command's own: --json changes nothing there.

    Ctrl-C goes to the command; the third one leaves it running and ends this.

    \b
    Examples:
      pvisor vm exec build -- make -j4
      pvisor vm exec -it build -- bash
      pvisor vm exec -i -w /src build -- tar -x < sources.tar
    """
    from vmm.vms import Vms
    from vmm.workload import resolve

    if not command:
        raise click.UsageError("give a command after --")
    vms = Vms(settings.config)
    workload = resolve(vms.get(name).image_config, command, options, entrypoint=False)
    return follow(vms, name, workload, stdin, timeout_s, tty=options.tty)


@click.command(short_help="List what commands run in a VM.")
@click.argument("name", metavar="VM")
@output_options
def ps(settings: Settings, name: str) -> None:
    """List what commands run in a VM: those that `vm exec` follows, those that it has left, and what they have started.

    \b
    Example:
      pvisor vm ps build
    """
    from vmm.execution import processes
    from vmm.vms import Vms

    found = processes(Vms(settings.config), name)

    def text() -> str:
        rows = [
            [str(one.pid), age(one.age_s), "followed" if one.followed else "-", " ".join(one.argv)] for one in found
        ]
        return table(["PID", "AGE", "BY EXEC", "COMMAND"], rows)

    settings.emit([{**one._asdict(), "argv": list(one.argv)} for one in found], text)


@click.command(short_help="Signal what commands run in a VM.")
@click.option("-s", "--signal", "signal_name", default="TERM", show_default=True, metavar="NAME", help="Or a number.")
@click.argument("name", metavar="VM")
@click.argument("pids", nargs=-1, required=True, type=click.IntRange(min=1), metavar="PID...")
@output_options
def kill(settings: Settings, name: str, pids: tuple[int, ...], signal_name: str) -> None:
    """Send a signal to processes of `vm ps`; where one is a command, to its whole process group.

    \b
    Examples:
      pvisor vm kill build 312
      pvisor vm kill -s KILL build 312 340
    """
    from vmm.execution import kill as kill_processes
    from vmm.vms import Vms

    kill_processes(Vms(settings.config), name, pids, _signal(signal_name))
    settings.emit({"name": name, "pids": list(pids)}, "")


def _signal(text: str) -> int:
    import signal

    name = text.upper().removeprefix("SIG")
    if name in {str(number) for number in range(1, signal.NSIG)}:
        return int(name)
    try:
        return signal.Signals[f"SIG{name}"]
    except KeyError:
        raise click.BadParameter(f"{text[:40]!r} is no signal; `kill -l` lists them", param_hint="-s") from None


@click.command(short_help="Use a VM's serial line.")
@click.argument("name", metavar="VM")
@output_options
def console(settings: Settings, name: str) -> None:
    """Use the serial line of a VM: a shell of the guest. Ctrl-] ends the connection, not the shell.

    With --json it only prints where the socket of the line is.

    \b
    Example:
      pvisor vm console build
    """
    from cli.console import converse
    from vmm.errors import VmStateError
    from vmm.survey import status
    from vmm.vms import Vms

    vms = Vms(settings.config)
    found = status(vms, name)
    if found.pid is None:
        raise VmStateError(f"VM {name!r} is {found.state}, not running", hint="`pvisor vm ls` tells more")
    path = vms.run(name) / "serial.sock"
    if settings.json_output:
        settings.emit({"name": name, "socket": str(path)}, "")
        return
    if sys.stdin.isatty():
        print("Ctrl-] ends this", file=sys.stderr)
    converse(path)
