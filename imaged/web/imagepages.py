"""The list of images, and the page of one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

from imaged.catalog import Entry
from imaged.chunkstore.refs import Ref
from imaged.chunkstore.store import ChunkStore
from imaged.errors import ChunkError, FormatError, NotFoundError
from imaged.ids import ChunkId
from imaged.names import ImageName
from imaged.record import ImageRecord
from imaged.web.figures import Known, Startup
from imaged.web.frame import Page, empty, facts, heading, live_part, row, table, tiles
from imaged.web.html import Child, Html, join, tag
from imaged.web.text import ago, plural, short, size

PAGE_ROWS = 100
_HEADER = [
    ("Image", ""),
    ("Size", "num"),
    ("Stored", "num"),
    ("Shared and own", ""),
    ("Startup profile", ""),
    ("Age", "nowrap"),
]
_SORTS = {"name": "by name", "stored": "largest first", "age": "newest first"}
_VALUE_LIMIT = 4000
_LIST_LIMIT = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Which part of the list is wanted."""

    words: str = ""
    sort: str = "name"
    page: int = 1

    @classmethod
    def parse(cls, query: Mapping[str, str]) -> Asked:
        """What is wrong in it is as if it were not there."""
        sort, page = query.get("sort", "name"), query.get("page", "1")
        return cls(
            words=query.get("q", "").strip()[:200],
            sort=sort if sort in _SORTS else "name",
            page=max(1, int(page)) if page.isascii() and page.isdigit() and len(page) < 7 else 1,
        )

    def link(self, **changed: str | int) -> str:
        values = {"q": self.words, "sort": self.sort, "page": self.page, **changed}
        plain = {"q": "", "sort": "name", "page": 1}
        return "/?" + urlencode({key: value for key, value in values.items() if value != plain[key]})

    def pick(self, refs: Sequence[tuple[str, Ref]]) -> list[tuple[str, Ref]]:
        words = self.words.lower().split()
        found = [(name, ref) for name, ref in refs if all(word in name.lower() for word in words)]
        if self.sort == "stored":
            found.sort(key=lambda item: -item[1].stored_bytes)
        elif self.sort == "age":
            found.sort(key=lambda item: -item[1].created_at)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """What the list shows besides images. `own` is None while it is counted; `store` (logical, stored and free bytes)
    when whoever looks may see it."""

    own: Mapping[str, int] | None
    snapshot_count: int
    store: tuple[int, int, int] | None


