"""Commands that are cut off where they call a function: killed, failed, or robbed of another process."""

from __future__ import annotations

import subprocess
import sys

from tests.support.command import Host

_PROGRAM = """
import importlib, os, sys, threading, time
from pathlib import Path
where, how, late_s = sys.argv[1:4]
module, _, name = where.rpartition(".")
try:
    target = importlib.import_module(module)
except ModuleNotFoundError:
    module, _, class_name = module.rpartition(".")
    target = getattr(importlib.import_module(module), class_name)
original = getattr(target, name)

def cut_off(*arguments, **options):
    if how == "interrupt":
        setattr(target, name, original)
        threading.Timer(float(late_s), os.kill, (os.getpid(), 2)).start()
        return original(*arguments, **options)
    time.sleep(float(late_s))
    if how == "kill":
        os.kill(os.getpid(), 9)
    if how == "fail":
        raise OSError(5, "no such luck")
    setattr(target, name, original)
    os.kill(int(how), 9)
    while Path(f"/proc/{how}/stat").exists() and ") Z" not in Path(f"/proc/{how}/stat").read_text():
        pass
    return original(*arguments, **options)

setattr(target, name, cut_off)
from cli.main import main
sys.argv[1:] = sys.argv[4:]
main()
"""


def cut_off(
    made: Host, where: str, how: str | int, *argv: str, late_s: float = 0.0
) -> subprocess.CompletedProcess[bytes]:
    """The command, which calls the function `where` (by its full name, with its class): then after `late_s` it is
    killed (`how` is "kill"), gets an OSError ("fail"), or goes on once a process with this id is killed. With
    "interrupt" it goes on at once, and gets SIGINT after `late_s`."""
    command = [sys.executable, "-c", _PROGRAM, where, str(how), str(late_s), *argv]
    return subprocess.run(command, env=made.env, capture_output=True, timeout=120, check=False)
