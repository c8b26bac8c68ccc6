"""Where the time of a resume and of a park goes: the calls they consist of, timed from outside."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from bench.common import Samples
from fuse import node, vmlease
from imaged import snapshots
from imaged.chunkstore.store import ChunkStore
from vmm import capture, facts, identity, parking, recovery
from vmm.held import Held
from vmm.process import Process
from vmm.qemu import Qemu

CONT, WHOLE, OTHER = "cont", "in all", "everything else"
_SPAWN = "process about to be made"
Calls = tuple[tuple[Any, str, str], ...]
"""Owner and name of a function, and what it does. None of them calls another one."""
RESUME: Calls = (
    (vmlease, "take", "lease of the node daemon"),
    (node, "open_snapshot", "snapshot opened by the daemon"),
    (facts, "check_host", "host compared"),
    (Held, "save", "vm.json, durable"),
    (Qemu, "start", "QEMU started, monitor answers"),
    (Qemu, "wait_loaded", "device state loaded"),
    (node, "check_snapshot", "working set verified"),
    (Qemu, "cont", CONT),
    (identity, "give", "guest's agent: identity"),
)
PARK: Calls = (
    (ChunkStore, "open", "store opened"),
    (Qemu, "attach", "QEMU found"),
    (Qemu, "status", "monitor connected"),
    (Held, "begin", "intent"),
    (parking, "hold_still", "guest held still"),
    (Qemu, "stop", "stop"),
    (Qemu, "save_state", "device state saved"),
    (capture, "capture_memory", "memory captured"),
    (snapshots, "publish_over", "flushed, recorded, named"),
    (recovery, "finish_park", "vm.json, QEMU ended"),
)


@dataclass(slots=True)
class Phases:
    """Milliseconds of each phase; `load_ms` is from before QEMU's process is made until `cont` has been answered."""

    samples: dict[str, Samples] = field(default_factory=dict)
    load_ms: Samples = field(default_factory=Samples)

    @contextmanager
    def timing(self, calls: Calls, *, counted: bool) -> Iterator[None]:
        """One resume or park of one VM, in one thread. RuntimeError when it does not consist of these calls."""
        spent = {label: 0.0 for _, _, label in calls}
        stamps: dict[str, float] = {}

        def timed(function: Callable[..., Any], label: str) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                started = time.perf_counter()
                try:
                    return function(*arguments, **options)
                finally:
                    stamps[label] = time.perf_counter()
                    spent[label] += stamps[label] - started

            return call

        spawn = Process.spawn

        def spawned(*arguments: Any, **options: Any) -> Process:
            stamps[_SPAWN] = time.perf_counter()
            return spawn(*arguments, **options)

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(Process, "spawn", spawned))
            for owner, name, label in calls:
                stack.enter_context(mock.patch.object(owner, name, timed(getattr(owner, name), label)))
            began = time.perf_counter()
            yield
            whole = time.perf_counter() - began
        for label in spent:
            if label not in stamps:
                raise RuntimeError(f"{label}: the function that does this is not called any more")
        if not counted:
            return
        for label, seconds in {**spent, OTHER: whole - sum(spent.values()), WHOLE: whole}.items():
            self.samples.setdefault(label, Samples()).add(seconds * 1e3)
        if _SPAWN in stamps:
            self.load_ms.add((stamps[CONT] - stamps[_SPAWN]) * 1e3)
