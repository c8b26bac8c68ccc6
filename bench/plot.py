"""Tables and plots of bench/cold_start.py for docs/benchmarks/, from its JSON.

python -m bench.plot bench/results/cold_start.json docs/benchmarks
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_PODMAN, _DOWNLOAD = "podman pull + run", "whole EROFS file in zstd"


def publish(results: Path, directory: Path) -> None:
    """cold_start.md, and a plot of each workload as PNG and SVG."""
    document = json.loads(results.read_text())
    directory.mkdir(parents=True, exist_ok=True)
    cells: list[dict[str, Any]] = document["samples"]
    workloads = list(dict.fromkeys(cell["workload"] for cell in cells))
    for workload in workloads:
        _plot([cell for cell in cells if cell["workload"] == workload], workload, directory)
    text = "\n".join(_markdown(document, workloads))
    (directory / "cold_start.md").write_text(text + "\n")


def _markdown(document: dict[str, Any], workloads: Sequence[str]) -> Iterator[str]:
    machine = document["machine"]
    yield "# Cold starts"
    yield ""
    yield "Time to the first output byte, by `bench/cold_start.py`, which says how. Requests and bytes are those of one"
    yield "start, both ways, until nothing passes any more; of podman and of the whole file those of the pull."
    yield ""
    linux = machine["kernel"].partition("-")[0]
    yield f"Measured on {machine['cores']} cores ({machine['cpu']}), Linux {linux}, Python {machine['python']}."
    for workload in workloads:
        cells = [cell for cell in document["samples"] if cell["workload"] == workload]
        yield ""
        yield f"## {workload}"
        yield ""
        yield f"![{workload}](cold_start-{workload}.svg)"
        yield ""
        yield "| link | contender | n | P50 ms | P95 ms | requests | MB | podman / | whole file / |"
        yield "|---|---|--:|--:|--:|--:|--:|--:|--:|"
        for cell in _ordered(cells):
            ready = cell["ready_s"]
            values = (
                cell["link"],
                cell["contender"],
                str(ready["n"]),
                f"{ready['p50'] * 1e3:.0f}",
                f"{ready['p95'] * 1e3:.0f}",
                f"{cell['requests']['p50']:.0f}",
                f"{cell['wire_bytes']['p50'] / 1e6:.3f}",
                _times(cells, cell, _PODMAN),
                _times(cells, cell, _DOWNLOAD),
            )
            yield f"| {' | '.join(values)} |"
    yield from _at_once(document["at_once"])


def _at_once(found: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield "## Eight at once"
    yield ""
    yield "Each image is minbase with a megabyte of its own that the workload reads; the server has their profiles, the"
    yield "host has nothing, and there is no delay. Times are those of the slowest start of a round."
    yield ""
    yield "| | n | P50 ms | P95 ms | of one | chunks fetched | MB |"
    yield "|---|--:|--:|--:|--:|--:|--:|"
    one = found["one_s"]["p50"]
    for name, key, chunks, wire in (
        ("one image", "one_s", "chunks_of_one", "bytes_of_one"),
        ("8 different images", "slowest_of_8_images_s", "", "bytes_of_8_images"),
        (
            "one image, 8 times",
            "slowest_of_8_starts_of_one_image_s",
            "chunks_of_8_of_one_image",
            "bytes_of_8_of_one_image",
        ),
    ):
        ready = found[key]
        values = (
            name,
            str(ready["n"]),
            f"{ready['p50'] * 1e3:.0f}",
            f"{ready['p95'] * 1e3:.0f}",
            f"{ready['p50'] / one:.2f}x",
            f"{found[chunks]['p50']:.0f}" if chunks else "",
            f"{found[wire]['p50'] / 1e6:.2f}",
        )
        yield f"| {' | '.join(values)} |"
    yield ""
    yield "Where nothing is fetched, eight at once take against one:"
    yield ""
    yield "| | n | P50 ms of one | P50 ms of 8 at once | of one |"
    yield "|---|--:|--:|--:|--:|"
    for name, pair in found["peers"].items():
        alone, together = pair["one_s"], pair["slowest_of_8_s"]
        times = f"{together['p50'] / alone['p50']:.2f}x"
        yield f"| {name} | {alone['n']} | {alone['p50'] * 1e3:.0f} | {together['p50'] * 1e3:.0f} | {times} |"


def _ordered(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By link as they came, then by time."""
    links = list(dict.fromkeys(cell["link"] for cell in cells))
    return sorted(cells, key=lambda cell: (links.index(cell["link"]), cell["ready_s"]["p50"]))


def _times(cells: Sequence[dict[str, Any]], cell: dict[str, Any], peer: str) -> str:
    for other in cells:
        if (other["link"], other["contender"]) == (cell["link"], peer):
            return f"{other['ready_s']['p50'] / cell['ready_s']['p50']:.1f}x"
    return ""


def _plot(cells: Sequence[dict[str, Any]], workload: str, directory: Path) -> None:
    """A bar for each contender and link, P50 with P95 as its whisker, on a logarithmic scale."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams.update({"svg.hashsalt": "pvisor", "svg.fonttype": "none"})
    from matplotlib import pyplot

    links = list(dict.fromkeys(cell["link"] for cell in cells))
    names = list(dict.fromkeys(cell["contender"] for cell in _ordered(cells)))
    figure, axes = pyplot.subplots(1, len(links), figsize=(5 * len(links), 0.42 * len(names) + 1.4), sharey=True)
    for axis, link in zip([axes] if len(links) == 1 else axes, links, strict=True):
        found = {cell["contender"]: cell for cell in cells if cell["link"] == link}
        for place, name in enumerate(reversed(names)):
            if name not in found:
                continue
            ready, wire = found[name]["ready_s"], found[name]["wire_bytes"]["p50"]
            ours = name.startswith("pvisor")
            color = "#3d85c6" if ours else "#b45f06"
            axis.barh(
                place, ready["p50"], xerr=[[0], [max(ready["p95"] - ready["p50"], 0)]], color=color, ecolor="#444444"
            )
            label = f" {ready['p50'] * 1e3:.0f} ms" + (f", {wire / 1e6:.2f} MB" if wire else "")
            axis.text(max(ready["p95"], ready["p50"]), place, label, va="center", fontsize=8)
        axis.set_xscale("log")
        low = min(cell["ready_s"]["p50"] for cell in cells)
        high = max(cell["ready_s"]["p95"] for cell in cells)
        axis.set_xlim(low / 2, high * 12)
        axis.set_title(link, fontsize=10)
        axis.set_xlabel("seconds to the first output byte", fontsize=8)
        axis.set_yticks(range(len(names)), list(reversed(names)), fontsize=9)
    figure.suptitle(f"{workload}: P50, whisker to P95", fontsize=11)
    figure.tight_layout()
    figure.savefig(directory / f"cold_start-{workload}.png", dpi=110)
    figure.savefig(directory / f"cold_start-{workload}.svg", metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("directory", type=Path)
    options = parser.parse_args()
    publish(options.results, options.directory)


if __name__ == "__main__":
    main()
