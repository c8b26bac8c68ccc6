"""Ed25519 keys as the openssl command makes them."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple


class KeyPair(NamedTuple):
    """Two PEM files."""

    private: Path
    public: Path


def make_keys(directory: Path, name: str) -> KeyPair:
    made = KeyPair(directory / f"{name}.key", directory / f"{name}.pub")
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", made.private], check=True)
    subprocess.run(["openssl", "pkey", "-in", made.private, "-pubout", "-out", made.public], check=True)
    return made
