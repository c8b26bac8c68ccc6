"""Reading a mounted image: warm and with a cold page cache, beside a plain directory and a local EROFS file.

The image is fully local (`pvisor pull`), so this shows what the FUSE path costs, not the network. Cold means
that the kernel's caches were dropped; ours then decompresses and verifies each chunk again. Samples are interleaved.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.common import Samples, show, write
from bench.image import pvisor, pvisor_env, served_debian

RANDOM_READS = 2000
SEED = 20


def drop_caches() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3\n")


def regular_files(root: Path) -> list[Path]:
    found = [Path(directory) / name for directory, _, names in os.walk(root) for name in names]
    return sorted(path for path in found if path.is_file() and not path.is_symlink())


def read_sequential(root: Path) -> None:
    """Every file from its start to its end, in 1 MiB reads."""
    for path in regular_files(root):
        with path.open("rb", buffering=0) as stream:
            while stream.read(1 << 20):
                pass


def read_random(root: Path) -> None:
    """4 KiB reads at random offsets of the larger files; the same ones each time."""
    generator = random.Random(SEED)
    large = [path for path in regular_files(root) if path.stat().st_size > 1 << 20]
    files = [(os.open(path, os.O_RDONLY), path.stat().st_size) for path in large]
    try:
        for _ in range(RANDOM_READS):
            fd, size = generator.choice(files)
            os.pread(fd, 4096, generator.randrange(0, size - 4096) & ~4095)
    finally:
        for fd, _ in files:
            os.close(fd)


def list_tree(root: Path) -> None:
    subprocess.run(["ls", "-lR", str(root)], stdout=subprocess.DEVNULL, check=True)


def tar_tree(root: Path) -> None:
    # Not to /dev/null itself: GNU tar then reads nothing.
    with subprocess.Popen(["tar", "-C", str(root), "-cf", "-", "."], stdout=subprocess.PIPE) as tar:
        assert tar.stdout is not None
        while tar.stdout.read(1 << 20):
            pass
    if tar.returncode:
        raise RuntimeError(f"tar ended with {tar.returncode}")


WORK: dict[str, Callable[[Path], None]] = {
    "sequential": read_sequential,
    "random 4 KiB": read_random,
    "ls -lR": list_tree,
    "tar": tar_tree,
}


@contextmanager
def subjects(scratch: Path) -> Iterator[dict[str, Path]]:
    """The same tree three times: lazily mounted, as a local EROFS file, as a plain directory."""
    env = pvisor_env(scratch)
    with ExitStack() as stack:
        with served_debian() as image:
            convert = [pvisor(), "convert", f"docker://{image.reference}", "--name", image.name]
            subprocess.run(convert, env=env, check=True, capture_output=True)
        trees = {"pvisor mount": scratch / "mount", "EROFS file": scratch / "erofs", "directory": scratch / "directory"}
        for tree in trees.values():
            tree.mkdir()
        stack.callback(subprocess.run, [pvisor(), "node", "stop"], env=env, check=True, capture_output=True)
        subprocess.run([pvisor(), "mount", image.name, str(trees["pvisor mount"])], env=env, check=True)
        stack.callback(subprocess.run, [pvisor(), "umount", str(trees["pvisor mount"])], env=env, check=True)
        file = scratch / "image.erofs"
        subprocess.run([pvisor(), "image", "export", image.name, str(file)], env=env, check=True)
        subprocess.run(["mount", "-t", "erofs", "-o", "loop,ro", str(file), str(trees["EROFS file"])], check=True)
        stack.callback(subprocess.run, ["umount", str(trees["EROFS file"])], check=True)
        subprocess.run([pvisor(), "image", "export", image.name, f"{trees['directory']}/"], env=env, check=True)
        yield trees


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=7)
    count = parser.parse_args().n
    results: dict[str, dict[str, dict[str, Samples]]] = {}
    with tempfile.TemporaryDirectory(prefix="pvisor-bench-") as directory, subjects(Path(directory)) as trees:
        for work, function in WORK.items():
            results[work] = {state: {name: Samples() for name in trees} for state in ("warm", "cold")}
            for root in trees.values():
                function(root)
            for _ in range(count):
                for state in ("warm", "cold"):
                    for name, root in trees.items():
                        function(root)
                        if state == "cold":
                            drop_caches()
                        started = time.perf_counter()
                        function(root)
                        results[work][state][name].add(time.perf_counter() - started)
        names = list(trees)
    show(
        f"P50 / P95 in ms, and P50 relative to the directory, n = {count}",
        ["", *names],
        [
            [
                f"{work}, {state}",
                *(
                    f"{by_name[name].p50 * 1e3:.1f} / {by_name[name].p95 * 1e3:.1f} "
                    f"({by_name[name].p50 / by_name['directory'].p50:.2f}x)"
                    for name in names
                ),
            ]
            for work, states in results.items()
            for state, by_name in states.items()
        ],
    )
    document = {
        work: {
            state: {name: samples.to_json() for name, samples in by_name.items()} for state, by_name in states.items()
        }
        for work, states in results.items()
    }
    write("read", {"samples": document})


if __name__ == "__main__":
    main()