def list_page(
    store: ChunkStore,
    namespace: str | None,
    refs: Sequence[tuple[str, Ref]],
    overview: Overview,
    asked: Asked,
    known: Known,
    server: str,
) -> Page:
    """All images that have a name, a hundred at a time."""
    found = asked.pick(refs)
    pages = max(1, -(-len(found) // PAGE_ROWS))
    shown = found[(min(asked.page, pages) - 1) * PAGE_ROWS :][:PAGE_ROWS]
    rows = [_row(store, namespace, name, ref, overview.own, known) for name, ref in shown]
    body: list[Child] = [
        heading("Images", "Block images that hosts start lazily: each chunk is stored once, whichever images have it."),
        _figures(refs, overview),
    ]
    if not refs:
        body.append(_nothing(server))
    else:
        live = live_part(overview.own is not None, _legend(overview), _list(rows, asked))
        body += [_controls(asked, len(found)), live, _pages(asked, pages)]
    return Page(title="Images", section="/", body=join(body), reloads=overview.own is None)


def _figures(refs: Sequence[tuple[str, Ref]], overview: Overview) -> Html:
    images = len({ref.record for _, ref in refs})
    names = f"under {plural(len(refs), 'name')}" if len(refs) != images else None
    shown: list[tuple[str, Child, Child]] = [
        ("Images", f"{images:,}", names),
        ("Snapshots", tag("a", f"{overview.snapshot_count:,}", href="/snapshots"), None),
    ]
    if overview.store is not None:
        logical, stored, free = overview.store
        share = f"{100 * stored // logical}% of {size(logical)} unpacked" if logical else None
        shown += [("Stored", size(stored), share), ("Free on the disk", size(free), None)]
    return tiles(*shown)


def _controls(asked: Asked, count: int) -> Html:
    find = tag(
        "form",
        tag("input", type="hidden", name="sort", value=asked.sort) if asked.sort != "name" else None,
        tag(
            "div",
            tag("label", "Find by name", for_="q"),
            tag("input", type="search", name="q", id="q", value=asked.words, autocomplete="off"),
        ),
        tag("button", "Find"),
        tag("a", "Show all", href=asked.link(q="", page=1)) if asked.words else None,
        method="get",
        action="/",
        role="search",
    )
    sorts = (
        tag("strong", name) if sort == asked.sort else tag("a", name, href=asked.link(sort=sort, page=1))
        for sort, name in _SORTS.items()
    )
    return tag(
        "div",
        find,
        tag("div", plural(count, "name"), " · ", _spaced(sorts), class_="right dim"),
        class_="bar",
    )


def _legend(overview: Overview) -> Html:
    keys = tag("span", class_="key own"), "own ", tag("span", class_="key shared"), "shared with others"
    return tag("p", "Stored bytes: ", keys, "" if overview.own is not None else " – being counted …", class_="dim")


def _spaced(items: Iterable[Child]) -> list[Child]:
    found: list[Child] = []
    for item in items:
        found += [item, " · "]
    return found[:-1]


def _list(rows: list[Html], asked: Asked) -> Html:
    if not rows:
        return empty(tag("p", "No image has ", tag("q", asked.words), " in its name."))
    return table("Images", _HEADER, rows)


def _pages(asked: Asked, pages: int) -> Html | None:
    if pages == 1:
        return None
    page = min(asked.page, pages)
    before = tag("a", "← Previous", href=asked.link(page=page - 1), rel="prev") if page > 1 else None
    after = tag("a", "Next →", href=asked.link(page=page + 1), rel="next") if page < pages else None
    return tag("nav", before, tag("span", f"Page {page} of {pages}"), after, class_="pages", aria_label="Pages")


def _nothing(server: str) -> Html:
    return empty(
        tag("h2", "No images yet"),
        tag("p", "Have this server convert an image of a registry:"),
        tag("pre", f"pvisor convert docker://docker.io/library/debian:12 --name debian:12 --server {server}"),
        tag("p", "or send one that is on your host, from an OCI layout, an archive or a directory:"),
        tag("pre", f"pvisor convert oci:./image:v1 --name app:v1 --server {server}"),
    )


def _row(
    store: ChunkStore, namespace: str | None, name: str, ref: Ref, own: Mapping[str, int] | None, known: Known
) -> Html:
    first = join(tag("a", tag("bdi", name), href=image_path(name)), tag("span", short(ref.record), class_="id"))
    try:
        entry = known.entry(store, name, ref)
    except (ChunkError, FormatError) as error:
        problem = tag("span", f"its record can not be read: {error.message}", class_="under")
        return row(_HEADER, join(first, problem), "", size(ref.stored_bytes), "", "", ago(ref.created_at))
    startup = known.startup(store, namespace, entry.record.data)
    return row(
        _HEADER,
        first,
        size(entry.record.data_bytes + entry.record.metadata_bytes),
        size(ref.stored_bytes),
        share(ref.stored_bytes, None if own is None else own.get(str(ref.record))),
        _startup(startup),
        ago(ref.created_at),
    )


def share(stored_bytes: int, own_bytes: int | None) -> Html:
    """How much of what it takes is shared, as a bar and in words."""
    if own_bytes is None:
        return tag("span", "–", class_="dim")
    own_bytes = min(own_bytes, stored_bytes)
    wide = 100 * own_bytes / stored_bytes if stored_bytes else 0
    bar = tag(
        "svg",
        tag("rect", class_="own", width=f"{wide:.1f}", height=7),
        tag("rect", class_="shared", x=f"{wide:.1f}", width=f"{100 - wide:.1f}", height=7),
        class_="share",
        viewBox="0 0 100 7",
        preserveAspectRatio="none",
        aria_hidden="true",
    )
    return join(tag("span", f"{size(stored_bytes - own_bytes)} shared, {size(own_bytes)} own"), bar)


def _startup(startup: Startup | None) -> Child:
    if startup is None:
        return tag("span", "none yet", class_="dim", title="The first start on a host records one")
    about = f"{plural(startup.entries, 'chunk')}, {plural(startup.runs, 'run')}"
    return join(size(startup.stored_bytes), tag("span", about, class_="under"))


def image_path(name: str) -> str:
    return f"/images/{quote(name, safe='/:')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Detail:
    """What the page of an image shows besides its record. `warnings` is None when the conversion is not remembered."""

    entry: Entry
    names: tuple[str, ...]
    snapshots: tuple[str, ...]
    own_bytes: int | None
    startup: Startup | None
    known_layers: frozenset[str]
    warnings: Sequence[str] | None
    job: str | None
    server: str


def find(refs: Sequence[tuple[str, Ref]], text: str) -> tuple[str, Ref]:
    """By its whole name or its id. NotFoundError."""
    for name, ref in refs:
        if text in (name, str(ref.record)):
            return name, ref
    wanted = str(ImageName.parse(text)) if not ChunkId.is_id(text) else text
    for name, ref in refs:
        if name == wanted:
            return name, ref
    raise NotFoundError(f"no image {text}", hint="it may have been removed; the list has those that there are")


def detail_page(detail: Detail) -> Page:
    entry, record = detail.entry, detail.entry.record
    others = [name for name in detail.names if name != entry.name]
    body = join(
        heading(entry.name, trail=tag("a", "Images", href="/")),
        tag("p", tag("span", str(entry.ref.record), class_="id")),
        live_part(
            detail.own_bytes is not None,
            tiles(
                ("Size", size(record.data_bytes + record.metadata_bytes), plural(record.entries, "file")),
                ("Stored", size(entry.ref.stored_bytes), plural(entry.ref.chunks, "chunk")),
                *_own_tiles(detail),
                ("Startup profile", _startup_figure(detail.startup), _startup_more(detail.startup)),
            ),
        ),
        _warnings(detail),
        tag(
            "div",
            tag("section", tag("h2", "Use it"), _use(detail), class_="card"),
            tag("section", tag("h2", "Where it comes from"), _origin(detail, others), class_="card"),
            tag("section", tag("h2", "Configuration"), _config(record), class_="card"),
            tag("section", tag("h2", "Layers"), _layers(detail), class_="card"),
            class_="columns",
        ),
    )
    return Page(title=entry.name, section="/", body=body, reloads=detail.own_bytes is None)


def _own_tiles(detail: Detail) -> list[tuple[str, Child, Child]]:
    if detail.own_bytes is None:
        return [("Shared and own", "…", "being counted")]
    own = min(detail.own_bytes, detail.entry.ref.stored_bytes)
    return [
        ("Shared", size(detail.entry.ref.stored_bytes - own), "with other images and snapshots"),
        ("Own", size(own), None),
    ]


def _startup_figure(startup: Startup | None) -> Child:
    return "none yet" if startup is None else size(startup.stored_bytes)


def _startup_more(startup: Startup | None) -> Child:
    if startup is None:
        return "the first start records one"
    return f"{startup.entries:,} chunks, from {plural(startup.runs, 'run')}"


def _warnings(detail: Detail) -> Html | None:
    if not detail.warnings:
        return None
    listed = tag("ol", (tag("li", text) for text in detail.warnings[:_LIST_LIMIT]), class_="warnings")
    said = (
        f"The conversion left out, or changed, what an image can not have: {plural(len(detail.warnings), 'warning')}."
    )
    return tag("div", tag("p", said), tag("details", tag("summary", "Show them"), listed), class_="note warn")


def _use(detail: Detail) -> Html:
    name, at = detail.entry.name, f"--server {detail.server}"
    return join(
        tag("p", "Start a process in it; what it reads is fetched when it is read:"),
        tag("pre", f"pvisor run {name} {at} -- sh"),
        tag("p", "Have it ready on a host, or all of it:"),
        tag("pre", f"pvisor pull --lazy {name} {at}\npvisor pull {name} {at}"),
        tag("p", "Start a virtual machine in it:"),
        tag("pre", f"pvisor vm run {name} {at} -- uname -a"),
    )


def _origin(detail: Detail, others: Sequence[str]) -> Html:
    entry, record = detail.entry, detail.entry.record
    return facts(
        ("Source", tag("bdi", entry.ref.source)),
        ("Source digest", tag("span", record.source_digest, class_="id") if record.source_digest else None),
        ("Platform", record.platform),
        ("Converted", join(ago(entry.ref.created_at), _job_link(detail))),
        ("Signed by", _listed(tag("span", one.key, class_="id") for one in entry.ref.signatures) or "nobody"),
        ("Other names", _listed(tag("a", tag("bdi", name), href=image_path(name)) for name in others)),
        (
            "Snapshots on it",
            _listed(tag("a", name, href=f"/snapshots/{quote(name)}") for name in detail.snapshots),
        ),
        ("Metadata", join(size(record.metadata_bytes), tag("span", str(record.metadata), class_="id under"))),
        ("Data", join(size(record.data_bytes), tag("span", str(record.data), class_="id under"))),
    )


def _job_link(detail: Detail) -> Child:
    return join(" by ", tag("a", "this job", href=f"/jobs/{detail.job}")) if detail.job is not None else None


def _listed(items: Iterable[Child]) -> Html | None:
    found = [tag("li", item) for item in items]
    more = [tag("li", f"and {len(found) - _LIST_LIMIT} more")] if len(found) > _LIST_LIMIT else []
    return tag("ul", found[:_LIST_LIMIT], more) if found else None


def _layers(detail: Detail) -> Html:
    layers = detail.entry.record.layers
    if not layers:
        return tag("p", "None: it was converted from a directory.", class_="dim")
    lines = (
        tag(
            "li",
            tag("span", layer, class_="id"),
            tag("span", "kept: another image with it is converted without reading it", class_="under")
            if layer in detail.known_layers
            else None,
        )
        for layer in layers[:_LIST_LIMIT]
    )
    return tag("ol", lines, class_="warnings")


def _config(record: ImageRecord) -> Html:
    pairs: list[tuple[str, Child]] = []
    for key in sorted(record.config):
        value = record.config[key]
        if value in (None, "", [], {}):
            continue
        pairs.append((key, _value(value)))
    return facts(*pairs) if pairs else tag("p", "None.", class_="dim")


def _value(value: Any) -> Html:
    if isinstance(value, str):
        return tag("bdi", _cut(value), class_="mono")
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return _listed(tag("bdi", _cut(item), class_="mono") for item in value) or join("–")
    if isinstance(value, Mapping) and all(isinstance(item, str) for item in value.values()):
        return _listed(tag("bdi", _cut(f"{key}={item}"), class_="mono") for key, item in value.items()) or join("–")
    if isinstance(value, Mapping) and all(item in (None, {}, []) for item in value.values()):
        return _listed(tag("bdi", _cut(str(key)), class_="mono") for key in value) or join("–")
    return tag("bdi", _cut(json.dumps(value, ensure_ascii=False)), class_="mono")


def _cut(text: str) -> str:
    return text if len(text) <= _VALUE_LIMIT else f"{text[:_VALUE_LIMIT]}… ({len(text)} characters)"
