"""Which snapshot descends from which, and the page of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from imaged.ids import ChunkId
from imaged.snapshots import Ancestor, Snapshot
from imaged.web.figures import Startup
from imaged.web.frame import Page, empty, facts, heading, live_part, tiles
from imaged.web.html import Child, Html, join, tag
from imaged.web.imagepages import image_path, share
from imaged.web.text import ago, plural, short, size

_NS = 1_000_000_000
_SHOWN = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """The lineage, parents before their children; names of images by id, stored and own bytes of snapshots by id."""

    ancestors: Sequence[Ancestor]
    images: Mapping[ChunkId, str]
    stored: Mapping[ChunkId, int]
    own: Mapping[str, int] | None


def tree_page(tree: Tree, server: str) -> Page:
    lead = "Virtual machines as they were parked. Each is below the one that its machine was started from."
    body: list[Child] = [heading("Snapshots", lead)]
    if not tree.ancestors:
        body.append(_nothing(server))
    else:
        shown = tree.ancestors[:_SHOWN]
        named = sum(bool(one.names) for one in tree.ancestors)
        body.append(tag("p", plural(named, "snapshot"), class_="dim"))
        body.append(live_part(tree.own is not None, _branches(tree, shown)))
        if len(tree.ancestors) > len(shown):
            body.append(tag("p", f"and {len(tree.ancestors) - len(shown)} more: `pvisor snapshot tree` has them all"))
    return Page(title="Snapshots", section="/snapshots", body=join(*body), reloads=tree.own is None)


def _nothing(server: str) -> Html:
    return empty(
        tag("h2", "No snapshots yet"),
        tag("p", "Park a virtual machine on a host, and send what it was to this server:"),
        tag(
            "pre",
            "pvisor vm run --name box debian:12\npvisor vm park box --as ready\n"
            f"pvisor snapshot push ready --server {server}",
        ),
    )


def _branches(tree: Tree, shown: Sequence[Ancestor]) -> Html:
    """Nested lists, made without recursion: lineages may be thousands of generations deep."""
    levels: list[list[list[Html]]] = [[]]
    for one in shown:
        while len(levels) > one.depth + 1:
            _close(levels)
        while len(levels) < one.depth + 1:
            levels.append([])
        levels[-1].append([_node(tree, one)])
    while len(levels) > 1:
        _close(levels)
    return tag("ul", (tag("li", parts) for parts in levels[0]), class_="tree")


def _close(levels: list[list[list[Html]]]) -> None:
    items = levels.pop()
    children = tag("ul", (tag("li", parts) for parts in items))
    (levels[-1] or [[]])[-1].append(children)


def _node(tree: Tree, one: Ancestor) -> Html:
    if one.record is None:
        return tag("div", "A parent that is gone ", tag("span", short(one.id), class_="id"), class_="node gone")
    record = one.record
    names = _names(one.names) or tag("i", "without a name")
    image = tree.images.get(record.image)
    stood = tag("a", tag("bdi", image), href=image_path(image)) if image is not None else f"image {short(record.image)}"
    machine = f"{size(record.machine.memory_bytes)} memory"
    disk = f", {size(record.disk_bytes)} disk" if record.disk is not None else ""
    stored = tree.stored.get(one.id)
    own = None if tree.own is None else tree.own.get(str(one.id))
    return tag(
        "div",
        tag("div", tag("b", names), " ", tag("span", short(one.id), class_="id")),
        tag(
            "div",
            f"VM {record.vm}, ",
            machine,
            disk,
            ", on ",
            stood,
            ", parked ",
            ago(record.created_ns / _NS),
            class_="facts-line",
        ),
        tag("div", f"{size(record.dirty_bytes)} changed", _kept(stored, own), class_="facts-line"),
        class_="node",
    )


def _kept(stored: int | None, own: int | None) -> Child:
    if stored is None:
        return None
    return f", {size(stored)} stored" + (f" of which {size(min(own, stored))} are its own" if own is not None else "")


def _names(names: Sequence[str]) -> Child:
    found: list[Child] = []
    for name in names:
        found += [tag("a", name, href=snapshot_path(name)), ", "]
    return found[:-1]


def snapshot_path(name: str) -> str:
    return f"/snapshots/{quote(name, safe='')}"


def detail_page(
    snapshot: Snapshot,
    *,
    image: str | None,
    parents: Sequence[str],
    children: Sequence[str],
    own_bytes: int | None,
    startup: Startup | None,
    server: str,
) -> Page:
    record, ref = snapshot.record, snapshot.ref
    stored = ref.stored_bytes if ref is not None else None
    machine = record.machine
    stood = tag("a", tag("bdi", image), href=image_path(image)) if image is not None else short(record.image)
    descent: list[Child] = [tag("a", name, href=snapshot_path(name)) for name in parents] or (
        [tag("span", short(record.parent), class_="id")]
        if record.parent is not None
        else ["none: its machine was booted"]
    )
    figures: list[tuple[str, Child, Child]] = [
        ("Memory", size(machine.memory_bytes), None),
        ("Disk", size(record.disk_bytes) if record.disk is not None else "none", None),
        ("Changed", size(record.dirty_bytes), "captured from the machine"),
    ]
    if stored is not None:
        figures.append(("Stored", size(stored), plural(ref.chunks or 0, "chunk") if ref is not None else None))
    if startup is not None:
        figures.append(("Startup profile", size(startup.stored_bytes), plural(startup.runs, "run")))
    at = f"--server {server}"
    name = snapshot.label
    body = join(
        heading(name, trail=tag("a", "Snapshots", href="/snapshots")),
        tag("p", tag("span", str(snapshot.id), class_="id")),
        tiles(*figures),
        tag(
            "div",
            tag(
                "section",
                tag("h2", "Use it"),
                tag("p", "Bring it to a host, and let machines go on from it:"),
                tag("pre", f"pvisor snapshot pull {name} {at}\npvisor vm resume {name}\npvisor vm fork {name} -n 4"),
                class_="card",
            ),
            tag(
                "section",
                tag("h2", "What it is"),
                facts(
                    ("Virtual machine", tag("bdi", record.vm)),
                    ("Parked", ago(record.created_ns / _NS)),
                    ("Image", stood),
                    ("Descends from", descent),
                    ("Descendants", [join(tag("a", one, href=snapshot_path(one)), " ") for one in children] or "none"),
                    ("Shared and own", share(stored, own_bytes) if stored is not None else None),
                    ("Processors", str(machine.cpus)),
                    ("Accelerator", f"{machine.accelerator}, CPU model {machine.cpu}"),
                    ("QEMU", f"{machine.qemu}, {machine.machine}"),
                    ("Kernel", tag("bdi", machine.kernel)),
                    ("Network", machine.network),
                ),
                class_="card",
            ),
            class_="columns",
        ),
    )
    return Page(title=name, section="/snapshots", body=body)
