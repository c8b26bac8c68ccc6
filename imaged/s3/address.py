"""Where a store in a bucket is, and how patient its servers are."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

from imaged.errors import InvalidNameError

SCHEME = "s3://"
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")
_PREFIX = re.compile(r"[A-Za-z0-9!_.*'()/=+@,:~-]*")
_HINT = "such as s3://BUCKET/PREFIX"


@dataclass(frozen=True, slots=True)
class BucketAddress:
    """A bucket, and the prefix of all keys of one store, without a slash at either end; it may be empty."""

    bucket: str
    prefix: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """From `s3://BUCKET/PREFIX`. InvalidNameError."""
        if not text.startswith(SCHEME):
            raise InvalidNameError(f"{text!r} is no address of a bucket", hint=_HINT)
        bucket, _, prefix = text.removeprefix(SCHEME).partition("/")
        prefix = prefix.strip("/")
        if _BUCKET.fullmatch(bucket) is None:
            raise InvalidNameError(f"{text!r}: {bucket!r} is no name of a bucket", hint=_HINT)
        if _PREFIX.fullmatch(prefix) is None or "//" in prefix or {".", ".."} & set(prefix.split("/")):
            raise InvalidNameError(f"{text!r}: {prefix!r} is no prefix for keys", hint=_HINT)
        return cls(bucket, prefix)

    def key(self, name: str) -> str:
        """The whole key of an object of this store."""
        return f"{self.prefix}/{name}" if self.prefix else name

    def __str__(self) -> str:
        return f"{SCHEME}{self.bucket}/{self.prefix}".rstrip("/")


def endpoint(environ: Mapping[str, str] = os.environ) -> str:
    """The S3 server's URL without credentials; "" is AWS's own."""
    url = environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL") or ""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}".rstrip("/") if parts.netloc else url


def directory_name(address: BucketAddress) -> str:
    """Of its mirror: the same bucket at another server is another store."""
    return hashlib.sha256(f"{endpoint()} {address}".encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Times and limits, from PVISOR_S3_* in the environment.

    `settle_s` is how long after a write a listing may still lack it; None is "as the server seems to be".
    """

    timeout_s: float = 30.0
    attempts: int = 5
    poll_s: float = 5.0
    lease_s: float = 120.0
    settle_s: float | None = None
    wait_s: float = 180.0
    """How long a collection waits for the servers to let go of what it wants to remove."""

    @classmethod
    def resolve(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """InvalidNameError for what is no number."""
        found: dict[str, float] = {}
        for field, name, least in _VARIABLES:
            text = environ.get(name)
            if text is None:
                continue
            try:
                value = float(text)
            except ValueError:
                value = -1.0
            if not least <= value <= _MOST:
                raise InvalidNameError(f"{name}={text!r} is not a number from {least:g} to {_MOST:g}")
            found[field] = value
        attempts = int(found.pop("attempts", 5))
        return cls(attempts=attempts, **found)


_MOST = 86400.0
_VARIABLES = (
    ("timeout_s", "PVISOR_S3_TIMEOUT_S", 0.1),
    ("attempts", "PVISOR_S3_ATTEMPTS", 1.0),
    ("poll_s", "PVISOR_S3_POLL_S", 0.05),
    ("lease_s", "PVISOR_S3_LEASE_S", 2.0),
    ("settle_s", "PVISOR_S3_SETTLE_S", 0.0),
    ("wait_s", "PVISOR_S3_WAIT_S", 0.0),
)
