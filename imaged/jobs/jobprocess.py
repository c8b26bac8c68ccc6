"""The process of one job (`imaged.jobs.job_worker`): started, listened to, ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from imaged import submodule
from imaged.jobs.job import Job, Kind
from imaged.jobs.jobstore import Claim

log = logging.getLogger(__name__)
_LINE_LIMIT_BYTES = 16 << 20
_STOP_WAIT_S = 5.0
Outcome: TypeAlias = Callable[[Job], Job]
"""How a job changes when it ends."""
Blocking: TypeAlias = Callable[[Callable[[Mapping[str, Any]], None], Mapping[str, Any]], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """How the commands that do the jobs of one store begin; they get options as `imaged.jobs.job_worker` does."""

    convert: Sequence[str] = ()
    gc: Sequence[str] = ()

    def command(self, store: Path, job: Job) -> list[str]:
        own = submodule.command("imaged.jobs.job_worker")
        if job.kind is Kind.GC:
            return [*(self.gc or own), f"--store={store}", "--gc"]
        options = {"--name": job.name, "--platform": job.platform, "--namespace": job.namespace}
        given = [f"{option}={value}" for option, value in options.items() if value is not None]
        return [*(self.convert or own), f"--store={store}", *given, "--", job.source]


async def run_job(claim: Claim, command: Sequence[str], *, blocking: Blocking) -> Outcome:
    """Run the job to its end, telling the claim how far it is, through `blocking`. Cancelled, it ends the process.
    OSError when there is no process."""
    job = claim.job
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=pipe,
        stdout=pipe,
        limit=_LINE_LIMIT_BYTES,
        env=submodule.environment(),
        pass_fds=claim.inherited,
    )
    outcome: Outcome | None = None
    try:
        assert process.stdout is not None
        async for line in process.stdout:
            report = _parse(job, line)
            if report is None or outcome is not None:
                continue
            outcome = _outcome(report)
            if outcome is None:
                await blocking(claim.report, report)
        status = await process.wait()
    finally:
        await _stop(process)
    if outcome is None:
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        hint = "the server's log may say why"
        outcome = partial(Job.failed, error=f"the process of the job {how} without a result", hint=hint)
    return outcome


async def _stop(process: asyncio.subprocess.Process) -> None:
    """End the process if it still runs: closing its stdin and SIGTERM ask, SIGKILL insists."""
    if process.stdin is not None:
        process.stdin.close()
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), _STOP_WAIT_S)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _parse(job: Job, line: bytes) -> dict[str, Any] | None:
    """One line of the process's report; a line that is not one is the log's."""
    try:
        report = json.loads(line)
        if isinstance(report, dict):
            return report
    except (ValueError, RecursionError):
        pass
    log.warning("job %s: not a report line: %r", job.id, line[:200])
    return None


def _outcome(report: Mapping[str, Any]) -> Outcome | None:
    """None for a report that is not the last."""
    if "error" in report:
        return partial(Job.failed, error=str(report["error"]), hint=str(report.get("hint", "")))
    for kind in ("image", "report"):
        if isinstance(report.get(kind), dict):
            return partial(Job.done, **{kind: report[kind]})
    return None
