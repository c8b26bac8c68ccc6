"""Imports point inward: cli -> stage, vmm, replay -> fuse -> imaged; only cli imports click, prints or exits."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
ALLOWED = {
    "imaged": set[str](),
    "fuse": {"imaged"},
    "stage": {"fuse", "imaged"},
    "vmm": {"fuse", "imaged"},
    "replay": {"fuse", "imaged"},
    "cli": {"stage", "vmm", "replay", "fuse", "imaged"},
}
MODULES = [path for package in ALLOWED for path in sorted((ROOT / package).rglob("*.py"))]


def imports(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_inward(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    tree = ast.parse(path.read_text())
    outward = (imports(tree) & set(ALLOWED)) - ALLOWED[package] - {package}
    assert not outward
    if package != "cli":
        assert "click" not in imports(tree)
        calls = {
            node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        assert not calls & {"print", "exit"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_are_one_noun(path: Path) -> None:
    assert path.read_text().count("\n") <= 600


def test_the_hot_path_imports_little() -> None:
    """`pvisor run` of a pulled image asks the node daemon: it needs neither the store nor an HTTP library."""
    code = "import sys, cli.run, cli.main, stage.launch; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = set(done.stdout.split())
    assert "cli.run" in loaded
    assert not loaded & {
        "lmdb",
        "zstandard",
        "blake3",
        "urllib3",
        "aiohttp",
        "asyncio",
        "http.client",
        "mfusepy",
        "boto3",
    }
