"""What a process in a guest runs as."""

from __future__ import annotations

from typing import Any

import pytest

from imaged.runconfig import DEFAULT_PATH, DEFAULT_TERM
from vmm.errors import VmSetupError
from vmm.workload import WorkloadOptions, resolve, taken

CONFIG: dict[str, Any] = {
    "Env": ["PATH=/bin", "COLOR=green"],
    "Entrypoint": ["/entry"],
    "Cmd": ["one", "two"],
    "WorkingDir": "srv",
    "User": "web",
    "Labels": {"big": "x" * 1000},
}


def test_the_image_says_what_the_command_line_does_not() -> None:
    found = resolve(CONFIG, (), WorkloadOptions(), entrypoint=True)
    assert found.argv == ("/entry", "one", "two")
    assert (found.env, found.cwd, found.user) == ({"PATH": "/bin", "COLOR": "green"}, "/srv", "web")
    assert resolve(CONFIG, ["a"], WorkloadOptions(), entrypoint=True).argv == ("/entry", "a")
    assert resolve(CONFIG, ["a"], WorkloadOptions(), entrypoint=False).argv == ("a",)


def test_the_command_line_wins() -> None:
    options = WorkloadOptions(env=["COLOR=red", "HERE", "NOT_HERE"], workdir="/w", user="0:0")
    found = resolve(CONFIG, ["a"], options, entrypoint=False, environ={"HERE": "yes"})
    assert found.env == {"PATH": "/bin", "COLOR": "red", "HERE": "yes"}
    assert (found.cwd, found.user) == ("/w", "0:0")


def test_a_terminal_has_a_type_that_image_and_command_line_may_choose() -> None:
    options = WorkloadOptions(tty=True)
    assert resolve({}, ["a"], options, entrypoint=False).env["TERM"] == DEFAULT_TERM
    assert resolve({"Env": ["TERM=vt100"]}, ["a"], options, entrypoint=False).env["TERM"] == "vt100"
    chosen = WorkloadOptions(env=["TERM"], tty=True)
    assert resolve({}, ["a"], chosen, entrypoint=False, environ={"TERM": "linux"}).env["TERM"] == "linux"


def test_an_image_without_a_configuration_has_a_path_and_a_root() -> None:
    found = resolve({}, ["a"], WorkloadOptions(), entrypoint=True)
    assert (found.env, found.cwd, found.user) == ({"PATH": DEFAULT_PATH}, "/", None)


@pytest.mark.parametrize(
    ("config", "args", "options"),
    [
        ({}, [], WorkloadOptions()),
        ({}, ["a"], WorkloadOptions(workdir="relative")),
        ({}, ["a"], WorkloadOptions(env=["=x"])),
        ({}, ["a\0b"], WorkloadOptions()),
        ({"Env": [1]}, ["a"], WorkloadOptions()),
        ({"User": 7}, ["a"], WorkloadOptions()),
    ],
)
def test_nonsense_is_refused(config: dict[str, Any], args: list[str], options: WorkloadOptions) -> None:
    with pytest.raises(VmSetupError):
        resolve(config, args, options, entrypoint=True)


def test_no_more_of_a_configuration_is_kept_than_is_taken() -> None:
    assert sorted(taken(CONFIG)) == ["Cmd", "Entrypoint", "Env", "User", "WorkingDir"]
