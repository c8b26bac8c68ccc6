"""A registry on the internet that would have us ask services of our own network, seen from a network of the test's own
in which the internet is an address of the loopback device."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fuse import linux
from imaged.errors import RegistryError
from imaged.names import SourceName
from imaged.oci.http import RetryPolicy
from imaged.oci.peers import is_public
from imaged.oci.source import open_image
from tests.support import oci
from tests.support.chunkserver import chunk_server
from tests.support.command import host
from tests.support.flaky import Flaky, redirect, run_flaky, status

PUBLIC = "1.2.3.4"
SIOCSIFFLAGS, SIOCSIFADDR, IFF_UP = 0x8914, 0x8916, 0x1
LAYER = oci.make_tar(("data", os.urandom(50_000)))
BLOB = f"/v2/app/blobs/{oci.digest(LAYER)}"
QUICK = RetryPolicy(base_s=0.01, cap_s=0.02, connect_timeout_s=2, read_timeout_s=2)
pytestmark = [pytest.mark.root, pytest.mark.network]


@pytest.fixture
def network() -> Iterator[None]:
    """A network namespace for this thread, and threads and processes it starts: loopback, with a public address."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        linux.unshare(linux.CLONE_NEWNET)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", IFF_UP))
            address = struct.pack("16sHH4s16x", b"lo:1", socket.AF_INET, 0, socket.inet_aton(PUBLIC))
            fcntl.ioctl(control, SIOCSIFADDR, address)
        yield
    finally:
        linux.setns(before)
        os.close(before)


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    return oci.write_layout(tmp_path / "layout", [LAYER], compression="none")


@pytest.fixture
def inner(network: None, layout: Path) -> Iterator[Flaky]:
    """What only this host should reach. It has the layer, so that nothing but its address is wrong with it."""
    with run_flaky() as running:
        running.serve(layout, "app")
        yield running


@pytest.fixture
def registry(inner: Flaky, layout: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Flaky]:
    with run_flaky(PUBLIC) as running:
        running.serve(layout, "app")
        monkeypatch.setenv("PVISOR_INSECURE_REGISTRIES", running.address)
        yield running


def foreign(layout: Path, registry: Flaky, *urls: str) -> None:
    """The registry's layer becomes a foreign one that only the urls have."""
    name = oci.read_index(layout)["manifests"][0]["digest"]
    manifest = json.loads(oci.blob_path(layout, name).read_bytes())
    manifest["layers"][0]["urls"] = list(urls)
    del registry.content[BLOB]
    registry.add_manifest("app", json.dumps(manifest).encode(), oci.OCI_MANIFEST, tag="latest")


def pull(registry: Flaky) -> bytes:
    source = SourceName.parse(registry.source("app"))
    with open_image(source, platform="linux/amd64", retries=QUICK) as image, image.layers[0].open() as stream:
        return b"".join(iter(lambda: stream.read(100_000), b""))


def by_urls(registry: Flaky, layout: Path, url: str) -> None:
    foreign(layout, registry, url + BLOB)


def by_redirect(registry: Flaky, layout: Path, url: str) -> None:
    registry.plan(BLOB, *[redirect(url + "{path}")] * 3)


def by_redirected_url(registry: Flaky, layout: Path, url: str) -> None:
    foreign(layout, registry, f"http://{registry.address}/elsewhere")
    registry.plan("/elsewhere", *[redirect(url + BLOB)] * 3)


def by_realm(registry: Flaky, layout: Path, url: str) -> None:
    challenge = {"WWW-Authenticate": f'Bearer realm="{url}{BLOB}",service="x"'}
    registry.plan("/manifests/", *[status(401, challenge)] * 3)


WAYS = [by_urls, by_redirect, by_redirected_url, by_realm]
Way = Callable[[Flaky, Path, str], None]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "0.0.0.0", "127.1", "2130706433", "[::ffff:127.0.0.1]"])
def test_a_public_registry_does_not_lead_inside(
    registry: Flaky, inner: Flaky, layout: Path, way: Way, name: str
) -> None:
    way(registry, layout, f"http://{name}:{inner.address.rpartition(':')[2]}")
    with pytest.raises(RegistryError, match="inside this host's network") as caught:
        pull(registry)
    assert "PVISOR_INSECURE_REGISTRIES" in caught.value.hint
    assert inner.requests == []


@pytest.mark.parametrize("name", ["169.254.169.254", "10.0.0.1", "[fd00::1]", "[fe80::1%25lo]", "[64:ff9b::7f00:1]"])
def test_no_packet_is_sent_to_what_is_not_allowed(registry: Flaky, layout: Path, name: str) -> None:
    foreign(layout, registry, f"http://{name}:9{BLOB}")
    with pytest.raises(RegistryError, match="inside this host's network"):
        pull(registry)


@pytest.mark.parametrize("way", WAYS[:3])
def test_what_the_configuration_lists_may_be_led_to(
    registry: Flaky, inner: Flaky, layout: Path, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PVISOR_INSECURE_REGISTRIES", f"{registry.address},{inner.address}")
    way(registry, layout, f"http://{inner.address}")
    assert pull(registry) == LAYER


@pytest.mark.parametrize("way", WAYS[:3])
def test_an_inner_registry_leads_anywhere(registry: Flaky, inner: Flaky, layout: Path, way: Way) -> None:
    way(inner, layout, f"http://{registry.address}")
    assert pull(inner) == LAYER


def test_through_a_proxy_addresses_are_judged_too(
    registry: Flaky, layout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proxy of this test is the registry, which takes the path of an absolute URL for its own."""
    for name, content in list(registry.content.items()):
        registry.content[f"http://{registry.address}{name}"] = content
    monkeypatch.setenv("http_proxy", f"http://{registry.address}")
    registry.plan(BLOB, redirect(f"http://169.254.169.254{BLOB}"))
    with pytest.raises(RegistryError, match="inside this host's network"):
        pull(registry)
    assert any(request.path.startswith("http://") for request in registry.requests)
    assert pull(registry) == LAYER


def test_a_chunk_server_does_not_fetch_for_its_clients(
    registry: Flaky, inner: Flaky, layout: Path, tmp_path: Path
) -> None:
    by_urls(registry, layout, f"http://{inner.address}")
    environ = {"PVISOR_INSECURE_REGISTRIES": registry.address}
    with chunk_server(tmp_path / "store", environ=environ) as server, host(tmp_path / "client", server.url) as client:
        said = client.error("convert", registry.source("app"), "--platform", "linux/amd64")
        assert "inside this host's network" in said
        assert client.json("image", "ls", "--remote") == []
    assert inner.requests == []


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("1.2.3.4", True),
        ("2606:4700::1111", True),
        ("::ffff:1.2.3.4", True),
        ("64:ff9b::102:304", True),
        ("2002:102:304::1", True),
        ("127.0.0.1", False),
        ("0.0.0.0", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("100.64.0.1", False),
        ("169.254.169.254", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("ff02::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::1", False),
    ],
)
def test_public_addresses(address: str, public: bool) -> None:
    assert is_public(address) is public
