"""A real OpenStack Swift of one node (Debian's packages) that speaks S3, on free loopback ports.

Its listings follow a write at once as long as its container server answers in time, and it has no conditional PUT: a
request with If-None-Match is answered 501.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

from tests.support.ports import free_port

ACCESS_KEY, SECRET_KEY = "test:tester", "swift-secret-Zq81"
REGION = "us-east-1"
_PYTHON = "/usr/bin/python3"  # Debian's packages are of Debian's Python
_KINDS = ("account", "container", "object")
_PIPELINE = "catch_errors healthcheck proxy-logging memcache listing_formats s3api tempauth bulk slo dlo proxy-server"

_MAIN = """
import ctypes, os, sys
from swift.common import utils
from swift.common.ring import RingBuilder
directory, ports = sys.argv[1], [int(port) for port in sys.argv[2:]]
kinds = ("account", "container", "object", "proxy")
utils.set_swift_dir(directory)
for kind, port in zip(kinds[:3], ports):
    builder = RingBuilder(6, 1, 0)
    builder.add_dev({"id": 0, "region": 1, "zone": 1, "weight": 1.0, "ip": "127.0.0.1", "port": port,
                     "replication_ip": "127.0.0.1", "replication_port": port, "device": "disk", "meta": ""})
    builder.rebalance()
    builder.get_ring().save(f"{directory}/{kind}.ring.gz")
from swift.common.wsgi import run_wsgi
import swift.account.server, swift.container.server, swift.obj.server, swift.proxy.server
import swift.common.middleware.s3api.s3api, swift.common.middleware.tempauth, swift.common.middleware.slo
for kind in kinds:
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(1, 9)  # they leave the process group; this kills them with their parent
        os._exit(run_wsgi(f"{directory}/{kind}.conf", f"{kind}-server"))
os.wait()  # one that ends early ends them all
os._exit(1)
"""


@dataclass(frozen=True, slots=True)
class S3Server:
    """An S3 endpoint and its credentials. `log` is what the server wrote."""

    endpoint: str
    access_key: str
    secret_key: str
    log: Path

    @property
    def environ(self) -> dict[str, str]:
        """How a process finds it."""
        return {
            "AWS_ENDPOINT_URL_S3": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def client(self) -> Any:
        """A plain boto3 client, to look at a bucket from outside."""
        import boto3
        from botocore.config import Config

        config = Config(
            s3={"addressing_style": "path"},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name=REGION,
            config=config,
        )

    def make_bucket(self, name: str) -> str:
        self.client().create_bucket(Bucket=name)
        return name

    def keys(self, bucket: str, prefix: str = "") -> list[str]:
        pages = self.client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        return [entry["Key"] for page in pages for entry in page.get("Contents", [])]


@contextmanager
def run_swift() -> Iterator[S3Server]:
    """All four servers and a memcached, their data in a temporary directory."""
    with tempfile.TemporaryDirectory(prefix="pvisor-swift-") as name:
        directory = Path(name)
        ports = [free_port() for _ in range(5)]
        _configure(directory, ports)
        log = directory / "log"
        user = "root" if os.geteuid() == 0 else str(os.geteuid())
        cache = subprocess.Popen(["memcached", "-u", user, "-l", "127.0.0.1", "-p", str(ports[4]), "-m", "16"])
        with log.open("wb") as output:
            servers = subprocess.Popen(
                [_PYTHON, "-c", _MAIN, str(directory), *map(str, ports[:4])],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "AWS_"))},
            )
        try:
            _wait_until_ready(servers, ports[3], log)
            yield S3Server(f"http://127.0.0.1:{ports[3]}", ACCESS_KEY, SECRET_KEY, log)
        finally:
            servers.kill()
            servers.wait()
            cache.kill()
            cache.wait()


def _configure(directory: Path, ports: list[int]) -> None:
    (directory / "devices/disk").mkdir(parents=True)
    (directory / "swift.conf").write_text(
        "[swift-hash]\nswift_hash_path_suffix = pvisor\nswift_hash_path_prefix = test\n"
        "[storage-policy:0]\nname = only\ndefault = yes\n"
    )
    user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    common = (
        f"bind_ip = 127.0.0.1\nworkers = 0\nuser = {user}\nswift_dir = {directory}\nlog_level = WARNING\n"
        f"log_address = {directory}/nolog\nfallocate_reserve = 0\n"
    )
    for kind, port in zip(_KINDS, ports, strict=False):
        (directory / f"{kind}.conf").write_text(
            f"[DEFAULT]\nbind_port = {port}\n{common}devices = {directory}/devices\nmount_check = false\n"
            f"recon_cache_path = {directory}\n[pipeline:main]\npipeline = {kind}-server\n"
            f"[app:{kind}-server]\nuse = egg:swift#{kind}\n"
        )
    account, _, user_name = ACCESS_KEY.partition(":")
    filters = {
        "catch_errors": "",
        "healthcheck": "",
        "proxy-logging": "",
        "memcache": f"memcache_servers = 127.0.0.1:{ports[4]}\n",
        "listing_formats": "",
        "s3api": f"location = {REGION}\n",
        "tempauth": f"user_{account}_{user_name} = {SECRET_KEY} .admin\n",
        "bulk": "",
        "slo": "",
        "dlo": "",
    }
    sections = [
        f"[filter:{name}]\nuse = egg:swift#{name.replace('proxy-logging', 'proxy_logging')}\n{options}"
        for name, options in filters.items()
    ]
    (directory / "proxy.conf").write_text(
        f"[DEFAULT]\nbind_port = {ports[3]}\n{common}[pipeline:main]\npipeline = {_PIPELINE}\n"
        "[app:proxy-server]\nuse = egg:swift#proxy\nallow_account_management = true\naccount_autocreate = true\n"
        + "".join(sections)
    )


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Until the proxy answers for an account: then the others do, too."""
    headers = {"X-Auth-User": ACCESS_KEY, "X-Auth-Key": SECRET_KEY}
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"swift ended with {process.returncode}: {log.read_text()[-2000:]}")
        try:
            url = f"http://127.0.0.1:{port}"
            with urllib.request.urlopen(urllib.request.Request(f"{url}/auth/v1.0", headers=headers), timeout=5) as got:
                storage, token = got.headers["X-Storage-Url"], got.headers["X-Storage-Token"]
            urllib.request.urlopen(urllib.request.Request(storage, headers={"X-Auth-Token": token}), timeout=5).close()
            return
        except (HTTPError, OSError):
            time.sleep(0.05)
    raise RuntimeError(f"swift did not start: {log.read_text()[-2000:]}")
