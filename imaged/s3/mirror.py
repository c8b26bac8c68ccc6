"""The local directory of a store in a bucket: its index is a mirror, its packs are a cache.

`bucket.json` in a store's directory says that it is one. Whatever opens a store by its directory (server processes,
conversions, collections) then works on the bucket.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from imaged.chunkstore.pack import PACKS_DIRECTORY
from imaged.chunkstore.store import MIRROR_NAME
from imaged.config import Config
from imaged.errors import FormatError, StoreError
from imaged.faults import store_faults
from imaged.publish import published
from imaged.s3.address import SCHEME, BucketAddress, directory_name, endpoint

_VERSION = 1


@dataclass(frozen=True, slots=True)
class Mirror:
    """`server` names this host's lease in the bucket; a directory that is copied must not keep it."""

    address: BucketAddress
    endpoint: str
    server: str

    @classmethod
    def read(cls, root: Path) -> Self:
        """StoreError when the directory is of another S3 server than the environment names."""
        with store_faults("read which bucket it mirrors", root):
            raw = (root / MIRROR_NAME).read_bytes()
        try:
            document = json.loads(raw)
            if document["version"] != _VERSION:
                raise FormatError(MIRROR_NAME, expected=f"version {_VERSION}", found=repr(document["version"])[:80])
            found = cls(BucketAddress.parse(document["url"]), str(document["endpoint"]), str(document["server"]))
        except (ValueError, LookupError, TypeError) as error:
            raise FormatError(MIRROR_NAME, expected="url, endpoint and server", found=str(error)[:80]) from error
        if found.endpoint != endpoint():
            raise StoreError(
                f"store {root}: it mirrors {found.address} at {found.endpoint or 'AWS'}, not at {endpoint() or 'AWS'}",
                hint="set AWS_ENDPOINT_URL_S3 as it was, or give the s3:// address instead of the directory",
            )
        return found


def is_mirror(root: Path) -> bool:
    return (root / MIRROR_NAME).exists()


def is_address(text: str) -> bool:
    return text.startswith(SCHEME)


def mirror_directory(config: Config, url: str) -> Path:
    """The directory of a store in a bucket, made when there is none. InvalidNameError, StoreError."""
    address = BucketAddress.parse(url)
    root = config.home / "s3" / directory_name(address)
    make_mirror(root, address)
    return root


def make_mirror(root: Path, address: BucketAddress) -> None:
    """Make this directory the mirror of a bucket, unless it is."""
    if is_mirror(root):
        return
    with store_faults("make its directory", root):
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        (root / PACKS_DIRECTORY).mkdir(exist_ok=True)
        document: Mapping[str, object] = {
            "version": _VERSION,
            "url": str(address),
            "endpoint": endpoint(),
            "server": secrets.token_hex(8),
        }
        with published(root / MIRROR_NAME) as file:
            file.write(json.dumps(document).encode())
