"""Kernel modules: which files a set of them needs, in an order in which they load.

What depends on what is in `modules.dep` of an installed kernel. A package that was only unpacked has none, since its
installation would have made it with depmod(8); then it is read from the modules, where the kernel's build has noted it.
"""

from __future__ import annotations

import gzip
import lzma
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import zstandard

from imaged.errors import FormatError
from vmm.errors import VmSetupError

_HINT = "guests run Debian's cloud kernel: install linux-image-cloud-amd64, or unset PVISOR_KERNEL to have it fetched"
_FILE = re.compile(r"\.ko(\.xz|\.zst|\.gz)?$")
_DEPENDS = re.compile(rb"\0depends=([^\0]*)\0")


@dataclass(frozen=True, slots=True)
class ModuleTree:
    """The modules of one kernel release, below /lib/modules/RELEASE. Names have `_` where files may have `-`."""

    directory: Path
    files: Mapping[str, Path]
    needs: Mapping[str, Sequence[str]] | None
    built_in: frozenset[str]

    @classmethod
    def read(cls, directory: Path) -> ModuleTree:
        """VmSetupError when there is none; FormatError when modules.dep is not what depmod writes."""
        built_in = frozenset(_name(line) for line in _lines(directory / "modules.builtin"))
        table = directory / "modules.dep"
        if not table.is_file():
            files = {_name(path.name): path for path in directory.rglob("*.ko*") if _FILE.search(path.name)}
            if not files:
                raise VmSetupError(f"no kernel modules in {directory}", hint=_HINT)
            return cls(directory, files, None, built_in)
        files, needs = {}, {}
        for number, line in enumerate(_lines(table), 1):
            path, colon, others = line.partition(":")
            if not colon:
                raise FormatError(f"{table}, line {number}", expected="MODULE: NEEDED...", found=repr(line[:80]))
            files[_name(path)] = directory / path
            needs[_name(path)] = [_name(other) for other in others.split()]
        return cls(directory, files, needs, built_in)

    def load_order(self, names: Iterable[str]) -> list[Path]:
        """The files of these modules and all that they need, each after what it needs; built-in ones are left out.

        VmSetupError names a module that the kernel does not have.
        """
        order: dict[str, Path] = {}
        visiting: set[str] = set()

        def visit(name: str, wanted_by: str) -> None:
            if name in visiting or name in self.built_in:
                return
            if name not in self.files:
                needed = f", which {wanted_by} needs" if wanted_by else ""
                raise VmSetupError(
                    f"the kernel {self.directory.name} has no module {name}{needed}",
                    hint=_HINT,
                )
            visiting.add(name)
            for other in self._needs(name):
                visit(other, name)
            order[name] = self.files[name]

        for name in names:
            visit(name.replace("-", "_"), "")
        return list(order.values())

    def _needs(self, name: str) -> list[str]:
        if self.needs is not None:
            # The table has all that a module needs, what must be loaded first last.
            return list(reversed(self.needs[name]))
        found = _DEPENDS.search(content(self.files[name]))
        return [_name(other) for other in found.group(1).decode().split(",") if other] if found is not None else []


def content(path: Path) -> bytes:
    """A module as the kernel takes it, decompressed. FormatError."""
    data = path.read_bytes()
    try:
        match path.suffix:
            case ".xz":
                return lzma.decompress(data)
            case ".zst":
                return zstandard.ZstdDecompressor().decompressobj().decompress(data)
            case ".gz":
                return gzip.decompress(data)
            case _:
                return data
    except (lzma.LZMAError, zstandard.ZstdError, zlib.error, EOFError, gzip.BadGzipFile) as error:
        raise FormatError(f"kernel module {path}", expected="a sound compressed file", found=str(error)) from error


def _name(path: str) -> str:
    return _FILE.sub("", path.strip().rpartition("/")[2]).replace("-", "_")


def _lines(path: Path) -> list[str]:
    try:
        return [line for line in path.read_text().splitlines() if line.strip()]
    except FileNotFoundError:
        return []
