"""What the benchmarks start, and the images it is in."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.debian import debian_layout


@dataclass(frozen=True, slots=True)
class Image:
    """A Debian root: minbase with more packages, and what `script` did in it."""

    name: str
    packages: tuple[str, ...] = ()
    script: str = ""

    def layout(self) -> Path:
        """As an OCI layout, built when it is not there yet."""
        return debian_layout(self.name, self.packages, self.script)


@dataclass(frozen=True, slots=True)
class Workload:
    """A command whose first output byte says that it is up; `marker` is in its output."""

    name: str
    image: Image
    command: str
    marker: bytes

    @property
    def argv(self) -> Sequence[str]:
        return shlex.split(self.command)


_REPOSITORY = "/srv/repository"
_COMMIT = "git -c user.name=bench -c user.email=bench@localhost commit -q -m first"
MINBASE = Image("minbase")
SCIENCE = Image(
    "science",
    ("git", "python3-numpy"),
    f"mkdir {_REPOSITORY}; cd {_REPOSITORY}; git init -q; seq 100 > numbers; seq 50 > more; git add .; {_COMMIT}",
)
SHELL = Workload("shell", MINBASE, "sh -c '. /etc/os-release; echo ready $PRETTY_NAME'", b"ready Debian")
NUMPY = Workload("numpy", SCIENCE, "python3 -c 'import numpy; print(numpy.__version__)'", b"1.")
GIT = Workload("git", SCIENCE, f"sh -c 'git --version && git -C {_REPOSITORY} status'", b"nothing to commit")
WORKLOADS = (SHELL, NUMPY, GIT)
