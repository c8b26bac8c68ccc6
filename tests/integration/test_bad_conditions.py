"""A store that is full, read-only, shared or left by a killed process; servers that go; a damaged cache; images that
can not be run: what `pvisor` says, and what it leaves behind."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import oci
from tests.support.bad import GZIP, PLAIN, SEED, image, listing, says, tree_of
from tests.support.chunkserver import chunk_server
from tests.support.command import Host, busybox_layout, host
from tests.support.flaky import Content, run_flaky
from tests.support.node import wait_for
from tests.support.tars import archive, member

pytestmark = [pytest.mark.root, pytest.mark.fuse, pytest.mark.network]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bad")


@pytest.fixture(scope="module")
def layout(scratch: Path) -> Path:
    return oci.write_layout(scratch / "good", [archive(member(b"kept", b"kept\n"))], tag="v1")


@contextlib.contextmanager
def small_home(root: Path, megabytes: int) -> Iterator[Path]:
    """PVISOR_HOME of a host at `root` on a file system of its own."""
    home = root / "home"
    home.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(home)], check=True)
    try:
        yield home
    finally:
        subprocess.run(["umount", "-l", str(home)], check=True)


def test_a_store_that_is_full(layout: Path, tmp_path: Path) -> None:
    big = archive(*(member(b"%d" % number, random.Random(number).randbytes(1 << 20)) for number in range(24)))
    oci.write_layout(tmp_path / "big", [big], tag="v1", compression="none")
    with small_home(tmp_path / "host", 12) as home, host(tmp_path / "host") as made:
        made.run("convert", f"oci:{layout}:v1", "--name", "kept:v1")
        before = made.json("image", "ls")
        says(
            made.error("convert", f"oci:{tmp_path}/big:v1", "--name", "kept:v1"), str(home), "No space left", "store gc"
        )
        says(made.error("run", f"oci:{tmp_path}/big:v1", "--", "x", code=125), str(home), "No space left", "store gc")
        assert made.json("image", "ls") == before
        made.assert_sound()
        made.run("store", "gc")
        made.assert_sound()
        made.run("image", "verify", "kept:v1")
        subprocess.run(["mount", "-o", "remount,size=64m", str(home)], check=True)
        made.run("convert", f"oci:{tmp_path}/big:v1", "--name", "kept:v1")
        made.assert_sound()


def test_a_run_directory_that_takes_nothing(tmp_path: Path) -> None:
    run = tmp_path / "host/run"
    run.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(run)], check=True)
    try:
        with host(tmp_path / "host") as made:
            with contextlib.suppress(OSError), (run / "ballast").open("wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass
            says(made.error("node", "start"), f"can not make {run}/node.pid: No space left", "free space there")
            (run / "ballast").unlink()
            # Once the daemon that did not start is gone.
            wait_for(lambda: subprocess.run(["mount", "-o", "remount,ro", str(run)], check=False).returncode == 0)
            says(made.error("node", "start"), f"can not make {run}/node.lock: Read-only", "set PVISOR_RUN")
            subprocess.run(["mount", "-o", "remount,rw", str(run)], check=True)
            made.run("node", "start")
            made.run("node", "stop")
    finally:
        subprocess.run(["umount", "-l", str(run)], check=True)


def test_a_store_that_is_read_only(layout: Path, tmp_path: Path) -> None:
    oci.write_layout(tmp_path / "more", [PLAIN], tag="v1")
    home = tmp_path / "host/home"
    with host(tmp_path / "host") as made:
        made.run("convert", f"oci:{layout}:v1", "--name", "kept:v1")
        before = made.json("image", "ls")
        subprocess.run(["mount", "--bind", str(home), str(home)], check=True)
        try:
            subprocess.run(["mount", "-o", "remount,bind,ro", str(home)], check=True)
            for argv, code in (
                (["convert", f"oci:{tmp_path}/more:v1", "--name", "kept:v1"], 1),
                (["pull", f"oci:{tmp_path}/more:v1"], 1),
                (["image", "tag", "kept:v1", "new:v1"], 1),
                (["image", "rm", "kept:v1"], 1),
                (["store", "gc"], 1),
                (["store", "fsck", "--rebuild"], 1),
                (["run", "kept:v1", "--", "true"], 125),
                (["serve", "--listen", "127.0.0.1:0"], 1),
            ):
                says(made.error(*argv, code=code), str(home), "Read-only file system")
            assert made.json("image", "ls") == before
            made.assert_sound()
        finally:
            subprocess.run(["umount", "-l", str(home)], check=True)
        made.run("convert", f"oci:{tmp_path}/more:v1", "--name", "kept:v1")
        made.assert_sound()


def big_layout(path: Path) -> str:
    """Some seconds of work in three layers."""
    layers = [
        archive(
            *(member(b"%d/%d" % (top, name), random.Random(top * 1000 + name).randbytes(40_000)) for name in range(150))
        )
        for top in range(3)
    ]
    return f"oci:{oci.write_layout(path, layers, tag='v1')}:v1"


def test_two_conversions_of_one_image_at_once(tmp_path: Path) -> None:
    """Into one name, while a third, of a bad image, fails without disturbing them."""
    source = big_layout(tmp_path / "big")
    with host(tmp_path / "host") as made:
        good = [made.start("convert", source, "--name", "kept:v1", "--json") for _ in range(2)]
        bad = made.start("convert", image(tmp_path / "bad", GZIP[:-500]), "--name", "kept:v1")
        answers = [json.loads(process.communicate(timeout=60)[0]) for process in good]
        said = bad.communicate(timeout=60)[1].decode()
        assert [process.returncode for process in (*good, bad)] == [0, 0, 1]
        says(said, "layer sha256:")
        assert answers[0]["id"] == answers[1]["id"]
        assert [image["id"] for image in made.json("image", "ls")] == [answers[0]["id"]]
        made.assert_sound()
        assert made.json("image", "verify", "kept:v1")["absent"] == 0


def test_killed_in_the_middle_of_a_conversion(layout: Path, tmp_path: Path) -> None:
    source = big_layout(tmp_path / "big")
    chosen = random.Random(SEED)
    with host(tmp_path / "timed") as timed:
        began = time.monotonic()
        new = timed.json("convert", source, "--name", "kept:v1")["id"]
        whole_s = time.monotonic() - began
    with host(tmp_path / "host") as made:
        made.run("convert", f"oci:{layout}:v1", "--name", "kept:v1")
        old = made.json("image", "inspect", "kept:v1")["id"]
        for part in range(5):
            process = made.start("convert", source, "--name", "kept:v1")
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(whole_s * (part + chosen.random()) / 5)
            process.kill()
            process.communicate()
            made.assert_sound()
            (kept,) = made.json("image", "ls")
            assert kept["id"] in (old, new)
        made.run("convert", source, "--name", "kept:v1")
        made.assert_sound()
        assert made.json("image", "verify", "kept:v1")["sound"]
        made.run("store", "gc")
        made.assert_sound()
        assert listing(tree_of(made, tmp_path, "kept:v1"))["2/149"] == random.Random(2149).randbytes(40_000)


DATA = random.Random(SEED + 1).randbytes(8 << 20)


@pytest.fixture(scope="module")
def origin(scratch: Path) -> Path:
    """The store of a chunk server with box:v1, a busybox image with /data."""
    busybox_layout(scratch, archive(member(b"data", DATA)), tag="v1")
    with host(scratch / "origin") as made:
        made.run("convert", f"oci:{scratch}/box:v1")
    return scratch / "origin/home/store"


READ_ON_TURN = "cat /bin/busybox > /dev/null; echo up; read _; cat /data > /dev/null; echo cat gave $?"


def test_a_server_that_goes_in_the_middle_of_a_run(origin: Path, tmp_path: Path) -> None:
    """The workload sees an I/O error in bounded time and ends as it likes; nothing wrong is ever read.

    All that has to wait for the server waits at once: reads give up after twenty seconds, commands after three.
    """
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(chunk_server(origin))
        lazy = stack.enter_context(host(tmp_path / "lazy", server.url))
        whole = stack.enter_context(host(tmp_path / "whole", server.url))
        whole.run("pull", "box:v1")
        flip_in_packs(whole.root / "home/store", DATA, 3)
        reader = lazy.start("run", "-i", "box:v1", "--", "sh", "-c", READ_ON_TURN, stdin=subprocess.PIPE)
        assert reader.stdin is not None and reader.stdout is not None
        assert reader.stdout.readline() == b"up\n"
        server.stop(signal.SIGKILL)

        began = time.monotonic()
        damaged = whole.start("run", "box:v1", "--", "cat", "/data")
        verify = whole.start("image", "verify", "box:v1", "--json")
        unknown = {
            lazy.start("run", "box:v2", "--", "true"): 125,
            lazy.start("pull", "--lazy", "box:v2"): 1,
            lazy.start("image", "ls", "--remote"): 1,
        }
        out, said = reader.communicate(b"go\n", timeout=60)
        assert (reader.returncode, out) == (0, b"cat gave 1\n"), (out, said)
        assert b"I/O error" in said or b"Input/output error" in said
        out, said = damaged.communicate(timeout=60)
        assert (damaged.returncode, DATA.startswith(out)) == (1, True), said
        assert json.loads(verify.communicate(timeout=60)[0])["sound"] is False
        for process, code in unknown.items():
            said = process.communicate(timeout=60)[1]
            assert process.returncode == code, said
            says(said.decode(), server.url.removeprefix("http://"))
        assert time.monotonic() - began < 60

        assert lazy.run("run", "box:v1", "--", "echo", "works").stdout == b"works\n"
        stack.enter_context(chunk_server(origin, port=server.port))
        time.sleep(1.5)  # for a second, a chunk that was just given up fails at once
        for worker in (lazy, whole):
            assert worker.run("run", "box:v1", "--", "cat", "/data").stdout == DATA
            worker.run("node", "stop")
            worker.assert_sound()


def test_a_chunk_server_that_answers_nonsense(tmp_path: Path) -> None:
    with run_flaky() as flaky, host(tmp_path, f"http://{flaky.address}") as worker:
        for path in ("/v1/images/box:v1", "/v1/images/box:v1?view=boot", "/v1/images"):
            flaky.content[path] = Content(b"<!DOCTYPE html><title>Sign in</title>", "text/html")
        for argv, code in (
            (["pull", "--lazy", "box:v1"], 1),
            (["pull", "box:v1"], 1),
            (["run", "box:v1", "--", "true"], 125),
            (["image", "ls", "--remote"], 1),
        ):
            says(worker.error(*argv, code=code), flaky.address)
        assert worker.json("image", "ls") == []


def flip_in_packs(store: Path, data: bytes, count: int) -> None:
    """Flip a bit in the first `count` chunks of this incompressible data, wherever the packs have them."""
    for pack in (store / "packs").iterdir():
        raw = bytearray(pack.read_bytes())
        for at in range(count):
            found = raw.find(data[(at << 16) + 1000 : (at << 16) + 1032])
            if found >= 0:
                raw[found] ^= 4
        pack.write_bytes(raw)


def test_corrupt_chunks_in_the_cache_of_a_worker(origin: Path, tmp_path: Path) -> None:
    """They are fetched again, and the reader sees the right bytes."""
    with chunk_server(origin) as server, host(tmp_path, server.url) as worker:
        worker.run("pull", "box:v1")
        flip_in_packs(worker.root / "home/store", DATA, 3)
        assert len(worker.json("store", "fsck", code=1)["errors"]) >= 3
        assert worker.run("run", "box:v1", "--", "cat", "/data").stdout == DATA
        worker.run("node", "stop")
        worker.assert_sound()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"Cmd": "sh -c true"}, ("sh -c true",)),
        ({"Cmd": ["sh"], "Env": {"A": 1}}, ("Env", "list of strings")),
        ({"Cmd": ["sh"], "User": "nobody-here"}, ("nobody-here",)),
        ({"Cmd": ["sh"], "WorkingDir": "/etc/passwd"}, ("/etc/passwd",)),
        ({"Cmd": ["a\0b"]}, ("NUL",)),
        ({}, ("no Cmd",)),
    ],
)
def test_configurations_that_can_not_be_run(
    boxes: Host, scratch: Path, config: dict[str, object], words: tuple[str, ...]
) -> None:
    source = f"oci:{busybox_layout(scratch, tag='odd', config=config or {'Env': []})}:odd"
    boxes.run("convert", source, "--name", "odd:v1")
    code = 127 if config.get("Cmd") == "sh -c true" else 125
    says(boxes.error("run", "odd:v1", code=code), *words)


@pytest.fixture(scope="module")
def boxes(scratch: Path) -> Iterator[Host]:
    with host(scratch / "boxes") as made:
        yield made
