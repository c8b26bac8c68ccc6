"""The Python API of VMs, with a real QEMU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import vmm
from imaged.config import Config
from tests.support.command import Host
from tests.support.vm import IMAGE, kernel_environment, vm_host
from vmm.errors import (
    VmArgumentError,
    VmCommandError,
    VmExistsError,
    VmInterruptedError,
    VmNotFoundError,
    VmStateError,
    VmTimeoutError,
)

pytestmark = [pytest.mark.root, pytest.mark.fuse, pytest.mark.qemu, pytest.mark.slow]
MEMORY = 256 << 20


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with vm_host(tmp_path_factory.mktemp("vm")) as host:
        yield host


@pytest.fixture
def config(made: Host, monkeypatch: pytest.MonkeyPatch) -> Config:
    for key, value in kernel_environment().items():
        monkeypatch.setenv(key, value)
    return Config(home=made.root / "home", run=made.root / "run")


@pytest.fixture
def vm(config: Config) -> Iterator[vmm.Vm]:
    started = vmm.start(IMAGE, name="api", memory_bytes=MEMORY, config=config)
    yield started
    started.remove()


def test_the_life_of_a_vm(config: Config, vm: vmm.Vm, tmp_path: Path) -> None:
    result = vm.exec(["sh", "-c", "cat; echo err >&2; exit 4"], input=b"in", capture_output=True)
    assert result == vmm.Result(exit_code=4, stdout=b"in", stderr=b"err\n")
    with open(tmp_path / "out", "wb") as stream:
        assert vm.exec(["sh", "-c", 'echo "$A $PWD"'], env={"A": "b"}, workdir="/tmp", stdout=stream).exit_code == 0
    assert (tmp_path / "out").read_bytes() == b"b /tmp\n"
    with pytest.raises(VmCommandError) as command:
        vm.exec(["/no/such"])
    assert command.value.exit_code == 127
    with pytest.raises(VmTimeoutError) as late:
        vm.exec(["sh", "-c", "echo early; sleep 60"], timeout_s=5, capture_output=True)
    assert late.value.stdout == b"early\n"
    with pytest.raises(VmExistsError):
        vmm.start(IMAGE, name="api", config=config)
    with pytest.raises(VmStateError):
        vm.resume()
    for nonsense in ({"argv": []}, {"argv": ["true"], "timeout_s": float("inf")}, {"argv": ["true"], "env": ["A=b"]}):
        with pytest.raises(VmArgumentError):
            vm.exec(**nonsense)
    assert vm.status().state == "running"
    assert [one.name for one in vmm.listing(config=config)] == ["api"]

    children = vm.fork(2)
    assert [child.name for child in children] == ["api-1", "api-2"]
    for child in children:
        assert child.exec(["hostname"], capture_output=True).stdout.decode().strip() == child.name
        child.remove()

    parked = vm.park("saved")
    assert (parked.vm, parked.name) == ("api", "saved")
    assert vm.status().state == "parked"
    with pytest.raises(VmStateError, match="parked"):
        vm.exec(["true"])
    other = vmm.resume("saved", new_name="other", config=config)
    assert other.exec(["true"]).exit_code == 0
    other.remove()
    assert vm.resume() == vm == vmm.get("api", config=config)
    assert vm.exec(["true"]).exit_code == 0


def test_a_process_in_a_vm_that_is_parked_goes_on_after_it(config: Config, vm: vmm.Vm) -> None:
    errors: list[Exception] = []

    def follow() -> None:
        try:
            script = "echo > /run/began; until [ -e /run/end ]; do sleep 0.1; done; echo done > /run/ended"
            vm.exec(["sh", "-c", script], capture_output=True)
        except VmInterruptedError as error:
            errors.append(error)

    thread = threading.Thread(target=follow)
    thread.start()
    vm.exec(["sh", "-c", "until [ -e /run/began ]; do sleep 0.1; done"], timeout_s=60)
    vm.park()
    thread.join(60)
    assert "parked" in str(errors[0])
    vm.resume()
    vm.exec(["sh", "-c", "> /run/end; until [ -e /run/ended ]; do sleep 0.1; done"], timeout_s=60)


def test_run_is_a_vm_for_one_process(config: Config) -> None:
    result = vmm.run(IMAGE, ["sh", "-c", "id -u"], memory_bytes=MEMORY, capture_output=True, config=config)
    assert result == vmm.Result(exit_code=0, stdout=b"0\n")
    assert vmm.listing(config=config) == []


def test_nonsense_is_an_argument_error(config: Config) -> None:
    nonsense: list[Callable[[], object]] = [
        lambda: vmm.fork("api", 0, config=config),
        lambda: vmm.fork("api", 10**40, config=config),
        lambda: vmm.fork(7, config=config),  # type: ignore[arg-type]
        lambda: vmm.resume("api", network="restricted", config=config),
        lambda: vmm.run(IMAGE, "true", config=config),
        lambda: vmm.run(IMAGE, ["true"], timeout_s=float("nan"), config=config),
        lambda: vmm.start(7, config=config),  # type: ignore[arg-type]
        lambda: vmm.start(IMAGE, name="no name", config=config),
        lambda: vmm.start(IMAGE, name=7, config=config),  # type: ignore[arg-type]
        lambda: vmm.start(IMAGE, network="restricted", config=config),
        *(lambda size=size: vmm.start(IMAGE, memory_bytes=size, config=config) for size in (0, -1, 1 << 26, 1 << 60)),
        lambda: vmm.start(IMAGE, memory_bytes="1G", config=config),  # type: ignore[arg-type]
        *(lambda cpus=cpus: vmm.start(IMAGE, cpus=cpus, config=config) for cpus in (0, 65, 1.5)),
        lambda: vmm.start(IMAGE, disk_bytes=4097, config=config),
        lambda: vmm.get("no name", config=config),
    ]
    for call in nonsense:
        with pytest.raises(VmArgumentError):
            call()
    with pytest.raises(VmNotFoundError):
        vmm.get("nobody", config=config)
    assert vmm.listing(config=config) == []
