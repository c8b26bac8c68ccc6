"""A detached process is found again, and how it ended is told as far as anybody can know."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vmm.errors import QemuTimeoutError, VmStateError
from vmm.process import Ending, Process, alive, last_ending

LONG_S = 60.0
ATTACH = """
import sys
from pathlib import Path
from vmm.process import Process
process = Process.attach(Path(sys.argv[1]))
print(process.pid, flush=True)
print(process.wait(60), flush=True)
"""


def spawn(run: Path, script: str, *, inherit: tuple[int, ...] = ()) -> Process:
    return Process.spawn(["/bin/sh", "-c", script], run, inherit=inherit)


def ended(run: Path, script: str) -> Ending:
    process = spawn(run, script)
    try:
        return process.wait(LONG_S)
    finally:
        process.close()


def test_an_exit_status_and_the_last_line_are_told(tmp_path: Path) -> None:
    ending = ended(tmp_path, "echo first; echo no such thing >&2; exit 3")
    assert ending == Ending(exit_code=3, log_line="no such thing")
    assert str(ending) == "exit status 3"
    assert "exit status 3; its log ends: no such thing" in ending.error().message
    assert last_ending(tmp_path) == ending


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGBUS, signal.SIGSYS])
def test_a_signal_is_told(tmp_path: Path, number: signal.Signals) -> None:
    ending = ended(tmp_path, f"kill -{number} $$")
    assert (ending.signal, ending.exit_code, ending.crashed) == (number, None, True)
    assert str(ending) == f"signal {int(number)} ({number.name})"
    assert not ending.powered_off


def test_an_orderly_end_is_a_power_off(tmp_path: Path) -> None:
    ending = ended(tmp_path, "exit 0")
    assert ending.powered_off
    assert "powered off" in ending.error().message


def test_a_terminated_one_is_no_power_off(tmp_path: Path) -> None:
    ending = ended(tmp_path, "echo qemu: terminating on signal 15 from pid 1; exit 0")
    assert not ending.powered_off


def test_it_is_alive_until_it_is_killed(tmp_path: Path) -> None:
    assert not alive(tmp_path)
    process = spawn(tmp_path, "sleep 60; true")
    assert alive(tmp_path)
    assert process.ending() is None
    with pytest.raises(QemuTimeoutError, match="did not end"):
        process.wait(0.01)
    assert process.kill().signal == signal.SIGKILL
    assert not alive(tmp_path)
    with pytest.raises(VmStateError, match=r"signal 9 \(SIGKILL\)"):
        Process.attach(tmp_path)
    process.close()
    process.close()


def test_it_is_a_session_of_its_own_with_only_what_it_inherits(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    other, unwanted = os.pipe()
    os.set_inheritable(unwanted, True)  # as a shell leaves what it has open for its commands
    script = f"ls /proc/$$/fd > {tmp_path}/fds; echo done > /proc/self/fd/{writing}; sleep 60; true"
    process = spawn(tmp_path, script, inherit=(writing,))
    try:
        os.close(writing)
        assert os.read(reading, 4096) == b"done\n"
        found = {int(line) for line in (tmp_path / "fds").read_text().split()}
        assert writing in found
        assert unwanted not in found
        assert os.getsid(process.pid) == process.pid
        assert str(Path(f"/proc/{process.pid}/cwd").readlink()) == "/"
        os.close(unwanted)
        assert os.read(other, 1) == b""
    finally:
        process.kill()
        process.close()
        for fd in (reading, other):
            os.close(fd)


def test_a_process_that_has_its_pid_now_is_another(tmp_path: Path) -> None:
    """As the pid of an ended QEMU may be given to any process."""
    (tmp_path / "qemu.log").write_text("")
    stat = Path("/proc/self/stat").read_text()
    head, _, tail = stat.rpartition(")")
    fields = tail.split()
    fields[19] = str(int(fields[19]) + 1)
    (tmp_path / "qemu.pid").write_text(f"{head}) {' '.join(fields)}\n")
    assert not alive(tmp_path)
    assert str(last_ending(tmp_path)) == "ended"
    (tmp_path / "qemu.live").write_text("")
    assert str(last_ending(tmp_path)) == "killed or crashed"
    with pytest.raises(VmStateError, match="killed or crashed"):
        Process.attach(tmp_path)


def test_a_directory_without_one_says_so(tmp_path: Path) -> None:
    assert last_ending(tmp_path) is None
    with pytest.raises(VmStateError, match="no QEMU was started"):
        Process.attach(tmp_path)


def test_a_stranger_that_waits_learns_how_it_ended(tmp_path: Path) -> None:
    process = spawn(tmp_path, "sleep 60; true")
    other = subprocess.Popen([sys.executable, "-c", ATTACH, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline().strip() == str(process.pid)
    os.kill(process.pid, signal.SIGTERM)
    said, _ = other.communicate(timeout=LONG_S)
    assert said.strip() == "signal 15 (SIGTERM)"
    assert process.wait(LONG_S).signal == signal.SIGTERM
    process.close()


def test_the_ending_of_a_stranger_is_kept_for_later_commands(tmp_path: Path) -> None:
    """The starter is gone: what one who watched has learnt, or what QEMU's pid file tells."""
    end = tmp_path / "end"
    start = (
        "import sys; from pathlib import Path; from vmm.process import Process;"
        "script = 'until [ -e \"$0\" ]; do sleep 0.05; done; exit 7';"
        "print(Process.spawn(['/bin/sh', '-c', script, sys.argv[2]], Path(sys.argv[1]), inherit=()).pid)"
    )
    subprocess.run([sys.executable, "-c", start, str(tmp_path), str(end)], check=True, stdout=subprocess.DEVNULL)
    process = Process.attach(tmp_path)
    end.touch()
    ending = process.wait(LONG_S)
    assert ending.exit_code in (7, None)  # None where the kernel does not tell
    assert last_ending(tmp_path) == ending
    process.close()


def test_the_pid_is_there_before_the_program_is(tmp_path: Path) -> None:
    process = spawn(tmp_path, "exit 0")
    process.wait(LONG_S)
    assert (tmp_path / "qemu.pid").read_text().startswith(f"{process.pid} (sh) ")
    process.close()


def test_a_program_that_is_not_there_is_an_ending(tmp_path: Path) -> None:
    process = Process.spawn([str(tmp_path / "none")], tmp_path, inherit=())
    ending = process.wait(LONG_S)
    assert ending.exit_code in (126, 127)
    assert "none" in ending.log_line
    process.close()


def test_a_new_start_forgets_the_old_ending(tmp_path: Path) -> None:
    assert ended(tmp_path, "echo old; exit 1").exit_code == 1
    process = spawn(tmp_path, "sleep 60; true")
    assert alive(tmp_path)
    process.kill()
    deadline = time.monotonic() + LONG_S
    while last_ending(tmp_path) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    ending = last_ending(tmp_path)
    assert ending is not None
    assert (ending.signal, ending.log_line) == (signal.SIGKILL, "")
    process.close()
