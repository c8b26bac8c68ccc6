"""A registry that misbehaves: cases 19 to 25 of the images that broke other tools."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path

import pytest

from imaged.errors import (
    DigestMismatchError,
    FormatError,
    InvalidNameError,
    PvisorError,
    RegistryAuthError,
    RegistryError,
    SourceError,
    UnsupportedImageError,
)
from imaged.names import SourceName
from imaged.oci.auth import Credentials
from imaged.oci.decompress import decompress
from imaged.oci.http import Http, RetryPolicy, allows_plain_http
from imaged.oci.source import open_image
from tests.support import oci
from tests.support.flaky import (
    Fault,
    Flaky,
    cut,
    drop,
    instead,
    redirect,
    run_flaky,
    status,
    whole,
    wrong_range,
)

pytestmark = pytest.mark.network
LAYER = oci.make_tar(("data", random.Random(8).randbytes(2_000_000)))  # the same in every process that collects
QUICK = RetryPolicy(base_s=0.01, cap_s=0.02, retry_after_cap_s=3, connect_timeout_s=2, read_timeout_s=2)
ALICE = Credentials("alice", "open sesame")


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("REGISTRY_AUTH_FILE", "DOCKER_CONFIG", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return oci.write_layout(tmp_path_factory.mktemp("layout"), [LAYER], compression="none")


@pytest.fixture
def server(layout: Path) -> Iterator[Flaky]:
    with run_flaky() as running:
        running.serve(layout, "app")
        yield running


LAYER_PATH = oci.digest(LAYER)


def pull(server: Flaky, name: str = "app:latest", *, auth: Credentials | None = None) -> bytes:
    with open_image(SourceName.parse(server.source(name)), platform="linux/amd64", auth=auth, retries=QUICK) as image:
        parts = []
        for layer in image.layers:
            with layer.open() as stream:
                plain = decompress(stream)
                parts += iter(lambda plain=plain: plain.read(100_000), b"")
        return b"".join(parts)


def test_without_faults(server: Flaky) -> None:
    assert pull(server) == LAYER
    assert [request.path.split("/")[3] for request in server.requests] == ["manifests", "blobs", "blobs"]


@pytest.mark.parametrize("code", [429, 500, 502, 503, 504])
@pytest.mark.parametrize("path", ["/manifests/", "/blobs/", LAYER_PATH])
def test_an_error_then_success(server: Flaky, code: int, path: str) -> None:
    server.plan(path, status(code), status(code))
    assert pull(server) == LAYER


@pytest.mark.alone
@pytest.mark.parametrize("code", [429, 503])
@pytest.mark.parametrize("as_date", [False, True])
def test_retry_after_is_honoured(server: Flaky, code: int, as_date: bool) -> None:
    wait = formatdate(time.time() + 2, usegmt=True) if as_date else "1"
    server.plan("/manifests/", status(code, {"Retry-After": wait}))
    started = time.monotonic()
    assert pull(server) == LAYER
    assert 0.9 < time.monotonic() - started < 4


@pytest.mark.alone
def test_retry_after_is_bounded(server: Flaky) -> None:
    server.plan("/manifests/", status(429, {"Retry-After": "3600"}))
    started = time.monotonic()
    with pytest.raises(RegistryError, match="answers 429 and asks to wait 3600 s"):
        pull(server)
    assert time.monotonic() - started < QUICK.retry_after_cap_s


def test_a_retry_after_that_means_nothing(server: Flaky) -> None:
    server.plan("/manifests/", status(503, {"Retry-After": "soon"}), status(503, {"Retry-After": "-1"}))
    assert pull(server) == LAYER


def test_errors_without_end(server: Flaky) -> None:
    server.plan("/manifests/", *[status(503, body=b'{"errors":[{"code":"UNAVAILABLE","message":"x\\u001b"}]}')] * 20)
    with pytest.raises(RegistryError, match=r"answers 503 for the manifest of .* \(UNAVAILABLE: x \)"):
        pull(server)
    assert len(server.requests) == QUICK.attempts


def test_a_denied_blob_is_not_retried(server: Flaky) -> None:
    server.plan(LAYER_PATH, status(400))
    with pytest.raises(RegistryError, match="answers 400"):
        pull(server)
    assert len(server.paths(LAYER_PATH)) == 1


@pytest.mark.parametrize("path", ["/manifests/", "/blobs/"])
def test_dropped_connections(server: Flaky, path: str) -> None:
    server.plan(path, drop, drop)
    assert pull(server) == LAYER


def test_a_cut_download_goes_on(server: Flaky) -> None:
    server.plan(LAYER_PATH, cut(700_000), cut(0), cut(500_000))
    assert pull(server) == LAYER
    ranges = [request.headers.get("range") for request in server.paths(LAYER_PATH)]
    assert ranges[0] is None
    assert ranges[1] == ranges[2], "nothing came in between"
    starts = [int(one.removeprefix("bytes=").rstrip("-")) for one in ranges[1:] if one]
    assert len(starts) == 3
    assert 0 < starts[0] <= 700_000 < starts[2] <= 1_200_000


def test_a_server_that_ignores_ranges(server: Flaky) -> None:
    server.plan(LAYER_PATH, cut(700_000), whole)
    assert pull(server) == LAYER
    server.plan(LAYER_PATH, cut(900_000), cut_whole(300_000), cut_whole(1_000_000), whole)
    assert pull(server) == LAYER


def cut_whole(after: int) -> Fault:
    def fault(handler: object, content: object) -> None:
        del handler.headers["Range"]  # type: ignore[attr-defined]
        cut(after)(handler, content)  # type: ignore[arg-type]

    return fault


@pytest.mark.parametrize("start", [0, 1, 650_000])
def test_a_wrong_content_range(server: Flaky, start: int) -> None:
    server.plan(LAYER_PATH, cut(700_000), wrong_range(start))
    assert pull(server) == LAYER
    assert server.paths(LAYER_PATH)[-1].headers.get("range") is None, "it is not asked for ranges again"


def test_a_download_that_always_breaks(server: Flaky) -> None:
    server.plan(LAYER_PATH, *[cut(10)] * 20)
    with pytest.raises(PvisorError, match=r"broke off 6 times|has \d+ bytes"):
        pull(server)
    assert len(server.paths(LAYER_PATH)) == QUICK.attempts


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
@pytest.mark.parametrize(
    ("body", "fact"),
    [
        (LAYER + b"x", "bytes"),
        (LAYER[:-1], "bytes"),
        (LAYER[:-1] + b"x", "digest"),
        (b"", "bytes"),
        (b"<html>welcome</html>", "bytes"),
    ],
    ids=["longer", "shorter", "flipped", "empty", "html"],
)
def test_wrong_bodies(server: Flaky, body: bytes, fact: str, chunked: bool) -> None:
    server.plan(LAYER_PATH, *[instead(body, chunked=chunked)] * 20)
    with pytest.raises(DigestMismatchError, match=fact):
        pull(server)


def test_the_range_is_past_the_end(server: Flaky) -> None:
    server.plan(LAYER_PATH, cut(700_000), status(416, {"Content-Range": "bytes */700000"}))
    with pytest.raises(DigestMismatchError, match="no bytes from"):
        pull(server)


@pytest.mark.parametrize("path", ["/manifests/", "/blobs/"])
@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_a_redirect_to_another_host_gets_no_credentials(server: Flaky, layout: Path, path: str, code: int) -> None:
    with run_flaky() as other:
        other.serve(layout, "app")
        for name in ("token", "basic"):
            server.requests.clear()
            other.requests.clear()
            ask_for(server, name)
            count = 1 if path == "/manifests/" else 2
            server.plan(path, *[redirect(f"http://{other.address}{{path}}", code)] * count)
            assert pull(server, auth=ALICE) == LAYER
            assert other.requests
            assert all("authorization" not in request.headers for request in other.requests)
            assert "authorization" in server.paths(path)[-1].headers


def ask_for(server: Flaky, scheme: str, *tokens: str) -> None:
    """Make the registry ask once for authorization of this kind."""
    if scheme == "basic":
        server.plan("/manifests/", status(401, {"WWW-Authenticate": 'Basic realm="x"'}))
        return
    challenge = f'Bearer realm="http://{server.address}/token?account=a",service="reg"'
    server.plan("/manifests/", status(401, {"WWW-Authenticate": challenge}))
    for token in tokens or ("one",):
        server.plan("/token", instead(json.dumps({"token": token}).encode()))


def test_a_redirect_back_gets_no_credentials_either(server: Flaky) -> None:
    with run_flaky() as other:
        ask_for(server, "basic")
        server.plan(LAYER_PATH, redirect(f"http://{other.address}{{path}}"))
        other.plan(LAYER_PATH, redirect(f"http://{server.address}{{path}}"))
        assert pull(server, auth=ALICE) == LAYER
        assert "authorization" not in server.paths(LAYER_PATH)[-1].headers


def test_a_redirect_on_the_same_host_keeps_credentials(server: Flaky) -> None:
    ask_for(server, "basic")
    server.plan(LAYER_PATH, redirect("{path}?again=1"))
    server.content[f"/v2/app/blobs/{LAYER_PATH}?again=1"] = server.content[f"/v2/app/blobs/{LAYER_PATH}"]
    assert pull(server, auth=ALICE) == LAYER
    assert "authorization" in server.paths("again=1")[0].headers


def test_redirects_without_end(server: Flaky) -> None:
    server.plan("/manifests/", *[redirect("{path}")] * 30)
    with pytest.raises(RegistryError, match="redirects more than 10 times"):
        pull(server)


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://x/y", "gopher:", "http://[::1", "http://x:99999999/"])
def test_redirects_elsewhere(server: Flaky, target: str) -> None:
    server.plan("/manifests/", redirect(target))
    with pytest.raises(RegistryError, match="which is no http URL"):
        pull(server)


def test_a_redirect_from_tls_to_plain_http_is_refused() -> None:
    http = Http(QUICK, {})
    with pytest.raises(RegistryError, match=r"from https to plain http on b\.example:80") as caught:
        http._redirect_target("https://a.example/x", "http://b.example:80/x")
    assert "PVISOR_INSECURE_REGISTRIES" in caught.value.hint
    assert http._redirect_target("https://a.example/x", "http://127.0.0.1:5000/x") == "http://127.0.0.1:5000/x"
    listed = Http(QUICK, {"PVISOR_INSECURE_REGISTRIES": "b.example"})
    assert listed._redirect_target("https://a.example/x", "http://b.example/") == "http://b.example/"
    assert http._redirect_target("https://a.example/x", "//b.example/y") == "https://b.example/y"


def test_an_expired_url_behind_a_redirect_is_not_an_authorization_problem(server: Flaky) -> None:
    with run_flaky() as other:
        server.plan(LAYER_PATH, redirect(f"http://{other.address}{{path}}"))
        other.plan(LAYER_PATH, status(403))
        with pytest.raises(RegistryError, match=f"{other.address} answers 403") as caught:
            pull(server)
        assert not isinstance(caught.value, RegistryAuthError)


@pytest.mark.parametrize("code", [401, 403])
@pytest.mark.parametrize("key", ["token", "access_token"])
def test_an_expired_token_is_renewed(server: Flaky, code: int, key: str) -> None:
    ask_for(server, "token", "one")
    server.plan("/token", instead(json.dumps({key: "two"}).encode()))
    server.plan(LAYER_PATH, status(code))
    assert pull(server) == LAYER
    sent = [request.headers.get("authorization") for request in server.requests if "/token" not in request.path]
    assert sent == [None, "Bearer one", "Bearer one", "Bearer one", "Bearer two"]
    assert [request.path for request in server.paths("/token")] == [
        "/token?account=a&service=reg&scope=repository%3Aapp%3Apull"
    ] * 2


def test_a_token_that_is_never_taken(server: Flaky) -> None:
    ask_for(server, "token", *[f"t{number}" for number in range(9)])
    server.plan("/manifests/", *[status(403)] * 9)
    with pytest.raises(RegistryAuthError, match="no anonymous access"):
        pull(server)
    assert len(server.paths("/token")) <= 3


@pytest.mark.parametrize(
    ("answer", "error", "fact"),
    [
        (instead(b"<html>"), RegistryError, "does not answer with JSON"),
        (instead(b"{}"), RegistryError, "without a token"),
        (instead(b'{"token": ""}'), RegistryError, "without a token"),
        (instead(b'{"token": 7}'), RegistryError, "without a token"),
        (instead(b'{"token": "a\\r\\nX: y"}'), RegistryError, "without a token"),
        (status(404), RegistryError, "answers 404"),
        (status(401), RegistryAuthError, "no anonymous access"),
    ],
)
def test_token_servers_that_answer_nonsense(server: Flaky, answer: Fault, error: type[PvisorError], fact: str) -> None:
    server.plan("/token", answer)
    ask_for(server, "token")
    with pytest.raises(error, match=fact):
        pull(server)


@pytest.mark.parametrize("realm", ["", "ftp://x/", "/token", "http://", "http://[::1"])
def test_realms_that_lead_nowhere(server: Flaky, realm: str) -> None:
    server.plan("/manifests/", status(401, {"WWW-Authenticate": f'Bearer realm="{realm}"'}))
    with pytest.raises(RegistryError, match="names no token server"):
        pull(server)


def test_credentials_do_not_go_to_a_token_server_without_tls(server: Flaky) -> None:
    server.plan("/manifests/", status(401, {"WWW-Authenticate": 'Bearer realm="http://auth.example/token"'}))
    with pytest.raises(RegistryAuthError, match=r"wants the credentials sent to auth\.example without TLS"):
        pull(server, auth=ALICE)


@pytest.mark.parametrize("challenge", [{}, {"WWW-Authenticate": "Negotiate"}, {"WWW-Authenticate": "Basic"}])
def test_no_way_to_authenticate(server: Flaky, challenge: dict[str, str]) -> None:
    server.plan("/manifests/", *[status(401, challenge)] * 5)
    with pytest.raises(RegistryAuthError, match="no anonymous access"):
        pull(server)


def test_the_secret_is_in_no_error(server: Flaky) -> None:
    ask_for(server, "basic")
    server.plan("/manifests/", *[status(401, {"WWW-Authenticate": "Basic"})] * 5)
    with pytest.raises(RegistryAuthError) as caught:
        pull(server, auth=ALICE)
    assert ALICE.password not in caught.value.message + caught.value.hint + repr(caught.value)


@pytest.mark.parametrize(
    ("fault", "error", "fact"),
    [
        (instead(b"<html>login</html>", media_type="text/html"), RegistryError, "answers with text/html in place of"),
        (instead(b""), RegistryError, "in place of the manifest"),
        (instead(b"{}"), FormatError, "config"),
        (instead(b"{" + b" " * (5 << 20)), SourceError, "more than the 4194304 bytes"),
        (instead(b'{"schemaVersion": 1}'), UnsupportedImageError, "schema 1"),
        (status(404, body=b"nothing"), RegistryError, "does not have the manifest"),
        (
            lambda handler, content: handler.answer(
                200, content.data, {"Docker-Content-Digest": "sha256:" + "0" * 64, "Content-Type": content.media_type}
            ),
            DigestMismatchError,
            "has digest sha256:",
        ),
    ],
)  # fmt: skip
def test_manifests_that_are_none(server: Flaky, fault: Fault, error: type[PvisorError], fact: str) -> None:
    server.plan("/manifests/", fault)
    with pytest.raises(error, match=fact):
        pull(server)


def test_a_host_that_is_no_registry(server: Flaky) -> None:
    del server.content["/v2/"]
    server.plan("/v2/", status(404), status(404))
    with pytest.raises(RegistryError, match="does not answer as a registry: /v2/ gives status 404"):
        pull(server)


def test_a_manifest_by_digest_is_verified(server: Flaky) -> None:
    name = next(path for path in server.content if "/manifests/sha256" in path).rpartition("/")[2]
    assert pull(server, f"app@{name}") == LAYER
    server.plan("/manifests/", instead(b"{}"))
    with pytest.raises(DigestMismatchError, match=name):
        pull(server, f"app@{name}")
    with pytest.raises(InvalidNameError, match="expected sha256"):
        pull(server, "app@sha256:12")


def test_a_registry_that_is_down() -> None:
    import socket

    with socket.socket() as nobody:  # has the port, so that no other process gets it, and does not listen
        nobody.bind(("127.0.0.1", 0))
        source = SourceName.parse(f"docker://127.0.0.1:{nobody.getsockname()[1]}/a:b")
        with (
            pytest.raises(RegistryError, match=r"can not be reached after 4 attempts: .*refused"),
            open_image(source, retries=QUICK),
        ):
            pass


def test_a_registry_that_never_answers() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        source = SourceName.parse(f"docker://127.0.0.1:{listener.getsockname()[1]}/a:b")
        policy = RetryPolicy(attempts=2, base_s=0.01, read_timeout_s=0.2)
        with pytest.raises(RegistryError, match=r"after 2 attempts: .*timed out"), open_image(source, retries=policy):
            pass


def test_tls_is_spoken_to_other_hosts(server: Flaky, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that resolves to this machine but is not listed gets TLS, which the server does not speak."""
    import socket

    name = socket.gethostname()
    port = server.address.partition(":")[2]
    if name in ("localhost", "") or "_" in name:
        pytest.skip("this machine has no name of its own")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(2, 1, 6, "", ("127.0.0.1", int(port)))])
    source = SourceName.parse(f"docker://{name}:{port}/app:latest")
    with pytest.raises(RegistryError, match="can not be reached") as caught, open_image(source, retries=QUICK):
        pass
    assert "PVISOR_INSECURE_REGISTRIES" in caught.value.hint
    monkeypatch.setenv("PVISOR_INSECURE_REGISTRIES", f"other.example, {name}:{port}")
    with open_image(source, retries=QUICK, platform="linux/amd64") as image:
        assert len(image.layers) == 1


