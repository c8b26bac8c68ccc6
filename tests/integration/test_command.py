"""The main job as a user types it: convert, serve, pull --lazy, run, and what stands around it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.common import Podman
from tests.support.chunkserver import chunk_server
from tests.support.command import ARGV, Host, busybox_layout, host, pvisor_mounts
from tests.support.node import wait_for
from tests.support.oci import make_tar
from tests.support.registry import run_registry
from tests.support.trees import found

pytestmark = [pytest.mark.root, pytest.mark.fuse]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("command")


@pytest.fixture(scope="module")
def layout(scratch: Path) -> Path:
    """box:v1, and box:v2 with one more layer."""
    busybox_layout(scratch, tag="v1")
    return busybox_layout(scratch, make_tar(("opt/added", os.urandom(100_000))), tag="v2")


@pytest.fixture(scope="module")
def origin(scratch: Path, layout: Path) -> Iterator[str]:
    """A chunk server that has box:v1 and box:v2."""
    with chunk_server(scratch / "origin/home/store") as server:
        with host(scratch / "pusher", server.url) as pusher:
            pusher.run("convert", f"oci:{layout}:v1")
            pusher.run("convert", f"oci:{layout}:v2")
        yield server.url


@pytest.fixture(scope="module")
def worker(scratch: Path, origin: str) -> Iterator[Host]:
    with host(scratch / "worker", origin) as made:
        made.run("pull", "--lazy", "box:v1")
        yield made


def test_a_cold_run_fetches_what_it_reads(tmp_path: Path, origin: str) -> None:
    with host(tmp_path, origin) as cold:
        done = cold.run("run", "box:v1", "--", "sh", "-c", "cat /etc/image-file; exit 7", code=7)
        assert done.stdout == b"from the image\n"
        status = cold.json("node", "status")
        (image,) = status["images"].values()
        inspected = cold.json("image", "inspect", "box:v1")
        late = "are late" in (tmp_path / "run/node.log").read_text()  # then they are asked for twice
        assert 0 < image["fetched_bytes"] <= inspected["stored_bytes"] * (1 + late)
        assert {"reads", "hits", "fetched_chunks", "fetched_bytes", "requests"} <= set(image)

        def fetched_bytes() -> int:
            (image,) = cold.json("node", "status")["images"].values()
            return int(image["fetched_bytes"])

        def fetches_nothing() -> bool:
            before = fetched_bytes()
            cold.run("run", "box:v1", "--", "cat", "/etc/image-file")
            return fetched_bytes() == before

        wait_for(fetches_nothing)  # what the kernel reads ahead may still be on its way after the first run
    assert not pvisor_mounts(tmp_path)


def test_inspect_has_the_fields_of_the_contract(worker: Host) -> None:
    document = worker.json("image", "inspect", "box:v1")
    assert {"id", "name", "size", "metadata_bytes", "entries", "chunks", "stored_bytes", "platform", "config"} <= set(
        document
    )
    assert document["source_digest"].startswith("sha256:")
    assert document["name"] == "box:v1" and document["platform"] == "linux/amd64"
    assert document["config"]["Env"] == ["PATH=/bin", "COLOR=green"]
    assert worker.json("image", "inspect", document["id"])["id"] == document["id"]


def test_the_image_configuration_holds(worker: Host) -> None:
    assert worker.run("run", "box:v1").stdout == b"from Cmd\n"
    command = ["run", "-e", "SIZE=9", "box:v1", "--", "sh", "-c", "echo $COLOR $SIZE; pwd; id -u"]
    assert worker.run(*command).stdout == b"green 9\n/tmp\n0\n"
    assert worker.run("run", "-u", "agent", "-w", "/etc", "box:v1", "--", "sh", "-c", "id -un; pwd").stdout == (
        b"agent\n/etc\n"
    )


def test_standard_input_is_read_only_with_i(worker: Host) -> None:
    assert worker.run("run", "-i", "box:v1", "--", "cat", stdin=b"typed").stdout == b"typed"
    assert worker.run("run", "box:v1", "--", "cat", stdin=b"typed").stdout == b""


def test_options_after_the_name_are_the_commands_own(worker: Host) -> None:
    assert worker.run("run", "box:v1", "echo", "-t", "-e", "x").stdout == b"-t -e x\n"
    assert worker.run("run", "box:v1", "--", "echo", "--", "--json").stdout == b"-- --json\n"


def test_the_start_of_an_id_is_enough(worker: Host) -> None:
    (image,) = [image for image in worker.json("image", "ls") if image["name"] == "box:v1"]
    assert worker.json("image", "inspect", image["id"][:12])["id"] == image["id"]
    assert worker.run("run", image["id"][:12]).stdout == b"from Cmd\n"


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["run", "box:v1", "--", "sh", "-c", "exit 3"], 3),
        (["run", "box:v1", "--", "sh", "-c", "kill -TERM $$"], 128 + 15),
        (["run", "box:v1", "--", "/no/such/program"], 127),
        (["run", "box:v1", "--", "/etc/passwd"], 126),
        (["run", "nothing:v9", "--", "true"], 125),
        (["run", "not a name", "--", "true"], 2),
        (["convert", "bogus"], 2),
        (["serve", "--listen", "nowhere"], 2),
        (["serve", "--store", "s3://"], 2),
        (["run", "--stage", "../x", "box:v1", "--", "true"], 125),
        (["run", "-u", "nobody-here", "box:v1", "--", "true"], 125),
        (["run"], 2),
        (["pull", "--lazy", "--fill-rate", "5", "box:v1"], 2),
        (["image", "ls", "--remote", "--store", "/nowhere"], 2),
        (["image", "ls", "--store", "/nowhere"], 1),
        (["store", "df", "--server", "http://127.0.0.1:1"], 2),
        (["stage", "ls", "--server", "http://127.0.0.1:1"], 2),
        (["run", "--no-such-option", "box:v1"], 2),
        (["frobnicate"], 2),
        (["image", "inspect", "nothing:v9"], 1),
        (["stage", "drop", "nothing"], 1),
    ],
)
def test_exit_codes(worker: Host, argv: list[str], code: int) -> None:
    done = worker.run(*argv, code=code)
    assert b"Traceback" not in done.stderr
    if code in (1, 2, 125, 126, 127):
        assert done.stderr and not done.stdout


def test_every_command_has_help_with_json(worker: Host) -> None:
    commands = ["serve", "convert", "pull", "mount", "umount", "run", "doctor"]
    groups = {
        "image": ["ls", "inspect", "tag", "rm", "verify", "export"],
        "stage": ["ls", "exec", "drop"],
        "store": ["df", "gc", "fsck"],
        "node": ["start", "stop", "status"],
    }
    for words in [*([name] for name in commands), *([g, name] for g, names in groups.items() for name in names)]:
        text = worker.run(*words, "--help").stdout
        assert b"--json" in text, words


def test_a_kept_stage_keeps_its_writes(worker: Host) -> None:
    worker.run("run", "--stage", "kept", "box:v1", "--", "sh", "-c", "echo mine > /etc/image-file; rm /etc/group")
    assert worker.run("stage", "exec", "kept", "--", "cat", "/etc/image-file").stdout == b"mine\n"
    worker.run("stage", "exec", "kept", "--", "test", "-e", "/etc/group", code=1)
    assert [stage["name"] for stage in worker.json("stage", "ls")] == ["kept"]
    assert worker.run("run", "box:v1", "--", "cat", "/etc/image-file").stdout == b"from the image\n"
    worker.run("stage", "drop", "kept")
    assert worker.json("stage", "ls") == []


def test_a_workspace_is_shown_and_not_changed(worker: Host, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("host\n")
    argv = [
        "run",
        "--workspace",
        str(tmp_path),
        "box:v1",
        "--",
        "sh",
        "-c",
        "cat /workspace/file; echo x > /workspace/file",
    ]
    assert worker.run(*argv).stdout == b"host\n"
    assert (tmp_path / "file").read_text() == "host\n"


def test_ls_says_how_much_is_here(worker: Host, origin: str, tmp_path: Path) -> None:
    def all_say_the_same() -> bool:
        """Once what earlier runs read is stored, which happens behind them."""
        (image,) = [image for image in worker.json("image", "ls") if image["name"] == "box:v1"]
        inspected = worker.json("image", "inspect", "box:v1")["present_chunks"]
        share = 100 * image["present_chunks"] // image["chunks"]
        shown = worker.run("image", "ls").stdout.decode()
        return 0 < image["present_chunks"] == inspected and f"lazy {share}%" in shown

    wait_for(all_say_the_same)
    with host(tmp_path) as other:
        assert other.json("image", "ls") == []
        assert other.json("image", "ls", "--server", origin) == worker.json("image", "ls", "--remote")
        assert other.json("--server", origin, "image", "ls") == []


def test_a_server_that_is_gone(tmp_path: Path, layout: Path) -> None:
    """A name that is not here is given up soon, and what is here can be verified."""
    with chunk_server(tmp_path / "server/home/store") as server, host(tmp_path / "cold", server.url) as cold:
        with host(tmp_path / "pusher", server.url) as pusher:
            pusher.run("convert", f"oci:{layout}:v1")
        cold.run("pull", "--lazy", "box:v1")
        cold.run("node", "start")
        server.stop()
        started = time.monotonic()
        cold.error("run", "other:1", code=125)
        cold.error("mount", "other:1", str(tmp_path))
        assert time.monotonic() - started < 30  # each after three seconds; a read goes on for twenty
        image = cold.json("image", "inspect", "box:v1")
        found = cold.json("image", "verify", "box:v1")
        assert found["sound"] and found["corrupt"] == [] and found["chunks"] == image["chunks"]
        assert found["verified"] == image["present_chunks"] == image["chunks"] - found["absent"] > 0
        assert f"{found['absent']} are not here yet" in cold.run("image", "verify", "box:v1").stdout.decode()


def test_tag_rm_and_names(worker: Host) -> None:
    worker.run("image", "tag", "box:v1", "team/other:x")
    names = [image["name"] for image in worker.json("image", "ls")]
    assert "team/other:x" in names and "box:v1" in names
    assert worker.json("image", "inspect", "other:x")["name"] == "team/other:x"
    worker.run("image", "rm", "team/other:x")
    assert "no image" in worker.error("image", "inspect", "team/other:x")
    assert "not an image name" in worker.error("image", "tag", "box:v1", "UP//x", code=2)


def test_verify_tells_lazy_from_lost(worker: Host, tmp_path: Path, layout: Path) -> None:
    lazy = worker.json("image", "verify", "box:v1")
    assert lazy["sound"] and lazy["lazy"]
    with host(tmp_path) as local:
        local.run("convert", f"oci:{layout}:v1")
        whole = local.json("image", "verify", "box:v1")
        assert whole["sound"] and whole["absent"] == 0 and whole["verified"] == whole["chunks"]
        (pack,) = (tmp_path / "home/store/packs").iterdir()
        with pack.open("r+b") as stream:
            stream.seek(pack.stat().st_size // 2)
            byte = stream.read(1)
            stream.seek(-1, os.SEEK_CUR)
            stream.write(bytes([byte[0] ^ 1]))
        broken = local.json("image", "verify", "box:v1", code=1)
        assert not broken["sound"] and len(broken["corrupt"]) == 1


def test_export_to_a_file_and_a_directory(worker: Host, tmp_path: Path) -> None:
    file = tmp_path / "box.erofs"
    worker.run("image", "export", "box:v1", str(file))
    subprocess.run(["fsck.erofs", str(file)], check=True, capture_output=True)
    worker.run("image", "export", "box:v1", f"{tmp_path}/tree/")
    assert (tmp_path / "tree/etc/image-file").read_text() == "from the image\n"
    assert stat.S_IMODE((tmp_path / "tree/tmp").stat().st_mode) == 0o1777
    assert (tmp_path / "tree/bin/sh").readlink() == Path("busybox")
    assert "not empty" in worker.error("image", "export", "box:v1", str(tmp_path / "tree"))


def test_mount_and_umount(worker: Host, tmp_path: Path) -> None:
    directory = tmp_path / "mnt"
    directory.mkdir()
    worker.run("mount", "box:v1", str(directory))
    assert (directory / "etc/image-file").read_text() == "from the image\n"
    with pytest.raises(OSError):
        (directory / "etc/image-file").write_text("no")
    worker.run("umount", str(directory))
    assert list(directory.iterdir()) == []
    worker.error("umount", str(directory))


@pytest.mark.network
def test_podman_runs_from_a_mounted_image(worker: Host, tmp_path: Path) -> None:
    storage = Path(tempfile.mkdtemp(prefix="pod-"))  # podman refuses a runroot of more than 50 characters
    mounted, merged = tmp_path / "mnt", tmp_path / "merged"
    for name in ("mnt", "merged", "upper", "work"):
        (tmp_path / name).mkdir()
    worker.run("mount", "box:v1", str(mounted))
    try:
        options = f"lowerdir={mounted},upperdir={tmp_path}/upper,workdir={tmp_path}/work"
        subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, str(merged)], check=True)
        try:
            podman = Podman(storage)
            argv = podman.run(str(merged), "sh", "-c", "cat /etc/image-file; echo new > /etc/new", rootfs=True)
            done = subprocess.run(argv, capture_output=True, timeout=60)
            assert done.stdout == b"from the image\n", done.stderr
            assert (tmp_path / "upper/etc/new").read_text() == "new\n"
        finally:
            subprocess.run(["umount", str(merged)], check=True)
            subprocess.run(["umount", str(storage / "root/overlay")], capture_output=True)
            shutil.rmtree(storage)
    finally:
        worker.run("umount", str(mounted))


def test_a_sibling_fetches_only_its_own_layers(tmp_path: Path, layout: Path, origin: str) -> None:
    with host(tmp_path / "local") as local:
        local.run("convert", f"oci:{layout}:v1")
        assert local.json("convert", f"oci:{layout}:v2")["layers_reused"] == 1
    with host(tmp_path / "worker", origin) as puller:
        first = puller.json("pull", "box:v1")
        second = puller.json("pull", "box:v2")
        assert second["fetched_bytes"] < first["fetched_bytes"] / 2
        assert second["fetched_bytes"] < 150_000  # 100,000 random bytes, metadata, one leaf
        puller.assert_sound()


@pytest.mark.network
def test_a_registry_image_is_converted_at_the_server_and_without_one(tmp_path: Path, layout: Path, origin: str) -> None:
    with run_registry() as registry:
        registry.push(f"oci:{layout}:v1", "box:from-registry")
        source = registry.source("box:from-registry")
        with host(tmp_path / "worker", origin) as remote:
            pulled = remote.json("pull", "--lazy", source)
            assert remote.run("run", "box:from-registry").stdout == b"from Cmd\n"
        with host(tmp_path / "local") as local:
            assert local.json("pull", source)["id"] == pulled["id"]
            assert local.run("run", source, "--", "cat", "/etc/image-file").stdout == b"from the image\n"
    with host(tmp_path / "local") as gone:  # the registry has gone; what was pulled works
        assert gone.run("run", "box:from-registry").stdout == b"from Cmd\n"
        assert "127.0.0.1" in gone.error("pull", source.replace("from-registry", "other"))


def test_a_killed_command_leaves_nothing_behind(worker: Host) -> None:
    process = worker.start("run", "box:v1", "--", "sh", "-c", "echo up; sleep 600")
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    assert children
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{child}").exists() for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{child}").exists() for child in children)
    process.communicate()
    worker.run("run", "box:v1", "--", "true")
    assert not list((worker.root / "home/stages").iterdir())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_reach_the_workload(worker: Host, number: signal.Signals) -> None:
    script = f"trap 'echo caught; exit 5' {number.name[3:]}; echo up; while :; do sleep 0.1; done"
    process = worker.start("run", "box:v1", "--", "sh", "-c", script)
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (5, b"caught\n"), err


def test_many_at_once(worker: Host) -> None:
    processes = [worker.start("run", "box:v1", "--", "sh", "-c", f"echo {n}") for n in range(8)]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [out for out, _ in outputs] == [b"%d\n" % n for n in range(8)], outputs
    assert [process.returncode for process in processes] == [0] * 8, outputs


def test_a_daemon_that_was_killed_is_replaced(tmp_path: Path, origin: str) -> None:
    with host(tmp_path, origin) as made:
        directory = tmp_path / "mnt"
        directory.mkdir()
        made.run("mount", "box:v1", str(directory))
        os.kill(made.json("node", "status")["pid"], signal.SIGKILL)
        assert made.run("run", "box:v1", "--", "cat", "/etc/image-file").stdout == b"from the image\n"
        assert (directory / "etc/image-file").read_text() == "from the image\n"
        made.run("umount", str(directory))
    assert not pvisor_mounts(tmp_path)


def test_json_is_all_there_is_on_stdout(worker: Host) -> None:
    for argv in (
        ["image", "ls"],
        ["node", "status"],
        ["store", "df"],
        ["stage", "ls"],
        ["doctor"],
        ["image", "ls", "--remote"],
    ):
        json.loads(worker.run(*argv, "--json").stdout)
    usage = worker.json("store", "df")
    assert {"logical_bytes", "stored_bytes", "chunks", "packs", "dead_bytes"} <= set(usage)


def test_gc_frees_what_is_unnamed_and_unused_while_the_daemon_runs(tmp_path: Path, layout: Path) -> None:
    with host(tmp_path) as made:
        made.run("convert", f"oci:{layout}:v1")
        made.run("convert", f"oci:{layout}:v2")
        assert made.run("run", "box:v1").stdout == b"from Cmd\n"
        before = made.json("store", "df")
        assert [one["names"] for one in before["images"]] == [["box:v2"], ["box:v1"]]
        assert all(one["live_bytes"] == one["shared_bytes"] + one["own_bytes"] for one in before["images"])
        made.run("image", "rm", "box:v2")
        made.run("store", "gc")
        after = made.json("store", "df")
        assert before["last_collection"] is None and after["last_collection"]["freed_bytes"] > 90_000
        assert b"\ncollected " in made.run("store", "df").stdout
        freed_bytes = before["stored_bytes"] - after["stored_bytes"]  # what the layer would be recalled by, too
        assert freed_bytes >= before["images"][0]["own_bytes"] > 90_000
        made.assert_sound()
        # Mounted by a user, and without a name.
        mounted = tmp_path / "mounted"
        mounted.mkdir()
        made.run("mount", "box:v1", str(mounted))
        made.run("image", "rm", "box:v1")
        kept = made.json("store", "gc")
        assert (kept["forgotten_layers"], kept["kept_by_leases"]) == (1, ["the node daemon"])
        assert found(mounted)
        made.run("umount", str(mounted))
        made.run("node", "stop")
        made.run("store", "gc")
        assert made.json("store", "df")["chunks"] == 0


def test_export_to_a_directory_copies_everything(tmp_path: Path) -> None:
    """Against the mount itself, entry by entry; a hole of 300 GB is not read."""
    source = tmp_path / "source"
    (source / "d").mkdir(parents=True)
    with (source / "sparse").open("wb") as stream:
        stream.truncate(300 << 30)
        stream.seek(200 << 30)
        stream.write(b"island")
    (source / "d/file").write_bytes(os.urandom(100_001))
    os.link(source / "d/file", source / "d/linked")
    (source / "d/file").chmod(0o4750)
    os.chown(source / "d/file", 1234, 70_000)
    (source / "d/file").chmod(0o4750)
    os.setxattr(source / "d/file", "user.a", b"\x00b")
    os.setxattr(source / "d", "trusted.t", b"")
    os.mknod(source / "null", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    os.mkfifo(source / "fifo")
    (source / "link").symlink_to("d/file")
    (source / os.fsdecode(b"odd\xff\nname")).touch()
    for path in (source / "d/file", source / "link", source / "d"):
        os.utime(path, ns=(0, 1_234_567_891_123_456_789), follow_symlinks=False)
    with host(tmp_path) as local:
        local.run("convert", f"dir:{source}", "--name", "all:1")
        local.run("image", "export", "all:1", f"{tmp_path}/copy/")
        mounted = tmp_path / "mounted"
        mounted.mkdir()
        local.run("mount", "all:1", str(mounted))
        try:
            assert found(tmp_path / "copy") == found(mounted)
        finally:
            local.run("umount", str(mounted))
    assert (tmp_path / "copy/sparse").stat().st_blocks < 4000
    with (tmp_path / "copy/sparse").open("rb") as stream:
        stream.seek(200 << 30)
        assert stream.read(10) == b"island" + bytes(4)


def test_closed_standard_streams_do_no_harm(worker: Host, tmp_path: Path, layout: Path) -> None:
    for closed in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-"):
        with host(tmp_path / closed.encode().hex()) as local:
            command = " ".join(map(shlex.quote, [*ARGV, "convert", f"oci:{layout}:v1"]))
            done = subprocess.run(["sh", "-c", f"{command} {closed}"], env=local.env, capture_output=True, timeout=60)
            assert done.returncode == 0, (closed, done.stdout, done.stderr)
            assert b"error" not in done.stdout + done.stderr
            assert [image["name"] for image in local.json("image", "ls")] == ["box:v1"]


def test_a_kept_stage_keeps_its_image(tmp_path: Path, layout: Path) -> None:
    with host(tmp_path) as made:
        made.run("convert", f"oci:{layout}:v1")
        made.run("run", "--stage", "precious", "box:v1", "--", "sh", "-c", "echo work > /made-here")
        made.run("image", "rm", "box:v1")
        made.run("node", "stop")
        assert "box:v1: kept by stage precious" in made.run("store", "gc").stdout.decode()
        assert made.json("store", "gc")["kept_by_stages"] == ["precious"]
        assert made.run("stage", "exec", "precious", "--", "cat", "/made-here").stdout == b"work\n"
        made.run("node", "stop")
        assert made.json("stage", "drop", "precious", "nothing", code=1) == {"dropped": ["precious"]}
        made.run("store", "gc")
        assert made.json("store", "df")["chunks"] == 0


def test_a_store_elsewhere_can_be_looked_after(tmp_path: Path, layout: Path) -> None:
    with host(tmp_path / "server") as keeper, host(tmp_path / "other") as other:
        keeper.run("convert", f"oci:{layout}:v1")
        elsewhere = ("--store", str(tmp_path / "server/home/store"))
        assert [image["name"] for image in other.json("image", "ls", *elsewhere)] == ["box:v1"]
        assert other.json("image", "verify", "box:v1", *elsewhere)["sound"]
        assert other.json("store", "fsck", *elsewhere)["errors"] == []
        other.run("image", "rm", "box:v1", *elsewhere)
        other.run("store", "gc", *elsewhere)
        assert other.json("store", "df", *elsewhere)["chunks"] == 0
        assert "no chunk store" in other.error("store", "gc", "--store", str(tmp_path / "nowhere"))
        for words in (["image", "ls"], ["image", "verify", "box:v1"], ["store", "df"]):
            said = other.error(*words, "--store", str(tmp_path / "server/home"))
            assert "no chunk store" in said and f"{tmp_path}/server/home/store" in said
        assert not (tmp_path / "server/home/packs").exists()
        assert not (tmp_path / "nowhere").exists()


def test_a_control_socket_that_can_not_be_made(tmp_path: Path) -> None:
    with host(tmp_path) as made:
        (tmp_path / "run/node.sock/in-the-way").mkdir(parents=True)
        started = time.monotonic()
        assert "node.sock" in made.error("node", "start")
        assert time.monotonic() - started < 20
        assert not pvisor_mounts(tmp_path)
