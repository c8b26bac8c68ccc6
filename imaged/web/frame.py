"""What every page has around it: its head, the way around, and the headers that keep a browser from doing more."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from imaged.web.html import Child, Html, join, tag
from imaged.web.session import Viewer

_STYLE = Path(__file__).with_name("style.css").read_text()
_SCRIPT = Path(__file__).with_name("live.js").read_text()
_ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E%3Crect width='16' height='16' "
    "rx='4' fill='%2312304f'/%3E%3Crect x='3' y='9' width='10' height='3' fill='%238fb5e8'/%3E%3Crect x='3' y='4' "
    "width='6' height='3' fill='%23fff'/%3E%3C/svg%3E"
)
_RELOAD_S = 5


def _hash(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; style-src {_hash(_STYLE)}; script-src {_hash(_SCRIPT)}; "
    "connect-src 'self'; img-src data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Vary": "Cookie",
}
"""Of every page. What it has of others is text, so no policy is needed for that; this is for when it once is not."""
SECTIONS = (("/", "Images"), ("/snapshots", "Snapshots"), ("/jobs", "Jobs"), ("/store", "Store"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One page. `section` is the path it belongs to; `reloads` when what it shows changes by itself.

    What is below the element with the id `live` is then kept up to date, without a script by loading the page again.
    """

    title: str
    body: Html
    section: str = ""
    reloads: bool = False
    status: int = 200


def respond(page: Page, viewer: Viewer | None) -> web.Response:
    """The page as an answer; `viewer` is None for one who has not signed in."""
    text = "<!doctype html>\n" + tag("html", _head(page), tag("body", *_body(page, viewer)), lang="en")
    return web.Response(
        text=text.encode(errors="backslashreplace").decode(),
        status=page.status,
        content_type="text/html",
        charset="utf-8",
        headers=HEADERS,
    )


def _head(page: Page) -> Html:
    reload = tag("meta", http_equiv="refresh", content=_RELOAD_S)
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("title", f"{page.title} · pVisor"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("link", rel="icon", href=_ICON),
        Html(f"<style>{_STYLE}</style>"),
        tag("noscript", reload) if page.reloads else None,
    )


def _body(page: Page, viewer: Viewer | None) -> list[Child]:
    script = Html(f"<script>{_SCRIPT}</script>") if page.reloads else None
    return [
        tag("a", "Skip to the content", class_="skip", href="#main"),
        tag("header", tag("div", tag("a", "pVisor", class_="brand", href="/"), _way(page, viewer), _who(viewer))),
        tag("main", page.body, id="main", tabindex="-1"),
        tag("footer", tag("p", "Chunk server · ", tag("a", "interface for programs", href="/v1/openapi.json"))),
        script,
    ]


def _way(page: Page, viewer: Viewer | None) -> Html | None:
    if viewer is None:
        return None
    shown = [(path, name) for path, name in SECTIONS if path != "/store" or viewer.sees_store]
    links = (
        tag("li", tag("a", name, href=path, aria_current="page" if path == page.section else None))
        for path, name in shown
    )
    return tag("nav", tag("ul", links), aria_label="Sections")


def _who(viewer: Viewer | None) -> Html | None:
    """Whose session it is, and how to end it; nothing where everybody may do everything."""
    if viewer is None or viewer.token is None:
        return None
    where = f", namespace {viewer.namespace}" if viewer.namespace is not None else ""
    out = tag("form", hidden(viewer), tag("button", "Sign out"), method="post", action="/logout", class_="inline")
    return tag("div", tag("span", f"{viewer.label} ({viewer.scope}{where})"), out, class_="who")


def hidden(viewer: Viewer) -> Html:
    """What a form has to send along to be believed."""
    return tag("input", type="hidden", name="form", value=viewer.form_key)


def heading(title: str, lead: Child = None, *, trail: Child = None) -> Html:
    return join(
        tag("p", trail, class_="trail") if trail is not None else None,
        tag("h1", tag("bdi", title)),
        tag("p", lead, class_="lead") if lead is not None else None,
    )


def note(kind: str, *children: Child) -> Html:
    """`kind` is good, bad or warn."""
    return tag("div", tag("p", *children), class_=f"note {kind}", role="alert" if kind == "bad" else "status")


def empty(*children: Child) -> Html:
    """In the place of a list that has nothing: what to do."""
    return tag("div", *children, class_="empty")


def tiles(*pairs: tuple[str, Child, Child]) -> Html:
    """Figures: what, how much, and what to know about it."""
    shown = (
        tag("div", tag("dt", name), tag("dd", value, tag("small", more) if more is not None else None))
        for name, value, more in pairs
    )
    return tag("dl", shown, class_="tiles")


def facts(*pairs: tuple[str, Child]) -> Html:
    """Names and values; those without a value are left out."""
    shown = (join(tag("dt", name), tag("dd", value)) for name, value in pairs if value is not None)
    return tag("dl", shown, class_="facts")


def live_part(settled: bool, *children: Child, busy: bool = False) -> Html:
    """The part of a page that is kept up to date: not after it is `settled`, often while it is `busy`."""
    return tag("div", children, id="live", data_busy="1" if busy else None, data_settled="1" if settled else None)


def table(caption: str, header: list[tuple[str, str]], rows: list[Html], **attributes: str) -> Html:
    """`header` has the name and class of each column; `rows` are made with `row`."""
    names = (
        tag("th", name or tag("span", "Actions", class_="hidden"), scope="col", class_=kind or None)
        for name, kind in header
    )
    return tag(
        "div",
        tag(
            "table",
            tag("caption", caption, class_="hidden"),
            tag("thead", tag("tr", names)),
            tag("tbody", rows),
            class_="stack",
        ),
        class_="wrap",
        **attributes,
    )


def row(header: list[tuple[str, str]], first: Child, *cells: Child, **attributes: str | None) -> Html:
    """One row; the first cell is what it is about. On a narrow page each cell has the name of its column before it."""
    rest = (
        Html("<td></td>")
        if cell in (None, "")
        else tag("td", tag("div", cell), class_=kind or None, data_label=name or None)
        for (name, kind), cell in zip(header[1:], cells, strict=True)
    )
    return tag("tr", tag("th", first, scope="row"), rest, **attributes)


def problem(title: str, message: str, hint: str, status: int) -> Page:
    """A page that says what went wrong, and what to do."""
    body = join(
        heading(title),
        note("bad", message),
        tag("p", hint) if hint else None,
        tag("p", tag("a", "Back to the images", href="/")),
    )
    return Page(title=title, body=body, status=status)
