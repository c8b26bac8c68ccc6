"""Virtual machine guests, parked as snapshots in the chunk store: the Python API.

    import vmm

    vm = vmm.start("debian:12")
    vm.exec(["sh", "-c", "echo work > /root/file"])
    vm.park()
    for child in vm.fork(4):
        print(child.name, child.exec(["cat", "/root/file"], capture_output=True).stdout)
        child.remove()
    vm.remove()

Names are imported on first use: `import vmm` costs nothing. No module of this package may have the name of a function
here, because importing it would replace the function.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vmm.api import Result, Vm, fork, get, listing, resume, run, start
    from vmm.parking import Parked
    from vmm.survey import VmStatus

_API = {
    "Parked": "vmm.parking",
    "Result": "vmm.api",
    "Vm": "vmm.api",
    "VmStatus": "vmm.survey",
    "fork": "vmm.api",
    "get": "vmm.api",
    "listing": "vmm.api",
    "resume": "vmm.api",
    "run": "vmm.api",
    "start": "vmm.api",
}

__all__ = ["Parked", "Result", "Vm", "VmStatus", "fork", "get", "listing", "resume", "run", "start"]


def __getattr__(name: str) -> Any:
    if name not in _API:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_API[name]), name)
    return value
