"""TLS with an authority of one's own: what a client accepts, and a renewal under a server that runs."""

from __future__ import annotations

import asyncio
import datetime
import errno
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from imaged.chunkstore.store import ChunkStore
from imaged.errors import InvalidNameError, PvisorError, UpstreamError
from imaged.fetching.retry import RetryPolicy
from imaged.fetching.upstream import HttpUpstream
from imaged.serving.tls import ServerTls
from tests.support.chunkserver import chunk_server
from tests.support.synthetic import add_image
from tests.support.tokens import write_tokens

QUICK = RetryPolicy(total_s=0.5, first_wait_s=0.02, longest_wait_s=0.1)
DAY = datetime.timedelta(days=1)


class Authority:
    """Made by openssl, signs with `cryptography`: certificates that have expired are made in a moment."""

    def __init__(self, directory: Path) -> None:
        self.certificate, key = directory / "ca.pem", directory / "ca.key"
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        command += ["-keyout", str(key), "-out", str(self.certificate), "-subj", "/CN=test authority", "-days", "30"]
        subprocess.run(command, check=True, capture_output=True)
        self._issuer = x509.load_pem_x509_certificate(self.certificate.read_bytes())
        self._key = serialization.load_pem_private_key(key.read_bytes(), None)

    def sign(self, certificate: Path, key: Path, *, days: int = 10, name: str = "localhost") -> None:
        """A pair for the server: the key goes first, as a renewal may."""
        own = ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.UTC)
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        made = x509.CertificateBuilder(self._issuer.subject, subject, own.public_key(), x509.random_serial_number())
        made = made.not_valid_before(now - 30 * DAY).not_valid_after(now + days * DAY)
        made = made.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        assert isinstance(self._key, ec.EllipticCurvePrivateKey)
        signed = made.sign(self._key, hashes.SHA256())
        pem = serialization.Encoding.PEM
        form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        key.write_bytes(own.private_bytes(pem, form, plain))
        certificate.write_bytes(signed.public_bytes(pem))


@pytest.fixture
def authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Authority]:
    made = Authority(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(made.certificate))
    yield made


def images(url: str, port: int) -> list[str]:
    with HttpUpstream(f"{url}:{port}", retry=QUICK) as upstream:
        return [image.name for image in upstream.images()]


def test_a_certificate_is_renewed_under_a_server_that_runs(tmp_path: Path, authority: Authority) -> None:
    with ChunkStore.open(tmp_path / "store") as store:
        image = add_image(store, "a:1")
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    authority.sign(certificate, key, days=-1)
    files = {"tls_cert": str(certificate), "tls_key": str(key)}
    with chunk_server(tmp_path / "store", **files) as server:
        assert server.url.startswith("https://")
        with pytest.raises(UpstreamError, match="certificate has expired"):
            images("https://localhost", server.port)
        kept = HttpUpstream(f"https://localhost:{server.port}", retry=RetryPolicy(total_s=10))
        authority.sign(certificate, key)
        deadline = time.monotonic() + 20
        while True:
            try:
                assert images("https://localhost", server.port) == ["a:1"]
                break
            except UpstreamError as error:
                assert "expired" in error.message
                assert time.monotonic() < deadline
                asyncio.run(asyncio.sleep(0.2))
        with kept:
            assert kept.get(image.id) == image.record.to_bytes()
            chunks = [image.id, image.record.data, image.record.metadata] * 20
            assert [frame.id for frame in kept.frames(chunks)] == chunks
        for url, says in (("https://127.0.0.1", "mismatch"), ("http://localhost", "chunk server http:")):
            with pytest.raises(UpstreamError, match=says):
                images(url, server.port)


