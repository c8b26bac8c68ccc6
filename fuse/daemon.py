"""The node daemon: `python -m fuse.daemon`, started by `fuse.starter`. One FUSE mount, one control socket."""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import os
import sys
from contextlib import ExitStack
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from fuse import blockoperations, rundir
from imaged.config import Config
from imaged.errors import PvisorError
from imaged.fetching.credentials import KNOWN, VARIABLE
from imaged.loglines import LineFormatter

log = logging.getLogger(__name__)
_LOG_BYTES = 4 << 20


def serve(config: Config, ready: Any) -> None:
    """Until the mount is unmounted or a signal ends the process. `ready()` is called once requests are answered."""
    from fuse import mounts
    from fuse.control import ControlServer
    from fuse.requests import Node
    from imaged.chunkstore.store import ChunkStore

    with ChunkStore.open(config.store) as store, Node(config, store) as node, ExitStack() as ends:
        control = ControlServer(config, node.answers(), node.waiting_answers())

        def mounted() -> None:
            control.start()
            ready()
            try:
                node.go_on()
            except Exception:  # else libfuse drops it without a word
                log.exception("what was being filled is not gone on with, or the cache grows without bound")

        ends.callback(mounts.detach_all, config)
        ends.callback(control.close)
        ends.callback(log.info, "unmounted; ending")
        control.bind()  # here, because libfuse swallows what `mounted` raises
        blockoperations.run(config, blockoperations.BlockOperations(node.files, mounted))


def _lock_pid(config: Config) -> None:
    """Held until the process ends, however it ends. A daemon that is just ending is waited for."""
    path = rundir.pid_path(config)
    with rundir.changing(path):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    rundir.lock(fd, path, wait_s=30.0)
    with rundir.changing(path):
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"%d\n" % os.getpid(), 0)


def _log_to(path: Path) -> None:
    handler = RotatingFileHandler(path, maxBytes=_LOG_BYTES, backupCount=1, delay=True)
    handler.setFormatter(LineFormatter("%(asctime)s %(levelname)s %(threadName)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    faulthandler.enable()


def main() -> None:
    """Fork off, serve; what goes wrong before the mount is up is one JSON line on descriptor `--ready-fd`."""
    parser = argparse.ArgumentParser(prog="fuse.daemon")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--server")
    parser.add_argument("--cache-max", type=int)
    parser.add_argument("--ready-fd", type=int, required=True)
    arguments = parser.parse_args()
    if os.fork():
        os._exit(0)
    config = Config(
        home=arguments.home, run=arguments.run, server=arguments.server, cache_max_bytes=arguments.cache_max
    )
    KNOWN.learn(config.server or "", os.environ.pop(VARIABLE, ""))
    ready_fd = arguments.ready_fd
    os.umask(0o077)

    def report(**document: Any) -> None:
        nonlocal ready_fd
        if ready_fd >= 0:
            os.write(ready_fd, json.dumps(document).encode() + b"\n")
            os.close(ready_fd)
            ready_fd = -1

    _log_to(rundir.log_path(config))
    try:
        _lock_pid(config)
        serve(config, lambda: report(ok=True))
        # Everything is stored and unmounted; a thread that still waits for a server must not hold up the end.
        logging.shutdown()
        os._exit(0)
    except PvisorError as error:
        log.error("%s", error.message)
        report(ok=False, error=error.message, hint=error.hint)
        sys.exit(1)
    except Exception as error:
        log.exception("node daemon failed")
        report(ok=False, error=f"{type(error).__name__}: {error}", hint=f"see {rundir.log_path(config)}")
        sys.exit(1)
    finally:
        report(ok=False, error="the daemon ended before it was ready", hint=f"see {rundir.log_path(config)}")


if __name__ == "__main__":
    main()
