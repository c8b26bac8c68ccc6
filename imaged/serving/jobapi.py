"""HTTP handlers for jobs."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from imaged.jobs.job import Job, Kind
from imaged.jobs.running import Jobs
from imaged.serving.access import grant, require
from imaged.serving.tokens import Scope

_NO_STORE = {"Cache-Control": "no-store"}


class JobApi:
    """The handlers under /v1/jobs, and /v1/gc, of one store."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/jobs", self.list_all),
            web.get("/v1/jobs/{id}", self.one),
            web.delete("/v1/jobs/{id}", self.cancel),
            web.post("/v1/gc", self.collect),
        ]

    async def list_all(self, request: web.Request) -> web.Response:
        """GET jobs: those that are remembered, the newest first, each with how many warnings it had."""
        namespace = grant(request).namespace
        found = [_summary(job) for job in await self._jobs.all() if job.is_visible_to(namespace)]
        return web.json_response({"jobs": found}, headers=_NO_STORE)

    async def one(self, request: web.Request) -> web.Response:
        """GET jobs/ID: how far a job is, or what it came to."""
        return web.json_response((await self._find(request)).to_json(), headers=_NO_STORE)

    async def cancel(self, request: web.Request) -> web.Response:
        """DELETE jobs/ID: end a job. What it has stored already is left to the next collection."""
        job = await self._find(request)
        if job.kind is Kind.GC:
            require(request, Scope.ADMIN)
        return web.json_response((await self._jobs.cancel(job.id)).to_json(), headers=_NO_STORE)

    async def collect(self, request: web.Request) -> web.Response:
        """POST gc: remove what nothing keeps alive, as a job; 202 and the job, which is joined when one runs."""
        return accepted(await self._jobs.submit(Job.collection()))

    async def _find(self, request: web.Request) -> Job:
        """NotFoundError, also for a job that whoever asks may not know of."""
        return await self._jobs.get(request.match_info["id"], namespace=grant(request).namespace)


def accepted(job: Job) -> web.Response:
    """202 and where to look."""
    return web.json_response({"job": job.id}, status=202, headers={"Location": f"/v1/jobs/{job.id}", **_NO_STORE})


def _summary(job: Job) -> dict[str, Any]:
    """Without the texts of the warnings, of which each job may have a thousand."""
    document = job.to_json()
    if job.image is not None:
        warnings = job.image.get("warnings")
        image = {key: value for key, value in job.image.items() if key != "warnings"}
        document["image"] = {**image, "warning_count": len(warnings) if isinstance(warnings, list) else 0}
    return document