def test_an_authority_that_is_not_known_is_refused_at_once(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    authority.sign(certificate, key)
    monkeypatch.delenv("SSL_CERT_FILE")
    tokens = write_tokens(tmp_path / "tokens")
    with chunk_server(
        tmp_path / "store", tls_cert=str(certificate), tls_key=str(key), token_file=str(tokens.path)
    ) as server:
        patient = RetryPolicy(total_s=60)
        started = time.monotonic()
        with (
            HttpUpstream(f"https://localhost:{server.port}", retry=patient) as upstream,
            pytest.raises(UpstreamError, match="certificate is not accepted") as caught,
        ):
            upstream.images()
        assert "SSL_CERT_FILE" in caught.value.hint
        assert time.monotonic() - started < 30
        # A handshake that never ends holds up nobody.
        with socket.create_connection(("127.0.0.1", server.port)):
            monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))
            with pytest.raises(UpstreamError, match="takes a token"):
                images("https://localhost", server.port)


def test_a_pipe_in_place_of_the_authorities_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "pipe"))
    with pytest.raises(InvalidNameError, match=r"SSL_CERT_FILE .*: a pipe"):
        HttpUpstream("https://localhost:1")


def test_a_server_without_tls_says_what_is_wrong(tmp_path: Path, authority: Authority) -> None:
    with chunk_server(tmp_path / "store") as server, pytest.raises(UpstreamError, match="no TLS connection"):
        images("https://localhost", server.port)


def test_what_is_no_pair_is_refused(tmp_path: Path, authority: Authority) -> None:
    one, two = (tmp_path / "1.pem", tmp_path / "1.key"), (tmp_path / "2.pem", tmp_path / "2.key")
    authority.sign(*one)
    authority.sign(*two)
    locked = tmp_path / "locked.key"
    command = ["openssl", "pkcs8", "-topk8", "-in", str(one[1]), "-out", str(locked), "-passout", "pass:canary"]
    subprocess.run(command, check=True, capture_output=True)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for certificate, key, says in (
        (one[0], two[1], "another certificate"),
        (one[0], locked, "has a password"),
        (one[1], one[1], "can not be used"),
        (one[0], tmp_path / "none", "No such file"),
        (tmp_path, one[1], "not a regular file"),
        (Path("/dev/null"), one[1], "not a regular file"),
        (pipe, one[1], "not a regular file"),
        (one[0], pipe, "not a regular file"),
    ):
        with pytest.raises(PvisorError, match=says):
            ServerTls(certificate, key)


def test_half_a_renewal_changes_nothing(tmp_path: Path, authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    authority.sign(certificate, key)
    tls = ServerTls(certificate, key)
    before = key.read_bytes()
    authority.sign(certificate, key)
    after = key.read_bytes()
    key.write_bytes(before)
    tls.reload()
    assert "the certificate stays as it was" in caplog.text
    key.write_bytes(after)
    tls.reload()
    assert "was read again" in caplog.text
    assert after.decode() not in caplog.text


@pytest.mark.parametrize("place", ["cert.pem", "key.pem"])
def test_a_pipe_in_place_of_a_file_stops_nothing(
    tmp_path: Path, authority: Authority, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    authority.sign(certificate, key)
    tls = ServerTls(certificate, key)
    (tmp_path / place).unlink()
    os.mkfifo(tmp_path / place)
    tls.reload()
    assert "not a regular file" in caplog.text
    assert "the certificate stays as it was" in caplog.text


@pytest.mark.parametrize("what", ["certificate", "key"])
def test_a_file_that_the_user_of_the_server_can_not_read(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    files = {"certificate": tmp_path / "cert.pem", "key": tmp_path / "key.pem"}
    authority.sign(files["certificate"], files["key"])

    def opened(path: Path) -> BinaryIO:
        if path == files[what]:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return path.open("rb")

    monkeypatch.setattr("imaged.serving.tls.open_regular", opened)
    with pytest.raises(PvisorError, match=f"{files[what]}: Permission denied") as caught:
        ServerTls(files["certificate"], files["key"])
    assert "chmod 0640" in caught.value.hint


def test_the_command_wants_both_files() -> None:
    command = [sys.executable, "-c", "from cli.main import main; main()", "serve", "--tls-cert", "x"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], env=dict(os.environ))
    assert (done.returncode, "go together" in done.stderr) == (2, True), done.stderr
