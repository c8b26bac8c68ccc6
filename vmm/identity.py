"""What makes a guest itself: name, machine id, address, clock and random numbers, given to it by its agent."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from imaged.errors import PvisorError
from vmm.agent import Agent
from vmm.errors import VmError

_ENTROPY_BYTES = 64
_CLOCK_S = 5.0
_HOLD_S = 5.0
_LATE_S = 0.4
_LONGEST_LABEL = 63


def hostname(name: str) -> str:
    """A VM's name as a label of the domain name system."""
    return re.sub(r"[^A-Za-z0-9-]", "-", name)[:_LONGEST_LABEL].rstrip("-") or "vm"


def new_mac() -> str:
    """A random address of those that are administered locally."""
    raw = bytes([os.urandom(1)[0] & 0xFC | 0x02]) + os.urandom(5)
    return raw.hex(":")


def give(run: Path, name: str, *, mac: str | None, timeout_s: float) -> None:
    """Wait for the agent of the guest in this directory, and make the guest another than all others. AgentError."""
    with Agent.connect(run, timeout_s=timeout_s, control=True) as agent:
        began = time.monotonic()
        left = agent.identify(
            hostname=hostname(name),
            machine_id=os.urandom(16).hex(),
            entropy=os.urandom(_ENTROPY_BYTES),
            mac=mac,
            time_ns=time.time_ns(),
        )
        if time.monotonic() - began > _LATE_S:  # on a busy host the time was old when the guest got it
            agent.identify(time_ns=time.time_ns())
    if left:
        _log("VM %s: %s", name, "; ".join(left))


def hold_still(run: Path, name: str) -> None:
    """What runs in the guest stands still until it has its next identity or clock, so that nothing asks for random
    numbers which its siblings get too. What does not stand still goes on; that is logged as an error, for nothing else
    tells of it."""
    try:
        with Agent.connect(run, timeout_s=_HOLD_S, control=True) as agent:
            left = agent.hold(timeout_s=_HOLD_S)
    except PvisorError as error:
        left = (error.message,)
    if left:
        text = "VM %s: what runs in it is not held still while it is written down: %s"
        _log(text, name, "; ".join(left), error=True)


def set_clock(run: Path, name: str) -> None:
    """The time of now, and nothing else, for a guest that stood still and goes on as who it was. One that does not
    answer keeps its own; that is logged."""
    try:
        with Agent.connect(run, timeout_s=_CLOCK_S, control=True) as agent:
            agent.identify(time_ns=time.time_ns(), timeout_s=_CLOCK_S)
    except VmError as error:
        _log("VM %s: its clock is not set after it stood still: %s", name, error.message)


def _log(text: str, *values: str, error: bool = False) -> None:
    import logging  # not on the way of a resume

    logging.getLogger(__name__).log(logging.ERROR if error else logging.WARNING, text, *values)
