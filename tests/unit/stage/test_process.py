"""The image's configuration merged with the command line."""

from __future__ import annotations

import os
from typing import Any

import pytest

from imaged.runconfig import DEFAULT_PATH
from stage.boundary.process import ProcessSpec, resolve
from stage.boundary.workload import execute
from stage.errors import CommandError, StageSetupError

IMAGE: dict[str, Any] = {
    "config": {
        "Entrypoint": ["/entry", "-x"],
        "Cmd": ["serve"],
        "Env": ["PATH=/image/bin", "A=1", "B=x=y", "EMPTY="],
        "WorkingDir": "srv",
        "User": "agent:staff",
    }
}


def test_the_image_says_everything() -> None:
    spec = resolve(IMAGE)
    assert spec.argv == ("/entry", "-x", "serve")
    assert spec.env == {"PATH": "/image/bin", "A": "1", "B": "x=y", "EMPTY": ""}
    assert (spec.workdir, spec.user) == ("/srv", "agent:staff")


def test_the_command_line_wins() -> None:
    given = ["A=2", "FROM_CALLER", "NOT_SET", "C="]
    spec = resolve(
        IMAGE,
        args=["ls", "-l"],
        env=given,
        workdir="/work/../tmp",
        user="0",
        environ={"FROM_CALLER": "yes", "PATH": "/host"},
    )
    assert spec.argv == ("/entry", "-x", "ls", "-l")
    assert spec.env == {"PATH": "/image/bin", "A": "2", "B": "x=y", "EMPTY": "", "FROM_CALLER": "yes", "C": ""}
    assert (spec.workdir, spec.user) == ("/tmp", "0")


def test_exec_takes_the_whole_command() -> None:
    assert resolve(IMAGE, args=["ls"], entrypoint=False).argv == ("ls",)


def test_defaults_of_an_image_that_says_nothing() -> None:
    for empty in ({}, {"config": None}, {"config": {"Env": None, "Cmd": None, "Entrypoint": None, "User": None}}):
        spec = resolve(empty, args=["true"], tty=True)
        assert spec.env == {"PATH": DEFAULT_PATH, "TERM": "xterm"}
        assert (spec.workdir, spec.user) == ("/", "")


def test_a_command_of_a_very_old_builder_is_one_string() -> None:
    assert resolve({"config": {"Entrypoint": "/bin/app"}}).argv == ("/bin/app",)


@pytest.mark.parametrize(
    ("image", "options"),
    [
        ({}, {}),
        ({"config": {"Cmd": []}}, {}),
        ({"config": {"Cmd": [1]}}, {}),
        ({"config": {"Cmd": {"a": 1}}}, {}),
        ({"config": [1]}, {}),
        ({"config": {"User": 5}}, {"args": ["true"]}),
        ({}, {"args": ["a\0b"]}),
        ({}, {"args": ["true"], "env": ["=x"]}),
        ({}, {"args": ["true"], "env": ["A=\0"]}),
        ({}, {"args": ["true"], "workdir": "rel"}),
        ({}, {"args": ["true"], "workdir": ""}),
    ],
)
def test_what_can_not_run_is_a_clear_error(image: dict[str, Any], options: dict[str, Any]) -> None:
    with pytest.raises(StageSetupError) as caught:
        resolve(image, **options)
    assert caught.value.message


@pytest.mark.parametrize(("program", "hint"), [("-t", "before the image's name"), ("no-such", "image's PATH")])
def test_an_option_in_the_place_of_the_command(program: str, hint: str) -> None:
    with pytest.raises(CommandError, match="not found") as caught:
        execute(ProcessSpec(argv=(program,), env={"PATH": "/nowhere"}), os.execve)
    assert hint in caught.value.hint and caught.value.exit_code == 127
