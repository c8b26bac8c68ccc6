"""What the server does, and did, for its clients."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from imaged.jobs.job import Job, Kind, State
from imaged.web.frame import Page, empty, facts, heading, hidden, live_part, note, row, table, tiles
from imaged.web.html import Child, Html, join, tag
from imaged.web.imagepages import image_path
from imaged.web.session import Viewer
from imaged.web.text import ago, plural, short, size, span

PAGE_ROWS = 100
_HEADER = [("Job", ""), ("State", ""), ("Progress", ""), ("Asked for", "nowrap"), ("", "")]
_LIST_LIMIT = 1000
_TITLES = {
    "kept_chunks": "Chunks kept",
    "removed_chunks": "Chunks removed",
    "freed_bytes": "Freed",
    "dead_bytes": "Still dead",
    "removed_packs": "Packs removed",
    "rewritten_packs": "Packs rewritten",
    "forgotten_layers": "Layers forgotten",
    "damaged_packs": "Damaged packs",
}


def list_page(jobs: Sequence[Job], viewer: Viewer, server: str, *, said: str) -> Page:
    """The jobs that are remembered, the newest first; what does not fit on the page only as a number."""
    body: list[Child] = [
        heading("Jobs", "Conversions and collections that this server does for its clients."),
        _said(said),
    ]
    busy = any(not job.finished for job in jobs)
    if jobs:
        shown = jobs[:PAGE_ROWS]
        more = len(jobs) - len(shown)
        live: list[Child] = [
            tag("p", _summary(jobs), role="status", class_="dim"),
            table("Jobs, the newest first", _HEADER, [_row(job, viewer) for job in shown]),
            tag("p", f"and {more:,} older ones: `pvisor job ls` has them all", class_="dim") if more else None,
        ]
    else:
        live = [_nothing(server)]
    body.append(live_part(False, live, busy=busy))
    return Page(title="Jobs", section="/jobs", body=join(*body), reloads=True)


def _summary(jobs: Sequence[Job]) -> str:
    running = sum(job.state is State.RUNNING for job in jobs)
    waiting = sum(job.state is State.QUEUED for job in jobs)
    if not running and not waiting:
        return f"Nothing is running. {plural(len(jobs), 'job')} remembered."
    return f"{running} running, {waiting} waiting. {plural(len(jobs), 'job')} remembered."


def _said(said: str) -> Html | None:
    """What was just done here."""
    words = {"cancelled": "The job is cancelled.", "collecting": "A collection was asked for."}
    return note("good", words[said]) if said in words else None


def _nothing(server: str) -> Html:
    return empty(
        tag("h2", "No jobs yet"),
        tag("p", "A job begins when somebody has this server convert an image of a registry:"),
        tag("pre", f"pvisor convert docker://docker.io/library/debian:12 --server {server}"),
    )


def _row(job: Job, viewer: Viewer) -> Html:
    first = join(
        tag("a", tag("bdi", _title(job)), href=f"/jobs/{job.id}"),
        tag("span", "as ", tag("bdi", job.name), class_="under") if job.name else None,
    )
    return row(
        _HEADER,
        first,
        _state(job),
        _progress(job) if not job.finished else _outcome(job),
        ago(job.created_at),
        cancel_button(job, viewer),
        id=f"job-{job.id}",
    )


def _title(job: Job) -> str:
    return job.source if job.kind is Kind.CONVERT else "Collection of what nothing keeps"


def _state(job: Job) -> Html:
    return tag("span", str(job.state), class_=f"state {job.state}")


def _progress(job: Job) -> Html:
    """A bar where the end is known, and in words."""
    if job.state is State.QUEUED:
        return tag(
            "span", "waits for other jobs" if not job.starts else f"is begun again, after {plural(job.starts, 'start')}"
        )
    step, done, total = str(job.progress.get("step") or "begins"), _count(job, "done_bytes"), _count(job, "total_bytes")
    if not total:
        return join(tag("span", step), tag("span", size(done), class_="under") if done else None)
    percent = min(100, 100 * done // total)
    bar = tag("progress", f"{percent}%", value=min(done, total), max=total, aria_label=f"{step} of {_title(job)}")
    return join(tag("span", step), bar, tag("span", f"{size(done)} of {size(total)}, {percent}%", class_="under"))


def _count(job: Job, key: str) -> int:
    value = job.progress.get(key)
    return value if isinstance(value, int) and value >= 0 else 0


def _outcome(job: Job) -> Child:
    took = f", took {span(job.ended_at - job.started_at)}" if job.ended_at and job.started_at else ""
    if job.image is not None:
        name, warnings = str(job.image.get("name", "")), job.image.get("warnings")
        count = len(warnings) if isinstance(warnings, list) else 0
        return join(
            tag("a", tag("bdi", name), href=image_path(name)),
            tag("span", (plural(count, "warning") if count else "no warnings") + took, class_="under"),
        )
    if job.report is not None:
        return join(
            f"{size(_number(job.report, 'freed_bytes'))} freed", tag("span", took.removeprefix(", "), class_="under")
        )
    return tag("span", job.error if len(job.error) < 200 else f"{job.error[:200]}…")


def _number(report: Mapping[str, Any], key: str) -> int:
    value = report.get(key)
    return value if isinstance(value, int) else 0


def cancel_button(job: Job, viewer: Viewer) -> Html | None:
    """Only where the job can be cancelled, and whoever looks may."""
    if job.finished or not viewer.may_cancel(job):
        return None
    button = tag("button", "Cancel", class_="danger", aria_label=f"Cancel {_title(job)}")
    return tag("form", hidden(viewer), button, method="post", action=f"/jobs/{job.id}/cancel", class_="inline")


def detail_page(job: Job, viewer: Viewer, *, said: str) -> Page:
    now = time.time()
    figures: list[tuple[str, Child, Child]] = [
        ("State", _state(job), None),
        ("Asked for", ago(job.created_at, now), None),
    ]
    if job.started_at is not None:
        figures.append(
            ("Begun", ago(job.started_at, now), None if job.starts < 2 else f"for the {_nth(job.starts)} time")
        )
        figures.append(("Took" if job.ended_at else "Takes", span((job.ended_at or now) - job.started_at), None))
    live = [
        tiles(*figures),
        tag("div", _progress(job), class_="card") if not job.finished else None,
        _problem(job),
        _result(job),
    ]
    body = join(
        heading(_title(job), trail=tag("a", "Jobs", href="/jobs")),
        tag("p", tag("span", job.id, class_="id")),
        _said(said),
        live_part(job.finished, live, cancel_button(job, viewer), busy=not job.finished),
        tag("h2", "What was asked for"),
        tag(
            "div",
            facts(
                ("Kind", "conversion" if job.kind is Kind.CONVERT else "collection"),
                ("Source", tag("bdi", job.source) if job.source else None),
                ("Name", tag("bdi", job.name) if job.name else None),
                ("Platform", job.platform),
                ("Namespace", job.namespace),
            ),
            class_="card",
        ),
    )
    return Page(title=f"Job {short(job.id)}", section="/jobs", body=body, reloads=not job.finished)


def _nth(count: int) -> str:
    return {2: "second", 3: "third"}.get(count, f"{count}th")


def _problem(job: Job) -> Html | None:
    if not job.error:
        return None
    kind = "warn" if job.state is State.CANCELLED else "bad"
    return tag("div", tag("p", job.error), tag("p", job.hint) if job.hint else None, class_=f"note {kind}")


def _result(job: Job) -> Html | None:
    if job.image is not None:
        name = str(job.image.get("name", ""))
        warnings = job.image.get("warnings")
        listed = [str(text) for text in warnings[:_LIST_LIMIT]] if isinstance(warnings, list) else []
        return tag(
            "div",
            facts(
                ("Image", tag("a", tag("bdi", name), href=image_path(name))),
                ("Id", tag("span", str(job.image.get("id", "")), class_="id")),
                ("Warnings", tag("ol", (tag("li", text) for text in listed), class_="warnings") if listed else "none"),
            ),
            class_="card",
        )
    if job.report is not None:
        pairs = [
            (_TITLES.get(key, key.replace("_", " ").capitalize()), _figure(key, value))
            for key, value in job.report.items()
        ]
        return tag("div", facts(*pairs), class_="card")
    return None


def _figure(key: str, value: Any) -> Child:
    if isinstance(value, int) and not isinstance(value, bool):
        return size(value) if key.endswith("_bytes") else f"{value:,}"
    if isinstance(value, list):
        return ", ".join(str(item) for item in value) or "none"
    return str(value)
