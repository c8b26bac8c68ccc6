"""A real `docker-registry` (Debian's package) on a free loopback port, open, behind a password or behind tokens."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import parse_qs, urlsplit

from tests.support.ports import free_port

ISSUER, SERVICE = "pvisor-test-issuer", "pvisor-test-registry"
USER, PASSWORD = "alice", "correct horse"
_PASSWORD_BCRYPT = "$2b$04$/gSfaTXktJpzR.a1PQ3ExeiTTo.OSS52AjdIqAkS2fBiGT1cNpHRu"


@dataclass
class Registry:
    """A running registry. `address` is HOST:PORT."""

    address: str
    log: Path

    def push(self, source: str, name: str, *options: str) -> None:
        """Copy an image in with skopeo; `source` is a skopeo name, `name` REPO:TAG."""
        command = ["skopeo", "copy", "--quiet", "--insecure-policy", "--dest-tls-verify=false", *options]
        subprocess.run(
            [*command, source, f"docker://{self.address}/{name}"], check=True, capture_output=True, text=True
        )

    def source(self, name: str) -> str:
        """The pVisor source name of an image here."""
        return f"docker://{self.address}/{name}"


@contextmanager
def run_registry(*, auth: dict[str, Any] | None = None) -> Iterator[Registry]:
    """A registry with its storage in a temporary directory; `auth` is the auth section of its configuration."""
    with tempfile.TemporaryDirectory(prefix="pvisor-registry-") as name:
        directory = Path(name)
        port = free_port()
        config: dict[str, Any] = {
            "version": 0.1,
            "log": {"level": "warn", "accesslog": {"disabled": True}},
            "storage": {"filesystem": {"rootdirectory": str(directory / "data")}},
            "http": {"addr": f"127.0.0.1:{port}"},
        }
        if auth is not None:
            config["auth"] = auth
        (directory / "config.yml").write_text(json.dumps(config))  # JSON is YAML
        log = directory / "log"
        with log.open("wb") as output:
            # REGISTRY_* variables would override its configuration.
            env = {key: value for key, value in os.environ.items() if not key.startswith("REGISTRY_")}
            argv = ["docker-registry", "serve", str(directory / "config.yml")]
            process = subprocess.Popen(argv, env=env, stdout=output, stderr=output)
        try:
            _wait_until_ready(process, port, log)
            yield Registry(f"127.0.0.1:{port}", log)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"docker-registry ended with {process.returncode}: {log.read_text()[-2000:]}")
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/", timeout=5).close()
            return
        except HTTPError:
            return  # 401: it is up and wants authorization
        except OSError:
            time.sleep(0.05)
    raise RuntimeError(f"docker-registry did not start: {log.read_text()[-2000:]}")


@dataclass
class TokenServer:
    """A token server with a real key. Counts its requests; `lifetime_s`, `token_key` and `requests` may be changed."""

    directory: Path
    port: int
    users: dict[str, str]
    token_key: str = "token"
    lifetime_s: int = 300
    say_expiry: bool = True
    allow_anonymous: bool = False
    identity_token: str = "identity-token-of-alice"
    requests: list[dict[str, Any]] = field(default_factory=list)

    @property
    def auth(self) -> dict[str, Any]:
        """The auth section of a registry that trusts this server."""
        return {
            "token": {
                "realm": f"http://127.0.0.1:{self.port}/token",
                "service": SERVICE,
                "issuer": ISSUER,
                "rootcertbundle": str(self.directory / "cert.pem"),
            }
        }

    def sign(self, access: list[dict[str, Any]], *, issued_at: float | None = None) -> str:
        """A JWT (RS256 with x5c) that grants `access`."""
        now = int(issued_at or time.time())
        certificate = "".join((self.directory / "cert.pem").read_text().splitlines()[1:-1])
        header = {"typ": "JWT", "alg": "RS256", "x5c": [certificate]}
        claims = {
            "iss": ISSUER, "sub": USER, "aud": SERVICE, "exp": now + self.lifetime_s, "nbf": now - 10, "iat": now,
            "jti": str(len(self.requests)), "access": access,
        }  # fmt: skip
        signed = f"{_encode(json.dumps(header).encode())}.{_encode(json.dumps(claims).encode())}"
        key = str(self.directory / "key.pem")
        done = subprocess.run(
            ["openssl", "dgst", "-sha256", "-sign", key], input=signed.encode(), capture_output=True, check=True
        )
        return f"{signed}.{_encode(done.stdout)}"


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


@contextmanager
def run_token_server() -> Iterator[TokenServer]:
    """A token server for USER with PASSWORD, on a free loopback port."""
    with tempfile.TemporaryDirectory(prefix="pvisor-token-") as name:
        directory = Path(name)
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=pvisor-test",
             "-keyout", str(directory / "key.pem"), "-out", str(directory / "cert.pem")],
            check=True,
            capture_output=True,
        )  # fmt: skip
        state = TokenServer(directory, 0, {USER: PASSWORD})
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(state))
        state.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield state
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


def _handler(state: TokenServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            query = parse_qs(urlsplit(self.path).query)
            authorization = self.headers.get("Authorization", "")
            state.requests.append({"method": "GET", "query": query, "authorization": authorization})
            if authorization.startswith("Basic "):
                user, _, password = base64.b64decode(authorization[6:]).decode().partition(":")
                allowed = state.users.get(user) == password
            else:
                allowed = state.allow_anonymous
            self.answer(allowed, query.get("scope", []))

        def do_POST(self) -> None:
            form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
            state.requests.append({"method": "POST", "query": form, "authorization": ""})
            allowed = form.get("refresh_token") == [state.identity_token]
            self.answer(allowed and form.get("grant_type") == ["refresh_token"], form.get("scope", []))

        def answer(self, allowed: bool, scopes: list[str]) -> None:
            access = []
            for scope in " ".join(scopes).split():
                kind, name, actions = scope.split(":")
                access.append({"type": kind, "name": name, "actions": actions.split(",")})
            document: dict[str, Any] = {"details": "denied"}
            if allowed:
                document = {state.token_key: state.sign(access)}
                if state.say_expiry:
                    document["expires_in"] = state.lifetime_s
            body = json.dumps(document).encode()
            self.send_response(200 if allowed else 401)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


def htpasswd_auth(path: Path) -> dict[str, Any]:
    """Write a password file for USER with PASSWORD; the auth section of a registry that uses it."""
    path.write_text(f"{USER}:{_PASSWORD_BCRYPT}\n")
    return {"htpasswd": {"realm": "pvisor-test", "path": str(path)}}
