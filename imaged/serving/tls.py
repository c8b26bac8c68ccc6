"""TLS of the chunk server: a certificate and its key from files, read again when they change."""

from __future__ import annotations

import contextlib
import logging
import os
import ssl
import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from imaged.errors import PvisorError
from imaged.regularfile import open_regular
from imaged.serving.repeating import repeating
from imaged.serving.watchedfiles import WatchedFiles, hint_of

log = logging.getLogger(__name__)
_LOOK_S = 1.0
_DAY_S = 86400
_WARN_S = 14 * _DAY_S
_FILE_LIMIT_BYTES = 1 << 20


class ServerTls:
    """The context for accepting connections; whoever connects after a change of the files gets the new certificate.

    A pair that does not fit changes nothing but the log.
    """

    def __init__(self, certificate: Path, key: Path) -> None:
        """PvisorError when they can not be used."""
        self._certificate, self._key = certificate, key
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._files = WatchedFiles("the certificate stays as it was", (certificate, key), self._load)

    def watching(self) -> AbstractAsyncContextManager[None]:
        """Look after the files until the end of the block."""
        return repeating(self.reload, _LOOK_S, "tls")

    def reload(self) -> None:
        """Read the files again if they have changed. Between the two files of a renewal they may not fit: then a later
        look, after the other has come, takes both."""
        self._files.look()

    def _load(self) -> str:
        """Both files are read once, tried apart, and then taken: the live context never has half of a pair."""
        certificate, key = _read(self._certificate, "--tls-cert"), _read(self._key, "--tls-key")
        with _as_file(certificate) as certificate_path, _as_file(key) as key_path:
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate_path, key_path, _no_password)
                self.context.load_cert_chain(certificate_path, key_path, _no_password)
            except (ssl.SSLError, ValueError) as error:
                raise PvisorError(
                    f"certificate {self._certificate} and key {self._key} can not be used: {_reason(error)}",
                    hint="both in PEM; the certificate first, then those that signed it; the key without a password",
                ) from None
        _warn_of_expiry(self._certificate, certificate)
        return f"certificate {self._certificate} was read again"


def _no_password() -> str:
    """Else OpenSSL asks the terminal."""
    raise ValueError("the key has a password")


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", None) or ""
    known = {
        "KEY_VALUES_MISMATCH": "the key is of another certificate",
        "NO_START_LINE": "no PEM is in one of them",
    }
    return known.get(reason, reason.lower().replace("_", " ") or str(error) or "not PEM")


def _read(path: Path, option: str) -> bytes:
    try:
        with open_regular(path) as file:
            return file.read(_FILE_LIMIT_BYTES)
    except OSError as error:
        hint = hint_of(error, "give the PEM file of the pair")
        raise PvisorError(f"{option} {path}: {error.strerror}", hint=hint) from error


@contextlib.contextmanager
def _as_file(data: bytes) -> Iterator[str]:
    """What was read as a file in memory: OpenSSL takes paths only."""
    fd = os.memfd_create("pem", os.MFD_CLOEXEC)
    try:
        os.write(fd, data)
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


def _warn_of_expiry(path: Path, pem: bytes) -> None:
    from cryptography import x509

    try:
        ends = x509.load_pem_x509_certificate(pem).not_valid_after_utc
    except ValueError:
        return
    left_s = ends.timestamp() - time.time()
    if left_s < 0:
        log.error("certificate %s has expired on %s: no client will accept it", path, ends.date())
    elif left_s < _WARN_S:
        log.warning("certificate %s expires on %s", path, ends.date())
