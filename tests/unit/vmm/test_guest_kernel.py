"""Which kernel is taken, and what is said when there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.vmm.test_guest_bzimage import image
from vmm.errors import VmSetupError
from vmm.guest import package
from vmm.guest.kernel import find_kernel, kernel_arguments, newest


def install(root: Path, release: str, *, modules: bool = True, boot: str = "boot") -> Path:
    (root / boot).mkdir(parents=True, exist_ok=True)
    path = root / boot / f"vmlinuz-{release}"
    path.write_bytes(image(release.encode() + b" more\0"))
    if modules:
        (root / "lib/modules" / release).mkdir(parents=True)
    return path


def test_the_newest_by_number_that_has_modules(tmp_path: Path) -> None:
    for release in ("6.1.0-9-cloud-amd64", "6.1.0-28-cloud-amd64", "6.1.0-99-amd64"):
        install(tmp_path, release)
    install(tmp_path, "6.1.0-40-cloud-amd64", modules=False)
    found = newest(tmp_path, "*-cloud-amd64")
    assert found is not None and found.release == "6.1.0-28-cloud-amd64"
    assert found.modules == tmp_path / "lib/modules/6.1.0-28-cloud-amd64"
    assert newest(tmp_path / "nowhere", "*") is None


def test_a_configured_directory(tmp_path: Path) -> None:
    install(tmp_path, "7.0-mine")
    assert find_kernel(tmp_path / "home", tmp_path).release == "7.0-mine"
    with pytest.raises(VmSetupError, match="has no boot/vmlinuz-RELEASE"):
        find_kernel(tmp_path / "home", tmp_path / "lib")


def test_a_configured_file(tmp_path: Path) -> None:
    path = install(tmp_path, "7.0-mine")
    plain = path.rename(path.with_name("bzImage"))
    found = find_kernel(tmp_path / "home", plain)
    assert (found.image, found.release, found.modules) == (plain, "7.0-mine", tmp_path / "lib/modules/7.0-mine")


def test_a_configured_file_without_modules(tmp_path: Path) -> None:
    path = install(tmp_path, "7.0-mine", modules=False)
    with pytest.raises(VmSetupError, match=r"is kernel 7\.0-mine, and its modules are not in"):
        find_kernel(tmp_path / "home", path)


def test_a_configured_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(VmSetupError, match="No such file"):
        find_kernel(tmp_path / "home", tmp_path / "absent")


def test_one_unpacked_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "unpack", lambda target, _: install(target, "6.1.0-9-cloud-amd64"))
    first = find_kernel(tmp_path)
    monkeypatch.setattr(package, "unpack", lambda *_: pytest.fail("it is there"))
    assert find_kernel(tmp_path) == first


def test_arguments() -> None:
    tcg = kernel_arguments(accelerator="tcg").split()
    assert {"panic=-1", "console=ttyS0", "pvisor.network=none", "pvisor.upper=memory"} <= set(tcg)
    assert {"mitigations=off", "norandmaps"} <= set(tcg)
    kvm = kernel_arguments(accelerator="kvm", network="user", disk=True).split()
    assert {"pvisor.network=user", "pvisor.upper=disk"} <= set(kvm)
    assert not {"mitigations=off", "norandmaps"} & set(kvm)
