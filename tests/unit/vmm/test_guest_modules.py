"""Which modules load, and in which order: from modules.dep, and without it."""

from __future__ import annotations

import gzip
import lzma
from pathlib import Path

import pytest
import zstandard

from imaged.errors import FormatError
from vmm.errors import VmSetupError
from vmm.guest.modules import ModuleTree, content

DEP = """\
kernel/drivers/virtio/virtio_ring.ko:
kernel/drivers/virtio/virtio.ko: kernel/drivers/virtio/virtio_ring.ko
kernel/drivers/virtio/virtio_pci.ko: kernel/drivers/virtio/virtio.ko kernel/drivers/virtio/virtio_ring.ko
kernel/drivers/block/virtio_blk.ko: kernel/drivers/virtio/virtio.ko kernel/drivers/virtio/virtio_ring.ko
kernel/lib/with-dash.ko.xz: kernel/drivers/block/virtio_blk.ko
"""


def module(path: Path, depends: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\x7fELF\0license=GPL\0depends=" + depends.encode() + b"\0retpoline=Y\0")


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    (tmp_path / "modules.dep").write_text(DEP)
    (tmp_path / "modules.builtin").write_text("kernel/lib/crc16.ko\nkernel/drivers/acpi/button.ko\n")
    return tmp_path


@pytest.fixture
def unpacked(tmp_path: Path) -> Path:
    module(tmp_path / "kernel/virtio_ring.ko", "")
    module(tmp_path / "kernel/virtio.ko", "virtio_ring")
    module(tmp_path / "kernel/virtio_blk.ko", "virtio,virtio_ring,crc16")
    module(tmp_path / "kernel/with-dash.ko", "virtio-blk")
    (tmp_path / "modules.builtin").write_text("kernel/lib/crc16.ko\n")
    return tmp_path


def test_installed(installed: Path) -> None:
    tree = ModuleTree.read(installed)
    order = names(tree.load_order(["virtio_blk", "virtio-pci", "with_dash", "button", "crc16"]))
    assert order == ["virtio_ring.ko", "virtio.ko", "virtio_blk.ko", "virtio_pci.ko", "with-dash.ko.xz"]


def test_unpacked(unpacked: Path) -> None:
    order = names(ModuleTree.read(unpacked).load_order(["with-dash"]))
    assert order == ["virtio_ring.ko", "virtio.ko", "virtio_blk.ko", "with-dash.ko"]


def test_modules_that_need_each_other(tmp_path: Path) -> None:
    module(tmp_path / "a.ko", "b")
    module(tmp_path / "b.ko", "a")
    assert names(ModuleTree.read(tmp_path).load_order(["a"])) == ["b.ko", "a.ko"]


def test_a_module_that_is_not_there(unpacked: Path) -> None:
    with pytest.raises(VmSetupError, match=f"the kernel {unpacked.name} has no module erofs"):
        ModuleTree.read(unpacked).load_order(["erofs"])
    module(unpacked / "kernel/erofs.ko", "libcrc32c")
    with pytest.raises(VmSetupError, match="no module libcrc32c, which erofs needs"):
        ModuleTree.read(unpacked).load_order(["erofs"])


def test_no_modules(tmp_path: Path) -> None:
    with pytest.raises(VmSetupError, match="no kernel modules in"):
        ModuleTree.read(tmp_path)


def test_a_table_that_is_not_one(installed: Path) -> None:
    (installed / "modules.dep").write_text(DEP + "what is this\n")
    with pytest.raises(FormatError, match="line 6: expected MODULE: NEEDED"):
        ModuleTree.read(installed)


def test_compressed_modules(tmp_path: Path) -> None:
    data = b"\x7fELF module" * 1000
    for suffix, packed in (
        ("", data),
        (".xz", lzma.compress(data)),
        (".gz", gzip.compress(data)),
        (".zst", zstandard.compress(data)),
    ):
        path = tmp_path / f"m.ko{suffix}"
        path.write_bytes(packed)
        assert content(path) == data
