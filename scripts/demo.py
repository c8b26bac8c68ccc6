"""The main job on real input: an OCI image, converted, served, pulled lazily, and a shell run from it.

Without --image a real Debian root is built with mmdebstrap, packed by umoci and pushed to a registry on loopback by
skopeo. With --image the image is converted from where it is. Everything that is started is ended, everything that is
made is removed, except the Debian root in `.demo/`, which the next run uses again.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from cli.common import human_bytes
from scripts.debian import TAG, debian_layout

PVISOR = str(Path(sys.executable).parent / "pvisor")
SHELL = '. /etc/os-release; echo "hello from $PRETTY_NAME, pid $$, $(ls /usr/bin | wc -l) programs in /usr/bin"'


def say(text: str) -> None:
    print(f"\n== {text}", flush=True)


def ask(*argv: str, env: dict[str, str] | None = None) -> str:
    """Run a command that is not shown, give back its output; stop the demo when it fails."""
    done = subprocess.run(argv, env=env, stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        print(done.stdout, end="", flush=True)
        sys.exit(f"demo: {shlex.join(argv)} failed with exit code {done.returncode}")
    return done.stdout


def sh(*argv: str, env: dict[str, str] | None = None) -> str:
    """As `ask`, with the command and its output shown."""
    print("$", shlex.join(argv), flush=True)
    output = ask(*argv, env=env)
    print(output, end="", flush=True)
    return output


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_port(port: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                print(f"listens on 127.0.0.1:{port}", flush=True)
                return
        if process.poll() is not None:
            sys.exit(f"demo: {process.args!r} ended with exit code {process.returncode}")
        time.sleep(0.05)
    sys.exit(f"demo: nothing listens on port {port}")


@contextmanager
def background(*argv: str, log: Path, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """A process that is ended when the block is left."""
    print("$", shlex.join(argv), "&", flush=True)
    with log.open("w") as output:
        process = subprocess.Popen(argv, env=env, stdout=output, stderr=output, stdin=subprocess.DEVNULL, text=True)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(timeout=20)


@contextmanager
def registry(scratch: Path) -> Iterator[int]:
    """A docker-registry on loopback with its files under scratch; yields its port."""
    port = free_port()
    settings = {
        "version": 0.1,
        "log": {"level": "error"},
        "storage": {"filesystem": {"rootdirectory": str(scratch / "registry")}},
        "http": {"addr": f"127.0.0.1:{port}"},
    }
    config = scratch / "registry.yml"
    config.write_text(json.dumps(settings))
    with background("docker-registry", "serve", str(config), log=scratch / "registry.log") as process:
        wait_for_port(port, process)
        yield port


def demo(image: str | None, stack: ExitStack) -> list[str]:
    """Run it all; the lines that say what it took and what to do next."""
    scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pvisor-demo-")))
    source = local = image
    if source is None:
        say("a Debian root in a registry (built with mmdebstrap the first time)")
        layout = debian_layout()
        local = f"oci:{os.path.relpath(layout)}:{TAG}"
        port = stack.enter_context(registry(scratch))
        source = f"docker://127.0.0.1:{port}/debian:bookworm"
        ask("skopeo", "copy", "--quiet", "--dest-tls-verify=false", f"oci:{layout}:{TAG}", source)
        print(f"pushed to {source}", flush=True)

    say("the chunk server")
    port = free_port()
    worker = os.environ | {
        "PVISOR_HOME": str(scratch / "worker"),
        "PVISOR_RUN": str(scratch / "run"),
        "PVISOR_SERVER": f"http://127.0.0.1:{port}",
    }
    serve = (PVISOR, "serve", "--listen", f"127.0.0.1:{port}", "--store", str(scratch / "server"))
    process = stack.enter_context(background(*serve, log=scratch / "serve.log"))
    wait_for_port(port, process)

    say("convert on the server, pull lazily on the worker, run")
    print("$ export", *(f"{key}={worker[key]}" for key in ("PVISOR_HOME", "PVISOR_RUN", "PVISOR_SERVER")))
    elsewhere = worker | {"PVISOR_HOME": str(scratch / "elsewhere")}  # a file source is read there, then pushed
    converted = json.loads(sh(PVISOR, "convert", source, "--json", env=elsewhere))
    name = converted["name"]
    sh(PVISOR, "node", "start", env=worker)
    stack.callback(ask, PVISOR, "node", "stop", env=worker)
    sh(PVISOR, "pull", "--lazy", name, "--json", env=worker)
    started = time.monotonic()
    if image is None:
        sh(PVISOR, "run", name, "--", "sh", "-c", SHELL, env=worker)
    else:
        sh(PVISOR, "run", name, "--", "sh", "-c", "ls /", env=worker)
    elapsed = time.monotonic() - started

    status = json.loads(ask(PVISOR, "node", "status", "--json", env=worker))
    inspected = json.loads(ask(PVISOR, "image", "inspect", name, "--json", env=worker))
    used = status["images"][inspected["id"]]  # what the pull has fetched is in it
    figures = (
        f"{used['name']}: {human_bytes(used['fetched_bytes'])} in {used['fetched_chunks']} chunks and "
        f"{used['requests']} requests, of {human_bytes(inspected['stored_bytes'])} stored "
        f"({human_bytes(inspected['size'])} of file data); the shell took {elapsed:.2f} s"
    )
    command, short = os.path.relpath(PVISOR), "debian:12" if image is None else name
    return [
        figures,
        "",
        f"try: {shlex.join([command, 'convert', str(local), '--name', short])}",
        f"     {shlex.join([command, 'run', '-it', short])}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--image", metavar="SOURCE", help="docker://HOST/REPO:TAG or another source")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("demo: run it as root: it mounts file systems")
    if shutil.which("fusermount3") is None:
        sys.exit("demo: fusermount3 is missing; `make demo` installs it")
    with ExitStack() as stack:
        lines = demo(arguments.image, stack)
    say("what it took")
    print(*lines, sep="\n")


if __name__ == "__main__":
    main()
