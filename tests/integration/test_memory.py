"""A conversion's memory does not follow the layer's size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.command import ARGV, ROOT, Host

PEAK_LIMIT_BYTES = 200_000_000
# Both in small processes of their own: the peak of a child counts what its parent held when it was made.
BUILD = """
import random, sys
from pathlib import Path
from tests.support.oci import write_layout
from tests.support.tars import archive, member
large = random.Random(7).randbytes(1 << 20) * 300
small = [member(b"small/%d" % n, b"%d" % n) for n in range(20_000)]
write_layout(Path(sys.argv[1]), [archive(member(b"large", large), *small)], compression="none")
"""
MEASURE = """
import os, subprocess, sys
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(process.pid, 0)
print(os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024)
"""


def test_conversion_of_a_large_layer_stays_below_200_mb(tmp_path: Path) -> None:
    layout = tmp_path / "big"
    subprocess.run([sys.executable, "-c", BUILD, str(layout)], check=True, cwd=ROOT)
    argv = [sys.executable, "-c", MEASURE, *ARGV, "convert", f"oci:{layout}"]
    done = subprocess.run(argv, env=Host(tmp_path).env, check=True, capture_output=True)
    code, peak_bytes = map(int, done.stdout.split())
    assert code == 0, done.stderr
    assert peak_bytes < PEAK_LIMIT_BYTES
