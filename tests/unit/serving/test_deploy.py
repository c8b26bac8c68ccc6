"""What deploy/ has fits the program: its options exist, its metrics exist, its files parse."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from cli.group import COMMANDS
from imaged.chunkstore.store import ChunkStore
from imaged.collection.eviction import Evictor
from imaged.serving.metrics import Metrics, Sources
from imaged.serving.traffic import Traffic

DEPLOY = Path(__file__).parents[3] / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.[st][ei]*"))
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))


def require_options(words: Sequence[str]) -> None:
    """Every option of this command line, as far as it is written out, is one of the program's."""
    command: click.Command = getattr(importlib.import_module(COMMANDS[words[0]][0]), words[0])
    rest = list(words[1:])
    while isinstance(command, click.Group):
        command = command.commands[rest.pop(0)]
    known = {option for parameter in command.params for option in parameter.opts}
    used = {word.partition("=")[0] for word in rest if word.startswith("-")}
    assert used <= known


def documents() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in MANIFESTS:
        for document in yaml.safe_load_all(path.read_text()):
            yield f"{path.name}: {document['kind']} {document['metadata']['name']}", document


def pod(document: dict[str, Any]) -> dict[str, Any] | None:
    spec: dict[str, Any] = document["spec"]
    spec = spec.get("jobTemplate", {}).get("spec", spec)
    found: dict[str, Any] | None = spec.get("template", {}).get("spec")
    return found


@pytest.mark.parametrize(("name", "document"), list(documents()), ids=[name for name, _ in documents()])
def test_manifests(name: str, document: dict[str, Any]) -> None:
    assert {"apiVersion", "kind", "metadata", "spec"} <= document.keys()
    spec = pod(document)
    if spec is None:
        return
    labels = document["spec"].get("selector", {}).get("matchLabels", {}).items()
    assert labels <= document["spec"].get("template", {}).get("metadata", {}).get("labels", {}).items()
    volumes = {volume["name"] for volume in spec["volumes"]}
    volumes |= {claim["metadata"]["name"] for claim in document["spec"].get("volumeClaimTemplates", ())}
    for container in spec["containers"]:
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        if "args" in container:
            require_options(container["args"])
        for words in re.findall(r"pvisor ([a-z][^;|>&']*)", " ".join(container.get("command", ()))):
            require_options(shlex.split(words))
        ports = {port["name"] for port in container.get("ports", ())}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            if "httpGet" in container.get(probe, {}):
                assert container[probe]["httpGet"]["port"] in ports
                assert container[probe]["httpGet"]["path"].partition("?")[0] in ("/healthz", "/readyz")
    drains = [float(word.partition("=")[2]) for one in spec["containers"] for word in one.get("args", ())
              if word.startswith("--drain=")]  # fmt: skip
    assert all(spec["terminationGracePeriodSeconds"] >= drain + 30 for drain in drains)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_units(unit: Path, tmp_path: Path) -> None:
    text = unit.read_text()
    lines = [line for line in text.splitlines() if line.startswith(("ExecStart=", "ExecStop="))]
    for line in lines:
        program, *words = shlex.split(line.partition("=")[2])
        assert program == "/usr/local/bin/pvisor"
        require_options([word for word in words if not word.startswith("$")])
    if shutil.which("systemd-analyze") is not None:
        # Where the program is not installed there still is a true.
        shown = tmp_path / unit.name
        shown.write_text(text.replace("/usr/local/bin/pvisor", "/bin/true"))
        for other in UNITS:
            if other != unit:
                (tmp_path / other.name).write_text(other.read_text().replace("/usr/local/bin/pvisor", "/bin/true"))
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", str(shown)], capture_output=True, text=True, check=False
        )
        assert (done.returncode, unit.name in done.stderr) == (0, False), done.stderr


def test_every_metric_of_the_dashboard_exists(tmp_path: Path) -> None:
    traffic = Traffic()
    traffic.note("GET", "/healthz", "/healthz", 200, 1, 1, 0.1, "peer")
    with ChunkStore.open(tmp_path / "store") as store:
        Evictor(store, 1 << 30).note()
        metrics = Metrics(Sources(store, lambda: {"done": 1}, lambda: 0, dict), traffic, lambda: 0)
        metrics.take()
        text = metrics.render().decode()
    there = {line.partition(" ")[0].partition("{")[0] for line in text.splitlines() if not line.startswith("#")}
    dashboard = json.loads((DEPLOY / "grafana/pvisor.json").read_text())
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    used = {name for expression in expressions for name in re.findall(r"\bpvisor_\w+", expression)}
    assert used <= there
    shown_nowhere = {"pvisor_build_info", "pvisor_http_connections"} | {name for name in there if "_created" in name}
    assert there - used <= shown_nowhere


def test_every_metric_is_in_the_documentation(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path / "store") as store:
        Evictor(store, 1 << 30).note()
        text = Metrics(Sources(store, dict, lambda: 0, dict), Traffic(), lambda: 0).render().decode()
    names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    page = (DEPLOY.parent / "docs/operations.md").read_text()
    assert {name for name in names if not name.endswith("_created") and f"`{name}" not in page} == set()
