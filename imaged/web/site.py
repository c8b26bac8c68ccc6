"""The handlers of the page: who looks, what they may see, and what their forms do."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Self
from urllib.parse import quote, urlsplit

from aiohttp import web

from imaged import snapshots
from imaged.chunkstore.refs import Ref
from imaged.chunkstore.snapshotrefs import SnapshotRef
from imaged.chunkstore.store import ChunkStore
from imaged.collection import lastcollection
from imaged.errors import FormatError, PvisorError
from imaged.jobs.job import Job, Kind
from imaged.jobs.running import Jobs
from imaged.serving.blocking import Blocking
from imaged.serving.httperrors import STATUS, request_id
from imaged.web import imagepages, jobpages, snapshotpages, storepage
from imaged.web.figures import Known, Sharing
from imaged.web.frame import Page, problem, respond
from imaged.web.loginpage import login_page
from imaged.web.session import COOKIE, ForeignFormError, Sessions, SignInError, Viewer

log = logging.getLogger(__name__)
_HOST = re.compile(r"[A-Za-z0-9.-]{1,253}(:[0-9]{1,5})?|\[[0-9A-Fa-f:.]{2,45}\](:[0-9]{1,5})?")
_TITLES = {400: "That can not be", 403: "Not allowed", 404: "Not found", 409: "Too late", 429: "Too much at once"}
Shown = Callable[[web.Request, Viewer], Awaitable[Page]]
Done = Callable[[web.Request, Viewer], Awaitable[str]]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
PATHS = (
    "/",
    "/images/{name}",
    "/snapshots",
    "/snapshots/{name}",
    "/jobs",
    "/jobs/{id}",
    "/jobs/{id}/cancel",
    "/store",
    "/store/collect",
    "/login",
    "/logout",
)
"""Of pages and forms: they are for browsers, and in no description of the interface."""


class Site:
    """The page of one store. For one event loop; an async context manager."""

    def __init__(self, store: ChunkStore, jobs: Jobs, sessions: Sessions, blocking: Blocking) -> None:
        self._store, self._jobs, self._sessions, self._blocking = store, jobs, sessions, blocking
        self._sharing, self._known = Sharing(store.root), Known()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, at: object) -> None:
        await self._sharing.close()

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/", self._page(self._images)),
            web.get("/images/{name:.+}", self._page(self._image)),
            web.get("/snapshots", self._page(self._snapshots)),
            web.get("/snapshots/{name}", self._page(self._snapshot)),
            web.get("/jobs", self._page(self._job_list)),
            web.get("/jobs/{id}", self._page(self._job)),
            web.post("/jobs/{id}/cancel", self._form(self._cancel)),
            web.get("/store", self._page(self._health)),
            web.post("/store/collect", self._form(self._collect)),
            web.get("/login", self._login),
            web.post("/login", self._sign_in),
            web.post("/logout", self._sign_out),
        ]

    # Pages

    async def _images(self, request: web.Request, viewer: Viewer) -> Page:
        return await self._blocking.run(self._list_images, request, viewer, _server(request), self._own(viewer))

    def _list_images(self, request: web.Request, viewer: Viewer, server: str, own: _Own) -> Page:
        store = viewer.view(self._store)
        refs, snapshot_refs = store.refs.items(), store.snapshots.items()
        room = None
        if viewer.sees_store:
            usage = self._store.df()
            room = usage.logical_bytes, usage.stored_bytes, _disk(self._store)[1]
        overview = imagepages.Overview(
            own=own(_signature(refs, snapshot_refs)), snapshot_count=len(snapshot_refs), store=room
        )
        asked = imagepages.Asked.parse(request.query)
        return imagepages.list_page(store, viewer.namespace, refs, overview, asked, self._known, server)

    async def _image(self, request: web.Request, viewer: Viewer) -> Page:
        name, server = request.match_info["name"], _server(request)
        jobs = [job for job in await self._jobs.all() if job.is_visible_to(viewer.namespace)]
        return await self._blocking.run(self._show_image, name, viewer, server, self._own(viewer), jobs)

    def _show_image(self, text: str, viewer: Viewer, server: str, own: _Own, jobs: list[Job]) -> Page:
        store = viewer.view(self._store)
        refs, snapshot_refs = store.refs.items(), store.snapshots.items()
        name, ref = imagepages.find(refs, text)
        entry = self._known.entry(store, name, ref)
        counted = own(_signature(refs, snapshot_refs))
        made = next((job for job in jobs if _made(job, str(ref.record))), None)
        warnings = None if made is None or made.image is None else made.image.get("warnings")
        standing = [one for one in snapshots.listing(store) if one.record.image == ref.record]
        detail = imagepages.Detail(
            entry=entry,
            names=tuple(other for other, held in refs if held.record == ref.record),
            snapshots=tuple(one.label for one in standing),
            own_bytes=None if counted is None else counted.get(str(ref.record)),
            startup=self._known.startup(store, viewer.namespace, entry.record.data),
            known_layers=frozenset(layer for layer in entry.record.layers if store.memos.get(layer) is not None),
            warnings=[str(text) for text in warnings] if isinstance(warnings, list) else None,
            job=None if made is None else made.id,
            server=server,
        )
        return imagepages.detail_page(detail)

    async def _snapshots(self, request: web.Request, viewer: Viewer) -> Page:
        return await self._blocking.run(self._list_snapshots, viewer, _server(request), self._own(viewer))

    def _list_snapshots(self, viewer: Viewer, server: str, own: _Own) -> Page:
        store = viewer.view(self._store)
        refs, snapshot_refs = store.refs.items(), store.snapshots.items()
        tree = snapshotpages.Tree(
            ancestors=snapshots.lineage(store),
            images={ref.record: name for name, ref in reversed(refs)},
            stored={ref.record: ref.stored_bytes for _, ref in snapshot_refs if ref.stored_bytes is not None},
            own=own(_signature(refs, snapshot_refs)),
        )
        return snapshotpages.tree_page(tree, server)

    async def _snapshot(self, request: web.Request, viewer: Viewer) -> Page:
        name = request.match_info["name"]
        return await self._blocking.run(self._show_snapshot, name, viewer, _server(request), self._own(viewer))

    def _show_snapshot(self, name: str, viewer: Viewer, server: str, own: _Own) -> Page:
        store = viewer.view(self._store)
        found = snapshots.find(store, name)
        refs, snapshot_refs = store.refs.items(), store.snapshots.items()
        counted = own(_signature(refs, snapshot_refs))
        everything = snapshots.listing(store)
        return snapshotpages.detail_page(
            found,
            image=next((image for image, ref in refs if ref.record == found.record.image), None),
            parents=[one.label for one in everything if one.id == found.record.parent],
            children=[one.label for one in everything if one.record.parent == found.id],
            own_bytes=None if counted is None else counted.get(str(found.id)),
            startup=self._known.startup(store, viewer.namespace, found.record.memory),
            server=server,
        )

    async def _job_list(self, request: web.Request, viewer: Viewer) -> Page:
        jobs = [job for job in await self._jobs.all() if job.is_visible_to(viewer.namespace)]
        return jobpages.list_page(jobs, viewer, _server(request), said=request.query.get("said", ""))

    async def _job(self, request: web.Request, viewer: Viewer) -> Page:
        job = await self._jobs.get(request.match_info["id"], namespace=viewer.namespace)
        return jobpages.detail_page(job, viewer, said=request.query.get("said", ""))

    async def _health(self, request: web.Request, viewer: Viewer) -> Page:
        if not viewer.sees_store:
            raise ForeignFormError("the store as a whole is not for tokens of a namespace", hint="use one without")
        jobs = [job for job in await self._jobs.all() if job.kind is Kind.GC]
        return await self._blocking.run(self._show_health, viewer, jobs)

    def _show_health(self, viewer: Viewer, collections: list[Job]) -> Page:
        store = self._store
        disk_bytes, free_bytes = _disk(store)
        health = storepage.Health(
            directory=str(store.root),
            usage=store.df(),
            disk_bytes=disk_bytes,
            free_bytes=free_bytes,
            leases=store.leases.live(),
            collections=collections,
            collected=lastcollection.noted(store.index),
            images=len(store.refs.items()),
            snapshots=len(store.snapshots.items()),
            profiles=len(store.profiles.ids()),
        )
        return storepage.health_page(health, viewer)

    # Forms

    async def _cancel(self, request: web.Request, viewer: Viewer) -> str:
        job = await self._jobs.get(request.match_info["id"], namespace=viewer.namespace)
        if not viewer.may_cancel(job):
            raise ForeignFormError("this token may not cancel the job", hint="use one of scope write, or admin")
        await self._jobs.cancel(job.id)
        return "/jobs?said=cancelled"

    async def _collect(self, request: web.Request, viewer: Viewer) -> str:
        if not viewer.may_collect:
            raise ForeignFormError("this token may not collect", hint="use one of scope admin, without a namespace")
        job = await self._jobs.submit(Job.collection())
        return f"/jobs/{job.id}?said=collecting"

    # Sessions

    async def _login(self, request: web.Request) -> web.StreamResponse:
        if not self._sessions.required:
            raise _redirect("/")
        return respond(login_page(_local(request.query.get("next", ""))), None)

    async def _sign_in(self, request: web.Request) -> web.StreamResponse:
        sent = await _sent(request)
        after = _local(_text(sent, "next"))
        response = _redirect(after)
        if self._sessions.required and not self._sessions.sign_in(request, response, _text(sent, "token").strip()):
            log.warning("a sign-in with a token that is none of this server's, from %s", request.remote)
            return respond(login_page(after, problem="This is none of the server's tokens."), None)
        raise response

    async def _sign_out(self, request: web.Request) -> web.StreamResponse:
        response = _redirect("/login")
        try:
            viewer = self._sessions.viewer(request)
            self._sessions.check_form(viewer, _text(await _sent(request), "form"))
        except (SignInError, ForeignFormError):
            raise response from None
        response.del_cookie(COOKIE, path="/")
        raise response

    # What all of them do

    def _page(self, show: Shown) -> Handler:
        async def handler(request: web.Request) -> web.StreamResponse:
            try:
                viewer = self._sessions.viewer(request)
            except SignInError:
                raise _redirect(f"/login?next={quote(request.path_qs, safe='')}") from None
            try:
                return respond(await show(request, viewer), viewer)
            except PvisorError as error:
                return self._failed(request, viewer, error)

        return handler

    def _form(self, do: Done) -> Handler:
        """What changes something: by a form of this site alone, and then to a page."""

        async def handler(request: web.Request) -> web.StreamResponse:
            try:
                viewer = self._sessions.viewer(request)
            except SignInError:
                raise _redirect("/login") from None
            try:
                self._sessions.check_form(viewer, _text(await _sent(request), "form"))
                after = await do(request, viewer)
            except PvisorError as error:
                return self._failed(request, viewer, error)
            raise _redirect(after)

        return handler

    def _failed(self, request: web.Request, viewer: Viewer, error: PvisorError) -> web.Response:
        foreign = isinstance(error, ForeignFormError)
        status = 403 if foreign else next((status for kind, status in STATUS if isinstance(error, kind)), 500)
        if status >= 500:
            log.error("%s %s: %s [request %s]", request.method, request.path, error.message, request_id(request))
        return respond(problem(_TITLES.get(status, "That failed"), error.message, error.hint, status), viewer)

    def _own(self, viewer: Viewer) -> _Own:
        """For use in a thread: what is known of own bytes, which has the event loop count when it is out of date."""
        loop = asyncio.get_running_loop()

        def ask(signature: int) -> Mapping[str, int] | None:
            async def look() -> Mapping[str, int] | None:
                return self._sharing.own(viewer.namespace, signature)

            return asyncio.run_coroutine_threadsafe(look(), loop).result(10)

        return ask


_Own = Callable[[int], Mapping[str, int] | None]


def _made(job: Job, image: str) -> bool:
    return job.image is not None and job.image.get("id") == image


def _signature(refs: list[tuple[str, Ref]], snapshot_refs: list[tuple[str, SnapshotRef]]) -> int:
    """Of what there is to count."""
    return hash((frozenset(ref.record for _, ref in refs), frozenset(ref.record for _, ref in snapshot_refs)))


def _disk(store: ChunkStore) -> tuple[int, int]:
    """Bytes of the file system altogether, and those that are free for us."""
    status = os.statvfs(store.root)
    return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize


def _server(request: web.Request) -> str:
    """The address of this server, for commands to copy: as the browser has it."""
    host = request.host if _HOST.fullmatch(request.host) else "SERVER:7878"
    secure = request.secure or request.headers.get("X-Forwarded-Proto") == "https"
    return f"{'https' if secure else 'http'}://{host}"


def _local(path: str) -> str:
    """A path of this site, whatever was asked for."""
    try:
        parts = urlsplit(path)
    except ValueError:
        return "/"
    local = path.startswith("/") and not parts.netloc and not path.startswith(("//", "/\\")) and path.isprintable()
    return path if local and parts.path != "/login" else "/"


async def _sent(request: web.Request) -> Mapping[str, Any]:
    """The fields of a form. FormatError for a body that is none, or in a charset that nobody knows."""
    try:
        return await request.post()
    except (ValueError, LookupError) as error:
        raise FormatError("request body", expected="the fields of a form", found=str(error)[:80]) from error


def _redirect(path: str) -> web.HTTPSeeOther:
    return web.HTTPSeeOther(path, headers={"Cache-Control": "no-store"})


def _text(sent: Mapping[str, Any], name: str) -> str:
    value = sent.get(name)
    return value if isinstance(value, str) else ""
