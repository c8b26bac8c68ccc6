"""Finds the command, and turns errors into one or two lines and an exit code.

Exit codes: the workload's own for `run`; 125 when pVisor failed before it started; 1 for any other error; 2 for wrong
usage; 130 after Ctrl-C.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from typing import Any

import click

from cli import startup
from cli.common import Settings, log_to_stderr, printable, writing
from imaged.errors import InvalidNameError, PvisorError

# Command name -> module that defines it (imported only when it is called), and the line `pvisor --help` shows.
COMMANDS = {
    "serve": ("cli.serve", "Serve a chunk store over HTTP."),
    "token": ("cli.token", "Make, list and revoke a server's tokens."),
    "convert": ("cli.convert", "Turn an OCI image into a block image."),
    "pull": ("cli.convert", "Fetch an image, completely or lazily."),
    "image": ("cli.image", "List, inspect, tag, sign, push, remove, verify and export images."),
    "mount": ("cli.run", "Mount an image on a directory."),
    "umount": ("cli.run", "Unmount what `mount` mounted."),
    "run": ("cli.run", "Run a process in an image."),
    "stage": ("cli.stage", "Work with stages that were kept."),
    "vm": ("cli.vm", "Run, park, resume and fork virtual machines."),
    "snapshot": ("cli.snapshot", "Look after snapshots of virtual machines."),
    "store": ("cli.store", "Look after the chunk store."),
    "job": ("cli.job", "List, inspect and cancel the server's jobs."),
    "node": ("cli.node", "Start, stop and ask the host's node daemon."),
    "doctor": ("cli.doctor", "Check what this host can do."),
}


class _ReaderLeftError(Exception):
    """Nobody reads our output any more. Not a BrokenPipeError, which click makes an exit code of 1."""


class LazyGroup(click.Group):
    """Imports a command's module when it is asked for, so that `run` does not pay for `serve`.

    `run` ends its start-up by itself, because it goes on importing while the node daemon works.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = getattr(importlib.import_module(COMMANDS[cmd_name][0]), cmd_name)
        assert isinstance(command, click.Command)
        if cmd_name != "run":
            log_to_stderr()
            startup.done()
        return command

    def make_context(self, *arguments: Any, **options: Any) -> click.Context:
        try:
            return super().make_context(*arguments, **options)
        except BrokenPipeError as error:  # while it prints a help text
            raise _ReaderLeftError from error

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise _ReaderLeftError from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--server", metavar="URL", help="Chunk server; PVISOR_SERVER when not given.")
@click.option("--json", "json_output", is_flag=True, help="One JSON document on stdout (but for run and exec).")
@click.option("-v", "--verbose", is_flag=True, help="Show tracebacks and warnings on the way.")
@click.version_option(package_name="pvisor", prog_name="pvisor")
@click.pass_context
def cli(ctx: click.Context, server: str | None, json_output: bool, verbose: bool) -> None:
    """Lazy images, staged processes and virtual machines from one chunk store.

    \b
    Examples:
      pvisor convert oci:./debian --name debian:12       into the local store
      pvisor serve --listen 0.0.0.0:7878                 give it to other hosts
      pvisor pull --lazy debian:12 --server http://store:7878
      pvisor run debian:12 -- sh -c 'cat /etc/os-release'
      pvisor vm run debian:12 -- uname -a                in a virtual machine
    """
    ctx.obj = Settings(server=server, json_output=json_output, verbose=verbose)


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code."""
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    verbose = "-v" in own or "--verbose" in own
    if verbose:
        log_to_stderr("INFO")
    try:
        result: Any = cli.main(args=arguments, prog_name="pvisor", standalone_mode=False)
        with writing():
            sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except (click.exceptions.Abort, KeyboardInterrupt):
        return startup.INTERRUPTED
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (BrokenPipeError, _ReaderLeftError):
        # What SIGPIPE would do. The interpreter does not complain then when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (PvisorError, OSError) as error:
        _give_up_output()
        if verbose and not isinstance(error, InvalidNameError):  # which is no more than a wrong argument
            _show_traceback()
        report(_message(error), getattr(error, "hint", ""))
        return int(getattr(error, "exit_code", 1))
    except Exception as error:
        # A bug; said in a line like any other failure.
        if verbose:
            _show_traceback()
        report(f"unexpected {type(error).__name__}: {error}", "this is a bug in pvisor; -v shows where")
        return int(getattr(error, "exit_code", 1))


def _give_up_output() -> None:
    """What can not be written is not tried again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _show_traceback() -> None:
    import traceback

    traceback.print_exc()


def _message(error: PvisorError | OSError) -> str:
    """The fact; an OSError as file and reason, without its number."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{os.fsdecode(error.filename)[:200]}: {error.strerror}"
    return str(error)


def report(message: str, hint: str) -> None:
    """The error lines every command ends with when it fails."""
    print(f"pvisor: error: {printable(message)}", file=sys.stderr)
    if hint:
        print(f"hint: {printable(hint)}", file=sys.stderr)