@pytest.mark.parametrize(
    ("host", "listed", "plain"),
    [
        ("localhost:5000", "", True),
        ("127.0.0.1", "", True),
        ("127.9.9.9:1", "", True),
        ("[::1]:5000", "", True),
        ("registry.example", "", False),
        ("127.0.0.1.example", "", False),
        ("10.0.0.1:5000", "", False),
        ("10.0.0.1:5000", "10.0.0.1:5000", True),
        ("Registry.example:5000", " x ,registry.example", True),
        ("registry.example:5000", "registry.example:5001", False),
    ],
)
def test_where_plain_http_is_spoken(host: str, listed: str, plain: bool) -> None:
    assert allows_plain_http(host, {"PVISOR_INSECURE_REGISTRIES": listed}) is plain


def foreign(layout: Path, tmp_path: Path, server: Flaky, *urls: str) -> None:
    """Serve an image whose layer the registry does not have, but the urls may."""
    image = oci.write_layout(tmp_path / "foreign", [LAYER], compression="none")
    name = oci.read_index(image)["manifests"][0]["digest"]
    manifest = json.loads(oci.blob_path(image, name).read_bytes())
    manifest["layers"][0]["urls"] = list(urls)
    manifest["layers"][0]["mediaType"] = "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"
    server.serve(image, "foreign")
    del server.content[f"/v2/foreign/blobs/{LAYER_PATH}"]
    server.add_manifest("foreign", json.dumps(manifest).encode(), oci.OCI_MANIFEST, tag="latest")


def test_foreign_layers_come_from_their_urls(server: Flaky, layout: Path, tmp_path: Path) -> None:
    with run_flaky() as other:
        other.serve(layout, "x")
        good = f"http://{other.address}/v2/x/blobs/{LAYER_PATH}"
        foreign(layout, tmp_path, server, "ftp://x/y", f"http://{other.address}/gone", good)
        ask_for(server, "basic")
        other.plan(LAYER_PATH, cut(1000))
        assert pull(server, "foreign:latest", auth=ALICE) == LAYER
        assert all("authorization" not in request.headers for request in other.requests)


def test_foreign_layers_that_are_nowhere_or_wrong(server: Flaky, layout: Path, tmp_path: Path) -> None:
    with run_flaky() as other:
        foreign(layout, tmp_path, server, f"http://{other.address}/gone")
        with pytest.raises(RegistryError, match=f"{other.address} does not have the blob"):
            pull(server, "foreign:latest")
        other.plan("/gone", instead(LAYER[:-1] + b"x"))
        with pytest.raises(DigestMismatchError, match="digest"):
            pull(server, "foreign:latest")
    foreign(layout, tmp_path, server)
    with pytest.raises(RegistryError, match=f"{server.address} does not have the blob"):
        pull(server, "foreign:latest")
