"""Imports point inward: cli -> stage, vmm, replay -> fuse -> imaged; only cli imports click, prints or exits."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import stage
import vmm

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


def loaded_by(code: str) -> set[str]:
    """The modules that a fresh interpreter has after this code, beyond those of its own start."""
    show = f"import sys; before = set(sys.modules); {code}; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.split())


def test_the_hot_path_imports_little() -> None:
    """`pvisor run` of a pulled image asks the node daemon: it needs neither the store nor an HTTP library.

    Nor what only errors, logs and other commands need. Each of these modules costs a start some milliseconds.
    """
    loaded = loaded_by("from cli import startup; startup.begin(); import cli.group, cli.run, stage.session")
    assert {"cli.run", "stage.boundary.launch"} <= loaded
    heavy = {
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
    errors_and_logs = {"logging", "traceback", "linecache", "tokenize", "dis", "ast"}
    others = {"subprocess", "ssl", "tempfile", "shutil", "random", "argparse", "email", "hashlib", "queue"}
    cold = {
        "fuse.starter",
        "fuse.mounts",
        "fuse.erofs",
        "fuse.loop",
        "imaged.chunkstore.store",
        "imaged.fetching.upstream",
        "stage.api",
    }
    assert not loaded & (heavy | errors_and_logs | others | cold)


def test_opening_a_snapshot_imports_little() -> None:
    """What of this package a resume of a virtual machine waits for."""
    loaded = loaded_by("import fuse.node, fuse.warm, fuse.vmlease, imaged.snapshot")
    heavy = {
        "lmdb",
        "zstandard",
        "urllib3",
        "asyncio",
        "logging",
        "subprocess",
        "imaged.chunkstore.store",
        "fuse.starter",
    }
    assert not loaded & heavy


def test_a_deferred_module_is_there_when_it_is_used() -> None:
    code = (
        "from cli import startup; startup.begin(); import inspect, dataclasses; from inspect import signature;"
        "text = inspect.cleandoc(' a\\n   b\\n   c'); assert text == 'a\\nb\\nc', text;"
        "assert inspect.cleandoc('  one line') == 'one line'; assert str(signature(lambda x: x)) == '(x)'"
    )
    assert "tokenize" in loaded_by(code)


def test_modules_that_few_commands_need_come_when_they_are_used() -> None:
    """click has `platform` imported, pathlib has `ipaddress`, and a start uses neither."""
    start = "from cli import startup; startup.begin(); import cli.group, cli.run, stage.session"
    answers = "assert platform.system() == 'Linux'; assert str(ipaddress.ip_address('::1')) == '::1'"
    code = f"{start}; import platform, ipaddress; {answers}; assert platform.machine() == os.uname().machine"
    loaded_by(f"import os; {code}")
    seen = (
        "assert not hasattr(sys.modules['platform'], '__file__') and not hasattr(sys.modules['ipaddress'], '__file__')"
    )
    loaded_by(f"{start}; {seen}")


def test_the_python_api_imports_nothing_until_it_is_called() -> None:
    for package in (stage, vmm):
        name = package.__name__
        loaded = loaded_by(f"import {name}; {name}")
        assert {module for module in loaded if module.partition(".")[0] in ALLOWED} == {name}
        assert package.run.__module__ == f"{name}.api"


def test_recovery_is_below_the_stages_that_call_it() -> None:
    assert "stage.kept.stages" not in loaded_by("import stage.applying.recovery")


def test_no_module_has_the_name_of_a_function_of_the_api() -> None:
    """Importing it would put the module in the function's place."""
    for package in (stage, vmm):
        for name in package.__all__:
            assert not (ROOT / package.__name__ / f"{name}.py").exists()
            assert getattr(package, name).__name__ == name


def test_exec_and_resume_import_little() -> None:
    """Neither the store nor what captures a VM: a resume is to be quicker than a look at it."""
    loaded = loaded_by("from cli import startup; startup.begin(); import cli.group, cli.vm, vmm.execution, vmm.restore")
    heavy = {"lmdb", "zstandard", "urllib3", "asyncio", "logging", "subprocess", "dis", "shutil", "concurrent.futures"}
    assert not loaded & (heavy | {"imaged.chunkstore.store", "vmm.disk", "vmm.parking", "vmm.api", "vmm.survey"})


def test_until_the_command_handles_an_interrupt_nothing_is_imported() -> None:
    """What Ctrl-C meets before that shows a traceback."""
    assert loaded_by("from cli.main import main") <= {"__future__", "cli", "cli.main"}
    little = {"__future__", "cli", "cli.startup", "gc", "inspect", "ipaddress", "platform"}
    assert loaded_by("from cli import startup; startup.begin()") <= little
